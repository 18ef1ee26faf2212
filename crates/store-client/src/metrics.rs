//! Client metrics: by operation, by call to the master, by transport and by peer.
//!
//! Counting costs a few relaxed atomic additions. A lock is taken only when a transfer fails.

pub(crate) mod disk;
mod text;

use std::{collections::BTreeMap, time::Duration};

pub use mooncake_base::histogram::Latency;
use mooncake_base::{counters, histogram::Histogram, sync::Mutex};
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
    pub(crate) replicas: ReplicaCounters,
    pub(crate) disk: DiskCounters,
    operations: [OperationCounters; Operation::ALL.len()],
    calls: CallTable,
    transfers: [Histogram; 4],
    copies: [TransportCounters; KINDS.len()],
    peer_errors: Mutex<BTreeMap<String, u64>>,
}

counters! {
    /// Counts what happened to replicas, of all operations and transports together.
    pub(crate) struct ReplicaCounters;
    /// A snapshot of a client's counters.
    pub struct MetricsSnapshot {
        /// Calls to the master, without bytes.
        pub calls: Count,
        /// Objects put. An existing object that was kept counts as done, with 0 bytes.
        pub puts: Count,
        /// Reads of objects or of parts of them.
        pub reads: Count,
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
    REPLICAS {
        /// Keys found by locate calls.
        hits = counter "hits_total",
        /// Keys not found by locate calls.
        misses = counter "misses_total",
        /// Reads that completed after their fence and needed verification.
        late_reads = counter "late_reads_total",
        /// Replicas whose checksum did not match.
        checksum_mismatches = counter "checksum_mismatches_total",
        /// Replicas that could not be read.
        /// Another one was tried.
        skipped_copies = counter "skipped_copies_total",
        /// Replicas that could not be written.
        /// The object has fewer.
        lost_copies = counter "lost_copies_total",
    }
}

counters! {
    /// Counts items and bytes.
    struct ItemCounters;
    /// Number of items and bytes.
    #[derive(Copy)]
    pub struct Count {}
    METRICS {
        /// Items that succeeded.
        done,
        /// Items that failed.
        failed,
        /// Bytes of the items that succeeded.
        bytes,
    }
}

counters! {
    /// Counts one operation.
    struct OperationCounters;
    /// Counts of one operation.
    pub struct OperationCount {
        /// Whether the operation reads; otherwise it writes.
        pub is_read: bool,
    }
    METRICS {
        /// Objects and bytes.
        objects: ItemCounters => Count,
        /// Latency per operation; a batch counts as one. A read counts from the locate call to its last
        /// byte, a write to the end of the put.
        latency: Histogram => Latency,
    }
}

counters! {
    /// Counts one kind of call to the master.
    struct CallCounters;
    /// Counts of one kind of call to the master.
    pub struct CallCount {}
    METRICS {
        /// Calls to the master without a response.
        failed = counter "failures_total",
        /// Latency of all calls, with and without a response.
        latency: Histogram => Latency,
    }
}

/// The calls by their numbers.
#[derive(Debug)]
struct CallTable([CallCounters; Method::ALL.len()]);

impl Default for CallTable {
    fn default() -> Self {
        Self(std::array::from_fn(|_| CallCounters::default()))
    }
}

counters! {
    /// Counts one transport.
    struct TransportCounters;
    /// Counts of one transport.
    #[derive(Copy)]
    pub struct TransportCount {}
    METRICS {
        /// Replicas, or parts of replicas, that were read.
        read,
        /// Bytes of these replicas.
        read_bytes,
        /// Replicas that were written.
        written,
        /// Bytes of these replicas.
        written_bytes,
        /// Replicas that could not be read or written.
        failed,
    }
}

/// Totals of a batch of outcomes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OutcomeTotals {
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) bytes: u64,
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
        row.objects.done.add_nonzero(totals.done);
        row.objects.failed.add_nonzero(totals.failed);
        row.objects.bytes.add_nonzero(totals.bytes);
    }

    pub(crate) fn count_call(&self, method: Method, is_done: bool, took: Duration) {
        let row = &self.calls.0[method as usize];
        row.latency.record(took);
        row.failed.add_nonzero(u64::from(!is_done));
    }

    /// Records the duration of one submission of `copies` replicas.
    pub(crate) fn count_transfer(&self, opcode: Opcode, copies: usize, took: Duration) {
        self.transfers[transfer_index(opcode, copies > 1)].record(took);
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
        done.add_nonzero(totals.done);
        bytes.add_nonzero(totals.bytes);
        row.failed.add_nonzero(totals.failed);
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
            peer_errors: self.peer_errors.lock().clone(),
            disk: self.disk.snapshot(),
            ..self.replicas.snapshot()
        };
        for (operation, row) in Operation::ALL.iter().zip(&self.operations) {
            let count = OperationCount { is_read: operation.is_read(), ..row.snapshot() };
            if count.latency.count() > 0 {
                let sum = if count.is_read { &mut snapshot.reads } else { &mut snapshot.puts };
                sum.add(count.objects);
                snapshot.operations.insert(operation.name(), count);
            }
        }
        for (method, row) in Method::ALL.into_iter().zip(&self.calls.0) {
            let count = row.snapshot();
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
        let used = KINDS.iter().zip(&self.copies).map(|(kind, row)| (kind.name(), row.snapshot()));
        snapshot.by_transport = used.filter(|(_, row)| *row != TransportCount::default()).collect();
        snapshot
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
