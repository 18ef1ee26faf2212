//! A client of the store: lends memory to the pool, puts objects and reads them.

mod bytes;
mod checksum;
mod heartbeat;
mod mount;
mod offload;
mod prefetch;
mod put;
mod query;
mod read;
mod rounds;
mod tasks;

use std::{
    fmt,
    net::IpAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use mooncake_base::{ClientId, Clock, Moment, Result, SystemClock, exposition::Exposition};
use mooncake_transfer_engine::Engine;
use tokio::runtime::Handle;

#[cfg(test)]
pub(crate) use self::bytes::dangling_range;
use self::{
    prefetch::AskedKeys,
    put::{io_session::IoSessions, open_puts::OpenPuts},
    tasks::worker::TaskWorker,
};
pub use self::{
    put::io_session::Sessions,
    put::reservation::{Reservation, Write},
    read::ranges::{GridsRead, PartOutcomes},
};
use crate::{
    config::ClientConfig,
    disk::Disks,
    http::{Health, HttpServer, Pages},
    lifetime::Lifetime,
    link::MasterLink,
    metrics::{Metrics, MetricsSnapshot},
    protocol::RetryPatience,
    replica::ReplicaSelector,
    rpc::MasterRpc,
    session::{ClientSession, mount::free_in_background},
    transfer::Transfers,
};

/// Time limit of the unregister call while a client closes.
const UNREGISTER_TIMEOUT: Duration = Duration::from_millis(300);

/// Time limit of the status call behind a health check.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

/// Time that closing waits for the heartbeat thread, which may be in the middle of a connect.
const JOIN_TIMEOUT: Duration = Duration::from_millis(100);

/// A client of the store. Closed when dropped.
///
/// All calls are thread-safe. Each call has a deadline. After [`close`](Self::close) and in a
/// forked child, each call fails at once.
pub struct Client {
    inner: Arc<ClientInner>,
}

/// State shared by the calls, the heartbeat thread and the task worker.
struct ClientInner {
    config: Arc<ClientConfig>,
    id: ClientId,
    engine: Engine,
    rpc: Arc<MasterRpc>,
    session: ClientSession,
    transfers: Transfers,
    disks: Disks,
    task_worker: TaskWorker,
    /// Also knows the name that the client's segments carry.
    lifetime: Arc<Lifetime>,
    metrics: Arc<Metrics>,
    io_sessions: IoSessions,
    open_puts: Arc<OpenPuts>,
    asked_keys: AskedKeys,
    started_at: Moment,
}

impl Client {
    /// Registers with the master, mounts the configured memory and starts the heartbeat.
    ///
    /// Blocks up to the link's connect and call time-outs. The client owns the link and closes it
    /// when the client closes. The engine stays open.
    ///
    /// # Errors
    /// The master cannot be reached or refuses, or the memory cannot be allocated.
    pub fn connect(
        config: ClientConfig,
        engine: Engine,
        link: Arc<dyn MasterLink>,
    ) -> Result<Self> {
        let id = ClientId::random();
        let name = match config.name.as_str() {
            "" => engine.segment_name().to_owned(),
            name => name.to_owned(),
        };
        let segment_bytes = config.segment_bytes;
        let (lifetime, metrics) = (Arc::new(Lifetime::new(name)), Arc::<Metrics>::default());
        let replicas =
            ReplicaSelector::new(engine.segment_name(), lifetime.name(), id.bits() as usize);
        let transfers = Transfers::new(engine.clone(), replicas, &lifetime, &metrics);
        let tenant = config.tenant.clone();
        let patience =
            RetryPatience { time: config.retry_patience, awaits_connection: config.awaits_master };
        let timeout = config.rpc_timeout;
        // A new leader knows the memory of this client only after it was announced.
        let beating = Arc::clone(&lifetime);
        link.on_leader_change(Box::new(move || beating.hasten_heartbeat()));
        let rpc = MasterRpc::new(link, id, tenant, timeout, patience, &lifetime, &metrics);
        let disks = Disks::open(&config, &engine, &metrics)?;
        let asked_keys = AskedKeys::new(config.prefetch);
        let (config, rpc) = (Arc::new(config), Arc::new(rpc));
        let session = ClientSession::new(&config, engine.clone(), &rpc, &lifetime);
        let inner = Arc::new(ClientInner {
            config,
            id,
            engine,
            rpc,
            session,
            transfers,
            disks,
            task_worker: TaskWorker::default(),
            lifetime,
            metrics,
            io_sessions: IoSessions::default(),
            open_puts: Arc::default(),
            asked_keys,
            started_at: SystemClock.now(),
        });
        inner.session.register(inner.rpc.deadline())?;
        // From here on, dropping the client undoes the registration.
        let client = Self { inner };
        heartbeat::start(&client.inner)?;
        if segment_bytes > 0 {
            client.mount(segment_bytes)?;
        }
        offload::start(&client.inner)?;
        Ok(client)
    }

    /// The client's id.
    pub fn id(&self) -> ClientId {
        self.inner.id
    }

    /// The name that the client's segments carry.
    pub fn name(&self) -> &str {
        self.inner.lifetime.name()
    }

    /// The settings of the client.
    pub fn config(&self) -> &ClientConfig {
        &self.inner.config
    }

    /// The transfer engine that moves the payload.
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// The address of the master.
    pub fn master_address(&self) -> String {
        self.inner.rpc.address()
    }

    /// A snapshot of the client's metrics.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.inner.metrics()
    }

    /// Serves health and metrics over HTTP at the address (port 0: a free port) on the given
    /// runtime, until the returned server is dropped or the client is closed.
    ///
    /// # Errors
    /// The address cannot be bound, or the client is closed.
    pub fn serve(&self, host: IpAddr, port: u16, runtime: &Handle) -> Result<HttpServer> {
        self.serve_with(host, port, runtime, |_| {})
    }

    /// Like [`serve`](Self::serve), with further metrics appended by `extra`.
    ///
    /// # Errors
    /// Same as [`serve`](Self::serve).
    pub fn serve_with(
        &self,
        host: IpAddr,
        port: u16,
        runtime: &Handle,
        extra: impl Fn(&mut Exposition) + Send + Sync + 'static,
    ) -> Result<HttpServer> {
        self.inner.lifetime.check_open()?;
        let [for_health, for_metrics, for_summary] = [(); 3].map(|()| Arc::downgrade(&self.inner));
        let metrics_of = |client: Weak<ClientInner>| {
            client.upgrade().filter(|client| client.config.metrics.is_enabled)
        };
        let pages = Pages {
            health: Box::new(move || {
                for_health.upgrade().map_or(Health::Closed, |client| client.check_health())
            }),
            metrics: Box::new(move || {
                let client = metrics_of(for_metrics.clone())?;
                let mut out = client.metrics().exposition(&client.config.metrics);
                extra(&mut out);
                mooncake_os::process::add_metrics(&mut out);
                Some(out)
            }),
            summary: Box::new(move || Some(metrics_of(for_summary.clone())?.summary())),
        };
        HttpServer::start(pages, host, port, runtime)
    }

    /// Leaves the pool: unregisters from the master if the master answers quickly, and returns the
    /// mounted memory to the system. Takes less than half a second, even if the master is dead; with
    /// directories of records, until their last records have reached the devices. Idempotent.
    pub fn close(&self) {
        self.inner.close();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("id", &self.inner.id)
            .field("name", &self.inner.lifetime.name())
            .field("master", &self.inner.rpc.address())
            .finish_non_exhaustive()
    }
}

impl ClientInner {
    fn metrics(&self) -> MetricsSnapshot {
        let mut snapshot = self.metrics.snapshot();
        let owners = self.disks.owners().iter();
        snapshot.disk.directories = owners.filter_map(|owner| owner.metrics()).collect();
        snapshot
    }

    /// The metrics as human-readable text.
    fn summary(&self) -> String {
        let uptime = SystemClock.now().since(self.started_at);
        self.metrics().summary(self.config.metrics.has_bandwidth.then_some(uptime))
    }

    /// Checks that the client is open and that the master answers a status call within a short time
    /// limit.
    fn check_health(&self) -> Health {
        if self.lifetime.check_open().is_err() {
            return Health::Closed;
        }
        match self.status(SystemClock.now() + HEALTH_TIMEOUT.min(self.config.rpc_timeout)) {
            Ok(_) => Health::Healthy,
            Err(_) => Health::MasterUnreachable,
        }
    }

    fn close(&self) {
        if self.lifetime.is_forked() {
            // All resources belong to the parent process, which still uses them.
            return;
        }
        if !self.lifetime.close() {
            return;
        }
        let deadline = SystemClock.now() + UNREGISTER_TIMEOUT;
        offload::unmount_all(self, deadline);
        self.session.unregister(deadline);
        self.rpc.close();
        let until = SystemClock.now() + JOIN_TIMEOUT;
        self.lifetime.await_heartbeat_end(until);
        self.join_worker(until);
        free_in_background(self.session.segments().take_all());
        self.disks.close();
    }
}
