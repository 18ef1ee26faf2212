//! One connection on the server's side: bytes between its socket and pinned memory, at a pace.

use std::{
    io, mem,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use mooncake_base::{
    Clock, SystemClock,
    spin_wait::{NEXT_CALL_SPIN_TIME, SpinWait},
};
use tokio::{
    io::Interest,
    net::TcpStream,
    time::{Instant, timeout_at},
};

use super::staged::DeviceSpan;
use crate::{
    handshake::acceptor::{Accepted, Guarded, Standing},
    piece::RemoteRange,
    region::{Pin, Regions},
    transport::tcp::vector::{self, Cursor, Patience, Readiness, Span, Void},
};

/// The slowest that a request may be on the whole. Slower, it would keep memory pinned for ever.
const BYTES_PER_SECOND_MIN: u64 = 1 << 20;

/// How long a connection on a seat waits for its next request before it gives the seat back.
const SEAT_WAIT: Duration = Duration::from_millis(20);

/// How long a request may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// How long it may stand still.
    progress: Duration,
    /// When it must be through.
    end: Instant,
}

/// A connection and the memory that its present request is about.
#[derive(Debug)]
pub(super) struct Connection {
    /// Dropped before the socket; see [`Accepted`].
    _guarded: Guarded,
    socket: Socket,
    /// What is sent before the spans. Emptied by sending.
    pub(super) wire: Vec<u8>,
    pub(super) spans: Vec<Span>,
    /// Those of them that are memory of devices.
    pub(super) devices: Vec<DeviceSpan>,
    /// Keeps the memory of `spans` registered.
    pins: Vec<Pin>,
    void: Void,
    spin_wait: SpinWait,
    /// Dropped after the pins: who waits for the connection's end waits for the memory.
    _standing: Standing,
}

/// Where a connection waits.
#[derive(Debug)]
enum Socket {
    /// In the runtime's event queue, beside others.
    Shared(TcpStream),
    /// In the kernel, on a thread of its own: nothing here is ever pending.
    Seated(Arc<std::net::TcpStream>),
}

impl Pace {
    pub(super) fn until(end: Instant) -> Self {
        Self { progress: Duration::from_secs(u64::MAX >> 32), end }
    }

    pub(super) fn of(progress: Duration, bytes: u64) -> Self {
        let whole = progress + Duration::from_secs(bytes / BYTES_PER_SECOND_MIN);
        Self { progress, end: Instant::now() + whole }
    }

    /// How long it may stand still from now on.
    pub(super) fn patience(&self) -> Duration {
        self.next().saturating_duration_since(Instant::now())
    }

    fn next(&self) -> Instant {
        self.end.min(Instant::now() + self.progress)
    }
}

impl Connection {
    pub(super) fn new(accepted: Accepted) -> Self {
        Self {
            _guarded: accepted.guarded,
            socket: Socket::Shared(accepted.stream),
            wire: Vec::new(),
            spans: Vec::new(),
            devices: Vec::new(),
            pins: Vec::new(),
            void: Void::default(),
            spin_wait: SpinWait::new(NEXT_CALL_SPIN_TIME),
            _standing: accepted.standing,
        }
    }

    /// Adds registered memory to what is moved next; false, and nothing is added, if the range is
    /// not registered.
    pub(super) fn add(&mut self, regions: &Regions, range: RemoteRange) -> bool {
        let Ok(pin) = regions.pin(range) else { return false };
        if let Some(memory) = pin.region().device().cloned() {
            let index = self.spans.len();
            self.spans.push(Span::void(pin.length()));
            self.devices.push(DeviceSpan { index, memory, pin });
            return true;
        }
        // SAFETY: the pin keeps the range registered, and with that its owner's promise that it may
        // be transferred from and to. `release` and dropping take spans and pins out together.
        self.spans.push(unsafe { Span::new(pin.address().expose_provenance(), pin.length()) });
        self.pins.push(pin);
        true
    }

    /// Adds bytes that are received and thrown away.
    pub(super) fn add_void(&mut self, length: usize) {
        self.spans.push(Span::void(length));
    }

    /// How many bytes are to be moved.
    pub(super) fn payload(&self) -> u64 {
        self.spans.iter().map(|span| span.length() as u64).sum()
    }

    /// Lets go of the memory.
    pub(super) fn release(&mut self) {
        self.spans.clear();
        self.devices.clear();
        self.pins.clear();
    }

    /// Leaves the runtime for a seat. The socket is shared so that it can be shut down from
    /// elsewhere.
    pub(super) fn seated(mut self) -> io::Result<(Self, Arc<std::net::TcpStream>)> {
        let stream = match self.socket {
            Socket::Shared(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(SEAT_WAIT))?;
                Arc::new(stream)
            }
            Socket::Seated(stream) => stream,
        };
        self.socket = Socket::Seated(Arc::clone(&stream));
        Ok((self, stream))
    }

    /// Comes back to the runtime, which the caller runs on.
    pub(super) fn unseated(mut self) -> io::Result<Self> {
        if let Socket::Seated(stream) = self.socket {
            let stream = Arc::into_inner(stream)
                .ok_or_else(|| io::Error::other("the connection is being shut down"))?;
            stream.set_nonblocking(true)?;
            self.socket = Socket::Shared(TcpStream::from_std(stream)?);
        }
        Ok(self)
    }

    /// Waits for the first bytes of the next request and reads what is there; 0 if the peer is
    /// gone. Waits as long as it takes, but on a seat only for a while (`WouldBlock`).
    pub(super) async fn read_some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Socket::Shared(stream) = &self.socket {
                stream.readable().await?;
            }
            match self.socket.read(buffer, &mut self.spin_wait) {
                Err(failure) if failure.kind() == io::ErrorKind::Interrupted => {}
                Err(failure) if failure.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                Err(failure) if failure.kind() == io::ErrorKind::WouldBlock => {
                    if matches!(self.socket, Socket::Seated(_)) {
                        return Err(failure);
                    }
                }
                other => return other,
            }
        }
    }

    /// Fills the buffer.
    pub(super) async fn read(&mut self, buffer: &mut [u8], pace: Pace) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.socket.read(&mut buffer[filled..], &mut self.spin_wait) {
                Ok(count) => filled += count,
                Err(failure) => self.wait_after(failure, Readiness::Read, pace).await?,
            }
        }
        Ok(())
    }

    /// Receives into the spans. Those whose memory cannot be written are returned by their index;
    /// their bytes are thrown away.
    pub(super) async fn receive(&mut self, pace: Pace) -> io::Result<Vec<usize>> {
        if !self.devices.is_empty() {
            return self.receive_staged(pace).await;
        }
        let mut spans = mem::take(&mut self.spans);
        let received = self.receive_into(&mut spans, pace).await;
        self.spans = spans;
        received
    }

    /// Receives into spans, whose memory the caller keeps.
    pub(super) async fn receive_into(
        &mut self,
        spans: &mut [Span],
        pace: Pace,
    ) -> io::Result<Vec<usize>> {
        let mut cursor = Cursor::default();
        let mut bad = Vec::new();
        while !cursor.is_done(&[], spans) {
            let void = &mut self.void;
            let received = self.socket.receive(&mut self.spin_wait, |socket, patience| {
                vector::receive(socket, spans, &mut cursor, void, patience)
            });
            match received {
                Ok(()) => self.give_others_time().await,
                Err(failure) if vector::is_fault(&failure) => {
                    if let Some(index) = cursor.fault() {
                        spans[index] = spans[index].into_void();
                        bad.push(index);
                    }
                }
                Err(failure) => self.wait_after(failure, Readiness::Read, pace).await?,
            }
        }
        Ok(bad)
    }

    /// Sends `wire` and the spans.
    pub(super) async fn send(&mut self, pace: Pace) -> io::Result<()> {
        if !self.devices.is_empty() {
            return self.send_staged(pace).await;
        }
        let spans = mem::take(&mut self.spans);
        let sent = self.send_from(&spans, pace).await;
        self.spans = spans;
        sent
    }

    /// Sends `wire` and spans, whose memory the caller keeps.
    pub(super) async fn send_from(&mut self, spans: &[Span], pace: Pace) -> io::Result<()> {
        let mut cursor = Cursor::default();
        while !cursor.is_done(&self.wire, spans) {
            let wire = &self.wire;
            let sent = self.socket.send(|socket| vector::send(socket, wire, spans, &mut cursor));
            match sent {
                Ok(()) => self.give_others_time().await,
                // The peer has been told that bytes come which cannot be read: only the end of
                // the connection can tell it otherwise.
                Err(failure) => self.wait_after(failure, Readiness::Write, pace).await?,
            }
        }
        self.wire.clear();
        Ok(())
    }

    /// Does what blocks: here on a seat, on a thread for such things in a task.
    pub(super) async fn aside<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        match &self.socket {
            Socket::Seated(_) => Ok(job()),
            Socket::Shared(_) => tokio::task::spawn_blocking(job).await.map_err(io::Error::other),
        }
    }

    /// A task with much to do lets the runtime's other tasks go on.
    async fn give_others_time(&self) {
        if matches!(self.socket, Socket::Shared(_)) {
            tokio::task::consume_budget().await;
        }
    }

    /// Waits if the failure says that waiting helps.
    async fn wait_after(
        &self,
        failure: io::Error,
        readiness: Readiness,
        pace: Pace,
    ) -> io::Result<()> {
        match (failure.kind(), &self.socket) {
            (io::ErrorKind::Interrupted, _) => Ok(()),
            (io::ErrorKind::WouldBlock, Socket::Shared(stream)) => {
                timeout_at(pace.next(), stream.ready(interest(readiness))).await??;
                Ok(())
            }
            (io::ErrorKind::WouldBlock, Socket::Seated(stream)) => {
                let left = pace.next().saturating_duration_since(Instant::now());
                vector::wait(stream.as_fd(), readiness, SystemClock.now() + left)
            }
            _ => Err(failure),
        }
    }
}

impl Socket {
    fn read(&self, buffer: &mut [u8], spin_wait: &mut SpinWait) -> io::Result<usize> {
        self.receive(spin_wait, |socket, patience| vector::read(socket, buffer, patience))
    }

    /// Receives by a system call that waits only where that keeps nobody else from his work.
    fn receive<T>(
        &self,
        spin_wait: &mut SpinWait,
        mut receive: impl FnMut(BorrowedFd<'_>, Patience) -> io::Result<T>,
    ) -> io::Result<T> {
        match self {
            Self::Shared(stream) => {
                stream.try_io(Interest::READABLE, || receive(stream.as_fd(), Patience::None))
            }
            Self::Seated(stream) => {
                let awake = spin_wait.poll(|| receive(stream.as_fd(), Patience::None));
                awake.unwrap_or_else(|| receive(stream.as_fd(), Patience::Socket))
            }
        }
    }

    /// Sends by a system call that does not wait.
    fn send(&self, send: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<()> {
        match self {
            Self::Shared(stream) => stream.try_io(Interest::WRITABLE, || send(stream.as_fd())),
            Self::Seated(stream) => send(stream.as_fd()),
        }
    }
}

const fn interest(readiness: Readiness) -> Interest {
    match readiness {
        Readiness::Read => Interest::READABLE,
        Readiness::Write => Interest::WRITABLE,
    }
}
