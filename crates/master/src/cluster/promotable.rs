//! `--check_promotable`: asks a master whether it could lead, for scripts that restart masters one after
//! the other.

use std::time::Duration;

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Result, SystemClock};
use mooncake_kv_client::{
    ErrorTexts,
    http::{HttpClient, Request},
};
use serde_json::Value;

use crate::config::ADMIN_PORT;

/// Time limit of the question.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum length of the answer.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

static TEXTS: ErrorTexts = ErrorTexts {
    unreachable: "the master cannot be reached",
    late: "the master did not answer in time",
    broken: "the connection to the master broke",
    refused: "the master refused the question",
    remedy: "Name the admin port of the master, which is 9003 unless --metrics_port says otherwise.",
};

/// Returns whether the master at an admin port leads or could lead next.
///
/// # Errors
/// It could not, with the reasons; or it does not answer.
pub(crate) fn check(address: &str) -> Result<()> {
    let endpoint = address.parse::<Endpoint>()?.or_port(ADMIN_PORT);
    let client = HttpClient::new(TIMEOUT, ANSWER_BYTES_MAX, &TEXTS);
    let url = format!("http://{endpoint}/health");
    let answer = client.call(Request::Get, &url, &[], SystemClock.now() + TIMEOUT)?;
    let health: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    verdict(&health).map_err(|error| error.with("master", &endpoint))
}

/// Judges the health of a master.
fn verdict(health: &Value) -> Result<()> {
    match health["promotable"].as_bool() {
        Some(true) => Ok(()),
        Some(false) => {
            let reasons = health["reasons"].as_array().into_iter().flatten();
            let reasons: Vec<_> = reasons.filter_map(Value::as_str).collect();
            Err(Error::new(
                ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS,
                format!("the master could not lead next: {}", reasons.join("; ")),
            ))
        }
        None => {
            let text = "the master runs without --enable_ha";
            Err(Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reasons_are_told() {
        verdict(&json!({"promotable": true, "reasons": []})).unwrap();
        let lagging = json!({"promotable": false, "reasons": ["it is catching up", "x"]});
        let error = verdict(&lagging).unwrap_err().to_string();
        assert!(error.contains("it is catching up; x"), "{error}");
        let single = verdict(&json!({"status": "ok"})).unwrap_err().to_string();
        assert!(single.contains("--enable_ha"), "{single}");
    }
}
