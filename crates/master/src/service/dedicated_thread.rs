//! Dedicated threads: each serves one connection of this host with blocking I/O during a burst of
//! calls.
//!
//! A runtime task learns of a call through an event queue, and often another thread must be woken
//! to run the task. A thread that blocks in a read of its socket starts sooner and with fewer
//! system calls; with busy-polling it starts sooner still. The number of dedicated threads is
//! limited. A connection that finds none free stays a task, and an idle connection goes back to
//! the runtime.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use mooncake_base::{Error, Result};
use mooncake_os::{
    dedicated_thread::{BurstDetector, ShutdownOnDrop},
    spin_wait::{ActiveThread, NEXT_CALL_SPIN_TIME, SpinWait, peek},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    runtime::Handle,
    sync::OwnedSemaphorePermit,
};

use super::{
    durability::AnsweringThread,
    native::{ConnectionDriver, Step, WRITE_DEADLINE},
};

/// The maximum number of dedicated threads of one master.
pub const DEDICATED_THREADS_MAX: usize = 16;

/// How long a dedicated thread waits for the next call before the connection goes back to the
/// runtime.
const IDLE_WAIT: Duration = Duration::from_millis(20);

/// The maximum number of bytes of one blocking read.
const READ_BYTES_MAX: usize = 64 << 10;

/// The socket of a client on this host, in one of two modes.
#[derive(Debug)]
pub(super) enum LocalStream {
    /// Registered with the runtime's event queue.
    Async(UnixStream),
    /// Blocking, on a dedicated thread. Reads and writes never return `Poll::Pending`.
    Blocking(BlockingStream),
}

/// A blocking socket with the busy-poll state of its thread.
#[derive(Debug)]
pub(super) struct BlockingStream {
    stream: Arc<net::UnixStream>,
    spin_wait: SpinWait,
    _active: ActiveThread,
}

/// Serves a connection until it ends. After a burst of calls it moves to a dedicated thread, if one
/// is free.
pub(super) async fn run(mut driver: ConnectionDriver<LocalStream>) -> Result<()> {
    if !driver.begin().await? {
        return Ok(());
    }
    let mut bursts = BurstDetector::new(Instant::now());
    while driver.step().await? != Step::Closed {
        if !bursts.record(Instant::now()) {
            continue;
        }
        if let Ok(permit) = Arc::clone(&driver.context.dedicated_threads).try_acquire_owned() {
            match serve_blocking(driver, permit).await? {
                Some(back) => driver = back,
                None => return Ok(()),
            }
        }
    }
    Ok(())
}

/// Serves the connection on a dedicated thread until it is idle. Returns `None` if the peer closed
/// the connection. Dropping the future earlier shuts the connection down.
async fn serve_blocking(
    driver: ConnectionDriver<LocalStream>,
    permit: OwnedSemaphorePermit,
) -> Result<Option<ConnectionDriver<LocalStream>>> {
    let (driver, shutdown) = to_blocking(driver)?;
    let runtime = Handle::current();
    let served = tokio::task::spawn_blocking(move || {
        let served = runtime.block_on(serve_until_idle(driver));
        drop(permit);
        served
    });
    let served = served.await.map_err(|source| {
        Error::internal("the dedicated thread of a connection panicked").caused_by(source)
    })?;
    shutdown.disarm();
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
) -> Result<(ConnectionDriver<LocalStream>, ShutdownOnDrop<net::UnixStream>)> {
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
    let shutdown = ShutdownOnDrop::new(&blocking.stream);
    driver.stream = LocalStream::Blocking(blocking);
    driver.thread = AnsweringThread::Dedicated;
    Ok((driver, shutdown))
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
    driver.thread = AnsweringThread::Runtime;
    Ok(driver)
}

fn switch_error(source: io::Error) -> Error {
    Error::internal("cannot move a connection between the runtime and a dedicated thread")
        .caused_by(source)
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
                // The read below blocks if no bytes arrived while polling.
                let _ = spin_wait.poll(|| peek(&**stream));
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

/// Repeats a system call while a signal interrupts it.
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
