//! The path to one peer over TCP: a batch becomes frames, sent one after another on a connection.

use std::io;

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::dial::peer_error;

use super::{
    TcpSettings,
    connection::{DataConnection, SendFailure},
    connection_pool::{ConnectionPool, Destination, PooledConnection, stall_error},
    request_window,
};
use crate::{
    discovery::descriptor::SegmentDescriptor,
    metrics::PoolSnapshot,
    transfer_entry::{Opcode, RemoteRange, TransferEntry},
    transport::{
        Path, TimeLimits, TransportKind,
        tcp::{
            batch_split::{FRAME_BYTES, FrameLimits, Framer, Part, fail_unfinished},
            compat_frame,
            data_frame::{self, Refusal, RequestHeader, ResponseHeader},
            vectored_io::Span,
        },
    },
};

/// The maximum number of bad local addresses found one by one in a call, each of which costs a
/// connection. After that the rest of the call fails.
const BAD_SPANS_MAX: usize = 16;

/// A path over TCP.
#[derive(Debug)]
pub(in crate::transport::tcp) struct TcpPath {
    pool: ConnectionPool,
    protocol: WireProtocol,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WireProtocol {
    Native,
    Compat { has_status: bool },
}

/// The outcome of one frame.
enum FrameOutcome {
    /// Every part has its outcome, and the connection can be reused.
    Done,
    /// Every part has its outcome, but the peer closes the connection.
    Closing,
    /// The local memory of one part cannot be read, so the request cannot be completed.
    BadPart(usize),
    /// The connection broke; `is_before_response` if no byte of the response had arrived.
    Broken { source: io::Error, is_before_response: bool },
}

impl TcpPath {
    pub(in crate::transport::tcp) fn connect(
        peer: &SegmentDescriptor,
        settings: &TcpSettings,
        deadline: Moment,
    ) -> Result<Self> {
        let destination = destination(peer)?;
        let protocol = match destination.native {
            Some(_) => WireProtocol::Native,
            None => WireProtocol::Compat { has_status: peer.tcp_proto_version >= 2 },
        };
        if settings.token.is_some() && destination.native.is_none() {
            settings.refusals.token_there.increment();
            let text = "the peer supports only upstream's frames, which carry no token";
            return Err(
                Error::new(ErrorCode::ILLEGAL_CLIENT, text).with("peer", &destination.endpoint)
            );
        }
        let pool = ConnectionPool::new(destination, settings);
        pool.acquire(deadline.into())?.release();
        Ok(Self { pool, protocol })
    }

    fn endpoint(&self) -> &Endpoint {
        &self.pool.destination().endpoint
    }

    /// Moves a large batch over several connections and the rest frame by frame. A returned error
    /// applies to all entries that have no outcome yet.
    fn move_all(
        &self,
        opcode: Opcode,
        entries: &mut [TransferEntry],
        limits: TimeLimits,
    ) -> Result<()> {
        if self.protocol == WireProtocol::Native {
            self.move_windowed(opcode, entries, limits)?;
        }
        self.move_frames(opcode, entries, limits)
    }

    /// Moves a batch of more than one frame over as many connections as its size justifies. After a
    /// failure the entries stay open; moving them frame by frame finds and reports the cause.
    fn move_windowed(
        &self,
        opcode: Opcode,
        entries: &mut [TransferEntry],
        limits: TimeLimits,
    ) -> Result<()> {
        let open = entries.iter().filter(|entry| entry.outcome.is_none());
        let (count, bytes) = open.fold((0_usize, 0_usize), |(count, bytes), entry| {
            (count + 1, bytes.saturating_add(entry.local.length()))
        });
        if bytes < FRAME_BYTES && count <= data_frame::ENTRIES_MAX {
            return Ok(());
        }
        let first = self.pool.acquire(limits)?;
        let most = self.pool.max_per_transfer(first.get());
        let batch =
            request_window::TransferBatch { opcode, entries, limits, endpoint: self.endpoint() };
        let wanted = request_window::connections_for(bytes, most);
        match request_window::run(&self.pool, first, bytes, wanted, batch) {
            Err(failure) if failure.kind() == io::ErrorKind::TimedOut => {
                Err(self.timeout_error(limits).caused_by(failure))
            }
            Err(failure) => {
                let peer = self.endpoint();
                tracing::debug!(%peer, %failure, "a large transfer was interrupted");
                TransferEntry::mark_given_up(opcode, entries);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Moves the open entries frame by frame.
    fn move_frames(
        &self,
        opcode: Opcode,
        entries: &mut [TransferEntry],
        limits: TimeLimits,
    ) -> Result<()> {
        let frame_limits = match self.protocol {
            WireProtocol::Native => FrameLimits::NATIVE,
            WireProtocol::Compat { .. } => FrameLimits::COMPAT,
        };
        let mut framer = Framer::new(entries, frame_limits);
        let mut parts = Vec::new();
        framer.next_frame(entries, &mut parts);
        if parts.is_empty() {
            return Ok(());
        }
        let mut pooled = self.pool.acquire(limits)?;
        let mut bad_spans = 0;
        while !parts.is_empty() {
            self.check_deadline(limits)?;
            match self.exchange(pooled.get_mut(), opcode, &parts, entries, limits) {
                FrameOutcome::Done => framer.next_frame(entries, &mut parts),
                FrameOutcome::Closing => {
                    framer.next_frame(entries, &mut parts);
                    self.reconnect(&mut pooled, &parts, limits)?;
                }
                FrameOutcome::BadPart(index) => {
                    parts[index].complete(entries, Err(bad_local_error(&parts[index])));
                    bad_spans += 1;
                    if bad_spans == BAD_SPANS_MAX {
                        return Err(Error::invalid("too many local addresses cannot be read"));
                    }
                    parts.retain(|part| entries[part.entry].outcome.is_none());
                    mark_resent(opcode, &parts, entries);
                    if parts.is_empty() {
                        framer.next_frame(entries, &mut parts);
                    }
                    self.reconnect(&mut pooled, &parts, limits)?;
                }
                // Transfers are idempotent, and an idle connection shows only when used that the
                // peer has closed it.
                FrameOutcome::Broken { is_before_response: true, source }
                    if pooled.get_mut().is_used && source.kind() != io::ErrorKind::TimedOut =>
                {
                    mark_resent(opcode, &parts, entries);
                    pooled.reconnect(limits.give_up_at())?;
                }
                FrameOutcome::Broken { source, .. } if source.kind() == io::ErrorKind::TimedOut => {
                    return Err(self.timeout_error(limits).caused_by(source));
                }
                FrameOutcome::Broken { source, .. } => {
                    let text = "the connection broke during the transfer";
                    return Err(peer_error(text, self.endpoint(), source));
                }
            }
        }
        if pooled.is_connected() {
            pooled.release();
        }
        Ok(())
    }

    fn exchange(
        &self,
        connection: &mut DataConnection,
        opcode: Opcode,
        parts: &[Part],
        entries: &mut [TransferEntry],
        limits: TimeLimits,
    ) -> FrameOutcome {
        let mut frame =
            FrameExchange { connection, opcode, parts, entries, endpoint: self.endpoint(), limits };
        match self.protocol {
            WireProtocol::Native => frame.native(),
            WireProtocol::Compat { has_status } => frame.compat(has_status),
        }
    }

    /// Closes the connection and opens a new one if there is more to move.
    fn reconnect(
        &self,
        pooled: &mut PooledConnection<'_>,
        next: &[Part],
        limits: TimeLimits,
    ) -> Result<()> {
        pooled.close();
        if next.is_empty() { Ok(()) } else { pooled.reconnect(limits.give_up_at()) }
    }

    fn check_deadline(&self, limits: TimeLimits) -> Result<()> {
        if limits.deadline.has_passed(SystemClock.now()) {
            return Err(self.timeout_error(limits));
        }
        Ok(())
    }

    /// Returns the error of a transfer that ran out of time. At the deadline the message names no
    /// cause: this side cannot determine which side was slow.
    fn timeout_error(&self, limits: TimeLimits) -> Error {
        match limits.stall {
            Some(stall) if !limits.deadline.has_passed(SystemClock.now()) => {
                stall_error(self.endpoint(), stall)
            }
            _ => {
                let text = "the deadline passed before the bytes were moved";
                Error::new(ErrorCode::RPC_TIMEOUT, text).with("peer", self.endpoint())
            }
        }
    }
}

impl Path for TcpPath {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn reaches(&self, _range: RemoteRange) -> bool {
        true // the owner checks each range
    }

    fn transfer(&self, opcode: Opcode, entries: &mut [TransferEntry], limits: TimeLimits) {
        if let Err(error) = self.move_all(opcode, entries, limits) {
            fail_unfinished(entries, &error);
        }
    }

    fn is_alive(&self) -> bool {
        self.pool.is_alive()
    }

    fn connections(&self) -> Option<PoolSnapshot> {
        Some(self.pool.snapshot())
    }

    fn close(&self) {
        self.pool.close();
    }
}

/// The exchange of one frame.
struct FrameExchange<'a> {
    connection: &'a mut DataConnection,
    opcode: Opcode,
    parts: &'a [Part],
    entries: &'a mut [TransferEntry],
    endpoint: &'a Endpoint,
    limits: TimeLimits,
}

impl FrameExchange<'_> {
    /// Moves all parts in one native request.
    fn native(&mut self) -> FrameOutcome {
        self.connection.sequence += 1;
        let payload = self.parts.iter().map(|part| part.remote.length).sum();
        let (opcode, count, sequence) = (self.opcode, self.parts.len(), self.connection.sequence);
        let request = RequestHeader { opcode, count, sequence, payload };
        self.connection.wire.clear();
        request.encode(&mut self.connection.wire);
        for part in self.parts {
            data_frame::encode_entry(part.remote, &mut self.connection.wire);
        }
        self.load_spans(self.opcode == Opcode::Write, &[]);
        if let Err(failure) = self.connection.send(self.limits) {
            return failure.into();
        }
        self.native_response(&request).unwrap_or_else(|(source, is_before_response)| {
            FrameOutcome::Broken { source, is_before_response }
        })
    }

    fn native_response(
        &mut self,
        request: &RequestHeader,
    ) -> Result<FrameOutcome, (io::Error, bool)> {
        let mut header = [0; data_frame::RESPONSE_BYTES];
        self.connection.read(&mut header, self.limits).map_err(|source| (source, true))?;
        let mid_response = |source: io::Error| (source, false);
        let answer =
            ResponseHeader::decode(&header, request).map_err(|bad| mid_response(bad.into()))?;
        let mut list = vec![0; answer.refused * data_frame::REFUSAL_BYTES];
        self.connection.read(&mut list, self.limits).map_err(mid_response)?;
        let refusals =
            Refusal::decode_all(&list, self.parts.len()).map_err(|bad| mid_response(bad.into()))?;
        for refusal in &refusals {
            let part = &self.parts[refusal.index];
            part.complete(self.entries, Err(part.refused(refusal.code, self.endpoint)));
        }
        if self.opcode == Opcode::Read {
            self.load_spans(true, &refusals);
            let expected: u64 = self.connection.spans.iter().map(|span| span.length() as u64).sum();
            if answer.payload != expected {
                return Err(mid_response(
                    data_frame::Malformed("the length of the payload is wrong").into(),
                ));
            }
            self.receive_parts().map_err(mid_response)?;
        }
        self.complete_parts();
        Ok(FrameOutcome::Done)
    }

    /// Moves the only part in an upstream request.
    fn compat(&mut self, has_status: bool) -> FrameOutcome {
        self.compat_exchange(has_status).unwrap_or_else(|exchange| exchange)
    }

    fn compat_exchange(&mut self, has_status: bool) -> Result<FrameOutcome, FrameOutcome> {
        let before_response = |source| FrameOutcome::Broken { source, is_before_response: true };
        let mid_response = |source| FrameOutcome::Broken { source, is_before_response: false };
        // Upstream's frames carry one range; the framer was given that limit.
        let header =
            compat_frame::Header { opcode: self.opcode, range: self.parts[0].remote, has_status };
        self.connection.wire.clear();
        self.connection.wire.extend_from_slice(&header.encode());
        self.load_spans(self.opcode == Opcode::Write, &[]);
        let sent = self.connection.send(self.limits);
        if let Err(failure @ SendFailure::BadSpan(_)) = sent {
            return Err(failure.into());
        }
        // A refusal may have arrived before everything was sent; it is the cause of the failure.
        if has_status {
            let mut status = [0; compat_frame::STATUS_BYTES];
            let read = self.connection.read(&mut status, self.limits);
            if let (Err(SendFailure::Broken(source)), Err(_)) = (sent, &read) {
                return Err(before_response(source));
            }
            read.map_err(before_response)?;
            let status =
                compat_frame::Status::decode(status).map_err(|bad| mid_response(bad.into()))?;
            if status == compat_frame::Status::Refused {
                let part = &self.parts[0];
                let error = part.refused(ErrorCode::TRANSFER_FAIL, self.endpoint);
                part.complete(self.entries, Err(error));
                return Ok(FrameOutcome::Closing);
            }
        } else {
            sent.map_err(FrameOutcome::from)?;
        }
        if self.opcode == Opcode::Read {
            self.load_spans(true, &[]);
            self.receive_parts().map_err(mid_response)?;
        }
        self.complete_parts();
        Ok(FrameOutcome::Done)
    }

    /// Lists the local memory of the parts that were not refused, or nothing if not `is_wanted`.
    fn load_spans(&mut self, is_wanted: bool, refusals: &[Refusal]) {
        let spans = &mut self.connection.spans;
        spans.clear();
        if !is_wanted {
            return;
        }
        let mut refusals = refusals.iter().peekable();
        for (index, part) in self.parts.iter().enumerate() {
            let is_refused = refusals.next_if(|refusal| refusal.index == index).is_some();
            spans.push(if is_refused {
                Span::discard(0) // keeps the indexes of spans and parts equal
            } else {
                part.span()
            });
        }
    }

    fn receive_parts(&mut self) -> io::Result<()> {
        for index in self.connection.receive(self.limits)? {
            let part = &self.parts[index];
            part.complete(self.entries, Err(bad_local_error(part)));
        }
        Ok(())
    }

    fn complete_parts(&mut self) {
        for part in self.parts {
            part.complete(self.entries, Ok(()));
        }
    }
}

impl From<SendFailure> for FrameOutcome {
    fn from(failure: SendFailure) -> Self {
        match failure {
            SendFailure::Broken(source) => Self::Broken { source, is_before_response: true },
            SendFailure::BadSpan(index) => Self::BadPart(index),
        }
    }
}

fn destination(peer: &SegmentDescriptor) -> Result<Destination> {
    if peer.tcp_data_port == 0 {
        let text = "the segment has no tcp data listener";
        return Err(Error::new(ErrorCode::NOT_SUPPORTED, text).with("segment", &peer.name));
    }
    let host = if peer.tcp_data_host.is_empty() { &peer.name } else { &peer.tcp_data_host };
    let host = host.parse::<Endpoint>()?.host;
    let native = peer.mooncake.as_ref().map(|own| own.engine());
    Ok(Destination { endpoint: Endpoint::new(host, peer.tcp_data_port), native })
}

/// Records that parts of writes are sent again: the peer may still read those of the closed connection.
fn mark_resent(opcode: Opcode, parts: &[Part], entries: &mut [TransferEntry]) {
    if opcode == Opcode::Write {
        parts.iter().for_each(|part| entries[part.entry].may_arrive_late = true);
    }
}

fn bad_local_error(part: &Part) -> Error {
    Error::invalid("the local address is not accessible memory")
        .with("address", format_args!("{:#x}", part.address))
        .with("length", part.length())
}
