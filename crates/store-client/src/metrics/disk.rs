//! Counters of the directories that a client keeps, and of its reads of copies on disk.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::{
    ByteSize,
    exposition::{Exposition, Labels, Metric},
    histogram::{Histogram, Latency},
};

use super::{
    add, read,
    text::{histogram, with},
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
    promoted: AtomicU64,
    promoted_bytes: AtomicU64,
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
    /// Records that were brought into memory of the pool.
    pub promoted: u64,
    /// Their bytes.
    pub promoted_bytes: u64,
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
    /// The open directories.
    pub directories: Vec<DirectoryMetrics>,
}

/// What one directory holds, and did since it was opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirectoryMetrics {
    /// The directory.
    pub path: String,
    /// What reads it: `io_uring` or `threads`.
    pub read_method: &'static str,
    /// Why it is not the other.
    pub why: String,
    /// The bytes that it may take.
    pub capacity: u64,
    /// The bytes of its files.
    pub used: u64,
    /// Records that can be read.
    pub records: u64,
    /// Bytes of the files that were written for records, moved ones and heads included.
    pub file_bytes: u64,
    /// Records that were moved because they had been read.
    pub moved: u64,
    /// Files given back to the file system.
    pub trimmed: u64,
    /// Reads past the page cache that the system refused.
    pub direct_refused: u64,
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

    /// Counts records that were brought into memory.
    pub(crate) fn count_promoted(&self, records: usize, bytes: u64) {
        add(&self.promoted, records as u64);
        add(&self.promoted_bytes, bytes);
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
            promoted: read(&self.promoted),
            promoted_bytes: read(&self.promoted_bytes),
            remote_calls: read(&self.remote_calls),
            remote_bytes: read(&self.remote_bytes),
            refused: refused.map(|(reason, count)| (reason.name(), read(count))).collect(),
            evicted: read(&self.evicted),
            lost: read(&self.lost),
            staged_bytes: read(&self.staged_bytes),
            staging_full: read(&self.staging_full),
            directories: Vec::new(),
        }
    }
}

impl DiskMetrics {
    /// Returns names and values of the counters of all directories together, as the metrics page
    /// has them.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
        RECORDS.iter().map(|metric| metric.entry(self))
    }

    /// Adds the metrics that upstream has, too.
    pub(super) fn add_upstream(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let mut total = self.read.clone();
        total.records += self.written.records;
        total.bytes += self.written.bytes;
        total.latency.add(&self.written.latency);
        for (way, count) in [("read", &self.read), ("write", &self.written), ("total", &total)] {
            let rows = [(labels.to_vec(), count)];
            out.rows(&format!("mooncake_ssd_{way}_"), &UPSTREAM_WAYS, &rows);
            let name = format!("mooncake_ssd_{way}_latency_us");
            out.head(&name, "histogram", "Latency of batches of records, in microseconds.");
            histogram(out, &name, labels, &count.latency);
            let name = format!("mooncake_ssd_{way}_latency_summary_us");
            out.head(&name, "summary", "Latency of batches of records, in microseconds.");
            for (quantile, part) in [("0.5", 0.5), ("0.9", 0.9), ("0.95", 0.95), ("0.99", 0.99)] {
                let micros = count.latency.quantile(part).unwrap_or_default().as_micros();
                out.sample(&name, &[labels, &[("quantile", quantile)]].concat(), micros);
            }
            out.sample(&format!("{name}_sum"), labels, count.latency.sum().as_micros());
            out.sample(&format!("{name}_count"), labels, count.latency.count());
        }
    }

    /// Writes lines for people; none without directories.
    pub(super) fn summary(&self, out: &mut String) {
        for it in &self.directories {
            let (used, capacity) = (ByteSize(it.used), ByteSize(it.capacity));
            let _ = writeln!(
                out,
                "disk {}: {} records, {used} of {capacity}, read through {} ({})",
                it.path, it.records, it.read_method, it.why
            );
        }
    }

    /// Adds the other metrics.
    pub(super) fn add_own(&self, out: &mut Exposition, labels: &Labels<'_>) {
        out.rows("mooncake_client_disk_", &RECORDS, &[(labels.to_vec(), self)]);
        let name = "mooncake_client_disk_refused_total";
        out.head(name, "counter", "Objects that were not written to a directory, by reason.");
        for (reason, count) in &self.refused {
            out.sample(name, &[labels, &[("reason", *reason)]].concat(), *count);
        }
        self.add_ways(out, labels);
        self.add_directories(out, labels);
    }

    fn add_ways(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let ways = [("read", &self.read), ("write", &self.written)];
        let rows = ways.map(|(way, count)| (with(labels, "direction", way), count));
        out.rows("mooncake_client_disk_", &WAYS, &rows);
        let name = "mooncake_client_disk_batch_duration_seconds";
        let help = "Duration of reads and writes of batches of records.";
        out.durations(name, help, rows.map(|(labels, count)| (labels, &count.latency)));
    }

    fn add_directories(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let name = "mooncake_client_disk_info";
        out.head(name, "gauge", "An open directory, what reads it, and why that does.");
        for it in &self.directories {
            let more = [("path", &*it.path), ("read_method", it.read_method), ("why", &*it.why)];
            out.sample(name, &[labels, &more].concat(), 1);
        }
        let rows = self.directories.iter();
        let rows: Vec<_> = rows.map(|it| (with(labels, "path", &it.path), it)).collect();
        out.rows("mooncake_client_disk_", &DIRECTORIES, &rows);
    }
}

/// The metrics of all directories.
static RECORDS: [Metric<DiskMetrics>; 8] = [
    Metric::counter("remote_loads_total", "Calls that loaded records of other processes.", |it| {
        it.remote_calls
    }),
    Metric::counter("promoted_total", "Records brought into memory of the pool.", |it| it.promoted),
    Metric::counter("promoted_bytes_total", "Their bytes.", |it| it.promoted_bytes),
    Metric::counter("remote_bytes_total", "Bytes of records of other processes.", |it| {
        it.remote_bytes
    }),
    Metric::counter("evicted_total", "Records dropped for others.", |it| it.evicted),
    Metric::counter("lost_total", "Records that were asked for and were gone or damaged.", |it| {
        it.lost
    }),
    Metric::counter("staging_full_total", "Loads that found no staging memory.", |it| {
        it.staging_full
    }),
    Metric::gauge("staged_bytes", "Staging memory that readers hold.", |it| it.staged_bytes),
];

/// The metrics of reads and writes: upstream's and ours.
static UPSTREAM_WAYS: [Metric<DiskCount>; 2] = [
    Metric::counter("bytes_total", "Bytes of records on disk.", |it| it.bytes),
    Metric::counter("ops_total", "Records on disk.", |it| it.records),
];
static WAYS: [Metric<DiskCount>; 2] = [
    Metric::counter("records_total", "Records read from and written to directories.", |it| {
        it.records
    }),
    Metric::counter("bytes_total", "Bytes of these records.", |it| it.bytes),
];

/// The metrics of each directory.
static DIRECTORIES: [Metric<DirectoryMetrics>; 7] = [
    Metric::gauge("capacity_bytes", "Bytes that a directory may take.", |it| it.capacity),
    Metric::gauge("used_bytes", "Bytes of the files of a directory.", |it| it.used),
    Metric::gauge("records", "Records that can be read.", |it| it.records),
    Metric::counter(
        "file_written_bytes_total",
        "Bytes written to files for records, with heads and moved records.",
        |it| it.file_bytes,
    ),
    Metric::counter(
        "moved_total",
        "Records moved because they had been read when their file was used again.",
        |it| it.moved,
    ),
    Metric::counter(
        "trimmed_total",
        "Files given back to a file system that was too full.",
        |it| it.trimmed,
    ),
    Metric::counter(
        "direct_refused_total",
        "Reads past the page cache that the system refused, so that they went through it.",
        |it| it.direct_refused,
    ),
];

impl DirectoryMetrics {
    /// Returns names and values of the numbers, as the metrics page has them.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
        DIRECTORIES.iter().map(|metric| metric.entry(self))
    }
}

impl DiskCount {
    /// Returns names and values of the counters, as the metrics page has them.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
        WAYS.iter().map(|metric| metric.entry(self))
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
