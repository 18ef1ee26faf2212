//! A listener for HTTP servers that limits the number and the idle time of connections.

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

/// The maximum number of connections of one HTTP server; further ones wait to be accepted.
const CONNECTIONS_MAX: usize = 4096;

/// A connection without traffic is closed after this time.
const IDLE: Duration = Duration::from_secs(60);

/// The pause after a failed accept, for instance when the process has no free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listener that limits its connections.
#[derive(Debug)]
pub struct LimitedListener {
    listener: TcpListener,
    permits: Arc<Semaphore>,
}

impl LimitedListener {
    /// Wraps a listener.
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, permits: Arc::new(Semaphore::new(CONNECTIONS_MAX)) }
    }
}

impl axum::serve::Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (LimitedStream, SocketAddr) {
        let permit = self.permits.clone().acquire_owned().await;
        let permit = permit.expect("the semaphore is never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let idle = Box::pin(sleep(IDLE));
                    return (LimitedStream { stream, idle, _permit: permit }, peer);
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

/// The address of a connection's peer, for handlers.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

impl Connected<IncomingStream<'_, LimitedListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, LimitedListener>) -> Self {
        Self(*stream.remote_addr())
    }
}

/// A connection with an idle timeout, which counts against the limit of its listener.
#[derive(Debug)]
pub struct LimitedStream {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl AsyncRead for LimitedStream {
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

impl AsyncWrite for LimitedStream {
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
