//! Moves a large batch over one or more connections with a window of requests in flight, so that no
//! connection idles between two frames.
//!
//! The calling thread drives all connections and sleeps only when none can make progress. Any
//! failure (unmapped local memory, a broken connection) ends the transfer: connections with an
//! unfinished exchange are closed, acknowledged entries keep their outcome, and the caller moves
//! the rest frame by frame, which finds the cause. Moving the same bytes again is idempotent.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use mooncake_base::{Clock, Endpoint, Result, SystemClock};

use super::{
    connection::PeerWait,
    connection_pool::{ConnectionPool, PooledConnection},
};
use crate::{
    transfer_entry::{Opcode, TransferEntry},
    transport::{
        TimeLimits,
        tcp::{
            batch_split::{FRAME_BYTES, FrameLimits, Framer, Part},
            data_frame::{
                self, Malformed, REFUSAL_BYTES, RESPONSE_BYTES, Refusal, RequestHeader,
                ResponseHeader,
            },
            vectored_io::{self, BlockMode, Cursor, Span},
        },
    },
};

/// The maximum number of requests in flight per connection: one travels while another is applied.
const WINDOW_DEPTH: usize = 2;

/// The minimum number of bytes that justifies another connection.
const CONNECTION_BYTES_MIN: usize = 2 << 20;

/// The minimum payload of a frame when a batch is spread over connections.
const FRAME_BYTES_MIN: usize = 512 << 10;

/// The batch of one transfer.
pub(super) struct TransferBatch<'a> {
    pub(super) opcode: Opcode,
    pub(super) entries: &'a mut [TransferEntry],
    pub(super) limits: TimeLimits,
    pub(super) endpoint: &'a Endpoint,
}

/// Returns the number of connections for a transfer of `bytes`, at most `most`.
pub(super) fn connections_for(bytes: usize, most: usize) -> usize {
    (bytes / CONNECTION_BYTES_MIN).clamp(1, most)
}

/// Moves the open entries over the first connection and up to `count - 1` others.
///
/// # Errors
/// The transfer ended before everything was moved; see the module documentation. Connections
/// without an unfinished exchange were released.
pub(super) fn run<'a>(
    pool: &'a ConnectionPool,
    first: PooledConnection<'a>,
    bytes: usize,
    count: usize,
    batch: TransferBatch<'_>,
) -> io::Result<()> {
    let share = (bytes / (count * WINDOW_DEPTH)).clamp(FRAME_BYTES_MIN, FRAME_BYTES);
    let limits = FrameLimits { bytes: share, ..FrameLimits::NATIVE };
    let framer = Framer::new(batch.entries, limits);
    let mut connections = vec![WindowedConnection::new(first)];
    while connections.len() < count {
        let Some(pooled) = pool.try_acquire_extra(batch.limits.give_up_at()) else { break };
        connections.push(WindowedConnection::new(pooled));
    }
    let progress = EntryProgress::new(batch.entries.len());
    let mut transfer =
        WindowedTransfer { pool, framer, progress, batch, connections, spare: Vec::new() };
    let ended = transfer.run();
    for connection in transfer.connections {
        // A connection with requests in flight is closed by dropping it.
        if connection.in_flight.is_empty() {
            connection.pooled.release();
        }
    }
    ended
}

struct WindowedTransfer<'a, 'b> {
    pool: &'a ConnectionPool,
    framer: Framer,
    progress: EntryProgress,
    batch: TransferBatch<'b>,
    connections: Vec<WindowedConnection<'a>>,
    /// Completed requests, kept for reuse of their buffers.
    spare: Vec<InFlightRequest>,
}

/// A connection with its window of requests.
struct WindowedConnection<'a> {
    pooled: PooledConnection<'a>,
    /// Requests in flight, oldest first; responses arrive in this order.
    in_flight: VecDeque<InFlightRequest>,
    /// The number of requests in flight that were sent completely.
    sent: usize,
    response: ResponseState,
    /// True if the connection gets no more frames because another caller waits for a connection.
    is_draining: bool,
}

/// A request and the state needed for its response.
#[derive(Debug, Default)]
struct InFlightRequest {
    header: Option<RequestHeader>,
    parts: Vec<Part>,
    wire: Vec<u8>,
    spans: Vec<Span>,
    cursor: Cursor,
}

/// The receive state of the response to the oldest request.
#[derive(Debug)]
enum ResponseState {
    Header { bytes: [u8; RESPONSE_BYTES], filled: usize },
    Refusals { header: ResponseHeader, bytes: Vec<u8>, filled: usize },
    Payload { cursor: Cursor },
}

/// For each entry, the number of parts in flight and whether its last part was framed.
struct EntryProgress(Vec<PartCount>);

#[derive(Clone, Default)]
struct PartCount {
    open: u32,
    is_framed: bool,
}

impl WindowedTransfer<'_, '_> {
    fn run(&mut self) -> io::Result<()> {
        let mut wait = PeerWait::new(self.batch.limits);
        loop {
            let mut has_moved = false;
            for index in 0..self.connections.len() {
                // Also while bytes move: past the deadline the memory may belong to others.
                if self.batch.limits.deadline.has_passed(SystemClock.now()) {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                has_moved |= self.enqueue(index);
                has_moved |= self.connections[index].send(self.batch.opcode, self.batch.limits)?;
                has_moved |= self.receive(index)?;
            }
            if self.connections.iter().all(|connection| connection.in_flight.is_empty()) {
                return Ok(());
            }
            if !has_moved {
                let polled =
                    self.connections.iter().filter(|connection| !connection.in_flight.is_empty());
                let mut polled: Vec<_> = polled.map(WindowedConnection::poll_fd).collect();
                vectored_io::wait_for_any(&mut polled, wait.until())?;
            } else {
                wait.record_progress();
            }
        }
    }

    /// Enqueues the next frame on a connection, if the window has space and a frame is left.
    fn enqueue(&mut self, index: usize) -> bool {
        if index > 0 && self.pool.has_waiters() {
            self.connections[index].is_draining = true;
        }
        let connection = &mut self.connections[index];
        if connection.is_draining || connection.in_flight.len() >= WINDOW_DEPTH {
            return false;
        }
        let mut request = self.spare.pop().unwrap_or_default();
        self.framer.next_frame(self.batch.entries, &mut request.parts);
        if request.parts.is_empty() {
            self.spare.push(request);
            return false;
        }
        self.progress.begin(&request.parts);
        connection.enqueue(request, self.batch.opcode);
        true
    }

    /// Receives the available bytes of a connection.
    fn receive(&mut self, index: usize) -> io::Result<bool> {
        let mut has_moved = false;
        loop {
            let connection = &mut self.connections[index];
            if connection.sent == 0 {
                return Ok(has_moved);
            }
            match connection.receive_step(&mut self.batch, &mut self.progress) {
                Ok(true) => {
                    let completed = connection.in_flight.pop_front().expect("one was sent");
                    connection.sent -= 1;
                    self.progress.complete(&completed.parts, self.batch.entries);
                    self.spare.push(completed);
                    // Send the next frame before looking for this connection's next response.
                    return Ok(true);
                }
                Ok(false) => has_moved = true,
                Err(failure) if failure.kind() == io::ErrorKind::Interrupted => {}
                Err(failure) if failure.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(has_moved);
                }
                Err(failure) => return Err(failure),
            }
        }
    }
}

impl<'a> WindowedConnection<'a> {
    fn new(pooled: PooledConnection<'a>) -> Self {
        let response = ResponseState::header();
        Self { pooled, in_flight: VecDeque::new(), sent: 0, response, is_draining: false }
    }

    fn enqueue(&mut self, mut request: InFlightRequest, opcode: Opcode) {
        let connection = self.pooled.get_mut();
        connection.sequence += 1;
        let payload = request.parts.iter().map(|part| part.remote.length).sum();
        let count = request.parts.len();
        let header = RequestHeader { opcode, count, sequence: connection.sequence, payload };
        request.wire.clear();
        header.encode(&mut request.wire);
        for part in &request.parts {
            data_frame::encode_entry(part.remote, &mut request.wire);
        }
        request.spans.clear();
        if opcode == Opcode::Write {
            request.spans.extend(request.parts.iter().map(Part::span));
        }
        request.header = Some(header);
        request.cursor = Cursor::default();
        self.in_flight.push_back(request);
    }

    /// Sends as much as the connection accepts. The caller has looked at the deadline before the first
    /// piece.
    fn send(&mut self, opcode: Opcode, limits: TimeLimits) -> io::Result<bool> {
        let mut has_moved = false;
        while let Some(request) = self.in_flight.get_mut(self.sent) {
            if has_moved && limits.deadline.has_passed(SystemClock.now()) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let socket = self.pooled.get_mut().as_fd();
            match vectored_io::send(socket, &request.wire, &request.spans, &mut request.cursor) {
                Ok(()) => has_moved = true,
                Err(failure) if failure.kind() == io::ErrorKind::Interrupted => continue,
                Err(failure) if failure.kind() == io::ErrorKind::WouldBlock => break,
                Err(failure) => return Err(failure),
            }
            if request.cursor.is_done(&request.wire, &request.spans) {
                if opcode == Opcode::Read {
                    request.spans.extend(request.parts.iter().map(Part::span));
                }
                self.sent += 1;
            }
        }
        Ok(has_moved)
    }

    /// Performs one receive step of the oldest request; returns true when its response is complete.
    fn receive_step(
        &mut self,
        batch: &mut TransferBatch<'_>,
        progress: &mut EntryProgress,
    ) -> io::Result<bool> {
        let request = self.in_flight.front_mut().expect("one was sent");
        let connection = self.pooled.get_mut();
        match &mut self.response {
            ResponseState::Header { bytes, filled } => {
                *filled += connection.read_available(&mut bytes[*filled..])?;
                if *filled == RESPONSE_BYTES {
                    let header = request.header.as_ref().expect("the request was enqueued");
                    let header = ResponseHeader::decode(bytes, header)?;
                    let bytes = vec![0; header.refused * REFUSAL_BYTES];
                    self.response = ResponseState::Refusals { header, bytes, filled: 0 };
                }
                Ok(false)
            }
            ResponseState::Refusals { header, bytes, filled } => {
                if *filled < bytes.len() {
                    *filled += connection.read_available(&mut bytes[*filled..])?;
                    return Ok(false);
                }
                let refusals = Refusal::decode_all(bytes, request.parts.len())?;
                request.refuse(&refusals, batch, progress);
                if batch.opcode == Opcode::Write {
                    self.response = ResponseState::header();
                    return Ok(true);
                }
                let expected: u64 = request.spans.iter().map(|span| span.length() as u64).sum();
                if header.payload != expected {
                    return Err(Malformed("the length of the payload is wrong").into());
                }
                self.response = ResponseState::Payload { cursor: Cursor::default() };
                Ok(false)
            }
            ResponseState::Payload { cursor } => {
                let socket = connection.fd_and_discard();
                vectored_io::receive(
                    socket.0,
                    &request.spans,
                    cursor,
                    socket.1,
                    BlockMode::NonBlocking,
                )?;
                let is_complete = cursor.is_done(&[], &request.spans);
                if is_complete {
                    self.response = ResponseState::header();
                }
                Ok(is_complete)
            }
        }
    }

    /// Returns the events that the connection waits for.
    fn poll_fd(&self) -> libc::pollfd {
        let is_sending = self.sent < self.in_flight.len();
        let events = if is_sending { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
        let socket: BorrowedFd<'_> = self.pooled.get().as_fd();
        libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 }
    }
}

impl InFlightRequest {
    /// Fails the refused parts; no payload is received for them.
    fn refuse(
        &mut self,
        refusals: &[Refusal],
        batch: &mut TransferBatch<'_>,
        progress: &mut EntryProgress,
    ) {
        for refusal in refusals {
            let part = &self.parts[refusal.index];
            let error = part.refused(refusal.code, batch.endpoint);
            progress.fail(part, batch.entries, Err(error));
            if batch.opcode == Opcode::Read {
                self.spans[refusal.index] = Span::discard(0);
            }
        }
    }
}

impl ResponseState {
    const fn header() -> Self {
        Self::Header { bytes: [0; RESPONSE_BYTES], filled: 0 }
    }
}

impl EntryProgress {
    fn new(entries: usize) -> Self {
        Self(vec![PartCount::default(); entries])
    }

    fn begin(&mut self, parts: &[Part]) {
        for part in parts {
            let count = &mut self.0[part.entry];
            count.open += 1;
            count.is_framed |= part.is_last;
        }
    }

    /// Fails the part's entry; the first failure is kept.
    fn fail(&self, part: &Part, entries: &mut [TransferEntry], outcome: Result<()>) {
        debug_assert!(self.0[part.entry].open > 0, "the part is in flight");
        entries[part.entry].outcome.get_or_insert(outcome);
    }

    /// Completes the parts. An entry is done when all of its parts are.
    fn complete(&mut self, parts: &[Part], entries: &mut [TransferEntry]) {
        for part in parts {
            let count = &mut self.0[part.entry];
            count.open -= 1;
            if count.open == 0 && count.is_framed {
                entries[part.entry].outcome.get_or_insert(Ok(()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{Shutdown, TcpListener},
        time::Duration,
    };

    use mooncake_base::Moment;

    use super::*;
    use crate::{
        transfer_entry::RemoteRange,
        transport::tcp::{
            TcpSettings,
            client::{connection::SendFailure, connection_pool::Destination},
        },
    };

    /// More parts than one system call takes, which fit into the buffers of a connection.
    const PARTS: usize = 1000;

    /// Connects to a peer that answers nothing, and sends it a frame of [`PARTS`] parts of one byte.
    /// Returns what `send` returned, and how many bytes of the parts the peer got.
    fn send_frame(
        limits: TimeLimits,
        send: impl Fn(PooledConnection<'_>, Vec<Part>, TimeLimits) -> io::Result<()>,
    ) -> (io::Result<()>, usize) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // A peer of upstream's frames has no greeting.
        let destination = Destination { endpoint: Endpoint::new("127.0.0.1", port), native: None };
        let pool = ConnectionPool::new(destination, &TcpSettings::default());
        let pooled = pool.acquire((SystemClock.now() + Duration::from_secs(20)).into());
        let mut there = listener.accept().unwrap().0;
        let ours = vec![7_u8; PARTS];
        let part = |index: usize| Part {
            entry: 0,
            address: ours.as_ptr().expose_provenance() + index,
            remote: RemoteRange { address: 0, length: 1 },
            is_last: index + 1 == PARTS,
        };
        let sent = send(pooled.unwrap(), (0..PARTS).map(part).collect(), limits);
        let mut got = Vec::new();
        there.read_to_end(&mut got).unwrap();
        (sent, got.into_iter().filter(|&byte| byte == 7).count())
    }

    fn send_alone(
        mut pooled: PooledConnection<'_>,
        parts: Vec<Part>,
        limits: TimeLimits,
    ) -> io::Result<()> {
        let connection = pooled.get_mut();
        connection.spans.clear();
        connection.spans.extend(parts.iter().map(Part::span));
        let sent = connection.send(limits);
        connection.stream().shutdown(Shutdown::Write).unwrap();
        sent.map_err(|failure| match failure {
            SendFailure::Broken(source) => source,
            SendFailure::BadSpan(index) => panic!("span {index} is readable"),
        })
    }

    fn send_in_window(
        pooled: PooledConnection<'_>,
        parts: Vec<Part>,
        limits: TimeLimits,
    ) -> io::Result<()> {
        let mut connection = WindowedConnection::new(pooled);
        connection.enqueue(InFlightRequest { parts, ..Default::default() }, Opcode::Write);
        let sent = connection.send(Opcode::Write, limits);
        connection.pooled.get().stream().shutdown(Shutdown::Write).unwrap();
        sent.map(drop)
    }

    /// Lets the deadline pass after the first piece, before which the caller has looked. The peer takes
    /// all bytes at once, so that nothing but the deadline ends the frame.
    fn check_deadline_in_frame(
        send: impl Fn(PooledConnection<'_>, Vec<Part>, TimeLimits) -> io::Result<()>,
    ) {
        let later = SystemClock.now() + Duration::from_secs(20);
        let (sent, got) = send_frame(later.into(), &send);
        sent.unwrap();
        assert_eq!(got, PARTS);
        let (sent, got) = send_frame(Moment::default().into(), send);
        assert!((1..PARTS).contains(&got), "{got} of {PARTS}");
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn rest_of_a_frame_is_not_sent_past_the_deadline() {
        check_deadline_in_frame(send_alone);
    }

    #[test]
    fn rest_of_a_frame_in_a_window_is_not_sent_past_the_deadline() {
        check_deadline_in_frame(send_in_window);
    }
}
