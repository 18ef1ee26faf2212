//! HTTP server of a client: health and metrics for operators.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use axum::{
    Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use mooncake_base::{Error, Result, exposition::Exposition};
use mooncake_http::{
    LimitedListener,
    reply::{self, not_found},
};
use tokio::{
    net::TcpListener,
    runtime::Handle,
    sync::{Semaphore, watch},
    task::JoinHandle,
};

/// Maximum concurrent health checks: each makes a call to the master.
const CHECKS_MAX: usize = 4;

/// A running server. Stops when dropped.
#[derive(Debug)]
pub struct HttpServer {
    address: SocketAddr,
    /// Dropped to stop the server.
    _stop: watch::Sender<()>,
    _task: JoinHandle<()>,
}

/// The content of the pages.
pub(crate) struct Pages {
    /// Checks the client; may block for a call to the master.
    pub(crate) health: Box<dyn Fn() -> Health + Send + Sync>,
    /// The metrics; `None` if they are disabled or the client is gone.
    pub(crate) metrics: Box<dyn Fn() -> Option<Exposition> + Send + Sync>,
    /// The metrics as human-readable text.
    pub(crate) summary: Box<dyn Fn() -> Option<String> + Send + Sync>,
}

/// The result of a health check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Healthy,
    Closed,
    MasterUnreachable,
}

/// State shared by the handlers.
struct HandlerState {
    pages: Pages,
    checks: Semaphore,
}

impl HttpServer {
    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves pages at the address (port 0: a free port).
    pub(crate) fn start(pages: Pages, host: IpAddr, port: u16, runtime: &Handle) -> Result<Self> {
        let cannot = |source: std::io::Error| {
            let is_taken = source.kind() == std::io::ErrorKind::AddrInUse;
            let mut error = Error::invalid("the client's HTTP server cannot listen on the address")
                .with("address", SocketAddr::new(host, port));
            if is_taken && let Some(holder) = mooncake_os::port_holder(port) {
                error = error.with("held_by", holder);
            }
            error.caused_by(source)
        };
        let listener = std::net::TcpListener::bind((host, port)).map_err(cannot)?;
        listener.set_nonblocking(true).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let _inside = runtime.enter();
        let listener = TcpListener::from_std(listener).map_err(cannot)?;
        let (stop, mut stopped) = watch::channel(());
        let router = router(HandlerState { pages, checks: Semaphore::new(CHECKS_MAX) });
        let task = runtime.spawn(async move {
            let stop = async move {
                // An error means that the server was dropped, which ends the wait.
                while stopped.changed().await.is_ok() {}
            };
            let serving = axum::serve(LimitedListener::new(listener), router);
            tokio::select! {
                () = stop => {}
                served = serving.into_future() => {
                    if let Err(error) = served {
                        tracing::error!(%error, "the client's HTTP server failed");
                    }
                }
            }
        });
        Ok(Self { address, _stop: stop, _task: task })
    }
}

fn router(state: HandlerState) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/metrics/summary", get(summary))
        .fallback(|| async { not_found() })
        .method_not_allowed_fallback(|| async { not_found() })
        .with_state(Arc::new(state))
}

async fn health(State(state): State<Arc<HandlerState>>) -> Response {
    let Ok(_check) = state.checks.acquire().await else { return health_reply(Health::Closed) };
    let checked = Arc::clone(&state);
    let health = tokio::task::spawn_blocking(move || (checked.pages.health)()).await;
    health_reply(health.unwrap_or(Health::Closed))
}

fn health_reply(health: Health) -> Response {
    let (status, word, code) = match health {
        Health::Healthy => (StatusCode::OK, "healthy", 0),
        Health::Closed => (StatusCode::SERVICE_UNAVAILABLE, "not_initialized", 1),
        Health::MasterUnreachable => (StatusCode::SERVICE_UNAVAILABLE, "master_unreachable", 2),
    };
    let text = format!("{{\"status\":\"{word}\",\"code\":{code}}}");
    (status, reply::json(text)).into_response()
}

async fn metrics(State(state): State<Arc<HandlerState>>) -> Response {
    match (state.pages.metrics)() {
        Some(metrics) => reply::metrics(metrics.finish()),
        None => not_available(),
    }
}

async fn summary(State(state): State<Arc<HandlerState>>) -> Response {
    (state.pages.summary)().map_or_else(not_available, reply::text)
}

fn not_available() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, reply::text("metrics not available")).into_response()
}
