//! An open store: a client with its engine, and the master where that is embedded.

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
use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_master::{Master, Origin};
use mooncake_store_client::{
    Client, DaemonLink, HttpServer, InProcessLink, MasterLink, SocketLink,
};
use mooncake_transfer_engine::{Engine, process};
use tokio::runtime::Runtime;

use super::{
    pool::Pool,
    settings::{self, DummyArguments, EMBEDDED, Settings},
};
use crate::engine::Running;

/// How long an engine that ends may wait for a metadata server.
const ENGINE_CLOSE_MAX: Duration = Duration::from_secs(1);

/// The client's HTTP server answers on every address of this host, as its scrapers expect.
const HTTP_HOST: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// How long an embedded master may take to end.
const MASTER_STOP_MAX: Duration = Duration::from_millis(500);

/// The stores that are open, so that exit can close them. Touched only by threads that are
/// attached to the interpreter, and so never taken by another thread at the moment of a fork.
static OPEN: Mutex<Vec<Weak<Open>>> = Mutex::new(Vec::new());

/// Everything behind one handle.
pub(crate) struct Open {
    client: Client,
    http: Mutex<Option<HttpServer>>,
    engine: Engine,
    /// The engine's owner, if that is not this store.
    shared: Option<Arc<Running>>,
    master: Mutex<Option<Master>>,
    /// Memory to be handed out, of a guest of a daemon.
    pool: Option<Pool>,
    runtime: &'static Runtime,
    generation: u64,
    is_closed: AtomicBool,
}

impl Open {
    /// Starts what is to be started and joins the pool. Blocks; to be called detached.
    ///
    /// # Errors
    /// The master cannot be reached, the metadata server refuses, or there is no memory. Nothing
    /// is left behind.
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
            let serve = |port| client.serve(HTTP_HOST, port, runtime.handle());
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
            generation: process::generation(),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Joins the pool as a guest of the daemon of this host, with so much memory to be handed out.
    /// Blocks; to be called detached.
    ///
    /// # Errors
    /// No daemon answers there, its master cannot be reached, or there is no memory.
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
            // Closed when dropped, should the server fail.
            let client = Client::connect(client, engine.clone(), Arc::new(link))?;
            let serve = |port| client.serve(HTTP_HOST, port, runtime.handle());
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
            generation: process::generation(),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Memory of a guest to be handed out.
    ///
    /// # Errors
    /// A closed error after [`close`](Self::close) and in a forked child.
    pub(crate) fn pool(&self) -> Result<Option<&Pool>> {
        self.check().map(|()| self.pool.as_ref())
    }

    /// Whether its way to the pool leads through a daemon.
    pub(crate) fn is_dummy(&self) -> bool {
        self.pool.is_some()
    }

    /// The client, if the store may still be used.
    ///
    /// # Errors
    /// A closed error after [`close`](Self::close) and in a forked child.
    pub(crate) fn client(&self) -> Result<&Client> {
        self.check().map(|()| &self.client)
    }

    /// The engine, if the store may still be used.
    ///
    /// # Errors
    /// As of [`client`](Self::client).
    pub(crate) fn engine(&self) -> Result<&Engine> {
        self.check().map(|()| &self.engine)
    }

    /// The name and the master's address, which stay known.
    pub(crate) fn names(&self) -> (String, String) {
        (self.client.name().to_owned(), self.client.master_address())
    }

    /// Where its HTTP server listens, if it has one.
    pub(crate) fn http_address(&self) -> Option<SocketAddr> {
        // A forked child may have inherited the lock from a thread it does not have.
        if self.is_forked() {
            return None;
        }
        self.http.lock().as_ref().map(HttpServer::address)
    }

    /// Whether the master runs in this process.
    pub(crate) fn is_embedded(&self) -> bool {
        // A forked child may have inherited the lock from a thread it does not have.
        !self.is_forked() && self.master.lock().is_some()
    }

    /// Leaves the pool and stops what was started. Doing it again, or in a forked child, does
    /// nothing.
    pub(crate) fn close(&self) {
        if self.is_forked() || self.is_closed.swap(true, Ordering::SeqCst) {
            return;
        }
        drop(self.http.lock().take());
        self.client.close();
        if self.shared.is_none() {
            self.engine.close(SystemClock.now() + ENGINE_CLOSE_MAX);
        }
        // Taken on a line of its own, so that the lock is free while the master stops.
        let master = self.master.lock().take();
        stop_master(self.runtime, master);
    }

    /// Whether this is a forked child of the process that opened it.
    pub(crate) fn is_forked(&self) -> bool {
        process::is_forked_since(self.generation)
    }

    /// Whether [`close`](Self::close) was called.
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

/// Remembers an open store for [`close_all`].
pub(crate) fn track(store: &Arc<Open>) {
    let mut open = OPEN.lock();
    open.retain(|store| store.strong_count() > 0);
    open.push(Arc::downgrade(store));
}

/// The stores that are open in this process.
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
        return Ok((Arc::new(SocketLink::new(address, config)?), None));
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
