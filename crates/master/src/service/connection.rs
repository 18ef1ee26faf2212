//! A connection: the shared server context, and the session.

pub(crate) mod grpc_stream;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use mooncake_base::{Error, Token};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::grpc_stream::GrpcStream;
use super::{
    Admission, Origin, Service,
    unproven::{ConnectionPermits, ConnectionPlace},
};
use crate::cluster::LogSource;

/// The context shared by all connections of a server.
#[derive(Debug, Clone)]
pub struct ServerContext {
    /// The service that executes the calls.
    pub service: Arc<Service>,
    /// The name of the abstract Unix socket; empty for none.
    pub unix_name: Arc<str>,
    /// The token that callers must know; `None`: everybody may call.
    pub token: Option<Token>,
    /// Sets `TCP_NODELAY`.
    pub is_nodelay: bool,
    /// The idle timeout after which a connection is closed; one of HTTP/2 has a timeout without it,
    /// too.
    pub idle: Option<Duration>,
    /// Asks connections to end after the calls they have received.
    pub stop: CancellationToken,
    /// Ends connections at once.
    pub kill: CancellationToken,
    /// Owns the tasks of the connections.
    pub tasks: TaskTracker,
    /// Admission control over all connections.
    pub admission: Admission,
    /// One permit per connection.
    pub permits: ConnectionPermits,
    /// One permit per connection that is served by a dedicated thread.
    pub dedicated_threads: Arc<Semaphore>,
    /// Takes connections that speak gRPC.
    pub(crate) to_grpc: mpsc::Sender<io::Result<GrpcStream>>,
    /// The log for standbys; `None` for a single master.
    pub(crate) log_source: Option<Arc<LogSource>>,
}

impl ServerContext {
    /// Returns the context of a service without listeners.
    #[cfg(test)]
    pub(super) fn for_tests(service: Arc<Service>, dedicated_threads: usize) -> Self {
        Self {
            service,
            unix_name: Arc::from(""),
            token: None,
            is_nodelay: true,
            idle: None,
            stop: CancellationToken::new(),
            kill: CancellationToken::new(),
            tasks: TaskTracker::new(),
            admission: Admission::new(2),
            permits: ConnectionPermits::with(8, 8),
            dedicated_threads: Arc::new(Semaphore::new(dedicated_threads)),
            to_grpc: mpsc::channel(1).0,
            log_source: None,
        }
    }

    /// Spawns a task that `kill` ends.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let kill = self.kill.clone();
        self.tasks.spawn(async move {
            kill.run_until_cancelled(task).await;
        });
    }

    /// Spawns the task of a connection, which ends when a newer one takes its place.
    pub(super) fn spawn_connection(
        &self,
        place: &ConnectionPlace,
        connection: impl Future<Output = ()> + Send + 'static,
    ) {
        let displaced = place.displaced().clone();
        let service = self.service.clone();
        self.spawn(async move {
            if displaced.run_until_cancelled(connection).await.is_none() {
                service.record_displaced();
            }
        });
    }
}

/// The address of callers whose connection is that of another process.
const RELAYED: &str = "relayed";

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionEnd {
    /// The kernel of the peer's host ended it: the process closed it or is dead.
    ByPeer,
    /// The master closed it because it was idle, or because it stops, which says nothing about the
    /// peer.
    ByMaster,
    /// An error.
    Unknown,
}

/// The RAII guard of a connection's session and permit: dropping it closes the session.
#[derive(Debug)]
pub(super) struct Connection {
    service: Arc<Service>,
    pub(super) origin: Origin,
    /// What is known of how the connection ended.
    end: ConnectionEnd,
    /// The peer's address; `None` for a Unix socket.
    peer: Option<SocketAddr>,
    /// Whether the other end belongs to the process that calls, and not to a proxy: then the end of
    /// the connection shows that the process closed it or is dead.
    is_direct: bool,
    /// The master stops.
    stop: CancellationToken,
    pub(super) place: Arc<ConnectionPlace>,
}

impl Connection {
    /// Opens the session of an accepted connection.
    pub(super) fn new(context: &ServerContext, is_local: bool, peer: Option<SocketAddr>) -> Self {
        let origin = context.service.open_session(is_local);
        let service = context.service.clone();
        let stop = context.stop.clone();
        let (end, is_direct) = (ConnectionEnd::Unknown, peer.is_none());
        let place = Arc::new(context.permits.take_in());
        Self { service, origin, end, peer, is_direct, stop, place }
    }

    /// Records that the peer speaks another version.
    pub(super) fn record_other_version(&self, error: &Error) {
        let shared = self.service.shared();
        shared.refused_versions().record(shared.now(), self.peer, error);
    }

    /// Records the address that the caller has at its own end of the connection; empty in all calls
    /// but the first.
    pub(super) fn record_caller_address(&mut self, address: &str) {
        if address.is_empty() {
            return;
        }
        self.is_direct = match self.peer {
            None => address != RELAYED,
            Some(peer) => address.parse::<SocketAddr>().is_ok_and(|own| {
                (own.ip().to_canonical(), own.port()) == (peer.ip().to_canonical(), peer.port())
            }),
        };
    }

    /// Notes that the master closes the connection because it was idle.
    pub(super) fn end_idle(&mut self) {
        self.end = ConnectionEnd::ByMaster;
    }

    /// Returns how the connection ends if it ends now.
    fn end(&self) -> ConnectionEnd {
        match self.end {
            // Clients hang up on a master that stops. Calls that it still answers find their objects.
            _ if self.stop.is_cancelled() => ConnectionEnd::ByMaster,
            // It may be the end of a proxy, and the process may go on.
            ConnectionEnd::ByPeer if !self.is_direct => ConnectionEnd::Unknown,
            end => end,
        }
    }

    /// Records the outcome of reading from the connection.
    pub(super) fn record_read(&mut self, outcome: &io::Result<usize>) {
        let is_end = match outcome {
            Ok(bytes) => *bytes == 0,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        };
        if is_end {
            self.end = ConnectionEnd::ByPeer;
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.service.close_session(&self.origin, self.end());
    }
}

#[cfg(test)]
mod tests {
    use mooncake_base::SystemClock;

    use super::*;
    use crate::state::Rules;

    /// Returns how a connection ends whose peer closes it after its caller has said that address.
    fn end_of(peer: Option<&str>, said: &str) -> ConnectionEnd {
        let service = Arc::new(Service::new(Rules::default(), SystemClock::shared()));
        let context = ServerContext::for_tests(service, 0);
        let peer = peer.map(|peer| peer.parse().unwrap());
        let mut connection = Connection::new(&context, false, peer);
        connection.record_caller_address(said);
        connection.record_caller_address("");
        connection.record_read(&Ok(0));
        connection.end()
    }

    #[test]
    fn only_end_of_direct_connection_is_end_of_process() {
        let (direct, relayed) = (ConnectionEnd::ByPeer, ConnectionEnd::Unknown);
        assert_eq!(end_of(Some("10.0.0.1:5"), "10.0.0.1:5"), direct);
        assert_eq!(end_of(Some("[::ffff:10.0.0.1]:5"), "10.0.0.1:5"), direct);
        assert_eq!(end_of(Some("10.0.0.9:5"), "10.0.0.1:5"), relayed, "a proxy is between");
        assert_eq!(end_of(Some("10.0.0.1:6"), "10.0.0.1:5"), relayed, "one on the same host");
        assert_eq!(end_of(Some("10.0.0.1:5"), ""), relayed, "an earlier client");
        assert_eq!(end_of(Some("10.0.0.1:5"), RELAYED), relayed);
        assert_eq!(end_of(None, "unix"), direct);
        assert_eq!(end_of(None, ""), direct);
        assert_eq!(end_of(None, RELAYED), relayed, "a daemon of the host");
    }
}
