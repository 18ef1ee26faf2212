//! A connection: what it needs to know, its session, and the form in which gRPC takes it.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{Admission, Origin, Service};

/// What every connection needs to know.
#[derive(Debug, Clone)]
pub struct ServerContext {
    /// Where calls go.
    pub service: Arc<Service>,
    /// The name of our abstract Unix socket; empty for none.
    pub unix_name: Arc<str>,
    /// Sends small answers at once.
    pub is_nodelay: bool,
    /// Closes a native connection on which nothing came for so long.
    pub idle: Option<Duration>,
    /// Asks connections to end after the call in hand.
    pub stop: CancellationToken,
    /// Ends them now.
    pub kill: CancellationToken,
    /// Owns the tasks of the connections.
    pub tasks: TaskTracker,
    /// What all connections together may ask.
    pub admission: Admission,
    /// One permit a connection.
    pub permits: Arc<Semaphore>,
    /// One permit a connection that has a thread of its own for a while.
    pub dedicated_threads: Arc<Semaphore>,
}

impl ServerContext {
    /// Starts a task that ends when all are told to.
    pub(super) fn spawn(&self, connection: impl Future<Output = ()> + Send + 'static) {
        let kill = self.kill.clone();
        self.tasks.spawn(async move {
            kill.run_until_cancelled(connection).await;
        });
    }
}

/// A connection's session; dropped with the connection, in whatever way that ends.
#[derive(Debug)]
pub(super) struct Connection {
    service: Arc<Service>,
    pub(super) origin: Origin,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// Opens the session of a connection that was accepted.
    pub(super) fn new(
        context: &ServerContext,
        is_local: bool,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let origin = context.service.open_session(is_local);
        Self { service: context.service.clone(), origin, _permit: permit }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.service.close_session(&self.origin);
    }
}

/// A connection on its way to gRPC: what was read of it, then the rest.
#[derive(Debug)]
pub(super) struct GrpcStream {
    prefix: BytesMut,
    stream: TcpStream,
    connection: Connection,
}

impl GrpcStream {
    /// Goes on with a stream of which the beginning was read.
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
            return Pin::new(&mut self.stream).poll_read(context, into);
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
