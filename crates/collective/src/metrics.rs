//! Counters of groups by operation, and their Prometheus text.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::{
    exposition::{Exposition, Metric},
    histogram::{Histogram, Latency},
};

use crate::{operation_kind::OperationKind, outcome::Outcome};

/// The counters of one group. Counting takes no lock.
#[derive(Debug, Default)]
pub(crate) struct GroupMetrics {
    sent_bytes: AtomicU64,
    fetched_bytes: AtomicU64,
    operations: [OperationMetrics; OperationKind::ALL.len()],
}

#[derive(Debug, Default)]
struct OperationMetrics {
    bytes: AtomicU64,
    losses: AtomicU64,
    errors: AtomicU64,
    nanos_max: AtomicU64,
    latency: Histogram,
}

/// What a group did.
#[derive(Debug, Default, Clone)]
pub struct Counters {
    /// Bytes that were sent or lent.
    pub bytes_sent: u64,
    /// Bytes that were read from memory of other hosts through a fabric.
    pub bytes_fetched: u64,
    /// Bytes of messages that have arrived and wait for a receive.
    pub bytes_buffered: u64,
    /// Operations that have ended, by their name; only those that were used.
    pub operations: BTreeMap<&'static str, OperationCounters>,
}

/// What became of the operations of one kind.
#[derive(Debug, Default, Clone)]
pub struct OperationCounters {
    /// Bytes of this rank that they read; for a receive, bytes that it wrote.
    pub bytes: u64,
    /// Operations in which a rank was lost.
    pub losses: u64,
    /// Operations that failed as a whole.
    pub errors: u64,
    /// Time from their begin to their end. A collective begins when the earlier ones have ended, a
    /// message when it is called.
    pub latency: Latency,
    /// The longest of these times.
    pub time_max: Duration,
}

/// An operation that is counted when it ends.
#[derive(Debug)]
pub(crate) struct Recording {
    metrics: Arc<GroupMetrics>,
    kind: OperationKind,
    bytes: usize,
    begin: Instant,
}

impl Recording {
    pub(crate) fn begin(metrics: &Arc<GroupMetrics>, kind: OperationKind, bytes: usize) -> Self {
        Self { metrics: Arc::clone(metrics), kind, bytes, begin: Instant::now() }
    }

    pub(crate) fn end(&self, outcome: &Outcome) {
        self.metrics.record(self.kind, outcome, self.bytes, self.begin.elapsed());
    }
}

impl GroupMetrics {
    pub(crate) fn add_sent(&self, bytes: usize) {
        self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_fetched(&self, bytes: usize) {
        self.fetched_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn record(&self, kind: OperationKind, outcome: &Outcome, bytes: usize, time: Duration) {
        let row = &self.operations[kind as usize];
        row.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        if !outcome.failed_slots.is_empty() {
            row.losses.fetch_add(1, Ordering::Relaxed);
        }
        if outcome.error.is_some() {
            row.errors.fetch_add(1, Ordering::Relaxed);
        }
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        row.nanos_max.fetch_max(nanos, Ordering::Relaxed);
        row.latency.record(time);
    }

    pub(crate) fn snapshot(&self) -> Counters {
        let rows = OperationKind::ALL.iter().zip(&self.operations);
        let operations = rows.map(|(kind, row)| {
            let counters = OperationCounters {
                bytes: row.bytes.load(Ordering::Relaxed),
                losses: row.losses.load(Ordering::Relaxed),
                errors: row.errors.load(Ordering::Relaxed),
                latency: row.latency.snapshot(),
                time_max: Duration::from_nanos(row.nanos_max.load(Ordering::Relaxed)),
            };
            (kind.name(), counters)
        });
        Counters {
            bytes_sent: self.sent_bytes.load(Ordering::Relaxed),
            bytes_fetched: self.fetched_bytes.load(Ordering::Relaxed),
            bytes_buffered: 0,
            operations: operations.filter(|(_, row)| row.latency.count() > 0).collect(),
        }
    }
}

/// The state of one group as it is shown.
#[derive(Debug)]
pub(crate) struct GroupReport {
    pub(crate) name: String,
    pub(crate) slot: String,
    pub(crate) epoch: u64,
    pub(crate) active: usize,
    pub(crate) counters: Counters,
}

impl GroupReport {
    fn labels(&self) -> [(&str, &str); 2] {
        [("group", &self.name), ("rank", &self.slot)]
    }

    /// Returns the counters of each operation, with their labels.
    fn rows(&self) -> impl Iterator<Item = (Vec<(&str, &str)>, &OperationCounters)> {
        let labels = |operation| [&self.labels()[..], &[("operation", operation)]].concat();
        self.counters.operations.iter().map(move |(operation, row)| (labels(*operation), row))
    }
}

const PREFIX: &str = "mooncake_group_";

/// The metrics of each group.
static VIEWS: [Metric<GroupReport>; 5] = [
    Metric::gauge("epoch", "Number of the view; it grows with each change of the members.", |it| {
        it.epoch
    }),
    Metric::gauge("active_ranks", "Ranks in the view.", |it| it.active as u64),
    Metric::gauge("buffered_bytes", "Bytes of messages that wait here for a receive.", |it| {
        it.counters.bytes_buffered
    }),
    Metric::counter("sent_bytes_total", "Bytes that this rank sent or lent.", |it| {
        it.counters.bytes_sent
    }),
    Metric::counter(
        "fetched_bytes_total",
        "Bytes that this rank read from memory of other hosts.",
        |it| it.counters.bytes_fetched,
    ),
];

/// The metrics of each operation of a group.
static OPERATIONS: [Metric<OperationCounters>; 4] = [
    Metric::counter("operations_total", "Operations that have ended.", |it| it.latency.count()),
    Metric::counter(
        "operation_bytes_total",
        "Bytes of this rank that operations read or received.",
        |it| it.bytes,
    ),
    Metric::counter("operation_losses_total", "Operations in which a rank was lost.", |it| {
        it.losses
    }),
    Metric::counter("operation_failures_total", "Operations that failed as a whole.", |it| {
        it.errors
    }),
];

/// Writes the metrics of groups; nothing if there is none.
pub(crate) fn write_reports(out: &mut Exposition, reports: &[GroupReport]) {
    if reports.is_empty() {
        return;
    }
    let rows: Vec<_> = reports.iter().map(|report| (report.labels().to_vec(), report)).collect();
    out.rows(PREFIX, &VIEWS, &rows);
    let rows: Vec<_> = reports.iter().flat_map(GroupReport::rows).collect();
    out.rows(PREFIX, &OPERATIONS, &rows);
    let name = "mooncake_group_operation_duration_seconds";
    let help = "Duration of operations, without the wait for earlier ones.";
    out.durations(name, help, rows.into_iter().map(|(labels, row)| (labels, &row.latency)));
}

#[cfg(test)]
mod tests {
    use mooncake_base::Error;

    use super::*;

    #[test]
    fn text_has_counts_and_durations_of_each_operation() {
        let metrics = GroupMetrics::default();
        let lost = Outcome { failed_slots: vec![2], ..Outcome::default() };
        let failed = Outcome { error: Some(Error::invalid("x")), ..Outcome::default() };
        metrics.record(OperationKind::AllReduce, &lost, 100, Duration::from_micros(3));
        metrics.record(OperationKind::AllReduce, &Outcome::default(), 1, Duration::from_millis(2));
        metrics.record(OperationKind::Receive, &failed, 8, Duration::from_secs(1));
        metrics.add_sent(77);
        let report = GroupReport {
            name: "world".to_owned(),
            slot: "1".to_owned(),
            epoch: 4,
            active: 3,
            counters: metrics.snapshot(),
        };
        let mut out = Exposition::default();
        write_reports(&mut out, &[report]);
        let text = out.finish();
        let group = "group=\"world\",rank=\"1\"";
        for line in [
            format!("epoch{{{group}}} 4"),
            format!("active_ranks{{{group}}} 3"),
            format!("sent_bytes_total{{{group}}} 77"),
            format!("operations_total{{{group},operation=\"allreduce\"}} 2"),
            format!("operation_bytes_total{{{group},operation=\"allreduce\"}} 101"),
            format!("operation_losses_total{{{group},operation=\"allreduce\"}} 1"),
            format!("operation_failures_total{{{group},operation=\"recv\"}} 1"),
            format!("operation_failures_total{{{group},operation=\"allreduce\"}} 0"),
            format!(
                "operation_duration_seconds_bucket{{{group},operation=\"allreduce\",\
                 le=\"0.000004\"}} 1"
            ),
            format!("operation_duration_seconds_sum{{{group},operation=\"recv\"}} 1"),
            format!("operation_duration_seconds_count{{{group},operation=\"allreduce\"}} 2"),
        ] {
            let line = format!("mooncake_group_{line}");
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("broadcast"), "an operation that was never used");
        assert_eq!(metrics.snapshot().operations["allreduce"].time_max, Duration::from_millis(2));
    }

    #[test]
    fn process_without_groups_shows_nothing() {
        let mut out = Exposition::default();
        write_reports(&mut out, &[]);
        assert_eq!(out.text(), "");
    }
}
