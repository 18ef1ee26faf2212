//! Where, when and how a run was made, so that a report can be compared with others.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

/// The circumstances of a run.
#[derive(Debug, Clone)]
pub(super) struct Circumstances {
    pub(super) host: String,
    /// Date and time of the start in UTC.
    pub(super) started_at: String,
    pub(super) version: &'static str,
    /// The command line, without the name of the program.
    pub(super) arguments: Vec<String>,
}

impl Circumstances {
    /// Returns those of a run that starts now on this host.
    pub(super) fn now(arguments: &[String]) -> Self {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            host: mooncake_os::process::host_name(),
            started_at: utc(since_1970.unwrap_or_default()),
            version: env!("CARGO_PKG_VERSION"),
            arguments: arguments.to_vec(),
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "host": self.host,
            "started_at": self.started_at,
            "version": self.version,
            "arguments": self.arguments,
        })
    }
}

/// Formats a time since 1970 as date and time in the Gregorian calendar.
fn utc(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years begin in March here, so that a leap day is the last day of its year. An era has 400
    // years; 1970-01-01 is day 719468 of the first.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + era * 400 + next_year;
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("{year:04}-{month:02}-{day_of_month:02}T{hour:02}:{minute:02}:{:02}Z", second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn run_names_its_host_version_and_arguments() {
        let json = Circumstances::now(&["--threads=2".to_owned()]).json();
        assert!(json["host"].as_str().is_some_and(|host| !host.is_empty()));
        assert!(json["started_at"].as_str().unwrap().ends_with('Z'));
        assert_eq!(json["arguments"][0], "--threads=2");
    }
}
