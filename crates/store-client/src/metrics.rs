//! What a client has done, counted.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use mooncake_base::sync::Mutex;
use mooncake_transfer_engine::TransportKind;

/// The most peers that are counted by name.
const PEERS_MAX: usize = 256;

/// Transports, in the order in which [`Metrics::by_transport`] counts them.
const KINDS: [TransportKind; 4] =
    [TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp, TransportKind::Rdma];

/// Counters of one client.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    calls: Tally,
    puts: Tally,
    reads: Tally,
    hits: AtomicU64,
    misses: AtomicU64,
    late_reads: AtomicU64,
    checksum_mismatches: AtomicU64,
    by_transport: [Tally; KINDS.len()],
    peer_errors: Mutex<BTreeMap<String, u64>>,
}

#[derive(Debug, Default)]
struct Tally {
    done: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
}

/// The counters of a client at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MetricsSnapshot {
    /// Calls to the master; no bytes are counted.
    pub calls: Count,
    /// Objects put. One that existed and was kept counts as done, without bytes.
    pub puts: Count,
    /// Reads of objects or of parts of them.
    pub reads: Count,
    /// Keys that were found when they were located.
    pub hits: u64,
    /// Keys that were not.
    pub misses: u64,
    /// Reads that ended after their fence and had to be confirmed by the master.
    pub late_reads: u64,
    /// Copies whose bytes did not match the checksum of their object.
    pub checksum_mismatches: u64,
    /// Copies that were read or written, by the name of the transport that served.
    pub by_transport: BTreeMap<&'static str, Count>,
    /// Failed transfers by the peer's endpoint; the first 256 peers only.
    pub peer_errors: BTreeMap<String, u64>,
}

/// How often, and how much.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Succeeded.
    pub done: u64,
    /// Failed.
    pub failed: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
}

impl Metrics {
    pub(crate) fn count_call(&self, is_done: bool) {
        self.calls.count(is_done, 0);
    }

    pub(crate) fn count_put(&self, stored: Option<u64>) {
        self.puts.count(stored.is_some(), stored.unwrap_or(0));
    }

    pub(crate) fn count_read(&self, read: Option<u64>) {
        self.reads.count(read.is_some(), read.unwrap_or(0));
    }

    pub(crate) fn count_located(&self, is_hit: bool) {
        if is_hit { &self.hits } else { &self.misses }.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_late(&self, reads: usize) {
        self.late_reads.fetch_add(reads as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_mismatch(&self) {
        self.checksum_mismatches.fetch_add(1, Ordering::Relaxed);
    }

    /// Over which transport, if any path was left.
    pub(crate) fn count_copy(&self, kind: Option<TransportKind>, copied: Option<u64>) {
        if let Some(at) = KINDS.iter().position(|known| Some(*known) == kind) {
            self.by_transport[at].count(copied.is_some(), copied.unwrap_or(0));
        }
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
        let by_transport = KINDS.iter().zip(&self.by_transport);
        MetricsSnapshot {
            calls: self.calls.read(),
            puts: self.puts.read(),
            reads: self.reads.read(),
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            late_reads: self.late_reads.load(Ordering::Relaxed),
            checksum_mismatches: self.checksum_mismatches.load(Ordering::Relaxed),
            by_transport: by_transport
                .map(|(kind, tally)| (kind.name(), tally.read()))
                .filter(|(_, count)| *count != Count::default())
                .collect(),
            peer_errors: self.peer_errors.lock().clone(),
        }
    }
}

impl Tally {
    fn count(&self, is_done: bool, bytes: u64) {
        if is_done { &self.done } else { &self.failed }.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn read(&self) -> Count {
        Count {
            done: self.done.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}
