//! A connection: the shared server context, the session, and the stream type that gRPC takes.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use mooncake_base::Token;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{Admission, Origin, Service};

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
    /// The idle timeout after which a native connection is closed.
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
    pub permits: Arc<Semaphore>,
    /// One permit per connection that is served by a dedicated thread.
    pub dedicated_threads: Arc<Semaphore>,
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
            permits: Arc::new(Semaphore::new(8)),
            dedicated_threads: Arc::new(Semaphore::new(dedicated_threads)),
        }
    }

    /// Spawns a connection task that `kill` ends.
    pub(super) fn spawn(&self, connection: impl Future<Output = ()> + Send + 'static) {
        let kill = self.kill.clone();
        self.tasks.spawn(async move {
            kill.run_until_cancelled(connection).await;
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
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// Opens the session of an accepted connection.
    pub(super) fn new(
        context: &ServerContext,
        is_local: bool,
        peer: Option<SocketAddr>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let origin = context.service.open_session(is_local);
        let service = context.service.clone();
        let stop = context.stop.clone();
        let (end, is_direct) = (ConnectionEnd::Unknown, peer.is_none());
        Self { service, origin, end, peer, is_direct, stop, _permit: permit }
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

/// A TCP stream for gRPC that first yields the bytes read while sniffing the protocol.
#[derive(Debug)]
pub(super) struct GrpcStream {
    prefix: BytesMut,
    stream: TcpStream,
    connection: Connection,
}

impl GrpcStream {
    /// Wraps a stream whose first bytes, `prefix`, have already been read.
    pub(super) fn new(prefix: BytesMut, stream: TcpStream, connection: Connection) -> Self {
        Self { prefix, stream, connection }
    }
}

impl tonic::transport::server::Connected for GrpcStream {
    type ConnectInfo = Origin;

    fn connect_info(&self) -> Origin {
        self.connection.origin.clone()
    }
}

impl AsyncRead for GrpcStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.prefix.is_empty() {
            let before = into.filled().len();
            let read = Pin::new(&mut self.stream).poll_read(context, into);
            return read.map(|read| {
                let outcome = read.map(|()| into.filled().len() - before);
                self.connection.record_read(&outcome);
                outcome.map(drop)
            });
        }
        let count = self.prefix.len().min(into.remaining());
        into.put_slice(&self.prefix[..count]);
        self.prefix.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for GrpcStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
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
        let permit = context.permits.clone().try_acquire_owned().unwrap();
        let peer = peer.map(|peer| peer.parse().unwrap());
        let mut connection = Connection::new(&context, false, peer, permit);
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
