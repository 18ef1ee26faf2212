//! Counters of the directories that a client keeps, and of its reads of copies on disk.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::{
    ByteSize,
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
        for (name, help, value) in [
            (
                "remote_loads_total",
                "Calls that loaded records of other processes.",
                self.remote_calls,
            ),
            ("promoted_total", "Records brought into memory of the pool.", self.promoted),
            ("promoted_bytes_total", "Their bytes.", self.promoted_bytes),
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
        self.add_ways(out, labels);
        self.add_directories(out, labels);
    }

    fn add_ways(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let ways = [("read", &self.read), ("write", &self.written)];
        type Part = fn(&DiskCount) -> u64;
        let parts: [(&str, &str, Part); 2] = [
            ("records_total", "Records read from and written to directories.", |it| it.records),
            ("bytes_total", "Bytes of these records.", |it| it.bytes),
        ];
        for (ending, help, part) in parts {
            let name = format!("mooncake_client_disk_{ending}");
            out.head(&name, "counter", help);
            for (way, count) in ways {
                out.sample(&name, &[labels, &[("direction", way)]].concat(), part(count));
            }
        }
        let name = "mooncake_client_disk_batch_duration_seconds";
        out.head(name, "histogram", "Duration of reads and writes of batches of records.");
        for (way, count) in ways {
            let seconds = |end: u64| end as f64 / 1e6;
            let buckets = count.latency.octaves().into_iter();
            let buckets = buckets.map(|(end, count)| (end.map(seconds), count));
            let labels = [labels, &[("direction", way)]].concat();
            out.histogram(name, &labels, buckets, count.latency.sum().as_secs_f64());
        }
    }

    fn add_directories(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let name = "mooncake_client_disk_info";
        out.head(name, "gauge", "An open directory, what reads it, and why that does.");
        for it in &self.directories {
            let more = [("path", &*it.path), ("read_method", it.read_method), ("why", &*it.why)];
            out.sample(name, &[labels, &more].concat(), 1);
        }
        type Part = fn(&DirectoryMetrics) -> u64;
        let parts: [(&str, &str, &str, Part); 7] = [
            ("capacity_bytes", "gauge", "Bytes that a directory may take.", |it| it.capacity),
            ("used_bytes", "gauge", "Bytes of the files of a directory.", |it| it.used),
            ("records", "gauge", "Records that can be read.", |it| it.records),
            (
                "file_written_bytes_total",
                "counter",
                "Bytes written to files for records, with heads and moved records.",
                |it| it.file_bytes,
            ),
            (
                "moved_total",
                "counter",
                "Records moved because they had been read when their file was used again.",
                |it| it.moved,
            ),
            (
                "trimmed_total",
                "counter",
                "Files given back to a file system that was too full.",
                |it| it.trimmed,
            ),
            (
                "direct_refused_total",
                "counter",
                "Reads past the page cache that the system refused, so that they went through it.",
                |it| it.direct_refused,
            ),
        ];
        for (ending, kind, help, part) in parts {
            let name = format!("mooncake_client_disk_{ending}");
            out.head(&name, kind, help);
            for it in &self.directories {
                out.sample(&name, &[labels, &[("path", &*it.path)]].concat(), part(it));
            }
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
