//! A running master: binds its listeners, serves, and stops.

mod interface;

use std::{io, net::SocketAddr, os::linux::net::SocketAddrExt, sync::Arc};

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Result, SystemClock};
use tokio::net::{TcpListener, TcpSocket, UnixListener};

use crate::{
    addresses::Addresses,
    admin,
    cluster::MemberHandle,
    config::{ADMIN_PORT, MasterConfig},
    events,
    journal::{Directory, Journal},
    server::{QuotaSource, RunningService, Server},
    service::{Service, listen},
};

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
    server: Arc<Server>,
    mode: Option<Mode>,
}

/// Who decides when this master serves.
#[derive(Debug)]
enum Mode {
    /// A single master serves from its start to its end.
    Single(RunningService),
    /// One of several masters serves while it leads.
    Member(MemberHandle),
}

impl Master {
    /// Returns the addresses that were really bound.
    pub fn addresses(&self) -> &Addresses {
        self.server.addresses()
    }

    /// Returns the service, for callers in the same process; `None` while another master leads.
    pub fn leading_service(&self) -> Option<Arc<Service>> {
        self.server.service()
    }

    /// Returns the service of a single master, for callers in the same process.
    ///
    /// # Panics
    /// Another master leads.
    pub fn service(&self) -> Arc<Service> {
        self.server.service().expect("a single master always serves")
    }

    /// Waits for the error after which this master answers no call any more.
    ///
    /// Cancel-safe.
    pub async fn ended(&self) -> Error {
        match &self.mode {
            Some(Mode::Member(member)) => member.cluster().ended().await,
            _ => match self.server.service() {
                Some(service) => service.ended().await,
                None => std::future::pending().await,
            },
        }
    }

    /// Closes the listeners, gives calls in flight up to two seconds to end, and stops.
    ///
    /// Not cancel-safe: if the future is dropped, the master ends at once.
    pub async fn stop(mut self) {
        let running = match self.mode.take() {
            Some(Mode::Single(running)) => Some(running),
            Some(Mode::Member(member)) => {
                // A leader ends its term, and gives its lease back.
                let ended = tokio::task::spawn_blocking(|| drop(member));
                let _ = ended.await;
                None
            }
            None => None,
        };
        self.server.stop(running).await;
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        self.server.kill();
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
    let events =
        if config.events.is_on { Some(events::bind(&config.events.endpoint).await?) } else { None };
    let addresses = Addresses {
        rpc: local_addr_of(&rpc)?,
        admin: admin.as_ref().map(local_addr_of).transpose()?,
        metadata: metadata.as_ref().map(local_addr_of).transpose()?,
        events: events.as_ref().map(local_addr_of).transpose()?,
    };
    let (unix, unix_name) = bind_unix();
    let events = events.map(TcpListener::into_std).transpose().map_err(|source| {
        Error::internal("the listener of the events cannot be used").caused_by(source)
    })?;
    let advertised = config.cluster.is_member.then(|| config.advertised_address(addresses.rpc));
    let advertised = advertised.transpose()?;
    let server = Arc::new(Server::new(config, clock.clone(), addresses, unix_name, events));
    let config = server.config();
    let mode = match advertised {
        None => {
            let service = open_service(config, clock, directory).await?;
            server.set_up(&service, QuotaSource::File)?;
            Mode::Single(server.start_service(service, None)?)
        }
        Some(address) => {
            let server = server.clone();
            // Reads the state directory.
            let started = tokio::task::spawn_blocking(move || {
                MemberHandle::start(server.clone(), server.config(), address)
            });
            Mode::Member(started.await.map_err(|source| {
                Error::internal("the start of a member panicked").caused_by(source)
            })??)
        }
    };
    if let Some(unix) = unix {
        server.spawn(listen::serve_unix(unix, server.clone()));
    }
    if let Some(listener) = admin {
        server.spawn(admin::serve(listener, server.clone()));
    }
    if let Some(listener) = metadata {
        let (store, stop) = (server.metadata().clone(), server.stop_token().clone());
        server.spawn(admin::metadata::serve(listener, store, stop));
    }
    server.spawn(listen::serve_tcp(rpc, server.clone()));
    Ok(Master { server, mode: Some(mode) })
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
        if let Some(journal) = service.shared().journal() {
            journal.set_recovery_time(time);
        }
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
        if is_taken && let Some(holder) = mooncake_os::port_holder(port) {
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
