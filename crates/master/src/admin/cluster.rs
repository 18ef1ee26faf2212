//! The pages of a leader about its cluster, and the change of leader; a single master answers that it
//! has none.

use std::sync::Arc;

use axum::{
    Router,
    extract::{RawQuery, State},
    http::StatusCode,
    middleware,
    response::Response,
    routing::post,
};
use mooncake_base::{Error, ErrorCode};
use mooncake_http::reply::text as text_reply;
use serde_json::json;

use super::{
    AdminContext,
    access::{self, Secrets},
    decoded, failure, json_reply, parameter, standby,
};
use crate::server::Server;

/// `/ha_status`: upstream's word.
pub(super) async fn state(State(admin): AdminContext) -> Response {
    text_reply(admin.cluster_status().map_or("serving", |status| status.state))
}

/// `/leader`.
pub(super) async fn leader(State(admin): AdminContext) -> Response {
    json_reply(&match admin.cluster_status() {
        Some(status) => status.leader_json(),
        None => json!({"present": false, "leader_address": null, "view_version": null}),
    })
}

/// `/api/v1/ha`.
pub(super) async fn show(State(admin): AdminContext) -> Response {
    json_reply(&match admin.cluster_status() {
        Some(status) => status.to_json(),
        None => json!({"enabled": false}),
    })
}

/// The routes that outlive a term: their handlers hold nothing of the service, which ends meanwhile.
pub(super) fn routes(server: &Arc<Server>) -> Router {
    let secrets = Secrets::of(server.config());
    let guard = middleware::from_fn_with_state(secrets, access::guard_with);
    let hosts: Arc<[String]> = server.config().admin_hosts.clone().into();
    let hosts = middleware::from_fn_with_state(hosts, access::check_host);
    let hand_over = post(hand_over).route_layer(guard).route_layer(hosts);
    Router::new().route("/api/v1/handover", hand_over).with_state(server.clone())
}

/// `/api/v1/handover`: lets a standby lead, and answers once it does.
async fn hand_over(State(server): State<Arc<Server>>, RawQuery(query): RawQuery) -> Response {
    let Some(cluster) = server.cluster() else {
        let text = "this master is the only one; start several with --enable_ha";
        let error = Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE, text);
        return failure(StatusCode::CONFLICT, &error);
    };
    if server.context().is_none() {
        return standby::refusal();
    }
    let query = query.unwrap_or_default();
    let to = parameter(&query, "to").map(decoded);
    let to = to.map(|to| String::from_utf8_lossy(&to).into_owned());
    match cluster.hand_over(to).await {
        Ok(view) => {
            let leader = cluster.leader_address();
            json_reply(&json!({"leader_address": leader, "view_version": view.0}))
        }
        Err(error) if error.code() == ErrorCode::RPC_TIMEOUT => {
            failure(StatusCode::SERVICE_UNAVAILABLE, &error)
        }
        Err(error) => failure(StatusCode::CONFLICT, &error),
    }
}
