//! Relay: accepts dummy clients over the native protocol and forwards their calls to the master.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{
    ClientId, Clock, Error, Moment, Result, SystemClock, TenantId, exposition::Exposition,
};
use mooncake_proto::native_frame::{self, DaemonGreeting, ServerGreeting};
use mooncake_store_client::MasterLink;
use rustc_hash::FxHashMap;
use socket2::{SockAddr, SockRef, Socket};

use crate::{
    client_table::CLIENTS_MAX,
    connection,
    counters::Gauges,
    dummy_clients::DummyClients,
    limits::RelayLimits,
    listeners::Listeners,
    process::{Process, is_of_this_user},
    waker::waker_pair,
    watch,
};

/// Stack size of a connection thread.
const STACK_BYTES: usize = 512 << 10;

/// Delay before a retry when the process is out of file descriptors or threads.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Time that accepting waits for the end of a silent connection that gives way.
const DISPLACE_TIMEOUT: Duration = Duration::from_secs(1);

/// Time that stopping waits for connections to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Settings of a relay.
#[derive(Debug)]
pub struct RelaySettings {
    /// Link to the master, owned and closed by the relay.
    pub link: Arc<dyn MasterLink>,
    /// Greeting for dummy clients.
    pub daemon: DaemonGreeting,
    /// The host of the dummy clients, as the master knows it.
    pub host: String,
    /// Namespace of the dummy clients' keys.
    pub tenant: TenantId,
    /// Time limit of one call to the master.
    pub rpc_timeout: Duration,
    /// Limits of connections.
    pub limits: RelayLimits,
}

/// A running relay. Stops when dropped.
#[derive(Debug)]
pub struct Relay {
    acceptor: Arc<Acceptor>,
    listeners: Listeners,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Accepts connections and keeps the list of open ones.
#[derive(Debug)]
struct Acceptor {
    dummy_clients: Arc<DummyClients>,
    greeting: ServerGreeting,
    sockets: Mutex<FxHashMap<u64, OpenConnection>>,
    limits: RelayLimits,
    /// Signalled when a connection ends.
    connection_ended: Condvar,
    last_number: AtomicU64,
}

/// An open connection.
#[derive(Debug)]
struct OpenConnection {
    socket: Arc<Socket>,
    /// Whether a dummy client has made a call over it.
    is_known: Arc<AtomicBool>,
}

impl Relay {
    /// Starts to serve.
    ///
    /// # Errors
    /// The process is out of file descriptors or threads.
    pub fn start(listeners: Listeners, settings: RelaySettings) -> Result<Self> {
        let RelaySettings { link, daemon, host, tenant, rpc_timeout, limits } = settings;
        let (waker, receiver) = waker_pair()?;
        let greeting = ServerGreeting {
            version: native_frame::VERSION,
            master: ClientId::random().to_bytes().to_vec(),
            unix_socket: listeners.unix_name().to_owned(),
            daemon: Some(daemon),
            ..ServerGreeting::default()
        };
        let acceptor = Arc::new(Acceptor {
            dummy_clients: Arc::new(DummyClients::new(link, host, tenant, rpc_timeout, waker)),
            greeting,
            sockets: Mutex::default(),
            limits,
            connection_ended: Condvar::new(),
            last_number: AtomicU64::new(0),
        });
        let relay = Self { acceptor, listeners, threads: Mutex::default() };
        let watching = watch::start(Arc::clone(&relay.acceptor.dummy_clients), receiver)?;
        relay.threads.lock().push(watching);
        for listener in relay.listeners.all() {
            let accepting = relay.accept_from(listener)?;
            relay.threads.lock().push(accepting);
        }
        Ok(relay)
    }

    /// The address for dummy clients of this host.
    pub fn address(&self) -> SocketAddr {
        self.listeners.address()
    }

    /// Number of dummy clients.
    pub fn dummy_clients(&self) -> usize {
        self.acceptor.dummy_clients.count()
    }

    /// Returns a function that appends the relay's metrics.
    pub fn metrics(&self) -> impl Fn(&mut Exposition) + Send + Sync + 'static {
        let acceptor = Arc::clone(&self.acceptor);
        move |out| {
            let gauges = Gauges {
                dummy_clients: (acceptor.dummy_clients.count(), CLIENTS_MAX),
                connections: (acceptor.sockets.lock().len(), acceptor.limits.connections_max),
            };
            acceptor.dummy_clients.counters.add_to(out, &gauges);
        }
    }

    /// Closes every connection and joins the threads. The dummy clients stay registered at the
    /// master, since they may reconnect to the next daemon.
    pub fn stop(&self) {
        if !self.acceptor.dummy_clients.close() {
            return;
        }
        for listener in self.listeners.all() {
            // Wakes the accepting thread.
            let _ = listener.shutdown(std::net::Shutdown::Both);
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A panic was already reported by the thread.
            let _ = thread.join();
        }
        self.acceptor.end_connections(SystemClock.now() + STOP_TIMEOUT);
    }

    #[allow(clippy::disallowed_methods, reason = "there is no event for free file descriptors")]
    fn accept_from(&self, listener: &Socket) -> Result<JoinHandle<()>> {
        let failed =
            |source| Error::internal("cannot start the accepting thread").caused_by(source);
        let listener = listener.try_clone().map_err(failed)?;
        let acceptor = Arc::clone(&self.acceptor);
        std::thread::Builder::new()
            .name("mc-accept".to_owned())
            .spawn(move || {
                while !acceptor.dummy_clients.is_closed() {
                    match listener.accept() {
                        Ok((socket, peer)) => acceptor.serve_connection(socket, &peer),
                        Err(_) if acceptor.dummy_clients.is_closed() => return,
                        Err(error) => {
                            tracing::warn!(%error, "cannot accept a connection");
                            std::thread::sleep(RETRY_PAUSE);
                        }
                    }
                }
            })
            .map_err(failed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Acceptor {
    /// Serves a new connection on its own thread.
    #[allow(clippy::disallowed_methods, reason = "there is no event for free threads")]
    fn serve_connection(self: &Arc<Self>, socket: Socket, peer: &SockAddr) {
        if let Some(peer) = peer.as_socket() {
            if !is_local(&socket, peer) {
                tracing::warn!(%peer, "refused a connection from another host");
                self.dummy_clients.counters.count_refusal();
                return;
            }
            // Best effort: without it the connection is only slower.
            let _ = socket.set_tcp_nodelay(true);
        }
        let socket = Arc::new(socket);
        let is_known = Arc::new(AtomicBool::new(false));
        let open = OpenConnection { socket: Arc::clone(&socket), is_known: Arc::clone(&is_known) };
        let Some(number) = self.add_connection(open) else {
            let limit = self.limits.connections_max;
            tracing::warn!(limit, "refused a connection: too many connections");
            self.dummy_clients.counters.count_refusal();
            return;
        };
        let is_unix = peer.is_unix();
        let process = is_unix.then(|| Process::of_peer(&socket)).flatten();
        let is_of_this_user = is_unix && is_of_this_user(&socket);
        let acceptor = Arc::clone(self);
        let serving = std::thread::Builder::new()
            .name("mc-dummy".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let guard = ConnectionGuard { acceptor, number };
                let Self { dummy_clients, greeting, limits, .. } = &*guard.acceptor;
                let socket = &socket;
                let peer =
                    connection::Peer { socket, process, is_of_this_user, is_known: &is_known };
                connection::serve(dummy_clients, greeting, peer, *limits);
            });
        if let Err(error) = serving {
            tracing::warn!(%error, "refused a connection: cannot start a thread");
            self.dummy_clients.counters.count_refusal();
            self.sockets.lock().remove(&number);
            std::thread::sleep(RETRY_PAUSE);
        }
    }

    /// Adds a connection and returns its number. Above the limit, the oldest connection over which
    /// no call was made is ended first; `None` if there is none.
    fn add_connection(&self, connection: OpenConnection) -> Option<u64> {
        let deadline = SystemClock.now() + DISPLACE_TIMEOUT;
        let mut sockets = self.sockets.lock();
        while sockets.len() >= self.limits.connections_max {
            let is_silent =
                |(_, open): &(&u64, &OpenConnection)| !open.is_known.load(Ordering::Relaxed);
            let (_, oldest) =
                sockets.iter().filter(is_silent).min_by_key(|(number, _)| **number)?;
            oldest.shut_down();
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                return None;
            }
            self.connection_ended.wait_for(&mut sockets, left);
        }
        let number = self.last_number.fetch_add(1, Ordering::Relaxed);
        sockets.insert(number, connection);
        Some(number)
    }

    fn end_connections(&self, deadline: Moment) {
        let mut sockets = self.sockets.lock();
        sockets.values().for_each(OpenConnection::shut_down);
        while !sockets.is_empty() {
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                tracing::warn!(connections = sockets.len(), "connections did not end in time");
                return;
            }
            self.connection_ended.wait_for(&mut sockets, left);
        }
    }
}

impl OpenConnection {
    fn shut_down(&self) {
        // Fails if the peer has already closed the connection.
        let _ = SockRef::from(&*self.socket).shutdown(std::net::Shutdown::Both);
    }
}

/// Removes the connection from the list when its thread ends, even by a panic.
struct ConnectionGuard {
    acceptor: Arc<Acceptor>,
    number: u64,
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.acceptor.sockets.lock().remove(&self.number);
        self.acceptor.connection_ended.notify_all();
    }
}

fn is_local(socket: &Socket, peer: SocketAddr) -> bool {
    let peer = peer.ip().to_canonical();
    let own = socket.local_addr().ok().and_then(|own| own.as_socket());
    peer.is_loopback() || own.is_some_and(|own| own.ip().to_canonical() == peer)
}
