//! HTTP for operators: health, metrics, upstream's JSON endpoints, and a web page.
//!
//! Requests that change anything need a peer on this host or the admin token. In a pool with a token
//! they need a token from this host, too, and so do those that show keys. [`metadata`] is the
//! embedded metadata server of the transfer engines, on its own port.

mod access;
mod body;
mod browse;
mod cluster;
mod disks;
mod history;
mod jobs;
mod log;
pub mod metadata;
mod metrics;
mod object;
mod objects;
mod overview;
mod page;
mod segments;
mod standby;
pub mod summary;

use std::{convert::Infallible, sync::Arc};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{RawQuery, Request, State},
    http::StatusCode,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use mooncake_base::Error;
use mooncake_base::sync::Mutex;
use mooncake_http::{
    LimitedListener, Peer,
    reply::{not_found, text as text_reply},
};
use mooncake_proto::v1::{self, request, response};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Semaphore};
use tower::ServiceExt as _;

pub(crate) use self::access::Secrets;
use self::{history::Samples, summary::CounterSnapshot};
use crate::{
    cluster::{Cluster, status::ClusterStatus},
    config::MasterConfig,
    server::Server,
    service::{AnsweringThread, Origin, Service},
};

/// The shared state of the handlers.
#[derive(Debug)]
struct Admin {
    service: Arc<Service>,
    /// `None` for a single master.
    cluster: Option<Arc<Cluster>>,
    settings: Settings,
    /// Earlier snapshots of the counters, to compute rates.
    history: Mutex<summary::History>,
    /// Samples of the last minutes, for the charts of the page.
    samples: Mutex<Samples>,
    /// One permit per request that may sweep all objects.
    sweeps: Arc<Semaphore>,
}

/// The settings of the admin port.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The secrets that allow changes, and the reading of keys.
    pub(crate) secrets: Secrets,
    /// Serves upstream's metric names, too.
    pub(crate) has_upstream_metrics: bool,
    /// Names under which browsers may read.
    pub(crate) hosts: Arc<[String]>,
}

impl Settings {
    fn of(config: &MasterConfig) -> Self {
        Self {
            secrets: Secrets::of(config),
            has_upstream_metrics: config.has_upstream_metrics,
            hosts: config.admin_hosts.clone().into(),
        }
    }
}

impl Admin {
    fn health(&self) -> Value {
        health(&self.service, self.cluster.as_deref())
    }

    /// Returns what is known of the cluster; `None` for a single master.
    fn cluster_status(&self) -> Option<ClusterStatus> {
        self.cluster.as_ref().map(|cluster| cluster.status(self.service.shared().journal()))
    }

    /// Calls the service in process, as a client does.
    ///
    /// Not cancel-safe: if the future is dropped, the call may or may not have been executed.
    async fn ask(&self, call: request::Call) -> response::Call {
        let request = v1::Request { call: Some(call), ..Default::default() };
        let (origin, thread) = (Origin::in_process(), AnsweringThread::Runtime);
        let answer = self.service.answer(request, &origin, (), thread).await.call;
        answer.unwrap_or_else(|| {
            response::Call::Failure((&Error::internal("the call has no response")).into())
        })
    }

    /// Returns an earlier snapshot of the counters and the present one.
    fn snapshots(&self) -> (CounterSnapshot, CounterSnapshot) {
        self.history.lock().step(CounterSnapshot::take(&self.service))
    }
}

type AdminContext = State<Arc<Admin>>;

/// Serves the admin port until the master stops.
pub(crate) async fn serve(listener: TcpListener, server: Arc<Server>) {
    let stop = server.stop_token().clone();
    let app = cluster::routes(&server).fallback_service(present_pages(server));
    let app = app.into_make_service_with_connect_info::<Peer>();
    let serving = axum::serve(LimitedListener::new(listener), app)
        .with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = serving.await {
        tracing::error!(%error, "the admin server failed");
    }
}

/// Returns the service that hands each request to the pages that answer when it comes.
fn present_pages(
    server: Arc<Server>,
) -> impl tower::Service<Request, Response = Response, Error = Infallible, Future: Send>
+ Clone
+ Send
+ Sync {
    let standby = standby::pages(&server);
    tower::service_fn(move |request: Request| {
        let pages = server.admin().unwrap_or_else(|| standby.clone());
        pages.oneshot(request)
    })
}

/// Returns the pages of a service, and what takes samples for them.
pub(crate) fn pages(
    service: Arc<Service>,
    server: &Arc<Server>,
) -> (Router, impl Future<Output = ()> + Send + 'static) {
    let history = Mutex::new(summary::History::new(CounterSnapshot::take(&service)));
    let samples = Mutex::default();
    let sweeps = Arc::new(Semaphore::new(browse::SWEEPS_MAX));
    let settings = Settings::of(server.config());
    let cluster = server.cluster().cloned();
    let admin = Arc::new(Admin { service, cluster, settings, history, samples, sweeps });
    (router(admin.clone()), sample(admin))
}

/// Takes samples at a fixed interval.
async fn sample(admin: Arc<Admin>) {
    loop {
        admin.samples.lock().take(&admin.service);
        tokio::time::sleep(history::STEP).await;
    }
}

fn router(admin: Arc<Admin>) -> Router {
    write_routes(&admin)
        .merge(read_routes())
        .merge(key_routes(&admin))
        .layer(middleware::from_fn_with_state(admin.clone(), while_leading))
        .layer(middleware::from_fn_with_state(admin.settings.hosts.clone(), access::check_host))
        .fallback(|| async { not_found() })
        .method_not_allowed_fallback(|| async { not_found() })
        .with_state(admin)
}

/// Answers only while this master leads: at the moment of the answer, not of the request.
async fn while_leading(State(admin): AdminContext, request: Request, next: Next) -> Response {
    let answer = next.run(request).await;
    if admin.service.shared().may_answer() { answer } else { standby::refusal() }
}

/// Returns the routes that change something. Any such route must be here, behind the access guard.
fn write_routes(admin: &Arc<Admin>) -> Router<Arc<Admin>> {
    let guard = middleware::from_fn_with_state(admin.clone(), access::guard);
    Router::new()
        .route("/api/v1/remove_all", post(remove_all))
        .route("/api/v1/finalize", post(log::finalize))
        .merge(jobs::write_routes())
        .route_layer(guard)
}

/// Returns the read-only routes.
fn read_routes() -> Router<Arc<Admin>> {
    Router::new()
        .route("/", get(page::show))
        .route("/guide", get(page::guide))
        .route("/grafana.json", get(page::dashboard))
        .route("/alerts.yml", get(page::alerts))
        .route(
            "/health",
            get(|State(admin): AdminContext| async move { json_reply(&admin.health()) }),
        )
        .route("/role", get(|| async { text_reply("leader") }))
        .route("/ha_status", get(cluster::state))
        .route("/leader", get(cluster::leader))
        .route("/api/v1/ha", get(cluster::show))
        .route(
            "/kv_events/status",
            get(|State(admin): AdminContext| async move { json_reply(&kv_events(&admin.service)) }),
        )
        .route("/metrics", get(metrics::show))
        .route("/metrics/summary", get(summary::show))
        .route("/get_all_segments", get(segments::names))
        .route("/get_segments_detail", get(segments::details))
        .route("/query_segment", get(segments::query))
        .route("/api/v1/segments/status", get(segments::status))
        .route("/api/v1/disks", get(disks::list))
        .route("/api/v1/overview", get(overview::show))
        .route("/api/v1/memory", get(object::memory))
        .merge(jobs::read_routes())
}

/// Returns the routes that show keys or objects. Any such route must be here, behind their guard.
fn key_routes(admin: &Arc<Admin>) -> Router<Arc<Admin>> {
    let guard = middleware::from_fn_with_state(admin.clone(), access::guard_keys);
    Router::new()
        .route("/get_all_keys", get(objects::all_keys))
        .route("/query_key", get(objects::query_key))
        .route("/batch_query_keys", get(objects::query_keys))
        .route("/api/v1/object", get(object::show))
        .route("/api/v1/keys", get(browse::keys))
        .route("/api/v1/key_groups", get(browse::groups))
        .route_layer(guard)
}

/// Returns the content of `/health` of a service: upstream's fields, then others.
fn health(service: &Service, cluster: Option<&Cluster>) -> Value {
    let work = service.work(0);
    let drains = work.jobs.iter().filter(|job| !job.status.is_over()).count();
    let log_state = match service.journal_status() {
        None => "off",
        Some(status) if status.is_healthy => "healthy",
        Some(_) => "failed",
    };
    let mut health = json!({
        "status": "ok",
        "role": "leader",
        "ha_state": "serving",
        "service_ready": true,
        "leader_address": null,
        "view_version": null,
        "log": log_state,
        "finalized": service.shared().journal().is_none_or(log::is_final),
        "tasks": {"pending": work.pending, "processing": work.processing, "drains": drains},
    });
    if let Some(cluster) = cluster {
        cluster.status(service.shared().journal()).add_health(&mut health);
    }
    health
}

/// Returns the content of `/health` on the RPC port: that of a leader only while this master leads.
pub(crate) fn health_of(server: &Server) -> Value {
    let cluster = server.cluster().map(|cluster| &**cluster);
    if let Some(service) = server.service() {
        let health = health(&service, cluster);
        // At this moment: another master may lead already.
        if service.shared().may_answer() {
            return health;
        }
    }
    match cluster {
        Some(cluster) => standby::health(&cluster.status(None)),
        None => json!({"status": "ok"}),
    }
}

pub(super) fn kv_events(service: &Service) -> Value {
    let events = service.events();
    let counts = events.map(|events| events.counts()).unwrap_or_default();
    let mut status = json!({
        "enabled": events.is_some(),
        "published_batches": counts.published_batches,
        "published_events": counts.published_events,
        "dropped_events": counts.dropped,
        "skipped_unparsed_keys": counts.skipped,
    });
    if let Some(events) = events {
        status["missed_by_slow_subscribers"] = counts.missed.into();
        status["subscribers"] = counts.subscribers.into();
        status["endpoint"] = events.endpoint().into();
        status["first_sequence"] = events.first_sequence().into();
    }
    status
}

async fn remove_all(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let force = match parameter(&query, "force").map(mooncake_base::parse::read_bool) {
        None => false,
        Some(Ok(force)) => force,
        // Treating an invalid value as false would look as if there had been nothing to remove.
        Some(Err(_)) => {
            let error = Error::invalid("force must be true or false");
            return failure(StatusCode::BAD_REQUEST, &error);
        }
    };
    let selector = v1::KeySelector { by: Some(v1::key_selector::By::All(true)) };
    // Only the tenant matters here; the request needs no client.
    let tenant = parameter(&query, "tenant_id").map(decoded).unwrap_or_default();
    let tenant = String::from_utf8_lossy(&tenant).into_owned();
    let caller = Some(v1::Caller { client: Bytes::new(), tenant });
    let call =
        v1::RemoveMatchingRequest { caller, selector: Some(selector), force, ..Default::default() };
    let _permit = match browse::begin_sweep(&admin) {
        Ok(permit) => permit,
        Err(refusal) => return *refusal,
    };
    match admin.ask(request::Call::RemoveMatching(call)).await {
        response::Call::RemoveMatching(answer) => {
            json_reply(&json!({"success": true, "removed_count": answer.removed}))
        }
        other => call_failure(other),
    }
}

/// Returns the value of a query parameter without decoding it.
fn parameter<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query.split('&').find_map(|pair| {
        let (found, value) = pair.split_once('=').unwrap_or((pair, ""));
        (found == name).then_some(value)
    })
}

/// Decodes percent codes and plus signs. Invalid codes are kept as they are.
fn decoded(text: &str) -> Vec<u8> {
    percent_decode_str(&text.replace('+', " ")).collect()
}

fn json_reply(value: &Value) -> Response {
    mooncake_http::reply::json(value.to_string())
}

/// Returns an error in upstream's JSON form.
fn failure(status: StatusCode, error: &Error) -> Response {
    let body = json!({
        "success": false,
        "error_code": error.code().number(),
        "error_message": error.message(),
    });
    (status, json_reply(&body)).into_response()
}

/// Returns the error reply for a response that is a failure of the whole call.
fn call_failure(answer: response::Call) -> Response {
    let error = match answer {
        response::Call::Failure(failure) => Error::from(&failure),
        _ => Error::internal("the response is not of the kind of the call"),
    };
    failure(StatusCode::INTERNAL_SERVER_ERROR, &error)
}

/// Returns a text reply whose body is generated while it is sent.
fn streamed_text(pieces: impl Iterator<Item = Bytes> + Send + 'static) -> Response {
    let pieces = tokio_stream::iter(pieces.map(Ok::<_, Infallible>));
    text_reply(Body::from_stream(pieces))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_is_not_decoded() {
        assert_eq!(parameter("key=a%2Fb&x=1", "key"), Some("a%2Fb"));
        assert_eq!(parameter("key", "key"), Some(""));
        assert_eq!(parameter("keys=1", "key"), None);
        assert_eq!(parameter("", "key"), None);
    }

    #[test]
    fn decodes_valid_percent_codes_only() {
        assert_eq!(decoded("a%2Fb+c"), b"a/b c");
        assert_eq!(decoded("%ff%"), b"\xff%");
        assert_eq!(decoded("%zz%4"), b"%zz%4");
    }
}
