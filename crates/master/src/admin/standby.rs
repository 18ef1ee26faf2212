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
use crate::{cluster::status::ClusterStatus, server::Server};

type Context = State<Arc<Server>>;

/// Returns the pages.
pub(super) fn pages(server: &Arc<Server>) -> Router {
    let hosts: Arc<[String]> = server.config().admin_hosts.clone().into();
    Router::new()
        .route("/", get(page::show))
        .route("/guide", get(page::guide))
        .route("/grafana.json", get(page::dashboard))
        .route("/alerts.yml", get(page::alerts))
        .route("/health", get(|server: Context| shown(server, health)))
        .route("/leader", get(|server: Context| shown(server, ClusterStatus::leader_json)))
        .route("/api/v1/ha", get(|server: Context| shown(server, ClusterStatus::to_json)))
        .route("/role", get(|| async { text_reply("standby") }))
        .route("/ha_status", get(state))
        .route("/metrics", get(metrics))
        .fallback(|| async { refusal() })
        .method_not_allowed_fallback(|| async { refusal() })
        .layer(middleware::from_fn_with_state(hosts, access::check_host))
        .with_state(server.clone())
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

fn status_of(server: &Server) -> Option<ClusterStatus> {
    server.cluster().map(|cluster| cluster.status(None))
}

async fn shown(State(server): Context, show: fn(&ClusterStatus) -> Value) -> Response {
    match status_of(&server) {
        Some(status) => json_reply(&show(&status)),
        None => refusal(),
    }
}

async fn state(State(server): Context) -> Response {
    text_reply(status_of(&server).map_or("starting", |status| status.state))
}

async fn metrics(State(server): Context) -> Response {
    metrics_reply(super::metrics::of_standby(status_of(&server).as_ref()))
}
