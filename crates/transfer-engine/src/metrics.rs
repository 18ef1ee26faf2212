//! Counters of an engine: what was transferred over which transport, and the state of its peers.

mod text;

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::{
    DeviceUsage,
    histogram::{Histogram, Latency},
};

use crate::{
    path::selection::PathMeasurement,
    transfer_entry::{Opcode, TransferEntry},
    transport_kind::TransportKind,
};

/// The counters of an engine at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EngineSnapshot {
    /// One entry per transport.
    pub transports: Vec<TransportSnapshot>,
    /// One entry per open peer, by name.
    pub peers: Vec<PeerSnapshot>,
    /// Maximum number of open peers.
    pub peers_max: usize,
    /// Peers that were evicted to open others.
    pub peers_evicted: u64,
    /// Number of registered ranges.
    pub regions: usize,
    /// Total size of the registered ranges.
    pub region_bytes: u64,
    /// Connections of peers to the data listener.
    pub incoming: PoolSnapshot,
    /// Pinned buffers for device memory.
    pub pinned: PoolSnapshot,
    /// Refusals, by this engine and by peers.
    pub refused: RefusalSnapshot,
    /// Submitted batches that wait for a worker, and those refused by a full queue.
    pub batches: QueueSnapshot,
    /// Notifications that wait to be taken, and those refused by a full queue.
    pub notifications: QueueSnapshot,
    /// Worker threads that move submitted batches.
    pub workers: usize,
    /// The RDMA devices.
    pub devices: Vec<DeviceUsage>,
}

/// The counters of one transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportSnapshot {
    /// The transport.
    pub kind: TransportKind,
    /// Batches given to the transport.
    pub batches: u64,
    /// Entries moved.
    pub entries: u64,
    /// Bytes read from peers.
    pub bytes_read: u64,
    /// Bytes written to peers.
    pub bytes_written: u64,
    /// Entries that failed.
    pub errors: u64,
    /// Entries whose memory the transport does not serve, left to another transport.
    pub unserved: u64,
    /// Number of times no path to a peer could be opened.
    pub refusals: u64,
    /// Durations of batches.
    pub latency: Latency,
}

/// The state of one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSnapshot {
    /// Name of the peer's segment.
    pub name: String,
    /// The cheapest open transport.
    pub transport: Option<TransportKind>,
    /// Entries that failed on every path.
    pub errors: u64,
    /// Why a path over a transport could not be opened.
    pub refusals: Vec<(TransportKind, String)>,
    /// Counters of each transport to the peer.
    pub transports: Vec<TransportSnapshot>,
    /// Connections to the peer, if a path has a connection pool.
    pub connections: PoolSnapshot,
    /// Measured speed of each path.
    pub measured: Vec<(TransportKind, PathMeasurement)>,
}

/// Usage of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolSnapshot {
    /// Items in the pool.
    pub open: usize,
    /// Items that are not in use.
    pub idle: usize,
    /// Maximum number of items.
    pub limit: usize,
    /// Requests that were refused.
    pub refused: u64,
}

/// Usage of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueSnapshot {
    /// Items in the queue.
    pub waiting: usize,
    /// Maximum number of items.
    pub limit: usize,
    /// Items that were refused.
    pub refused: u64,
}

/// Numbers of refused peers and requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RefusalSnapshot {
    /// Peers whose token was wrong or missing.
    pub token_here: u64,
    /// Peers that refused our token, or that asked for none although we have one.
    pub token_there: u64,
    /// Connections in upstream's frames, which carry no token.
    pub compat: u64,
    /// Requested ranges that are not registered.
    pub ranges: u64,
}

/// Counters of refusals.
#[derive(Debug, Default)]
pub struct Refusals {
    token_here: AtomicU64,
    token_there: AtomicU64,
    compat: AtomicU64,
    ranges: AtomicU64,
}

/// Counters per transport.
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

/// Progress of a batch.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Progress {
    entries: u64,
    bytes: u64,
    errors: u64,
    open: u64,
}

/// The part of a batch that one path has moved.
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

    /// Returns the current counts.
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
    /// Counters of an unused transport.
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

    /// Returns whether the transport was used or refused.
    pub(crate) const fn is_used(&self) -> bool {
        self.batches > 0 || self.refusals > 0 || self.unserved > 0
    }

    /// Total number of moved bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes_read + self.bytes_written
    }
}
