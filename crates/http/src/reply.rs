//! Answers of the few kinds that our servers give.

use axum::{
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};

/// Text for people.
pub fn text(text: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text.into()).into_response()
}

/// Text that is JSON.
pub fn json(text: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, "application/json; charset=utf-8")], text.into()).into_response()
}

/// Metrics as Prometheus text.
pub fn metrics(text: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text.into()).into_response()
}

/// There is nothing of that name.
pub fn not_found() -> Response {
    (StatusCode::NOT_FOUND, text("404 Not Found")).into_response()
}
