//! The common responses of our HTTP servers.

use axum::{
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};

/// Returns a plain text response.
pub fn text(text: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text.into()).into_response()
}

/// Returns a JSON response.
pub fn json(text: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, "application/json; charset=utf-8")], text.into()).into_response()
}

/// Returns metrics in the Prometheus text format.
pub fn metrics(text: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text.into()).into_response()
}

/// Returns a 404 response.
pub fn not_found() -> Response {
    (StatusCode::NOT_FOUND, text("404 Not Found")).into_response()
}
