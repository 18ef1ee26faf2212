//! Relay: accepts dummy clients over the native protocol and forwards their calls to the master.

use std::{
    net::{Shutdown, SocketAddr},
    sync::Arc,
    time::Duration,
};

use mooncake_base::{
    ClientId, Clock, Error, Result, SystemClock, TenantId, exposition::Exposition,
};
use mooncake_os::{
    acceptor::{
        Acceptor, ConnectionLimits, ConnectionPlace, Connections, Overflow, pause_accepting,
    },
    threads::Threads,
};
use mooncake_proto::native_frame::{self, DaemonGreeting, ServerGreeting};
use mooncake_store_client::MasterLink;
use socket2::Socket;

use crate::{
    client_table::CLIENTS_MAX,
    connection,
    counters::RelayUsage,
    dummy_clients::DummyClients,
    limits::RelayLimits,
    listeners::Listeners,
    process::{Process, is_of_this_user},
    waker::waker_pair,
    watch,
};

/// Stack size of a connection thread.
const STACK_BYTES: usize = 512 << 10;

/// Threads that accept connections at two listeners, and one that watches processes.
const THREADS_MAX: usize = 3;

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
    shared: Arc<RelayParts>,
    address: SocketAddr,
    acceptors: Vec<Arc<Acceptor<Socket>>>,
    /// Those that accept connections, and that watch the processes of dummy clients.
    threads: Threads,
}

#[derive(Debug)]
struct RelayParts {
    dummy_clients: Arc<DummyClients>,
    greeting: ServerGreeting,
    connections: Arc<Connections>,
    limits: RelayLimits,
    /// One for each connection, which bounds them.
    threads: Threads,
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
        let unconnected_max = limits.unconnected_max;
        let dummy_clients =
            DummyClients::new(link, host, tenant, rpc_timeout, unconnected_max, waker);
        let dummy_clients = Arc::new(dummy_clients);
        let connections = Connections::new(ConnectionLimits {
            count: limits.connections_max,
            overflow: Overflow::Close,
            greetings: limits.connections_max,
            greeting_time: limits.greeting_timeout,
        });
        let threads = Threads::unbounded().with_stack_bytes(STACK_BYTES);
        let address = listeners.address();
        let shared = Arc::new(RelayParts { dummy_clients, greeting, connections, limits, threads });
        let acceptors = listeners
            .into_sockets()
            .map(|listener| Arc::new(Acceptor::sharing(listener, Arc::clone(&shared.connections))));
        let acceptors: Vec<_> = acceptors.collect();
        let relay = Self { shared, address, acceptors, threads: Threads::new(THREADS_MAX) };
        let failed = |source| Error::internal("cannot start a thread").caused_by(source);
        let dummy_clients = Arc::clone(&relay.shared.dummy_clients);
        let watch = move || watch::run(&dummy_clients, &receiver);
        relay.threads.spawn("mc-watch", watch).map_err(failed)?;
        for acceptor in &relay.acceptors {
            let (shared, acceptor) = (Arc::clone(&relay.shared), Arc::clone(acceptor));
            let accept = move || shared.accept(&acceptor);
            relay.threads.spawn("mc-accept", accept).map_err(failed)?;
        }
        Ok(relay)
    }

    /// The address for dummy clients of this host.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Number of dummy clients.
    pub fn dummy_clients(&self) -> usize {
        self.shared.dummy_clients.count()
    }

    /// Returns a function that appends the relay's metrics.
    pub fn metrics(&self) -> impl Fn(&mut Exposition) + Send + Sync + 'static {
        let shared = Arc::clone(&self.shared);
        move |out| {
            let usage = RelayUsage {
                dummy_clients: shared.dummy_clients.count(),
                dummy_clients_max: CLIENTS_MAX,
                connections: shared.connections.count(),
                connections_max: shared.limits.connections_max,
                refused: shared.connections.refused(),
                ..shared.dummy_clients.counters.snapshot()
            };
            usage.add_to(out);
        }
    }

    /// Closes every connection and joins the threads. The dummy clients stay registered at the
    /// master, since they may reconnect to the next daemon.
    pub fn stop(&self) {
        let RelayParts { dummy_clients, connections, .. } = &*self.shared;
        if !dummy_clients.close() {
            return;
        }
        self.threads.stop(|| self.acceptors.iter().for_each(|acceptor| acceptor.close()));
        connections.close(Shutdown::Both);
        let left = connections.await_end(SystemClock.now() + STOP_TIMEOUT);
        if left > 0 {
            tracing::warn!(connections = left, "connections did not end in time");
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop();
    }
}

impl RelayParts {
    fn accept(self: &Arc<Self>, acceptor: &Acceptor<Socket>) {
        while let Some((socket, place)) = acceptor.next(|| self.dummy_clients.is_closed()) {
            self.serve_connection(socket, place);
        }
    }

    /// Serves a new connection on its own thread.
    fn serve_connection(self: &Arc<Self>, socket: Socket, place: ConnectionPlace) {
        // Fails if the peer is gone.
        let Ok(peer) = socket.peer_addr() else { return };
        if let Some(peer) = peer.as_socket() {
            if !is_local(&socket, peer) {
                tracing::warn!(%peer, "refused a connection from another host");
                self.connections.record_refusal();
                return;
            }
            // Best effort: without it the connection is only slower.
            let _ = socket.set_tcp_nodelay(true);
        }
        let is_unix = peer.is_unix();
        let process = is_unix.then(|| Process::of_peer(&socket)).flatten();
        let is_of_this_user = is_unix && is_of_this_user(&socket);
        let shared = Arc::clone(self);
        let serving = self.threads.spawn("mc-dummy", move || {
            let peer = connection::Peer { socket: &socket, process, is_of_this_user };
            connection::serve(&shared.dummy_clients, &shared.greeting, peer, shared.limits, place);
        });
        if let Err(error) = serving {
            tracing::warn!(%error, "refused a connection: cannot start a thread");
            self.connections.record_refusal();
            pause_accepting();
        }
    }
}

fn is_local(socket: &Socket, peer: SocketAddr) -> bool {
    let peer = peer.ip().to_canonical();
    let own = socket.local_addr().ok().and_then(|own| own.as_socket());
    peer.is_loopback() || own.is_some_and(|own| own.ip().to_canonical() == peer)
}
