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

use super::native::{Driver, Step, WRITE_DEADLINE};

/// The most seats of one master.
pub const SEATS_MAX: usize = 16;

/// A connection asks for a seat after so many calls in a row, each soon after the one before.
const CALLS_IN_HASTE: u32 = 16;

/// How soon that is.
const SOON: Duration = Duration::from_millis(5);

/// How long a connection on a seat waits for its next call before it gives the seat back.
const SEAT_WAIT: Duration = Duration::from_millis(20);

/// The most that is read at once on a seat.
const READ_BYTES_MAX: usize = 64 << 10;

/// A socket of a client of this host.
#[derive(Debug)]
pub(super) enum Local {
    /// In the runtime's event queue, beside others.
    Shared(UnixStream),
    /// In the kernel, on a thread of its own: nothing is ever pending.
    Seated(Seat),
}

/// What a thread of its own has of a connection.
#[derive(Debug)]
pub(super) struct Seat {
    stream: Arc<net::UnixStream>,
    spin_wait: SpinWait,
    _active: ActiveThread,
}

/// Serves a connection until it ends, on a seat whenever it asks for one and one is free.
pub(super) async fn run(mut driver: Driver<Local>) -> Result<()> {
    if !driver.begin().await? {
        return Ok(());
    }
    let (mut last, mut in_haste) = (Instant::now(), 0);
    while driver.step().await? != Step::Gone {
        let now = Instant::now();
        in_haste = if now - last < SOON { in_haste + 1 } else { 0 };
        last = now;
        if in_haste < CALLS_IN_HASTE {
            continue;
        }
        in_haste = 0;
        if let Ok(seat) = Arc::clone(&driver.doors.seats).try_acquire_owned() {
            match sit(driver, seat).await? {
                Some(back) => driver = back,
                None => return Ok(()),
            }
        }
    }
    Ok(())
}

/// Serves the connection on a seat until it has nothing to do for a moment; nothing if the peer has
/// gone. Dropped before that, it ends the connection.
async fn sit(driver: Driver<Local>, seat: OwnedSemaphorePermit) -> Result<Option<Driver<Local>>> {
    let (driver, socket) = seated(driver)?;
    let mut recall = Recall(socket);
    let runtime = Handle::current();
    let stayed = tokio::task::spawn_blocking(move || {
        let stayed = runtime.block_on(stay(driver));
        drop(seat);
        stayed
    });
    let stayed = stayed
        .await
        .map_err(|source| Error::internal("a connection broke on its seat").caused_by(source))?;
    recall.0 = Weak::new();
    stayed?.map(unseated).transpose()
}

async fn stay(mut driver: Driver<Local>) -> Result<Option<Driver<Local>>> {
    loop {
        match driver.step().await? {
            Step::Answered if !driver.doors.stop.is_cancelled() => {}
            Step::Answered | Step::Idle => return Ok(Some(driver)),
            Step::Gone => return Ok(None),
        }
    }
}

fn seated(mut driver: Driver<Local>) -> Result<(Driver<Local>, Weak<net::UnixStream>)> {
    let seat = match driver.stream {
        Local::Seated(seat) => seat,
        Local::Shared(stream) => {
            let stream = stream.into_std().map_err(moved)?;
            stream.set_nonblocking(false).map_err(moved)?;
            stream.set_read_timeout(Some(SEAT_WAIT)).map_err(moved)?;
            stream.set_write_timeout(Some(WRITE_DEADLINE)).map_err(moved)?;
            Seat {
                stream: Arc::new(stream),
                spin_wait: SpinWait::new(NEXT_CALL_SPIN_TIME),
                _active: ActiveThread::new(),
            }
        }
    };
    let socket = Arc::downgrade(&seat.stream);
    driver.stream = Local::Seated(seat);
    Ok((driver, socket))
}

fn unseated(mut driver: Driver<Local>) -> Result<Driver<Local>> {
    driver.stream = match driver.stream {
        Local::Shared(stream) => Local::Shared(stream),
        Local::Seated(seat) => {
            let stream = Arc::into_inner(seat.stream)
                .ok_or_else(|| Error::internal("the connection is being shut down"))?;
            stream.set_nonblocking(true).map_err(moved)?;
            Local::Shared(UnixStream::from_std(stream).map_err(moved)?)
        }
    };
    Ok(driver)
}

fn moved(source: io::Error) -> Error {
    Error::internal("a connection could not be moved between the runtime and a seat")
        .caused_by(source)
}

/// Ends the connection of a seat, which may be waiting in the kernel, when nobody waits for it any
/// more.
struct Recall(Weak<net::UnixStream>);

impl Drop for Recall {
    fn drop(&mut self) {
        if let Some(socket) = self.0.upgrade() {
            // It may have been closed by the peer just now, which is as well.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl AsyncRead for Local {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Shared(stream) => Pin::new(stream).poll_read(context, into),
            Self::Seated(Seat { stream, spin_wait, .. }) => {
                let room = into.remaining().min(READ_BYTES_MAX);
                let room = into.initialize_unfilled_to(room);
                // What comes then is read next.
                let _ = spin_wait.poll(|| peek(stream));
                let count = again(|| (&**stream).read(room))?;
                into.advance(count);
                Poll::Ready(Ok(()))
            }
        }
    }
}

impl AsyncWrite for Local {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Shared(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Seated(seat) => Poll::Ready(again(|| (&*seat.stream).write(bytes))),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Shared(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Seated(seat) => Poll::Ready(seat.stream.shutdown(Shutdown::Write)),
        }
    }
}

/// What a read would bring now, without waiting and without taking it.
fn peek(stream: &net::UnixStream) -> io::Result<usize> {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    SockRef::from(stream).recv_with_flags(&mut [MaybeUninit::uninit()], flags)
}

/// Calls until no signal comes between.
fn again(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests;
