//! A running master: binds its listeners, serves, and stops.

mod interface;

use std::{io, net::SocketAddr, os::linux::net::SocketAddrExt, sync::Arc, time::Duration};

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::rlimit::limit;
use tokio::{
    net::{TcpListener, TcpSocket, UnixListener},
    sync::Semaphore,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    addresses::Addresses,
    admin::{self, metadata::Metadata},
    config::{ADMIN_PORT, MasterConfig},
    events::{self, Events},
    journal::{Directory, Journal, Maintenance},
    rlimit::connections_max,
    service::{
        Admission, Service,
        connection::ServerContext,
        dedicated_thread::DEDICATED_THREADS_MAX,
        listen::{self, CONNECTIONS_MAX},
        unproven::ConnectionPermits,
    },
};

/// How long connections may take to end before they are aborted.
const DRAIN_DEADLINE: Duration = Duration::from_secs(2);

/// The maximum interval between two runs of the timers.
const TICK_MAX: Duration = Duration::from_millis(250);

/// The minimum interval between two runs of the timers.
const TICK_MIN: Duration = Duration::from_millis(5);

/// How often a summary line is logged.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The backlog of connections that wait to be accepted.
const BACKLOG: u32 = 4096;

/// The options that set an address, named in the error if it cannot be bound.
#[derive(Clone, Copy)]
struct ListenOptions {
    host: &'static str,
    port: &'static str,
}

const RPC: ListenOptions = ListenOptions { host: "rpc_address", port: "rpc_port" };
const ADMIN: ListenOptions = ListenOptions { host: "metrics_host", port: "metrics_port" };
const METADATA: ListenOptions =
    ListenOptions { host: "http_metadata_server_host", port: "http_metadata_server_port" };

/// A master that serves until it is stopped or dropped.
#[derive(Debug)]
pub struct Master {
    addresses: Addresses,
    service: Arc<Service>,
    stop: CancellationToken,
    kill: CancellationToken,
    tasks: TaskTracker,
    maintenance: Option<Maintenance<Service>>,
}

impl Master {
    /// Returns the addresses that were really bound.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Returns the service, for callers in the same process.
    pub fn service(&self) -> Arc<Service> {
        self.service.clone()
    }

    /// Closes the listeners, gives calls in flight up to two seconds to end, and stops.
    ///
    /// Not cancel-safe: if the future is dropped, the master ends at once.
    pub async fn stop(mut self) {
        self.stop.cancel();
        self.tasks.close();
        if timeout(DRAIN_DEADLINE, self.tasks.wait()).await.is_err() {
            tracing::info!(
                connections = self.tasks.len(),
                "aborting connections that did not end in time"
            );
            self.kill.cancel();
            // Aborted tasks end at their next await. A task that computes is not waited for any
            // longer.
            let _ = timeout(DRAIN_DEADLINE, self.tasks.wait()).await;
        }
        let maintenance = self.maintenance.take();
        // Ending the maintenance thread syncs the log, which may take as long as the disk does.
        let _ = timeout(DRAIN_DEADLINE, tokio::task::spawn_blocking(|| drop(maintenance))).await;
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        self.stop.cancel();
        self.kill.cancel();
        self.tasks.close();
    }
}

/// Binds all configured addresses, then serves. Must be called within a tokio runtime.
///
/// # Errors
/// The configuration is invalid, or an address cannot be bound. The message names the option.
///
/// Cancel-safe: if the future is dropped, nothing is left behind.
pub async fn start(config: MasterConfig) -> Result<Master> {
    start_with(config, SystemClock::shared()).await
}

/// Starts a master as [`start`] does, with another clock.
///
/// # Errors
/// The same as for [`start`].
pub async fn start_with(config: MasterConfig, clock: Arc<dyn Clock>) -> Result<Master> {
    start_in(config, clock, None).await
}

/// Starts a master as [`start`] does, with its log on a disk of the caller.
///
/// # Errors
/// The same as for [`start`].
#[cfg(feature = "test-util")]
pub async fn start_on(config: MasterConfig, disk: Arc<dyn crate::Disk>) -> Result<Master> {
    start_in(config, SystemClock::shared(), Some(Directory::on(disk))).await
}

/// Starts a master with its log in the directory, if there is one, or else in that of its
/// configuration.
async fn start_in(
    config: MasterConfig,
    clock: Arc<dyn Clock>,
    directory: Option<Directory>,
) -> Result<Master> {
    config.check()?;
    let host = match &config.rpc_interface[..] {
        "" => config.rpc_address.clone(),
        name => interface::address_of(name)?.to_string(),
    };
    let rpc = bind(&host, config.effective_rpc_port(), RPC).await?;
    let admin = if config.has_admin { Some(bind_admin(&config).await?) } else { None };
    let metadata = if config.has_metadata {
        Some(bind(&config.metadata_host, config.metadata_port, METADATA).await?)
    } else {
        None
    };
    let events = match config.events.is_on {
        true => Some(events::bind(&config.events.endpoint).await?),
        false => None,
    };
    let addresses = Addresses {
        rpc: local_addr_of(&rpc)?,
        admin: admin.as_ref().map(local_addr_of).transpose()?,
        metadata: metadata.as_ref().map(local_addr_of).transpose()?,
        events: events.as_ref().map(local_addr_of).transpose()?,
    };
    let service = open_service(&config, clock, directory).await?;
    if config.is_multi_tenant {
        service.load_quota_file(&config.tenant_policy)?;
    }
    service.set_addresses(addresses);
    service.slow_log().set_threshold(config.slow_call);
    let (unix, unix_name) = bind_unix();
    let master = Master {
        addresses,
        service: service.clone(),
        stop: CancellationToken::new(),
        kill: CancellationToken::new(),
        tasks: TaskTracker::new(),
        maintenance: service.has_journal().then(|| Maintenance::start(&service)).transpose()?,
    };
    let context = server_context(&config, &master, unix_name);
    if let (Some(listener), Some(address)) = (events, addresses.events) {
        let events = Arc::new(Events::new(config.events.clone(), address));
        service.set_events(events.clone());
        tracing::info!(%address, backend_id = config.events.backend_id, "events are published");
        master.spawn(events.serve(listener, master.stop.clone()));
    }
    let store = Arc::new(Metadata::default());
    let cleaned = (config.is_metadata_cleaned && config.has_metadata).then(|| store.clone());
    master.spawn_until_stop(run_timers(service.clone(), cleaned));
    if config.is_reporting {
        master.spawn_until_stop(log_summary(service.clone()));
    }
    if let Some(unix) = unix {
        master.spawn(listen::serve_unix(unix, context.clone()));
    }
    if let Some(listener) = admin {
        let settings = admin_settings(&config);
        master.spawn(admin::serve(listener, service, settings, master.stop.clone()));
    }
    if let Some(listener) = metadata {
        master.spawn(admin::metadata::serve(listener, store, master.stop.clone()));
    }
    master.spawn(listen::serve_tcp(rpc, context));
    Ok(master)
}

fn admin_settings(config: &MasterConfig) -> admin::Settings {
    admin::Settings {
        secrets: admin::Secrets {
            admin: config.admin_token.clone(),
            rpc: config.rpc_token.clone(),
        },
        has_upstream_metrics: config.has_upstream_metrics,
        hosts: config.admin_hosts.clone(),
    }
}

/// Creates the context shared by all connections.
fn server_context(config: &MasterConfig, master: &Master, unix_name: Arc<str>) -> ServerContext {
    let admission = Admission::new(tokio::runtime::Handle::current().metrics().num_workers());
    master.service.set_admission(admission.clone());
    ServerContext {
        service: master.service.clone(),
        unix_name,
        token: config.rpc_token.clone(),
        is_nodelay: config.is_tcp_nodelay,
        idle: (!config.rpc_idle_timeout.is_zero()).then_some(config.rpc_idle_timeout),
        stop: master.stop.clone(),
        kill: master.kill.clone(),
        tasks: master.tasks.clone(),
        admission,
        permits: ConnectionPermits::new(connections_max(CONNECTIONS_MAX, limit())),
        dedicated_threads: Arc::new(Semaphore::new(DEDICATED_THREADS_MAX)),
    }
}

/// Creates the service, from the log if the configuration has one.
async fn open_service(
    config: &MasterConfig,
    clock: Arc<dyn Clock>,
    directory: Option<Directory>,
) -> Result<Arc<Service>> {
    let rules = config.rules();
    if let Some(directory) = directory {
        let opened = Journal::open(directory, config.log_sync)?;
        return Ok(Arc::new(Service::from_log(rules, clock, opened).0));
    }
    let Some((path, is_asked_for)) = config.state_path() else {
        return Ok(Arc::new(Service::new(rules, clock)));
    };
    let (sync, on_failure) = (config.log_sync, config.effective_on_log_failure());
    let opened = tokio::task::spawn_blocking(move || {
        let directory = match Directory::lock(&path) {
            Ok(directory) => directory,
            Err(error) if is_asked_for => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "running without a log: a restart will forget everything");
                return Ok(Service::new(rules, clock));
            }
        };
        let start = SystemClock.now();
        let mut opened = Journal::open(directory, sync)?;
        opened.journal = opened.journal.with_failure_policy(on_failure);
        let (service, restored) = Service::from_log(rules, clock, opened);
        let time = SystemClock.now().since(start);
        service.set_recovery_time(time);
        tracing::info!(
            state_dir = %path.display(),
            segments = restored.segments,
            objects = restored.objects,
            puts_under_way = restored.writes,
            tasks = restored.tasks,
            drain_jobs = restored.jobs,
            milliseconds = time.as_millis(),
            "read the log"
        );
        if restored.conflicts > 0 {
            let conflicts = restored.conflicts;
            tracing::error!(conflicts, "dropped objects of the log that overlap others");
        }
        Ok(service)
    });
    let service = opened.await.map_err(|source| {
        Error::internal("the recovery of the log panicked").caused_by(source)
    })??;
    Ok(Arc::new(service))
}

impl Master {
    /// Spawns a task that needs no cleanup when the master stops.
    fn spawn_until_stop(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.spawn(async move {
            stop.run_until_cancelled(task).await;
        });
    }

    /// Spawns a task that ends by itself when the master stops, and is aborted if it takes too
    /// long.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let (stop, kill) = (self.stop.clone(), self.kill.clone());
        self.tasks.spawn(async move {
            kill.run_until_cancelled(task).await;
            // A task that ends without a stop is a bug.
            if !stop.is_cancelled() && !kill.is_cancelled() {
                tracing::error!("a task of the master ended unexpectedly");
            }
        });
    }
}

/// Runs the timers of the state and forgets expired clients.
async fn run_timers(service: Arc<Service>, cleaned: Option<Arc<Metadata>>) {
    loop {
        let due = service.advance();
        for (name, gone) in service.take_expired_clients() {
            tracing::warn!(
                client = name,
                segments = gone.segments,
                copies = gone.copies,
                bytes = gone.bytes,
                "a client expired: no heartbeat within its TTL; objects that have no copy elsewhere \
                 are lost"
            );
            if let Some(metadata) = &cleaned {
                metadata.remove_engine(&name);
            }
        }
        let wait = due.map_or(TICK_MAX, |due: Moment| due.left(service.now()));
        tokio::time::sleep(wait.clamp(TICK_MIN, TICK_MAX)).await;
    }
}

async fn log_summary(service: Arc<Service>) {
    let mut previous = admin::summary::Snapshot::take(&service);
    loop {
        tokio::time::sleep(REPORT_INTERVAL).await;
        let present = admin::summary::Snapshot::take(&service);
        tracing::info!("{}", admin::summary::log_line(&previous, &present));
        previous = present;
    }
}

/// Binds the admin port. If the default port is taken, binds a free one: two masters may share a
/// host.
async fn bind_admin(config: &MasterConfig) -> Result<TcpListener> {
    if let Some(port) = config.admin_port {
        return bind(&config.admin_host, port, ADMIN).await;
    }
    match bind(&config.admin_host, ADMIN_PORT, ADMIN).await {
        Ok(listener) => Ok(listener),
        Err(error) => {
            let listener = bind(&config.admin_host, 0, ADMIN).await?;
            tracing::warn!(%error, taken = %local_addr_of(&listener)?, "the default admin port is not available; bound a free port");
            Ok(listener)
        }
    }
}

/// Binds the first address of the host that can be bound.
async fn bind(host: &str, port: u16, by: ListenOptions) -> Result<TcpListener> {
    let endpoint: Endpoint = host.parse()?;
    if endpoint.port.is_some() {
        return Err(Error::invalid("the host must not contain a port; use the option of the port")
            .with("host", host)
            .with("option", format_args!("--{}", by.host)));
    }
    let failed = |source: io::Error| {
        let (message, option) = match source.kind() {
            io::ErrorKind::AddrInUse => ("the address is in use; choose another port", by.port),
            io::ErrorKind::PermissionDenied => ("no permission to bind the port", by.port),
            _ => ("the address cannot be bound", by.host),
        };
        let is_taken = source.kind() == io::ErrorKind::AddrInUse;
        let mut error = Error::new(ErrorCode::RPC_FAIL, message)
            .with("address", Endpoint::new(endpoint.host.clone(), port))
            .with("option", format_args!("--{option}"))
            .with_remedy("Name an address of this machine, and a port that is free.");
        if let Some(holder) = mooncake_os::port_holder(port).filter(|_| is_taken) {
            error = error.with("held_by", holder);
        }
        error.caused_by(source)
    };
    let addresses = tokio::net::lookup_host((&endpoint.host[..], port)).await.map_err(failed)?;
    let mut last = io::Error::other("the host name has no address");
    for address in addresses {
        match listen_at(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Lingering connections of an earlier master must not block the port.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn local_addr_of(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|source| {
        Error::internal("cannot get the address of a bound socket").caused_by(source)
    })
}

/// Binds the abstract Unix socket under a random name. Without the socket, clients use TCP.
fn bind_unix() -> (Option<UnixListener>, Arc<str>) {
    let (first, second) = mooncake_base::EngineId::random().halves();
    let name = format!("mooncake-master-{first:016x}{second:016x}");
    let bound = std::os::unix::net::SocketAddr::from_abstract_name(&name)
        .and_then(|address| std::os::unix::net::UnixListener::bind_addr(&address))
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .and_then(UnixListener::from_std);
    match bound {
        Ok(listener) => (Some(listener), Arc::from(name)),
        Err(error) => {
            tracing::warn!(%error, "cannot bind a Unix socket: clients on this host will use TCP");
            (None, Arc::from(""))
        }
    }
}
