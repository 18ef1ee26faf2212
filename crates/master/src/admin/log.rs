//! `/api/v1/finalize`: lets the log have all kinds of records that this version knows.

use axum::{extract::State, http::StatusCode, response::Response};
use mooncake_base::{Error, ErrorCode, Result};
use serde_json::json;

use super::{AdminContext, failure, json_reply};
use crate::journal::{Journal, level::RecordLevel};

/// Returns whether the log may have all kinds of records.
pub(super) fn is_final(journal: &Journal) -> bool {
    journal.level().get() == RecordLevel::PRESENT
}

pub(super) async fn finalize(State(admin): AdminContext) -> Response {
    // The file is small, and written once.
    match admin.service.shared().journal().map_or(Ok(()), finalize_log) {
        Ok(()) => json_reply(&json!({"success": true, "finalized": true})),
        Err(error) => failure(StatusCode::CONFLICT, &error),
    }
}

/// # Errors
/// A standby could not read the log then, or the level cannot be kept.
fn finalize_log(journal: &Journal) -> Result<()> {
    let standbys = journal.followers().status();
    if let Some(earlier) = standbys.iter().find(|standby| standby.level < RecordLevel::PRESENT) {
        let text = "a standby is of an earlier version, which could not read the log any more: install \
                    this version there first";
        return Err(Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text)
            .with("standby", &earlier.address));
    }
    journal.level().finalize()
}
