//! What an engine has moved, and over which way.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    piece::{Opcode, Piece},
    transport::TransportKind,
};

/// What an engine has done up to now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EngineSnapshot {
    /// One entry for each way.
    pub transports: Vec<TransportSnapshot>,
    /// One entry for each open peer, by name.
    pub peers: Vec<PeerSnapshot>,
}

/// What went over one way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportSnapshot {
    /// Which.
    pub kind: TransportKind,
    /// Batches that it was given.
    pub batches: u64,
    /// Pieces that it moved.
    pub pieces: u64,
    /// Bytes that it brought here.
    pub bytes_read: u64,
    /// Bytes that it brought to peers.
    pub bytes_written: u64,
    /// Pieces that it could not move.
    pub errors: u64,
    /// Peers to which there was no such way.
    pub refusals: u64,
}

/// How it stands with one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSnapshot {
    /// Its segment's name.
    pub name: String,
    /// The cheapest way that is open.
    pub transport: Option<TransportKind>,
    /// Pieces that failed on every way.
    pub errors: u64,
    /// Why there is no way of some kind.
    pub refusals: Vec<(TransportKind, String)>,
}

/// Running sums, one set for each way.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    sums: [Sums; KINDS.len()],
}

#[derive(Debug, Default)]
struct Sums {
    batches: AtomicU64,
    pieces: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    errors: AtomicU64,
    refusals: AtomicU64,
}

/// What of a batch is done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    pieces: u64,
    bytes: u64,
    errors: u64,
}

const KINDS: [TransportKind; 4] =
    [TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp, TransportKind::Rdma];

impl Progress {
    pub(crate) fn of(pieces: &[Piece]) -> Self {
        let mut progress = Self::default();
        for piece in pieces {
            match &piece.outcome {
                Some(Ok(())) => {
                    progress.pieces += 1;
                    progress.bytes += piece.local.length() as u64;
                }
                Some(Err(_)) => progress.errors += 1,
                None => {}
            }
        }
        progress
    }

    pub(crate) const fn errors(&self) -> u64 {
        self.errors
    }
}

impl Metrics {
    pub(crate) fn count_batch(
        &self,
        kind: TransportKind,
        opcode: Opcode,
        (before, after): (Progress, Progress),
    ) {
        let sums = self.sums(kind);
        let add = |sum: &AtomicU64, count: u64| sum.fetch_add(count, Ordering::Relaxed);
        add(&sums.batches, 1);
        add(&sums.pieces, after.pieces - before.pieces);
        add(&sums.errors, after.errors.saturating_sub(before.errors));
        let bytes = match opcode {
            Opcode::Read => &sums.bytes_read,
            Opcode::Write => &sums.bytes_written,
        };
        add(bytes, after.bytes - before.bytes);
    }

    pub(crate) fn count_refusal(&self, kind: TransportKind) {
        self.sums(kind).refusals.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Vec<TransportSnapshot> {
        let read = |sum: &AtomicU64| sum.load(Ordering::Relaxed);
        let one = |kind: TransportKind| {
            let sums = self.sums(kind);
            TransportSnapshot {
                kind,
                batches: read(&sums.batches),
                pieces: read(&sums.pieces),
                bytes_read: read(&sums.bytes_read),
                bytes_written: read(&sums.bytes_written),
                errors: read(&sums.errors),
                refusals: read(&sums.refusals),
            }
        };
        KINDS.into_iter().map(one).collect()
    }

    fn sums(&self, kind: TransportKind) -> &Sums {
        match kind {
            TransportKind::Memory => &self.sums[0],
            TransportKind::Shm => &self.sums[1],
            TransportKind::Tcp => &self.sums[2],
            TransportKind::Rdma => &self.sums[3],
        }
    }
}
