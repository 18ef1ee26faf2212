//! Counters of the directories that a client keeps, and of its reads of copies on disk.

use std::{fmt::Write as _, time::Duration};

use mooncake_base::{
    ByteSize,
    counter::Counter,
    counters,
    exposition::{Exposition, Labels, Metric},
    histogram::{Histogram, Latency},
};

use super::text::{histogram, with};

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

/// Counts refusals by reason.
#[derive(Debug, Default)]
pub(crate) struct RefusalCounters([Counter; OffloadRefusal::ALL.len()]);

counters! {
    /// Counts copies on disk.
    pub(crate) struct DiskCounters;
    /// A snapshot of the counters.
    pub struct DiskMetrics {
        /// The open directories.
        pub directories: Vec<DirectoryMetrics>,
    }
    RECORDS {
        /// Calls that loaded records of other processes.
        remote_calls = counter "remote_loads_total",
        /// Records brought into memory of the pool.
        promoted = counter "promoted_total",
        /// Their bytes.
        promoted_bytes = counter "promoted_bytes_total",
        /// Bytes of records of other processes.
        remote_bytes = counter "remote_bytes_total",
        /// Records dropped for others.
        evicted = counter "evicted_total",
        /// Records that were asked for and were gone or damaged.
        lost = counter "lost_total",
        /// Loads that found no staging memory.
        /// They waited for it.
        staging_full = counter "staging_full_total",
        /// Staging memory that readers hold.
        staged_bytes = gauge "staged_bytes",
        /// Records read from own directories, for this process and for others.
        read: RecordCounters => DiskCount,
        /// Records written to own directories.
        written: RecordCounters => DiskCount,
        /// Objects that were not written, by reason.
        refused: RefusalCounters => Vec<(&'static str, u64)>,
    }
}

counters! {
    /// What one directory holds, and did since it was opened.
    pub struct DirectoryMetrics {
        /// The directory.
        pub path: String,
        /// What reads it: `io_uring` or `threads`.
        pub read_method: &'static str,
        /// Why it is not the other.
        pub why: String,
    }
    METRICS {
        /// Bytes that a directory may take.
        capacity = gauge "capacity_bytes",
        /// Bytes of the files of a directory.
        used = gauge "used_bytes",
        /// Records that can be read.
        records = gauge "records",
        /// Bytes written to files for records, with heads and moved records.
        file_bytes = counter "file_written_bytes_total",
        /// Records moved because they had been read when their file was used again.
        moved = counter "moved_total",
        /// Files given back to a file system that was too full.
        trimmed = counter "trimmed_total",
        /// Files that could not be read or written, and are used again only if there is no other.
        set_aside = counter "set_aside_total",
        /// Reads past the page cache that the system refused, so that they went through it.
        direct_refused = counter "direct_refused_total",
    }
}

counters! {
    /// Counts records that went one way.
    pub(crate) struct RecordCounters;
    /// Records, their bytes, and the latency of batches.
    pub struct DiskCount {}
    METRICS {
        /// Records read from and written to directories.
        records = counter "records_total",
        /// Bytes of these records.
        bytes = counter "bytes_total",
        /// Latency of batches.
        latency: Histogram => Latency,
    }
}

impl DiskCounters {
    /// Counts a call that loaded records in another process.
    pub(crate) fn count_remote(&self, bytes: u64) {
        self.remote_calls.increment();
        self.remote_bytes.add_nonzero(bytes);
    }

    pub(crate) fn count_refused(&self, reason: OffloadRefusal) {
        self.refused.0[reason as usize].increment();
    }
}

impl RefusalCounters {
    fn snapshot(&self) -> Vec<(&'static str, u64)> {
        let counts = OffloadRefusal::ALL.iter().zip(&self.0);
        counts.map(|(reason, count)| (reason.name(), count.get())).collect()
    }
}

impl RecordCounters {
    /// Counts a batch of records.
    pub(crate) fn count(&self, records: u64, bytes: u64, took: Duration) {
        if records > 0 {
            self.latency.record(took);
            self.records.add(records);
            self.bytes.add_nonzero(bytes);
        }
    }
}

impl DiskMetrics {
    /// Returns names and values of the counters of all directories together, as the metrics page
    /// has them.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Self::RECORDS.iter().map(|metric| metric.entry(self))
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
        out.rows("mooncake_client_disk_", Self::RECORDS, &[(labels.to_vec(), self)]);
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
        out.rows("mooncake_client_disk_", DiskCount::METRICS, &rows);
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
        out.rows("mooncake_client_disk_", DirectoryMetrics::METRICS, &rows);
    }
}

/// Upstream's metrics of reads and writes.
static UPSTREAM_WAYS: [Metric<DiskCount>; 2] = [
    Metric::counter("bytes_total", "Bytes of records on disk.", |it| it.bytes),
    Metric::counter("ops_total", "Records on disk.", |it| it.records),
];

impl DirectoryMetrics {
    /// Returns names and values of the numbers, as the metrics page has them.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Self::METRICS.iter().map(|metric| metric.entry(self))
    }
}

impl DiskCount {
    /// Returns names and values of the counters, as the metrics page has them.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Self::METRICS.iter().map(|metric| metric.entry(self))
    }
}
