//! The path to one peer over TCP: a batch becomes frames, sent one after another on a connection.

use std::io;

use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::dial::peer_error;

use super::{
    TcpSettings,
    connection::DataConnection,
    connection_pool::{ConnectionPool, Destination, PooledConnection, stall_error},
    frame_exchange::{FrameExchange, FrameOutcome, bad_local_error},
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
            data_frame::ENTRIES_MAX,
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
        if bytes < FRAME_BYTES && count <= ENTRIES_MAX {
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
