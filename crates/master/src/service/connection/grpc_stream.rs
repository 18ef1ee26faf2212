//! The stream of a gRPC connection, and its calls in progress.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use mooncake_base::sync::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep},
};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::Connection;
use crate::service::{Origin, unproven::ConnectionPlace};

/// The time after which an HTTP/2 connection without calls is closed, unless an option sets another.
const GRPC_IDLE: Duration = Duration::from_secs(600);

/// A TCP stream for gRPC that first yields the bytes read while sniffing the protocol. It ends when it
/// was idle for too long, or when a newer connection takes its place.
#[derive(Debug)]
pub(crate) struct GrpcStream {
    prefix: BytesMut,
    stream: TcpStream,
    peer: GrpcPeer,
    connection: Connection,
    idle: Duration,
    /// When to look whether it is idle.
    idle_check: Pin<Box<Sleep>>,
    displaced: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// The caller of a gRPC connection, as its calls find it.
#[derive(Debug, Clone)]
pub(crate) struct GrpcPeer {
    pub(in crate::service) origin: Origin,
    pub(in crate::service) place: Arc<ConnectionPlace>,
    calls: Arc<CallActivity>,
}

/// How busy a connection is.
#[derive(Debug)]
struct CallActivity {
    running: AtomicUsize,
    /// When a call began or ended last.
    last: Mutex<Instant>,
}

/// A call in progress. Dropped when it is answered or given up.
#[derive(Debug)]
pub(in crate::service) struct GrpcCall(Arc<CallActivity>);

impl GrpcPeer {
    /// Records that a call begins.
    pub(in crate::service) fn begin_call(&self) -> Arc<GrpcCall> {
        self.calls.running.fetch_add(1, Ordering::AcqRel);
        *self.calls.last.lock() = Instant::now();
        Arc::new(GrpcCall(self.calls.clone()))
    }
}

impl Drop for GrpcCall {
    fn drop(&mut self) {
        *self.0.last.lock() = Instant::now();
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

impl GrpcStream {
    /// Wraps a stream whose first bytes, `prefix`, have already been read.
    pub(in crate::service) fn new(
        prefix: BytesMut,
        stream: TcpStream,
        connection: Connection,
        idle: Option<Duration>,
    ) -> Self {
        let idle = idle.unwrap_or(GRPC_IDLE);
        let last = Mutex::new(Instant::now());
        let calls = Arc::new(CallActivity { running: AtomicUsize::new(0), last });
        let (origin, place) = (connection.origin.clone(), connection.place.clone());
        let displaced = Box::pin(place.displaced().clone().cancelled_owned());
        let idle_check = Box::pin(tokio::time::sleep(idle));
        let peer = GrpcPeer { origin, place, calls };
        Self { prefix, stream, peer, connection, idle, idle_check, displaced }
    }

    /// Returns whether the master ends the connection now.
    fn poll_end(&mut self, context: &mut Context<'_>) -> bool {
        if self.displaced.as_mut().poll(context).is_ready() {
            self.connection.service.record_displaced();
            return true;
        }
        while self.idle_check.as_mut().poll(context).is_ready() {
            let (last, now) = (*self.peer.calls.last.lock(), Instant::now());
            let is_busy = self.peer.calls.running.load(Ordering::Acquire) > 0;
            if !is_busy && last + self.idle <= now {
                self.connection.end_idle();
                return true;
            }
            let next = if is_busy { now } else { last };
            self.idle_check.as_mut().reset(next + self.idle);
        }
        false
    }
}

impl tonic::transport::server::Connected for GrpcStream {
    type ConnectInfo = GrpcPeer;

    fn connect_info(&self) -> GrpcPeer {
        self.peer.clone()
    }
}

impl AsyncRead for GrpcStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.poll_end(context) {
            // As if the peer had closed it.
            return Poll::Ready(Ok(()));
        }
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
