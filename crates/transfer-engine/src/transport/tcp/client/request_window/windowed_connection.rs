//! A connection with its window of requests.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use mooncake_base::{Clock, SystemClock};

use super::{super::connection_pool::PooledConnection, EntryProgress, TransferBatch};
use crate::{
    transfer_entry::Opcode,
    transport::{
        TimeLimits,
        tcp::{
            batch_split::Part,
            data_frame::{
                self, Malformed, REFUSAL_BYTES, RESPONSE_BYTES, Refusal, RequestHeader,
                ResponseHeader,
            },
            vectored_io::{self, BlockMode, Cursor, Span},
        },
    },
};

/// A connection with its window of requests.
pub(super) struct WindowedConnection<'a> {
    pub(super) pooled: PooledConnection<'a>,
    /// Requests in flight, oldest first; responses arrive in this order.
    pub(super) in_flight: VecDeque<InFlightRequest>,
    /// The number of requests in flight that were sent completely.
    pub(super) sent: usize,
    response: ResponseState,
    /// True if the connection gets no more frames because another caller waits for a connection.
    pub(super) is_draining: bool,
}

/// A request and the state needed for its response.
#[derive(Debug, Default)]
pub(super) struct InFlightRequest {
    header: Option<RequestHeader>,
    pub(super) parts: Vec<Part>,
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

impl<'a> WindowedConnection<'a> {
    pub(super) fn new(pooled: PooledConnection<'a>) -> Self {
        let response = ResponseState::header();
        Self { pooled, in_flight: VecDeque::new(), sent: 0, response, is_draining: false }
    }

    pub(super) fn enqueue(&mut self, mut request: InFlightRequest, opcode: Opcode) {
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
    pub(super) fn send(&mut self, opcode: Opcode, limits: TimeLimits) -> io::Result<bool> {
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
    pub(super) fn receive_step(
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
    pub(super) fn poll_fd(&self) -> libc::pollfd {
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

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{Shutdown, TcpListener},
        time::Duration,
    };

    use mooncake_base::{Endpoint, Moment};

    use super::*;
    use crate::{
        transfer_entry::RemoteRange,
        transport::tcp::{
            TcpSettings,
            client::{
                connection::SendFailure,
                connection_pool::{ConnectionPool, Destination},
            },
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
