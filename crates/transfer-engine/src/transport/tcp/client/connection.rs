//! A connection to a peer's data listener, driven by the transferring thread.

use std::{
    io,
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd},
    sync::Arc,
    time::Duration,
};

use mooncake_base::{Clock, Moment, SystemClock};
use mooncake_os::{
    call_limit, fork,
    spin_wait::{ANSWER_SPIN_TIME, SpinWait},
};
use socket2::SockRef;

use super::connection_budget::CountedConnection;
use crate::transport::{
    TimeLimits,
    tcp::{
        greeting::{GREETING_BYTES, Greeting},
        socket_options::set_socket_options,
        vectored_io::{self, BlockMode, Cursor, DiscardBuffer, Readiness, Span},
    },
};

/// The receive timeout of the socket. Blocking in `recv` is cheaper than a `poll` before each call.
/// When less time is left before the deadline, the connection polls instead.
const RECEIVE_TIMEOUT: Duration = Duration::from_millis(100);

/// A connection to a peer. Both ends agree on its state between exchanges, so it may be reused only
/// after every exchange on it was completed.
#[derive(Debug)]
pub(super) struct DataConnection {
    /// The pool has a weak reference, to end exchanges in flight when it closes.
    socket: Arc<ForkGuardedStream>,
    /// The sequence number of the last request.
    pub(super) sequence: u64,
    /// Reused by every exchange to avoid allocations.
    pub(super) wire: Vec<u8>,
    pub(super) spans: Vec<Span>,
    discard: DiscardBuffer,
    spin_wait: SpinWait,
    /// True after the first exchange: the peer may have closed the connection while it was idle.
    pub(super) is_used: bool,
    /// The number of looks for idle connections before the last use.
    pub(super) last_use: u64,
    /// Counts the connection while it is open.
    pub(super) count: Option<CountedConnection>,
}

/// The wait for a peer during one exchange. Each byte that moves extends it.
pub(super) struct PeerWait {
    limits: TimeLimits,
    /// The end of the wait since the last byte moved; `None` until it is asked for.
    silent_until: Option<Moment>,
}

/// The reason why sending failed.
#[derive(Debug)]
pub(super) enum SendFailure {
    /// The connection broke.
    Broken(io::Error),
    /// The memory of the span with this index cannot be read; the peer still expects its bytes.
    BadSpan(usize),
}

impl DataConnection {
    /// Takes over a connected socket.
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(RECEIVE_TIMEOUT))?;
        set_socket_options(SockRef::from(&stream))?;
        Ok(Self {
            socket: Arc::new(ForkGuardedStream::new(stream)),
            sequence: 0,
            wire: Vec::new(),
            spans: Vec::new(),
            discard: DiscardBuffer::default(),
            spin_wait: SpinWait::new(ANSWER_SPIN_TIME),
            is_used: false,
            last_use: 0,
            count: None,
        })
    }

    /// Sends bytes that are not a request, such as greetings and claims.
    pub(super) fn send_bytes(&mut self, bytes: &[u8], deadline: Moment) -> io::Result<()> {
        self.wire.clear();
        self.wire.extend_from_slice(bytes);
        self.spans.clear();
        self.send(deadline.into()).map_err(|failure| match failure {
            SendFailure::Broken(source) => source,
            SendFailure::BadSpan(_) => io::ErrorKind::InvalidInput.into(),
        })
    }

    /// Closes the connection within an exchange. What the system has not sent of a write is dropped
    /// with it: otherwise it would be sent for as long as the peer takes nothing, while the memory may
    /// go to others.
    pub(super) fn abort(self) {
        // In a forked child the number of the socket may refer to another file.
        if !fork::is_forked_since(self.socket.generation) {
            // If this fails, the bytes are sent, and the connection is closed all the same.
            let _ = SockRef::from(self.stream()).set_linger(Some(Duration::ZERO));
        }
    }

    pub(super) const fn socket(&self) -> &Arc<ForkGuardedStream> {
        &self.socket
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn stream(&self) -> &TcpStream {
        self.socket.stream()
    }

    /// Returns the socket and the discard buffer, which receiving needs together.
    pub(super) fn fd_and_discard(&mut self) -> (BorrowedFd<'_>, &mut DiscardBuffer) {
        (self.socket.as_fd(), &mut self.discard)
    }

    /// Sends our greeting and returns the peer's.
    pub(super) fn exchange_greetings(
        &mut self,
        ours: Greeting,
        deadline: Moment,
    ) -> io::Result<Greeting> {
        self.send_bytes(&ours.encode(), deadline)?;
        let mut theirs = [0; GREETING_BYTES];
        self.read(&mut theirs, deadline.into())?;
        Ok(Greeting::decode(&theirs)?)
    }

    /// Sends `wire`, then `spans`.
    pub(super) fn send(&mut self, limits: TimeLimits) -> Result<(), SendFailure> {
        let mut cursor = Cursor::default();
        let mut wait = PeerWait::new(limits);
        let mut is_first = true;
        while !cursor.is_done(&self.wire, &self.spans) {
            // The caller has looked before the first piece. Past the deadline the memory may belong
            // to others, however well the bytes move.
            if !std::mem::take(&mut is_first) && limits.deadline.has_passed(SystemClock.now()) {
                return Err(SendFailure::Broken(io::ErrorKind::TimedOut.into()));
            }
            let sent = vectored_io::send(self.socket.as_fd(), &self.wire, &self.spans, &mut cursor);
            match sent {
                Ok(()) => wait.record_progress(),
                Err(failure) if vectored_io::is_fault(&failure) => {
                    if let Some(index) = cursor.fault() {
                        return Err(SendFailure::BadSpan(index));
                    }
                }
                Err(failure) => self
                    .wait_after(failure, Readiness::Write, wait.until())
                    .map_err(SendFailure::Broken)?,
            }
        }
        Ok(())
    }

    /// Receives into `spans`. Returns the indexes of spans whose memory cannot be written; their
    /// bytes are discarded, and the other spans are filled.
    pub(super) fn receive(&mut self, limits: TimeLimits) -> io::Result<Vec<usize>> {
        let mut cursor = Cursor::default();
        let mut wait = PeerWait::new(limits);
        let mut bad = Vec::new();
        while !cursor.is_done(&[], &self.spans) {
            let (socket, spans, discard) = (self.socket.as_fd(), &self.spans, &mut self.discard);
            let until = wait.until();
            let mode = block_mode(until);
            let mut receive =
                |mode| vectored_io::receive(socket, spans, &mut cursor, discard, mode);
            let polled = self.spin_wait.poll(|| receive(BlockMode::NonBlocking));
            match polled.unwrap_or_else(|| receive(mode)) {
                Ok(()) => wait.record_progress(),
                Err(failure) if vectored_io::is_fault(&failure) => {
                    if let Some(index) = cursor.fault() {
                        self.spans[index] = self.spans[index].into_discard();
                        bad.push(index);
                    }
                }
                Err(failure) => self.wait_to_receive(failure, mode, until)?,
            }
        }
        Ok(bad)
    }

    /// Fills the buffer, waiting within the limits.
    pub(super) fn read(&mut self, buffer: &mut [u8], limits: TimeLimits) -> io::Result<()> {
        let mut filled = 0;
        let mut wait = PeerWait::new(limits);
        while filled < buffer.len() {
            let until = wait.until();
            let (socket, mode) = (self.socket.as_fd(), block_mode(until));
            let mut read = |mode| vectored_io::read(socket, &mut buffer[filled..], mode);
            let polled = self.spin_wait.poll(|| read(BlockMode::NonBlocking));
            match polled.unwrap_or_else(|| read(mode)) {
                Ok(count) => {
                    filled += count;
                    wait.record_progress();
                }
                Err(failure) => self.wait_to_receive(failure, mode, until)?,
            }
        }
        Ok(())
    }

    /// Reads available bytes without blocking.
    pub(super) fn read_available(&self, buffer: &mut [u8]) -> io::Result<usize> {
        vectored_io::read(self.socket.as_fd(), buffer, BlockMode::NonBlocking)
    }

    /// Waits for more bytes, unless the failed call has already waited.
    fn wait_to_receive(
        &self,
        failure: io::Error,
        mode: BlockMode,
        deadline: Moment,
    ) -> io::Result<()> {
        let has_waited = mode == BlockMode::SocketTimeout;
        if has_waited && failure.kind() == io::ErrorKind::WouldBlock {
            return Ok(());
        }
        self.wait_after(failure, Readiness::Read, deadline)
    }

    /// Waits if the failure is temporary; returns it otherwise.
    fn wait_after(
        &self,
        failure: io::Error,
        readiness: Readiness,
        deadline: Moment,
    ) -> io::Result<()> {
        match failure.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => {
                vectored_io::wait(self.socket.as_fd(), readiness, deadline)
            }
            _ => Err(failure),
        }
    }
}

impl PeerWait {
    pub(super) const fn new(limits: TimeLimits) -> Self {
        Self { limits, silent_until: None }
    }

    /// Returns the moment at which the wait ends unless a byte moves before.
    pub(super) fn until(&mut self) -> Moment {
        *self.silent_until.get_or_insert_with(|| self.limits.give_up_at())
    }

    pub(super) const fn record_progress(&mut self) {
        self.silent_until = None;
    }
}

/// Returns whether a receiving call may block before the next check of the deadline.
fn block_mode(deadline: Moment) -> BlockMode {
    let has_time = call_limit::left(deadline) > RECEIVE_TIMEOUT;
    if has_time { BlockMode::SocketTimeout } else { BlockMode::NonBlocking }
}

/// A socket that a forked child closes at once, so that the connection ends with this process.
#[derive(Debug)]
pub(super) struct ForkGuardedStream {
    stream: Option<TcpStream>,
    generation: u64,
}

impl ForkGuardedStream {
    fn new(stream: TcpStream) -> Self {
        let generation = fork::generation();
        fork::guard_descriptor(stream.as_raw_fd());
        Self { stream: Some(stream), generation }
    }

    fn stream(&self) -> &TcpStream {
        self.stream.as_ref().expect("only drop takes the stream")
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }

    /// Ends the exchange that another thread has in flight: its system calls fail from now on, and the
    /// bytes that the system has not sent are dropped when that thread closes the connection.
    pub(super) fn end(&self) {
        // A failure means that the connection has ended already.
        let _ = SockRef::from(self.stream()).set_linger(Some(Duration::ZERO));
        let _ = self.stream().shutdown(Shutdown::Both);
    }
}

impl Drop for ForkGuardedStream {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        if fork::is_forked_since(self.generation) {
            // Closed already; the number may refer to another file by now.
            let _ = stream.into_raw_fd();
        } else {
            fork::unguard(stream.as_raw_fd());
        }
    }
}
