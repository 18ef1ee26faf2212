//! An open store: a client with its engine, and the embedded master if there is one.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, Result, SystemClock, exposition::Exposition};
use mooncake_collective::add_metrics;
use mooncake_master::{Master, Origin};
use mooncake_os::fork;
use mooncake_store_client::{Client, DaemonLink, HttpServer, InProcessLink, MasterLink, open_link};
use mooncake_transfer_engine::Engine;
use pyo3::Python;
use tokio::runtime::{Handle, Runtime};

use super::{
    pool::Pool,
    settings::{self, DummyArguments, EMBEDDED, Settings},
};
use crate::{detach::detached, engine::Running};

/// Longest time that the close of an engine waits for a metadata server.
const ENGINE_CLOSE_MAX: Duration = Duration::from_secs(1);

/// Address of the client's HTTP server: every interface of this host, as scrapers expect.
const HTTP_HOST: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// Longest time that an embedded master may take to stop.
const MASTER_STOP_MAX: Duration = Duration::from_millis(500);

/// The open stores, to be closed at exit. Only threads that are attached to the interpreter take
/// the lock, so no other thread holds it at the moment of a fork.
static OPEN: Mutex<Vec<Weak<Open>>> = Mutex::new(Vec::new());

/// The state behind a store handle.
pub(crate) struct Open {
    client: Client,
    http: Mutex<Option<HttpServer>>,
    engine: Engine,
    /// The owner of the engine, if the engine is shared.
    shared: Option<Arc<Running>>,
    master: Mutex<Option<Master>>,
    /// Memory pool of a dummy client.
    pool: Option<Pool>,
    runtime: &'static Runtime,
    generation: u64,
    is_closed: AtomicBool,
}

impl Open {
    /// Starts the needed components and joins the pool. Blocks; must be called detached from the
    /// interpreter.
    ///
    /// # Errors
    /// The master cannot be reached, the metadata server refuses, or there is no memory. Components
    /// started before the failure are stopped.
    pub(crate) fn start(
        settings: Settings,
        shared: Option<Arc<Running>>,
        runtime: &'static Runtime,
    ) -> Result<Self> {
        let engine = match &shared {
            Some(shared) => shared.engine()?.clone(),
            None => Engine::start(settings.engine, runtime.handle().clone())?,
        };
        let joined = link(&settings.master, settings.link, settings.embedded, runtime).and_then(
            |(link, master)| match Client::connect(settings.client, engine.clone(), link) {
                Ok(client) => Ok((client, master)),
                Err(error) => {
                    stop_master(runtime, master);
                    Err(error)
                }
            },
        );
        let joined = joined.and_then(|(client, master)| {
            let serve = |port| serve(&client, port, runtime.handle());
            match settings.http_port.map(serve).transpose() {
                Ok(http) => Ok((client, master, http)),
                Err(error) => {
                    client.close();
                    stop_master(runtime, master);
                    Err(error)
                }
            }
        });
        let (client, master, http) = match joined {
            Ok(joined) => joined,
            Err(error) => {
                if shared.is_none() {
                    engine.close(SystemClock.now() + ENGINE_CLOSE_MAX);
                }
                return Err(error);
            }
        };
        Ok(Self {
            client,
            http: Mutex::new(http),
            engine,
            shared,
            master: Mutex::new(master),
            pool: None,
            runtime,
            generation: fork::generation(),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Joins the pool as a dummy client of the daemon of this host, with a memory pool of
    /// `pool_bytes`. Blocks; must be called detached from the interpreter.
    ///
    /// # Errors
    /// No daemon answers at that address, its master cannot be reached, or there is no memory.
    pub(crate) fn start_dummy(
        daemon: &str,
        pool_bytes: u64,
        arguments: &DummyArguments,
        runtime: &'static Runtime,
    ) -> Result<Self> {
        let config = settings::link(arguments.connect_timeout_s)?;
        let connect_timeout = config.connect_timeout;
        let link = DaemonLink::connect(daemon, config, connect_timeout)?;
        let Settings { engine, client, http_port, .. } = Settings::dummy(link.daemon(), arguments)?;
        let engine = Engine::start(engine, runtime.handle().clone())?;
        let joined = Pool::new(&engine, pool_bytes).and_then(|pool| {
            // The client closes when it is dropped, also if the HTTP server cannot start.
            let client = Client::connect(client, engine.clone(), Arc::new(link))?;
            let serve = |port| serve(&client, port, runtime.handle());
            let http = http_port.map(serve).transpose()?;
            Ok((client, pool, http))
        });
        let (client, pool, http) =
            joined.inspect_err(|_| engine.close(SystemClock.now() + ENGINE_CLOSE_MAX))?;
        Ok(Self {
            client,
            http: Mutex::new(http),
            engine,
            shared: None,
            master: Mutex::new(None),
            pool: Some(pool),
            runtime,
            generation: fork::generation(),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Returns the memory pool of a dummy client.
    ///
    /// # Errors
    /// A closed error after [`close`](Self::close) and in a forked child.
    pub(crate) fn pool(&self) -> Result<Option<&Pool>> {
        self.check().map(|()| self.pool.as_ref())
    }

    /// Registers memory of this process for peers. Touches no page.
    ///
    /// # Errors
    /// The range is null, empty or overlaps a registered one; or the errors of
    /// [`client`](Self::client).
    pub(crate) fn register(&self, address: u64, length: u64) -> Result<()> {
        if address == 0 {
            return Err(Error::invalid("the buffer address is null"));
        }
        if self.pool()?.map_or(Ok(false), |pool| pool.register(address, length))? {
            return Ok(());
        }
        self.engine()?.regions().register(address, length, "*")
    }

    /// Unregisters memory by its first address.
    ///
    /// # Errors
    /// No registered range begins there, or a peer still uses it; or the errors of
    /// [`client`](Self::client).
    pub(crate) fn unregister(&self, address: u64) -> Result<()> {
        if self.pool()?.map_or(Ok(false), |pool| pool.unregister(address))? {
            return Ok(());
        }
        self.engine()?.regions().unregister(address)
    }

    /// True for a dummy client, which reaches the master through a daemon.
    pub(crate) fn is_dummy(&self) -> bool {
        self.pool.is_some()
    }

    /// Returns the client.
    ///
    /// # Errors
    /// A closed error after [`close`](Self::close) and in a forked child.
    pub(crate) fn client(&self) -> Result<&Client> {
        self.check().map(|()| &self.client)
    }

    /// Returns the engine.
    ///
    /// # Errors
    /// The errors of [`client`](Self::client).
    pub(crate) fn engine(&self) -> Result<&Engine> {
        self.check().map(|()| &self.engine)
    }

    /// Returns the client's name and the master's address, also after close.
    pub(crate) fn names(&self) -> (String, String) {
        (self.client.name().to_owned(), self.client.master_address())
    }

    /// Returns the address of the client's HTTP server, if it has one.
    pub(crate) fn http_address(&self) -> Option<SocketAddr> {
        // A forked child may have inherited the lock in locked state.
        if self.is_forked() {
            return None;
        }
        self.http.lock().as_ref().map(HttpServer::address)
    }

    /// True if the master runs in this process.
    pub(crate) fn is_embedded(&self) -> bool {
        // A forked child may have inherited the lock in locked state.
        !self.is_forked() && self.master.lock().is_some()
    }

    /// Leaves the pool and stops the components that this store started. Idempotent; does nothing
    /// in a forked child.
    pub(crate) fn close(&self) {
        if self.is_forked() || self.is_closed.swap(true, Ordering::SeqCst) {
            return;
        }
        drop(self.http.lock().take());
        self.client.close();
        if self.shared.is_none() {
            self.engine.close(SystemClock.now() + ENGINE_CLOSE_MAX);
        }
        // A separate statement, so that the lock is free while the master stops.
        let master = self.master.lock().take();
        stop_master(self.runtime, master);
    }

    /// True in a forked child of the process that opened the store.
    pub(crate) fn is_forked(&self) -> bool {
        fork::is_forked_since(self.generation)
    }

    /// True after [`close`](Self::close).
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    fn check(&self) -> Result<()> {
        if self.is_forked() {
            return Err(Error::closed(
                "the store was opened before this process was forked; open one here",
            ));
        }
        if self.is_closed() {
            return Err(Error::closed("the store is closed"));
        }
        Ok(())
    }
}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Open").field("name", &self.client.name()).finish_non_exhaustive()
    }
}

/// Registers an open store, to be closed at exit.
pub(crate) fn track(store: &Arc<Open>) {
    let mut open = OPEN.lock();
    open.retain(|store| store.strong_count() > 0);
    open.push(Arc::downgrade(store));
}

/// Returns the open stores of this process.
pub(crate) fn all_open() -> Vec<Arc<Open>> {
    OPEN.lock().iter().filter_map(Weak::upgrade).collect()
}

type Joined = (Arc<dyn MasterLink>, Option<Master>);

fn link(
    address: &str,
    config: mooncake_store_client::LinkConfig,
    embedded: mooncake_master::MasterConfig,
    runtime: &'static Runtime,
) -> Result<Joined> {
    if address != EMBEDDED {
        return Ok((open_link(address, config)?, None));
    }
    let master = runtime.block_on(mooncake_master::start(embedded))?;
    let service = master.service();
    let origin = Origin::in_process();
    let link = InProcessLink::new(master.addresses().rpc.to_string(), move |request| {
        Ok(service.dispatch(request, &origin))
    });
    Ok((Arc::new(link), Some(master)))
}

fn stop_master(runtime: &'static Runtime, master: Option<Master>) {
    let Some(master) = master else { return };
    let stopped =
        runtime.block_on(async { tokio::time::timeout(MASTER_STOP_MAX, master.stop()).await });
    if stopped.is_err() {
        tracing::warn!(limit = ?MASTER_STOP_MAX, "the embedded master did not stop in time");
    }
}

/// Gives up a handle on a store, and closes the store with the last one.
pub(super) fn release(open: Arc<Open>) {
    if open.is_forked() {
        // Locks may be held by threads that do not exist in this process, so the store is leaked.
        std::mem::forget(open);
        return;
    }
    let close_if_last = || {
        if Arc::strong_count(&open) == 1 {
            open.close();
        }
    };
    // During exit the call is refused, and the process ends anyway.
    let _ = Python::attach(|py| detached(py, close_if_last));
}

/// Serves health and metrics of the client, and the metrics of this process's groups.
fn serve(client: &Client, port: u16, runtime: &Handle) -> Result<HttpServer> {
    client.serve_with(HTTP_HOST, port, runtime, add_metrics)
}

/// Returns the metrics of the client and of this process's groups as Prometheus text.
pub(super) fn metrics_text(client: &Client) -> String {
    let mut groups = Exposition::default();
    add_metrics(&mut groups);
    client.metrics().prometheus(&client.config().metrics) + groups.text()
}
