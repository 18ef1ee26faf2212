//! The pages of a standby: its state. Everything else is refused with upstream's text.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use mooncake_http::reply::{metrics as metrics_reply, text as text_reply};
use serde_json::{Value, json};

use super::json_reply;
use crate::{cluster::status::ClusterStatus, front::Front};

type Context = State<Arc<Front>>;

/// Returns the pages.
pub(super) fn pages(front: &Arc<Front>) -> Router {
    Router::new()
        .route("/health", get(|front: Context| page(front, health)))
        .route("/leader", get(|front: Context| page(front, ClusterStatus::leader_json)))
        .route("/api/v1/ha", get(|front: Context| page(front, ClusterStatus::to_json)))
        .route("/role", get(|| async { text_reply("standby") }))
        .route("/ha_status", get(state))
        .route("/metrics", get(metrics))
        .fallback(|| async { refusal() })
        .method_not_allowed_fallback(|| async { refusal() })
        .with_state(front.clone())
}

/// The answer to what only a leader answers.
pub(super) fn refusal() -> Response {
    let body = json!({
        "success": false,
        "error_code": -1011,
        "error_message": "service plane is not active",
    });
    (StatusCode::SERVICE_UNAVAILABLE, json_reply(&body)).into_response()
}

/// The content of `/health` of a standby.
pub(super) fn health(status: &ClusterStatus) -> Value {
    let mut health = json!({"status": "ok"});
    status.add_health(&mut health);
    health
}

fn status_of(front: &Front) -> Option<ClusterStatus> {
    front.cluster().map(|cluster| cluster.status(None))
}

async fn page(State(front): Context, show: fn(&ClusterStatus) -> Value) -> Response {
    match status_of(&front) {
        Some(status) => json_reply(&show(&status)),
        None => refusal(),
    }
}

async fn state(State(front): Context) -> Response {
    text_reply(status_of(&front).map_or("starting", |status| status.state))
}

async fn metrics(State(front): Context) -> Response {
    metrics_reply(super::metrics::of_standby(status_of(&front).as_ref()))
}
