//! `/api/v1/finalize`: lets the log have all kinds of records that this version knows.

use axum::{extract::State, http::StatusCode, response::Response};
use serde_json::json;

use super::{AdminContext, failure, json_reply};
use crate::journal::{
    Journal,
    level::{self, RecordLevel},
};

/// Returns whether the log may have all kinds of records.
pub(super) fn is_final(journal: &Journal) -> bool {
    journal.level().get() == RecordLevel::PRESENT
}

pub(super) async fn finalize(State(admin): AdminContext) -> Response {
    // The file is small, and written once.
    match admin.service.shared().journal().map_or(Ok(()), level::finalize) {
        Ok(()) => json_reply(&json!({"success": true, "finalized": true})),
        Err(error) => failure(StatusCode::CONFLICT, &error),
    }
}
