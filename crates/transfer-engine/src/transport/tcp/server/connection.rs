//! A connection on the server's side: moves bytes between its socket and pinned memory, with
//! timeouts.

mod staged;

use std::{
    io, mem,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use mooncake_base::{Clock, SystemClock};
use mooncake_os::spin_wait::{NEXT_CALL_SPIN_TIME, SpinWait};
use tokio::{
    io::Interest,
    net::TcpStream,
    time::{Instant, timeout_at},
};

use self::staged::DeviceSpan;
use super::pins::{HeldPins, PinTable};
use crate::{
    acceptor::{Accepted, ConnectionGuard, ForkGuard},
    memory::region::Regions,
    transfer_entry::RemoteRange,
    transport::tcp::vectored_io::{self, BlockMode, Cursor, DiscardBuffer, Readiness, Span},
};

/// The minimum average speed of a request; slower ones would keep memory pinned indefinitely.
const BYTES_PER_SECOND_MIN: u64 = 1 << 20;

/// The maximum time of a request beyond the time without progress, however long it is. Upstream's
/// frames do not limit the length of a request.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(600);

/// The idle time after which a connection gives up its dedicated thread.
const DEDICATED_IDLE_TIMEOUT: Duration = Duration::from_millis(20);

/// The time limits of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestTimeout {
    /// The maximum time without progress.
    progress: Duration,
    /// The time at which the request must be complete.
    end: Instant,
}

/// A connection and the memory of its current request.
#[derive(Debug)]
pub(super) struct Connection {
    /// Dropped before the socket; see [`Accepted`].
    _fork_guard: ForkGuard,
    socket: Socket,
    /// The bytes sent before the spans. Cleared by sending.
    pub(super) wire: Vec<u8>,
    pub(super) spans: Vec<Span>,
    /// The spans that are device memory.
    devices: Vec<DeviceSpan>,
    /// Pins that keep the memory of `spans` and `devices` registered.
    pins: HeldPins,
    discard: DiscardBuffer,
    spin_wait: SpinWait,
    /// Dropped after the pins: the end of the connection implies that the memory is released.
    guard: ConnectionGuard,
}

/// The socket of a connection, by the way in which it waits.
#[derive(Debug)]
enum Socket {
    /// The connection is a task of the runtime and waits in its event queue.
    Async(TcpStream),
    /// The connection has a dedicated thread and blocks in the kernel: no future is ever pending.
    Blocking(Arc<std::net::TcpStream>),
}

impl RequestTimeout {
    pub(super) fn until(end: Instant) -> Self {
        Self { progress: Duration::from_secs(u64::MAX >> 32), end }
    }

    pub(super) fn for_bytes(progress: Duration, bytes: u64) -> Self {
        let transfer = Duration::from_secs(bytes / BYTES_PER_SECOND_MIN).min(REQUEST_TIME_MAX);
        let whole = progress + transfer;
        Self { progress, end: Instant::now() + whole }
    }

    /// Returns the time left until the next progress is due.
    pub(super) fn left(&self) -> Duration {
        self.next().saturating_duration_since(Instant::now())
    }

    fn next(&self) -> Instant {
        self.end.min(Instant::now() + self.progress)
    }
}

impl Connection {
    pub(super) fn new(accepted: Accepted, pins: &Arc<PinTable>) -> Self {
        Self {
            _fork_guard: accepted.fork_guard,
            socket: Socket::Async(accepted.stream),
            wire: Vec::new(),
            spans: Vec::new(),
            devices: Vec::new(),
            pins: pins.add(accepted.cut),
            discard: DiscardBuffer::default(),
            spin_wait: SpinWait::new(NEXT_CALL_SPIN_TIME),
            guard: accepted.guard,
        }
    }

    /// Marks the connection as one that has sent a valid greeting or request.
    pub(super) fn mark_known(&self) {
        self.guard.mark_known();
    }

    /// Adds registered memory to the spans of the request. Returns false and adds nothing if the
    /// range is not registered.
    pub(super) fn add_range(&mut self, regions: &Regions, range: RemoteRange) -> bool {
        let Ok(pin) = regions.pin(range) else { return false };
        if let Some(memory) = pin.region().device().cloned() {
            let index = self.spans.len();
            self.pins.push(pin.clone());
            self.spans.push(Span::discard(pin.length()));
            self.devices.push(DeviceSpan { index, memory, pin });
            return true;
        }
        // SAFETY: the pin keeps the range registered and thereby upholds its owner's promise that
        // the range may be transferred. `release` and drop remove spans and pins together.
        self.spans.push(unsafe { Span::new(pin.address().expose_provenance(), pin.length()) });
        self.pins.push(pin);
        true
    }

    /// Adds bytes that are received and discarded.
    pub(super) fn add_discard(&mut self, length: usize) {
        self.spans.push(Span::discard(length));
    }

    /// Returns the number of bytes in the spans.
    pub(super) fn payload(&self) -> u64 {
        self.spans.iter().map(|span| span.length() as u64).sum()
    }

    /// Releases the memory of the request.
    pub(super) fn release(&mut self) {
        self.spans.clear();
        self.devices.clear();
        self.pins.clear();
    }

    /// Moves the connection from the runtime to a dedicated thread. The socket is shared, so that
    /// another thread can shut it down.
    pub(super) fn into_blocking(mut self) -> io::Result<(Self, Arc<std::net::TcpStream>)> {
        let stream = match self.socket {
            Socket::Async(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(DEDICATED_IDLE_TIMEOUT))?;
                Arc::new(stream)
            }
            Socket::Blocking(stream) => stream,
        };
        self.socket = Socket::Blocking(Arc::clone(&stream));
        Ok((self, stream))
    }

    /// Moves the connection back to the runtime, on which the caller runs.
    pub(super) fn into_async(mut self) -> io::Result<Self> {
        if let Socket::Blocking(stream) = self.socket {
            let stream = Arc::into_inner(stream)
                .ok_or_else(|| io::Error::other("the connection is being shut down"))?;
            stream.set_nonblocking(true)?;
            self.socket = Socket::Async(TcpStream::from_std(stream)?);
        }
        Ok(self)
    }

    /// Waits for the first bytes of the next request and reads the available ones; returns 0 if the
    /// peer closed the connection. Waits indefinitely, but on a dedicated thread only for the idle
    /// timeout (`WouldBlock`).
    pub(super) async fn read_available(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Socket::Async(stream) = &self.socket {
                self.guard.begin_wait();
                stream.readable().await?;
                self.guard.end_wait();
            }
            match self.socket.read(buffer, &mut self.spin_wait) {
                Err(failure) if failure.kind() == io::ErrorKind::Interrupted => {}
                Err(failure) if failure.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                Err(failure) if failure.kind() == io::ErrorKind::WouldBlock => {
                    if matches!(self.socket, Socket::Blocking(_)) {
                        return Err(failure);
                    }
                }
                other => return other,
            }
        }
    }

    /// Fills the buffer.
    pub(super) async fn read(
        &mut self,
        buffer: &mut [u8],
        timeout: RequestTimeout,
    ) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.socket.read(&mut buffer[filled..], &mut self.spin_wait) {
                Ok(count) => filled += count,
                Err(failure) => self.wait_after(failure, Readiness::Read, timeout).await?,
            }
        }
        Ok(())
    }

    /// Receives into the spans. Returns the indexes of spans whose memory cannot be written; their
    /// bytes are discarded.
    pub(super) async fn receive(&mut self, timeout: RequestTimeout) -> io::Result<Vec<usize>> {
        if !self.devices.is_empty() {
            return self.receive_staged(timeout).await;
        }
        let mut spans = mem::take(&mut self.spans);
        let received = self.receive_into(&mut spans, timeout).await;
        self.spans = spans;
        received
    }

    /// Receives into the given spans, whose memory the caller keeps valid.
    pub(super) async fn receive_into(
        &mut self,
        spans: &mut [Span],
        timeout: RequestTimeout,
    ) -> io::Result<Vec<usize>> {
        let mut cursor = Cursor::default();
        let mut bad = Vec::new();
        while !cursor.is_done(&[], spans) {
            let discard = &mut self.discard;
            let received = self.socket.receive(&mut self.spin_wait, |socket, mode| {
                vectored_io::receive(socket, spans, &mut cursor, discard, mode)
            });
            match received {
                Ok(()) => self.yield_to_runtime().await,
                Err(failure) if vectored_io::is_fault(&failure) => {
                    if let Some(index) = cursor.fault() {
                        spans[index] = spans[index].into_discard();
                        bad.push(index);
                    }
                }
                Err(failure) => self.wait_after(failure, Readiness::Read, timeout).await?,
            }
        }
        Ok(bad)
    }

    /// Sends `wire`, then the spans.
    pub(super) async fn send(&mut self, timeout: RequestTimeout) -> io::Result<()> {
        if !self.devices.is_empty() {
            return self.send_staged(timeout).await;
        }
        let spans = mem::take(&mut self.spans);
        let sent = self.send_from(&spans, timeout).await;
        self.spans = spans;
        sent
    }

    /// Sends `wire`, then the given spans, whose memory the caller keeps valid.
    pub(super) async fn send_from(
        &mut self,
        spans: &[Span],
        timeout: RequestTimeout,
    ) -> io::Result<()> {
        let mut cursor = Cursor::default();
        while !cursor.is_done(&self.wire, spans) {
            let wire = &self.wire;
            let sent =
                self.socket.send(|socket| vectored_io::send(socket, wire, spans, &mut cursor));
            match sent {
                Ok(()) => self.yield_to_runtime().await,
                // The response announced bytes that cannot be read: only closing the connection
                // can signal that to the peer.
                Err(failure) => self.wait_after(failure, Readiness::Write, timeout).await?,
            }
        }
        self.wire.clear();
        Ok(())
    }

    /// Runs blocking work: inline on a dedicated thread, on the runtime's blocking pool in a task.
    pub(super) async fn run_blocking<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        match &self.socket {
            Socket::Blocking(_) => Ok(job()),
            Socket::Async(_) => tokio::task::spawn_blocking(job).await.map_err(io::Error::other),
        }
    }

    /// Lets other tasks of the runtime run during a long transfer.
    async fn yield_to_runtime(&self) {
        if matches!(self.socket, Socket::Async(_)) {
            tokio::task::consume_budget().await;
        }
    }

    /// Waits if the failure is temporary; returns it otherwise.
    async fn wait_after(
        &self,
        failure: io::Error,
        readiness: Readiness,
        timeout: RequestTimeout,
    ) -> io::Result<()> {
        match (failure.kind(), &self.socket) {
            (io::ErrorKind::Interrupted, _) => Ok(()),
            (io::ErrorKind::WouldBlock, Socket::Async(stream)) => {
                self.guard.begin_wait();
                timeout_at(timeout.next(), stream.ready(interest(readiness))).await??;
                self.guard.end_wait();
                Ok(())
            }
            (io::ErrorKind::WouldBlock, Socket::Blocking(stream)) => {
                let left = timeout.next().saturating_duration_since(Instant::now());
                vectored_io::wait(stream.as_fd(), readiness, SystemClock.now() + left)
            }
            _ => Err(failure),
        }
    }
}

impl Socket {
    fn read(&self, buffer: &mut [u8], spin_wait: &mut SpinWait) -> io::Result<usize> {
        self.receive(spin_wait, |socket, mode| vectored_io::read(socket, buffer, mode))
    }

    /// Receives with a system call that blocks only on a dedicated thread.
    fn receive<T>(
        &self,
        spin_wait: &mut SpinWait,
        mut receive: impl FnMut(BorrowedFd<'_>, BlockMode) -> io::Result<T>,
    ) -> io::Result<T> {
        match self {
            Self::Async(stream) => stream
                .try_io(Interest::READABLE, || receive(stream.as_fd(), BlockMode::NonBlocking)),
            Self::Blocking(stream) => {
                let polled = spin_wait.poll(|| receive(stream.as_fd(), BlockMode::NonBlocking));
                polled.unwrap_or_else(|| receive(stream.as_fd(), BlockMode::SocketTimeout))
            }
        }
    }

    /// Sends with a system call that does not block.
    fn send(&self, send: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<()> {
        match self {
            Self::Async(stream) => stream.try_io(Interest::WRITABLE, || send(stream.as_fd())),
            Self::Blocking(stream) => send(stream.as_fd()),
        }
    }
}

const fn interest(readiness: Readiness) -> Interest {
    match readiness {
        Readiness::Read => Interest::READABLE,
        Readiness::Write => Interest::WRITABLE,
    }
}
