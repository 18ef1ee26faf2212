//! The endpoints for segments.

use axum::{
    extract::{RawQuery, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use mooncake_base::{ClientId, Error, ErrorCode, SegmentId};
use mooncake_proto::v1::{self, request, response};
use serde_json::{Value, json};

use super::{AdminContext, call_failure, decoded, failure, json_reply, parameter, text_reply};

/// A segment as the endpoints show it.
pub(super) struct SegmentRow {
    pub(super) segment: v1::Segment,
    pub(super) client: String,
    pub(super) status: v1::SegmentStatus,
    pub(super) used: u64,
}

impl SegmentRow {
    pub(super) fn new(summary: v1::SegmentSummary) -> Self {
        let status = summary.status();
        let client = ClientId::from_bytes(&summary.client);
        Self {
            segment: summary.segment.unwrap_or_default(),
            client: client.map(|client| client.to_string()).unwrap_or_default(),
            status,
            used: summary.used,
        }
    }

    pub(super) fn percent(&self) -> f64 {
        match self.segment.length {
            0 => 0.0,
            length => self.used as f64 / length as f64 * 100.0,
        }
    }

    fn json(&self) -> Value {
        let segment = &self.segment;
        let id = SegmentId::from_bytes(&segment.id).map(|id| id.to_string());
        json!({
            "segment_name": segment.name,
            "segment_id": id.unwrap_or_default(),
            "client_id": self.client,
            "base_address": format!("{:#x}", segment.base),
            "size_bytes": segment.length,
            "size_human": format!("{:.4} GiB", segment.length as f64 / (1_u64 << 30) as f64),
            "te_endpoint": segment.endpoint,
            "protocol": segment.protocol,
            "status": status_name(self.status),
            "allocator_used_bytes": self.used,
            "allocator_capacity_bytes": segment.length,
            "allocator_usage_percent": self.percent(),
        })
    }
}

/// Returns upstream's name of a status.
pub(super) fn status_name(status: v1::SegmentStatus) -> &'static str {
    match status {
        v1::SegmentStatus::Undefined => "UNDEFINED",
        v1::SegmentStatus::Ok => "OK",
        v1::SegmentStatus::Draining => "DRAINING",
        v1::SegmentStatus::Drained => "DRAINED",
        v1::SegmentStatus::GracefullyUnmounting => "GRACEFULLY_UNMOUNTING",
        v1::SegmentStatus::Unmounting => "UNMOUNTING",
    }
}

/// GET /get_all_segments: the distinct segment names.
pub(super) async fn names(State(admin): AdminContext) -> Response {
    let mut text = String::new();
    let mut names: Vec<String> = admin.service.segments().into_iter().map(name).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        text.push_str(&name);
        text.push('\n');
    }
    text_reply(text)
}

/// GET /get_segments_detail
pub(super) async fn details(State(admin): AdminContext) -> Response {
    let segments: Vec<Value> = admin
        .service
        .segments()
        .into_iter()
        .map(|summary| SegmentRow::new(summary).json())
        .collect();
    json_reply(&json!({"total_segments": segments.len(), "segments": segments}))
}

/// GET /query_segment?segment=NAME: the totals over the segments of that name.
pub(super) async fn query(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let wanted = wanted(query);
    let found = found(admin.service.segments(), &wanted);
    if wanted.is_empty() || found.is_empty() {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        return (status, text_reply("Failed to query segment")).into_response();
    }
    let used: u64 = found.iter().map(|shown| shown.used).sum();
    let capacity: u64 = found.iter().map(|shown| shown.segment.length).sum();
    text_reply(format!("{wanted}\nUsed(bytes): {used}\nCapacity(bytes) : {capacity}\n"))
}

/// GET /api/v1/segments/status?segment=NAME
pub(super) async fn status(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let wanted = wanted(query);
    if wanted.is_empty() {
        let error = Error::invalid("Missing segment query parameter");
        return failure(StatusCode::BAD_REQUEST, &error);
    }
    // Who waits for a drain shuts the node down then: the answer waits for the log.
    let call = request::Call::ListSegments(v1::ListSegmentsRequest::default());
    let listed = match admin.ask(call).await {
        response::Call::ListSegments(listed) => listed.segments,
        other => return call_failure(other),
    };
    let found = found(listed, &wanted);
    // Of several segments of one name, the worst status is shown.
    let Some(status) = found.iter().map(|shown| shown.status).max() else {
        let code = ErrorCode::SEGMENT_NOT_FOUND;
        return failure(StatusCode::NOT_FOUND, &Error::new(code, code.name()));
    };
    json_reply(&json!({
        "success": true,
        "segment": wanted,
        "status": i32::from(status),
        "status_name": status_name(status),
        "error_code": 0,
        "error_message": "",
    }))
}

fn name(summary: v1::SegmentSummary) -> String {
    summary.segment.map(|segment| segment.name).unwrap_or_default()
}

fn wanted(query: Option<String>) -> String {
    let query = query.unwrap_or_default();
    let text = parameter(&query, "segment").unwrap_or_default();
    String::from_utf8_lossy(&decoded(text)).into_owned()
}

fn found(segments: Vec<v1::SegmentSummary>, wanted: &str) -> Vec<SegmentRow> {
    let shown = segments.into_iter().map(SegmentRow::new);
    shown.filter(|shown| shown.segment.name == wanted).collect()
}
