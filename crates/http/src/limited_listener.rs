//! Connections of the HTTP servers, bounded in number and in how long they may say nothing.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{extract::connect_info::Connected, serve::IncomingStream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};

/// The most connections of one HTTP server at a time; the others wait to be accepted.
const CONNECTIONS_MAX: usize = 4096;

/// A connection on which nothing comes for so long is closed.
const IDLE: Duration = Duration::from_secs(60);

/// How long to wait when the system has no more descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listener whose connections are bounded.
#[derive(Debug)]
pub struct LimitedListener {
    listener: TcpListener,
    permits: Arc<Semaphore>,
}

impl LimitedListener {
    /// Connections of that listener.
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, permits: Arc::new(Semaphore::new(CONNECTIONS_MAX)) }
    }
}

impl axum::serve::Listener for LimitedListener {
    type Io = BoundedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (BoundedStream, SocketAddr) {
        let permit = self.permits.clone().acquire_owned().await;
        let permit = permit.expect("the semaphore is never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let idle = Box::pin(sleep(IDLE));
                    return (BoundedStream { stream, idle, _permit: permit }, peer);
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// The peer of a connection, for handlers.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

impl Connected<IncomingStream<'_, LimitedListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, LimitedListener>) -> Self {
        Self(*stream.remote_addr())
    }
}

/// One connection.
#[derive(Debug)]
pub struct BoundedStream {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl AsyncRead for BoundedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(context, into) {
            Poll::Ready(read) => {
                self.idle.as_mut().reset(Instant::now() + IDLE);
                Poll::Ready(read)
            }
            Poll::Pending => {
                self.idle.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl AsyncWrite for BoundedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        if written.is_ready() {
            self.idle.as_mut().reset(Instant::now() + IDLE);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
