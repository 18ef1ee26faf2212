//! Moves a large batch over one or more connections with a window of requests in flight, so that no
//! connection idles between two frames.
//!
//! The calling thread drives all connections and sleeps only when none can make progress. Any
//! failure (unmapped local memory, a broken connection) ends the transfer: connections with an
//! unfinished exchange are closed, acknowledged entries keep their outcome, and the caller moves
//! the rest frame by frame, which finds the cause. Moving the same bytes again is idempotent.

mod windowed_connection;

use std::io;

use mooncake_base::{Clock, Endpoint, Result, SystemClock};

use self::windowed_connection::{InFlightRequest, WindowedConnection};
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
            vectored_io,
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
