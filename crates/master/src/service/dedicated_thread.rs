//! Seats: threads that serve one connection of this host each while its calls come thick and fast.
//!
//! A task of the runtime learns of a call from an event queue, which another of its threads may have
//! to be woken for. A thread that waits in its one socket is there sooner, with fewer system calls,
//! and sooner still if it stays awake for it.
//! There are few seats, so that threads stay few; who finds none free goes on as a task, and who has
//! nothing to do for a moment gives his back.

use std::{
    io::{self, Read, Write},
    mem::MaybeUninit,
    net::Shutdown,
    os::unix::net,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use mooncake_base::{
    Error, Result,
    spin_wait::{ActiveThread, NEXT_CALL_SPIN_TIME, SpinWait},
};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    runtime::Handle,
    sync::OwnedSemaphorePermit,
};

use super::native::{ConnectionDriver, Step, WRITE_DEADLINE};

/// The most seats of one master.
pub const DEDICATED_THREADS_MAX: usize = 16;

/// A connection asks for a seat after so many calls in a row, each soon after the one before.
const BURST_CALLS: u32 = 16;

/// How soon that is.
const BURST_GAP: Duration = Duration::from_millis(5);

/// How long a connection on a seat waits for its next call before it gives the seat back.
const IDLE_WAIT: Duration = Duration::from_millis(20);

/// The most that is read at once on a seat.
const READ_BYTES_MAX: usize = 64 << 10;

/// A socket of a client of this host.
#[derive(Debug)]
pub(super) enum LocalStream {
    /// In the runtime's event queue, beside others.
    Async(UnixStream),
    /// In the kernel, on a thread of its own: nothing is ever pending.
    Blocking(BlockingStream),
}

/// What a thread of its own has of a connection.
#[derive(Debug)]
pub(super) struct BlockingStream {
    stream: Arc<net::UnixStream>,
    spin_wait: SpinWait,
    _active: ActiveThread,
}

/// Serves a connection until it ends, on a seat whenever it asks for one and one is free.
pub(super) async fn run(mut driver: ConnectionDriver<LocalStream>) -> Result<()> {
    if !driver.begin().await? {
        return Ok(());
    }
    let (mut last, mut burst) = (Instant::now(), 0);
    while driver.step().await? != Step::Closed {
        let now = Instant::now();
        burst = if now - last < BURST_GAP { burst + 1 } else { 0 };
        last = now;
        if burst < BURST_CALLS {
            continue;
        }
        burst = 0;
        if let Ok(permit) = Arc::clone(&driver.context.dedicated_threads).try_acquire_owned() {
            match serve_blocking(driver, permit).await? {
                Some(back) => driver = back,
                None => return Ok(()),
            }
        }
    }
    Ok(())
}

/// Serves the connection on a seat until it has nothing to do for a moment; nothing if the peer has
/// gone. Dropped before that, it ends the connection.
async fn serve_blocking(
    driver: ConnectionDriver<LocalStream>,
    permit: OwnedSemaphorePermit,
) -> Result<Option<ConnectionDriver<LocalStream>>> {
    let (driver, socket) = to_blocking(driver)?;
    let mut shutdown = ShutdownOnDrop(socket);
    let runtime = Handle::current();
    let served = tokio::task::spawn_blocking(move || {
        let served = runtime.block_on(serve_until_idle(driver));
        drop(permit);
        served
    });
    let served = served
        .await
        .map_err(|source| Error::internal("a connection broke on its seat").caused_by(source))?;
    shutdown.0 = Weak::new();
    served?.map(to_async).transpose()
}

async fn serve_until_idle(
    mut driver: ConnectionDriver<LocalStream>,
) -> Result<Option<ConnectionDriver<LocalStream>>> {
    loop {
        match driver.step().await? {
            Step::Answered if !driver.context.stop.is_cancelled() => {}
            Step::Answered | Step::Idle => return Ok(Some(driver)),
            Step::Closed => return Ok(None),
        }
    }
}

fn to_blocking(
    mut driver: ConnectionDriver<LocalStream>,
) -> Result<(ConnectionDriver<LocalStream>, Weak<net::UnixStream>)> {
    let blocking = match driver.stream {
        LocalStream::Blocking(blocking) => blocking,
        LocalStream::Async(stream) => {
            let stream = stream.into_std().map_err(switch_error)?;
            stream.set_nonblocking(false).map_err(switch_error)?;
            stream.set_read_timeout(Some(IDLE_WAIT)).map_err(switch_error)?;
            stream.set_write_timeout(Some(WRITE_DEADLINE)).map_err(switch_error)?;
            BlockingStream {
                stream: Arc::new(stream),
                spin_wait: SpinWait::new(NEXT_CALL_SPIN_TIME),
                _active: ActiveThread::new(),
            }
        }
    };
    let socket = Arc::downgrade(&blocking.stream);
    driver.stream = LocalStream::Blocking(blocking);
    Ok((driver, socket))
}

fn to_async(mut driver: ConnectionDriver<LocalStream>) -> Result<ConnectionDriver<LocalStream>> {
    driver.stream = match driver.stream {
        LocalStream::Async(stream) => LocalStream::Async(stream),
        LocalStream::Blocking(blocking) => {
            let stream = Arc::into_inner(blocking.stream)
                .ok_or_else(|| Error::internal("the connection is being shut down"))?;
            stream.set_nonblocking(true).map_err(switch_error)?;
            LocalStream::Async(UnixStream::from_std(stream).map_err(switch_error)?)
        }
    };
    Ok(driver)
}

fn switch_error(source: io::Error) -> Error {
    Error::internal("a connection could not be moved between the runtime and its own thread")
        .caused_by(source)
}

/// Ends the connection of a seat, which may be waiting in the kernel, when nobody waits for it any
/// more.
struct ShutdownOnDrop(Weak<net::UnixStream>);

impl Drop for ShutdownOnDrop {
    fn drop(&mut self) {
        if let Some(socket) = self.0.upgrade() {
            // It may have been closed by the peer just now, which is as well.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl AsyncRead for LocalStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Async(stream) => Pin::new(stream).poll_read(context, into),
            Self::Blocking(BlockingStream { stream, spin_wait, .. }) => {
                let room = into.remaining().min(READ_BYTES_MAX);
                let room = into.initialize_unfilled_to(room);
                // What comes then is read next.
                let _ = spin_wait.poll(|| peek(stream));
                let count = retry_interrupted(|| (&**stream).read(room))?;
                into.advance(count);
                Poll::Ready(Ok(()))
            }
        }
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Async(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Blocking(blocking) => {
                Poll::Ready(retry_interrupted(|| (&*blocking.stream).write(bytes)))
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Async(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Blocking(blocking) => Poll::Ready(blocking.stream.shutdown(Shutdown::Write)),
        }
    }
}

/// What a read would bring now, without waiting and without taking it.
fn peek(stream: &net::UnixStream) -> io::Result<usize> {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    SockRef::from(stream).recv_with_flags(&mut [MaybeUninit::uninit()], flags)
}

/// Calls until no signal comes between.
fn retry_interrupted(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests;
