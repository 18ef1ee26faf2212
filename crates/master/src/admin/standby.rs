//! The pages of a standby: its state. Everything else is refused with upstream's text.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::StatusCode,
    middleware,
    response::{IntoResponse, Response},
    routing::get,
};
use mooncake_http::reply::{metrics as metrics_reply, text as text_reply};
use serde_json::{Value, json};

use super::{access, json_reply, page};
use crate::{cluster::status::ClusterStatus, front::Front};

type Context = State<Arc<Front>>;

/// Returns the pages.
pub(super) fn pages(front: &Arc<Front>) -> Router {
    let hosts: Arc<[String]> = front.config().admin_hosts.clone().into();
    Router::new()
        .route("/", get(page::show))
        .route("/guide", get(page::guide))
        .route("/grafana.json", get(page::dashboard))
        .route("/alerts.yml", get(page::alerts))
        .route("/health", get(|front: Context| shown(front, health)))
        .route("/leader", get(|front: Context| shown(front, ClusterStatus::leader_json)))
        .route("/api/v1/ha", get(|front: Context| shown(front, ClusterStatus::to_json)))
        .route("/role", get(|| async { text_reply("standby") }))
        .route("/ha_status", get(state))
        .route("/metrics", get(metrics))
        .fallback(|| async { refusal() })
        .method_not_allowed_fallback(|| async { refusal() })
        .layer(middleware::from_fn_with_state(hosts, access::check_host))
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

async fn shown(State(front): Context, show: fn(&ClusterStatus) -> Value) -> Response {
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
