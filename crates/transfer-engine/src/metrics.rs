//! What an engine has moved, over which way, and how it stands with its peers.

mod histogram;
mod text;

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use self::histogram::Histogram;
pub use self::histogram::LatencySnapshot;
use crate::{
    path_selection::PathMeasurement,
    transfer_entry::{Opcode, TransferEntry},
    transport::TransportKind,
};

/// What an engine has done up to now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EngineSnapshot {
    /// One entry for each way.
    pub transports: Vec<TransportSnapshot>,
    /// One entry for each open peer, by name.
    pub peers: Vec<PeerSnapshot>,
    /// The most peers that are kept open.
    pub peers_max: usize,
    /// Peers that were closed to make room for others.
    pub peers_evicted: u64,
    /// Ranges that are registered.
    pub regions: usize,
    /// Their bytes.
    pub region_bytes: u64,
    /// Connections of peers to the data listener.
    pub incoming: PoolSnapshot,
    /// Pinned buffers through which device memory goes.
    pub pinned: PoolSnapshot,
    /// Who was turned away, here and by peers.
    pub refused: RefusalSnapshot,
    /// Submitted batches that wait for a thread, and those that found no place to wait in time.
    pub batches: QueueSnapshot,
    /// Notifications that wait to be taken, and those that peers could not leave.
    pub notifications: QueueSnapshot,
    /// Threads that move submitted batches.
    pub workers: usize,
}

/// What went over one way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportSnapshot {
    /// Which.
    pub kind: TransportKind,
    /// Batches that it was given.
    pub batches: u64,
    /// Pieces that it moved.
    pub entries: u64,
    /// Bytes that it brought here.
    pub bytes_read: u64,
    /// Bytes that it brought to peers.
    pub bytes_written: u64,
    /// Pieces that it could not move.
    pub errors: u64,
    /// Pieces of memory that it does not serve, and left to another way.
    pub unserved: u64,
    /// Peers to which there was no such way.
    pub refusals: u64,
    /// How long batches took.
    pub latency: LatencySnapshot,
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
    /// What went over each way to it.
    pub transports: Vec<TransportSnapshot>,
    /// Its connections, if a way to it has some.
    pub connections: PoolSnapshot,
    /// How fast each way was measured to be.
    pub measured: Vec<(TransportKind, PathMeasurement)>,
}

/// How full a pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolSnapshot {
    /// What it holds.
    pub open: usize,
    /// Of these, how many nobody uses at the moment.
    pub idle: usize,
    /// The most that it may hold.
    pub limit: usize,
    /// What it turned away.
    pub refused: u64,
}

/// How full a queue is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueSnapshot {
    /// What waits in it.
    pub waiting: usize,
    /// The most that may wait.
    pub limit: usize,
    /// What it turned away.
    pub refused: u64,
}

/// Who was turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RefusalSnapshot {
    /// Peers whose token was wrong or missing.
    pub token_here: u64,
    /// Peers that refused ours, or that asked for none although we have one.
    pub token_there: u64,
    /// Connections in the established engine's frames, which carry no token.
    pub compat: u64,
    /// Ranges that peers asked for and that are not registered.
    pub ranges: u64,
}

/// Counts of those who were turned away.
#[derive(Debug, Default)]
pub struct Refusals {
    token_here: AtomicU64,
    token_there: AtomicU64,
    compat: AtomicU64,
    ranges: AtomicU64,
}

/// Running sums, one set for each way.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    sums: [Sums; KINDS.len()],
}

#[derive(Debug, Default)]
struct Sums {
    batches: AtomicU64,
    entries: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    errors: AtomicU64,
    unserved: AtomicU64,
    refusals: AtomicU64,
    latency: Histogram,
}

/// What of a batch is done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    entries: u64,
    bytes: u64,
    errors: u64,
    open: u64,
}

/// What one way did for one batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) kind: TransportKind,
    pub(crate) opcode: Opcode,
    pub(crate) before: Progress,
    pub(crate) after: Progress,
    pub(crate) took: Duration,
}

const KINDS: [TransportKind; 4] =
    [TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp, TransportKind::Rdma];

impl Refusals {
    pub(crate) fn count_token_here(&self) {
        self.token_here.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_token_there(&self) {
        self.token_there.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_compat(&self) {
        self.compat.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_range(&self) {
        self.ranges.fetch_add(1, Ordering::Relaxed);
    }

    /// The counts at this moment.
    pub fn snapshot(&self) -> RefusalSnapshot {
        RefusalSnapshot {
            token_here: self.token_here.load(Ordering::Relaxed),
            token_there: self.token_there.load(Ordering::Relaxed),
            compat: self.compat.load(Ordering::Relaxed),
            ranges: self.ranges.load(Ordering::Relaxed),
        }
    }
}

impl Progress {
    pub(crate) fn of(entries: &[TransferEntry]) -> Self {
        let mut progress = Self::default();
        for entry in entries {
            match &entry.outcome {
                Some(Ok(())) => {
                    progress.entries += 1;
                    progress.bytes += entry.local.length() as u64;
                }
                Some(Err(_)) => progress.errors += 1,
                None => progress.open += 1,
            }
        }
        progress
    }

    pub(crate) const fn errors(&self) -> u64 {
        self.errors
    }

    pub(crate) const fn entries(&self) -> u64 {
        self.entries
    }
}

impl Metrics {
    pub(crate) fn count(&self, work: &Work) {
        let sums = self.sums(work.kind);
        let add = |sum: &AtomicU64, count: u64| sum.fetch_add(count, Ordering::Relaxed);
        if work.after.open > 0 {
            add(&sums.unserved, work.after.open);
            if work.after.open == work.before.open {
                return;
            }
        }
        add(&sums.batches, 1);
        add(&sums.entries, work.after.entries - work.before.entries);
        let errors = work.after.errors.saturating_sub(work.before.errors);
        if errors > 0 {
            add(&sums.errors, errors);
        }
        let bytes = match work.opcode {
            Opcode::Read => &sums.bytes_read,
            Opcode::Write => &sums.bytes_written,
        };
        add(bytes, work.after.bytes - work.before.bytes);
        sums.latency.record(work.took);
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
                entries: read(&sums.entries),
                bytes_read: read(&sums.bytes_read),
                bytes_written: read(&sums.bytes_written),
                errors: read(&sums.errors),
                unserved: read(&sums.unserved),
                refusals: read(&sums.refusals),
                latency: sums.latency.snapshot(),
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

impl TransportSnapshot {
    /// Of a way on which nothing has happened.
    fn nothing(kind: TransportKind) -> Self {
        let latency = Histogram::default().snapshot();
        Self {
            kind,
            batches: 0,
            entries: 0,
            bytes_read: 0,
            bytes_written: 0,
            errors: 0,
            unserved: 0,
            refusals: 0,
            latency,
        }
    }

    /// Whether anything happened on it.
    pub(crate) const fn is_used(&self) -> bool {
        self.batches > 0 || self.refusals > 0 || self.unserved > 0
    }

    /// All bytes that it moved.
    pub const fn bytes(&self) -> u64 {
        self.bytes_read + self.bytes_written
    }
}
