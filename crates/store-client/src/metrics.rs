//! Client metrics: by operation, by call to the master, by transport and by peer.
//!
//! Counting costs a few relaxed atomic additions. A lock is taken only when a transfer fails.

pub(crate) mod disk;
mod text;

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

pub use mooncake_base::histogram::Latency;
use mooncake_base::{histogram::Histogram, sync::Mutex};
use mooncake_proto::calls::Method;
use mooncake_transfer_engine::{Opcode, TransportKind};

use self::disk::DiskCounters;
pub use self::disk::{DirectoryMetrics, DiskCount, DiskMetrics};

/// Maximum number of peers counted by name.
const PEERS_MAX: usize = 256;

/// Transports in the index order of [`Metrics::copies`].
const KINDS: [TransportKind; 4] =
    [TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp, TransportKind::Rdma];

/// Operations that move payload. Every other operation is a single call to the master and is
/// counted as such.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Put,
    PutBatch,
    Upsert,
    UpsertBatch,
    PutParts,
    Get,
    GetBatch,
    GetParts,
}

impl Operation {
    /// All operations, in index order.
    const ALL: [Self; 8] = [
        Self::Put,
        Self::PutBatch,
        Self::Upsert,
        Self::UpsertBatch,
        Self::PutParts,
        Self::Get,
        Self::GetBatch,
        Self::GetParts,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::PutBatch => "put_batch",
            Self::Upsert => "upsert",
            Self::UpsertBatch => "upsert_batch",
            Self::PutParts => "put_parts",
            Self::Get => "get",
            Self::GetBatch => "get_batch",
            Self::GetParts => "get_parts",
        }
    }

    const fn is_read(self) -> bool {
        matches!(self, Self::Get | Self::GetBatch | Self::GetParts)
    }
}

/// The counters of one client.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    operations: [OperationCounters; Operation::ALL.len()],
    calls: CallTable,
    transfers: [Histogram; 4],
    copies: [TransportCounters; KINDS.len()],
    hits: AtomicU64,
    misses: AtomicU64,
    late_reads: AtomicU64,
    checksum_mismatches: AtomicU64,
    skipped_copies: AtomicU64,
    lost_copies: AtomicU64,
    peer_errors: Mutex<BTreeMap<String, u64>>,
    disk: DiskCounters,
}

#[derive(Debug, Default)]
struct OperationCounters {
    latency: Histogram,
    done: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
}

/// The calls by their numbers.
#[derive(Debug)]
struct CallTable([CallCounters; Method::ALL.len()]);

impl Default for CallTable {
    fn default() -> Self {
        Self(std::array::from_fn(|_| CallCounters::default()))
    }
}

#[derive(Debug, Default)]
struct CallCounters {
    latency: Histogram,
    failed: AtomicU64,
}

#[derive(Debug, Default)]
struct TransportCounters {
    read: AtomicU64,
    read_bytes: AtomicU64,
    written: AtomicU64,
    written_bytes: AtomicU64,
    failed: AtomicU64,
}

/// Totals of a batch of outcomes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OutcomeTotals {
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) bytes: u64,
}

/// A snapshot of a client's counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MetricsSnapshot {
    /// Calls to the master, without bytes.
    pub calls: Count,
    /// Objects put. An existing object that was kept counts as done, with 0 bytes.
    pub puts: Count,
    /// Reads of objects or of parts of them.
    pub reads: Count,
    /// Keys found by locate calls.
    pub hits: u64,
    /// Keys not found by locate calls.
    pub misses: u64,
    /// Reads that completed after their fence and needed verification by the master.
    pub late_reads: u64,
    /// Replicas whose bytes did not match the object's checksum.
    pub checksum_mismatches: u64,
    /// Replicas that could not be read, so that another one was tried.
    pub skipped_copies: u64,
    /// Replicas that could not be written, so that the object has fewer.
    pub lost_copies: u64,
    /// Counts by operation name; only operations that were used.
    pub operations: BTreeMap<&'static str, OperationCount>,
    /// Calls to the master by upstream's name, or by our own where upstream has none; only calls
    /// that were made.
    pub rpcs: BTreeMap<&'static str, CallCount>,
    /// Transfer latency of single reads, batch reads, single writes and batch writes.
    pub transfers: BTreeMap<&'static str, Latency>,
    /// Replicas read or written, by transport name.
    pub by_transport: BTreeMap<&'static str, TransportCount>,
    /// Failed transfers by peer endpoint; only the first 256 peers.
    pub peer_errors: BTreeMap<String, u64>,
    /// Copies on disk.
    pub disk: DiskMetrics,
}

/// Number of items and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Items that succeeded.
    pub done: u64,
    /// Items that failed.
    pub failed: u64,
    /// Bytes of the items that succeeded.
    pub bytes: u64,
}

/// Counts of one operation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OperationCount {
    /// Whether the operation reads; otherwise it writes.
    pub is_read: bool,
    /// Objects and bytes.
    pub objects: Count,
    /// Latency per operation; a batch counts as one. A read counts from the locate call to its last
    /// byte, a write to the end of the put.
    pub latency: Latency,
}

/// Counts of one kind of call to the master.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallCount {
    /// Calls without a response.
    pub failed: u64,
    /// Latency of all calls, with and without a response.
    pub latency: Latency,
}

/// Counts of one transport.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TransportCount {
    /// Replicas, or parts of replicas, that were read.
    pub read: u64,
    /// Bytes of these replicas.
    pub read_bytes: u64,
    /// Replicas that were written.
    pub written: u64,
    /// Bytes of these replicas.
    pub written_bytes: u64,
    /// Replicas that could not be read or written.
    pub failed: u64,
}

impl TransportCount {
    /// Returns the sum of reads and writes.
    pub const fn total(&self) -> Count {
        Count {
            done: self.read + self.written,
            failed: self.failed,
            bytes: self.read_bytes + self.written_bytes,
        }
    }
}

impl OutcomeTotals {
    /// Adds one outcome.
    pub(crate) fn add(&mut self, bytes: Option<u64>) {
        match bytes {
            Some(bytes) => {
                self.done += 1;
                self.bytes += bytes;
            }
            None => self.failed += 1,
        }
    }

    /// Adds the bytes of a part, whose whole is added later.
    pub(crate) fn add_part(&mut self, bytes: Option<u64>) {
        match bytes {
            Some(bytes) => self.bytes += bytes,
            None => self.failed += 1,
        }
    }
}

impl Metrics {
    pub(crate) fn count_operation(
        &self,
        operation: Operation,
        totals: OutcomeTotals,
        took: Duration,
    ) {
        let row = &self.operations[operation as usize];
        row.latency.record(took);
        add(&row.done, totals.done);
        add(&row.failed, totals.failed);
        add(&row.bytes, totals.bytes);
    }

    pub(crate) fn count_call(&self, method: Method, is_done: bool, took: Duration) {
        let row = &self.calls.0[method as usize];
        row.latency.record(took);
        add(&row.failed, u64::from(!is_done));
    }

    /// Records the duration of one submission of `copies` replicas.
    pub(crate) fn count_transfer(&self, opcode: Opcode, copies: usize, took: Duration) {
        self.transfers[transfer_index(opcode, copies > 1)].record(took);
    }

    pub(crate) fn count_located(&self, hits: u64, misses: u64) {
        add(&self.hits, hits);
        add(&self.misses, misses);
    }

    pub(crate) fn count_late(&self, reads: usize) {
        add(&self.late_reads, reads as u64);
    }

    pub(crate) fn count_mismatch(&self) {
        add(&self.checksum_mismatches, 1);
    }

    pub(crate) fn count_skipped(&self, copies: u64) {
        add(&self.skipped_copies, copies);
    }

    pub(crate) fn count_lost(&self, copies: u64) {
        add(&self.lost_copies, copies);
    }

    /// Records the replicas served by a transport, if any path was available.
    pub(crate) fn count_copies(
        &self,
        kind: Option<TransportKind>,
        opcode: Opcode,
        totals: OutcomeTotals,
    ) {
        let Some(at) = KINDS.iter().position(|known| Some(*known) == kind) else { return };
        let row = &self.copies[at];
        let (done, bytes) = match opcode {
            Opcode::Read => (&row.read, &row.read_bytes),
            Opcode::Write => (&row.written, &row.written_bytes),
        };
        add(done, totals.done);
        add(bytes, totals.bytes);
        add(&row.failed, totals.failed);
    }

    /// Returns the counters of copies on disk.
    pub(crate) const fn disk(&self) -> &DiskCounters {
        &self.disk
    }

    pub(crate) fn count_peer_error(&self, endpoint: &str) {
        let mut errors = self.peer_errors.lock();
        if let Some(count) = errors.get_mut(endpoint) {
            *count += 1;
        } else if errors.len() < PEERS_MAX {
            errors.insert(endpoint.to_owned(), 1);
        }
    }

    pub(crate) fn snapshot(&self) -> MetricsSnapshot {
        let mut snapshot = MetricsSnapshot {
            hits: read(&self.hits),
            misses: read(&self.misses),
            late_reads: read(&self.late_reads),
            checksum_mismatches: read(&self.checksum_mismatches),
            skipped_copies: read(&self.skipped_copies),
            lost_copies: read(&self.lost_copies),
            peer_errors: self.peer_errors.lock().clone(),
            disk: self.disk.snapshot(),
            ..MetricsSnapshot::default()
        };
        for (operation, row) in Operation::ALL.iter().zip(&self.operations) {
            let latency = row.latency.snapshot();
            if latency.count() == 0 {
                continue;
            }
            let objects =
                Count { done: read(&row.done), failed: read(&row.failed), bytes: read(&row.bytes) };
            let is_read = operation.is_read();
            if is_read { &mut snapshot.reads } else { &mut snapshot.puts }.add(objects);
            let count = OperationCount { is_read, objects, latency };
            snapshot.operations.insert(operation.name(), count);
        }
        for (method, row) in Method::ALL.into_iter().zip(&self.calls.0) {
            let count = CallCount { failed: read(&row.failed), latency: row.latency.snapshot() };
            let calls = count.latency.count();
            if calls > 0 {
                let done = calls.saturating_sub(count.failed);
                snapshot.calls.add(Count { done, failed: count.failed, bytes: 0 });
                snapshot.rpcs.insert(method.metric_name(), count);
            }
        }
        for opcode in [Opcode::Read, Opcode::Write] {
            for is_batch in [false, true] {
                let latency = self.transfers[transfer_index(opcode, is_batch)].snapshot();
                snapshot.transfers.insert(transfer_name(opcode, is_batch), latency);
            }
        }
        let used = KINDS.iter().zip(&self.copies).map(|(kind, row)| (kind.name(), row.read()));
        snapshot.by_transport = used.filter(|(_, row)| *row != TransportCount::default()).collect();
        snapshot
    }
}

impl TransportCounters {
    fn read(&self) -> TransportCount {
        TransportCount {
            read: read(&self.read),
            read_bytes: read(&self.read_bytes),
            written: read(&self.written),
            written_bytes: read(&self.written_bytes),
            failed: read(&self.failed),
        }
    }
}

impl Count {
    const fn add(&mut self, other: Self) {
        self.done += other.done;
        self.failed += other.failed;
        self.bytes += other.bytes;
    }
}

fn transfer_index(opcode: Opcode, is_batch: bool) -> usize {
    let first = match opcode {
        Opcode::Read => 0,
        Opcode::Write => 2,
    };
    first + usize::from(is_batch)
}

const fn transfer_name(opcode: Opcode, is_batch: bool) -> &'static str {
    match (opcode, is_batch) {
        (Opcode::Read, false) => "get",
        (Opcode::Read, true) => "batch_get",
        (Opcode::Write, false) => "put",
        (Opcode::Write, true) => "batch_put",
    }
}

/// Skips zero, since an atomic addition costs more than the comparison.
fn add(sum: &AtomicU64, count: u64) {
    if count > 0 {
        sum.fetch_add(count, Ordering::Relaxed);
    }
}

fn read(sum: &AtomicU64) -> u64 {
    sum.load(Ordering::Relaxed)
}
