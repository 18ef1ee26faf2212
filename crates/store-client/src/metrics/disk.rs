//! Counters of the directories that a client keeps, and of its reads of copies on disk.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::{
    exposition::Exposition,
    histogram::{Histogram, Latency},
};

use super::{
    add, read,
    text::{Labels, counter, histogram},
};

/// Why an object that was to be written to a directory was not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OffloadRefusal {
    /// Its memory could not be read.
    Unreadable,
    /// Its memory was read too late to count.
    Late,
    /// It is too long for a record.
    TooLong,
    /// The directory or its file system is full.
    Full,
    /// The system could not write it.
    Failed,
    /// A later version is there.
    Superseded,
}

impl OffloadRefusal {
    const ALL: [Self; 6] =
        [Self::Unreadable, Self::Late, Self::TooLong, Self::Full, Self::Failed, Self::Superseded];

    const fn name(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::Late => "late",
            Self::TooLong => "too_long",
            Self::Full => "full",
            Self::Failed => "failed",
            Self::Superseded => "superseded",
        }
    }
}

/// The counters.
#[derive(Debug, Default)]
pub(crate) struct DiskCounters {
    reads: Rows,
    writes: Rows,
    remote_calls: AtomicU64,
    remote_bytes: AtomicU64,
    refused: [AtomicU64; OffloadRefusal::ALL.len()],
    evicted: AtomicU64,
    lost: AtomicU64,
    staged_bytes: AtomicU64,
    staging_full: AtomicU64,
}

/// Records that went one way.
#[derive(Debug, Default)]
struct Rows {
    batches: Histogram,
    records: AtomicU64,
    bytes: AtomicU64,
}

/// A snapshot of the counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskMetrics {
    /// Records read from own directories, for this process and for others.
    pub read: DiskCount,
    /// Records written to own directories.
    pub written: DiskCount,
    /// Calls to other processes that loaded records from their directories.
    pub remote_calls: u64,
    /// Bytes of these records.
    pub remote_bytes: u64,
    /// Objects that were not written, by reason.
    pub refused: Vec<(&'static str, u64)>,
    /// Records dropped for others.
    pub evicted: u64,
    /// Records that were asked for and were gone or damaged.
    pub lost: u64,
    /// Bytes of staging memory in use.
    pub staged_bytes: u64,
    /// Loads that found no staging memory in time.
    pub staging_full: u64,
}

/// Records, their bytes, and the latency of batches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskCount {
    /// Records.
    pub records: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Latency of batches.
    pub latency: Latency,
}

impl DiskCounters {
    /// Counts a batch of records that were read.
    pub(crate) fn count_reads(&self, records: u64, bytes: u64, took: Duration) {
        self.reads.count(records, bytes, took);
    }

    /// Counts a batch of records that were written.
    pub(crate) fn count_writes(&self, records: u64, bytes: u64, took: Duration) {
        self.writes.count(records, bytes, took);
    }

    /// Counts a call that loaded records in another process.
    pub(crate) fn count_remote(&self, bytes: u64) {
        add(&self.remote_calls, 1);
        add(&self.remote_bytes, bytes);
    }

    pub(crate) fn count_refused(&self, reason: OffloadRefusal) {
        add(&self.refused[reason as usize], 1);
    }

    pub(crate) fn count_evicted(&self, records: usize) {
        add(&self.evicted, records as u64);
    }

    pub(crate) fn count_lost(&self) {
        add(&self.lost, 1);
    }

    pub(crate) fn count_staging_full(&self) {
        add(&self.staging_full, 1);
    }

    pub(crate) fn add_staged(&self, bytes: u64) {
        add(&self.staged_bytes, bytes);
    }

    pub(crate) fn remove_staged(&self, bytes: u64) {
        self.staged_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> DiskMetrics {
        let refused = OffloadRefusal::ALL.iter().zip(&self.refused);
        DiskMetrics {
            read: self.reads.snapshot(),
            written: self.writes.snapshot(),
            remote_calls: read(&self.remote_calls),
            remote_bytes: read(&self.remote_bytes),
            refused: refused.map(|(reason, count)| (reason.name(), read(count))).collect(),
            evicted: read(&self.evicted),
            lost: read(&self.lost),
            staged_bytes: read(&self.staged_bytes),
            staging_full: read(&self.staging_full),
        }
    }
}

impl DiskMetrics {
    /// Adds the metrics that upstream has, too.
    pub(super) fn add_upstream(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let mut total = self.read.clone();
        total.records += self.written.records;
        total.bytes += self.written.bytes;
        total.latency.add(&self.written.latency);
        for (way, count) in [("read", &self.read), ("write", &self.written), ("total", &total)] {
            let name = format!("mooncake_ssd_{way}_bytes_total");
            counter(out, &name, "Bytes of records on disk.", labels, count.bytes);
            let name = format!("mooncake_ssd_{way}_ops_total");
            counter(out, &name, "Records on disk.", labels, count.records);
            let name = format!("mooncake_ssd_{way}_latency_us");
            out.head(&name, "histogram", "Latency of batches of records, in microseconds.");
            histogram(out, &name, labels, &count.latency);
        }
    }

    /// Adds the other metrics.
    pub(super) fn add_own(&self, out: &mut Exposition, labels: &Labels<'_>) {
        for (name, help, value) in [
            (
                "remote_loads_total",
                "Calls that loaded records of other processes.",
                self.remote_calls,
            ),
            ("remote_bytes_total", "Bytes of records of other processes.", self.remote_bytes),
            ("evicted_total", "Records dropped for others.", self.evicted),
            ("lost_total", "Records that were asked for and were gone or damaged.", self.lost),
            ("staging_full_total", "Loads that found no staging memory.", self.staging_full),
        ] {
            counter(out, &format!("mooncake_client_disk_{name}"), help, labels, value);
        }
        let name = "mooncake_client_disk_staged_bytes";
        out.head(name, "gauge", "Staging memory that readers hold.");
        out.sample(name, labels, self.staged_bytes);
        let name = "mooncake_client_disk_refused_total";
        out.head(name, "counter", "Objects that were not written to a directory, by reason.");
        for (reason, count) in &self.refused {
            out.sample(name, &[labels, &[("reason", *reason)]].concat(), *count);
        }
    }
}

impl Rows {
    fn count(&self, records: u64, bytes: u64, took: Duration) {
        if records > 0 {
            self.batches.record(took);
            add(&self.records, records);
            add(&self.bytes, bytes);
        }
    }

    fn snapshot(&self) -> DiskCount {
        DiskCount {
            records: read(&self.records),
            bytes: read(&self.bytes),
            latency: self.batches.snapshot(),
        }
    }
}
