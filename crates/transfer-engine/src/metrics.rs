//! Counters of an engine: what was transferred over which transport, and the state of its peers.

mod text;

use std::time::Duration;

use mooncake_base::{
    DeviceUsage, counters,
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

counters! {
    /// Counts one transport.
    struct TransportCounters;
    /// The counters of one transport.
    pub struct TransportSnapshot {
        /// The transport.
        pub kind: TransportKind,
    }
    METRICS {
        /// batches given to a transport
        batches = counter "batches_total",
        /// transfer entries moved
        entries = counter "pieces_total",
        /// bytes moved
        /// from peers
        bytes_read = counter "bytes_total" { operation = "read" },
        /// bytes moved
        /// to peers
        bytes_written = counter "bytes_total" { operation = "write" },
        /// transfer entries that failed
        errors = counter "errors_total",
        /// entries left to another transport
        /// because their memory is not served by this one
        unserved = counter "unserved_total",
        /// times no path could be opened
        refusals = counter "unreachable_total",
        /// durations of batches
        latency: Histogram => Latency,
    }
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

counters! {
    /// Counters of refusals.
    pub struct Refusals;
    /// Numbers of refused peers and requests.
    #[derive(Copy)]
    pub struct RefusalSnapshot {}
    METRICS {
        /// refusals, by reason
        ///
        /// Peers whose token was wrong or missing.
        token_here = counter "refused_total" { reason = "token_here" },
        /// Peers that refused our token, or that asked for none although we have one.
        token_there = counter "refused_total" { reason = "token_there" },
        /// Connections in upstream's frames, which carry no token.
        compat = counter "refused_total" { reason = "established" },
        /// Requested ranges that are not registered.
        ranges = counter "refused_total" { reason = "range" },
    }
}

/// Counters per transport.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    transports: [TransportCounters; KINDS.len()],
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
        let counters = self.transport(work.kind);
        if work.after.open > 0 {
            counters.unserved.add(work.after.open);
            if work.after.open == work.before.open {
                return;
            }
        }
        counters.batches.increment();
        counters.entries.add(work.after.entries - work.before.entries);
        counters.errors.add_nonzero(work.after.errors.saturating_sub(work.before.errors));
        let bytes = match work.opcode {
            Opcode::Read => &counters.bytes_read,
            Opcode::Write => &counters.bytes_written,
        };
        bytes.add(work.after.bytes - work.before.bytes);
        counters.latency.record(work.took);
    }

    pub(crate) fn count_refusal(&self, kind: TransportKind) {
        self.transport(kind).refusals.increment();
    }

    pub(crate) fn snapshot(&self) -> Vec<TransportSnapshot> {
        let one = |kind| TransportSnapshot { kind, ..self.transport(kind).snapshot() };
        KINDS.into_iter().map(one).collect()
    }

    fn transport(&self, kind: TransportKind) -> &TransportCounters {
        match kind {
            TransportKind::Memory => &self.transports[0],
            TransportKind::Shm => &self.transports[1],
            TransportKind::Tcp => &self.transports[2],
            TransportKind::Rdma => &self.transports[3],
        }
    }
}

impl TransportSnapshot {
    /// Returns whether the transport was used or refused.
    pub(crate) const fn is_used(&self) -> bool {
        self.batches > 0 || self.refusals > 0 || self.unserved > 0
    }

    /// Total number of moved bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes_read + self.bytes_written
    }
}
