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
    counters,
    exposition::{Exposition, Metric},
    histogram::{Histogram, Latency},
};

use crate::{operation_kind::OperationKind, outcome::Outcome};

/// The counters of one group. Counting takes no lock.
#[derive(Debug, Default)]
pub(crate) struct GroupMetrics {
    bytes: ByteCounters,
    operations: [OperationMetrics; OperationKind::ALL.len()],
}

counters! {
    /// Counts the bytes of a group.
    struct ByteCounters;
    /// What a group did.
    pub struct Counters {
        /// Bytes of messages that have arrived and wait for a receive.
        pub bytes_buffered: u64,
        /// Operations that have ended, by their name; only those that were used.
        pub operations: BTreeMap<&'static str, OperationCounters>,
    }
    METRICS {
        /// Bytes that this rank sent or lent.
        bytes_sent = counter "sent_bytes_total",
        /// Bytes that this rank read from memory of other hosts.
        bytes_fetched = counter "fetched_bytes_total",
    }
}

counters! {
    /// Counts the operations of one kind.
    struct OperationMetrics;
    /// What became of the operations of one kind.
    pub struct OperationCounters {}
    METRICS {
        /// Bytes of this rank that operations read or received.
        bytes = counter "operation_bytes_total",
        /// Operations in which a rank was lost.
        losses = counter "operation_losses_total",
        /// Operations that failed as a whole.
        errors = counter "operation_failures_total",
        /// Time from their begin to their end. A collective begins when the earlier ones have ended, a
        /// message when it is called.
        latency: Histogram => Latency,
        /// The longest of these times.
        time_max: Longest => Duration,
    }
}

/// The longest of durations.
#[derive(Debug, Default)]
struct Longest {
    nanos: AtomicU64,
}

impl Longest {
    fn record(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_max(nanos, Ordering::Relaxed);
    }

    fn snapshot(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }
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
        self.bytes.bytes_sent.add(bytes as u64);
    }

    pub(crate) fn add_fetched(&self, bytes: usize) {
        self.bytes.bytes_fetched.add(bytes as u64);
    }

    fn record(&self, kind: OperationKind, outcome: &Outcome, bytes: usize, time: Duration) {
        let row = &self.operations[kind as usize];
        row.bytes.add(bytes as u64);
        row.losses.add_nonzero(u64::from(!outcome.failed_slots.is_empty()));
        row.errors.add_nonzero(u64::from(outcome.error.is_some()));
        row.time_max.record(time);
        row.latency.record(time);
    }

    pub(crate) fn snapshot(&self) -> Counters {
        let rows = OperationKind::ALL.iter().zip(&self.operations);
        let operations = rows.map(|(kind, row)| (kind.name(), row.snapshot()));
        let operations = operations.filter(|(_, row)| row.latency.count() > 0).collect();
        Counters { operations, ..self.bytes.snapshot() }
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

/// The metrics of the state of each group.
static VIEWS: [Metric<GroupReport>; 3] = [
    Metric::gauge("epoch", "Number of the view; it grows with each change of the members.", |it| {
        it.epoch
    }),
    Metric::gauge("active_ranks", "Ranks in the view.", |it| it.active as u64),
    Metric::gauge("buffered_bytes", "Bytes of messages that wait here for a receive.", |it| {
        it.counters.bytes_buffered
    }),
];

/// The number of operations of a group.
static OPERATIONS: [Metric<OperationCounters>; 1] =
    [Metric::counter("operations_total", "Operations that have ended.", |it| it.latency.count())];

/// Writes the metrics of groups; nothing if there is none.
pub(crate) fn write_reports(out: &mut Exposition, reports: &[GroupReport]) {
    if reports.is_empty() {
        return;
    }
    let rows: Vec<_> = reports.iter().map(|report| (report.labels().to_vec(), report)).collect();
    out.rows(PREFIX, &VIEWS, &rows);
    let rows = reports.iter().map(|report| (report.labels().to_vec(), &report.counters));
    out.rows(PREFIX, Counters::METRICS, &rows.collect::<Vec<_>>());
    let rows: Vec<_> = reports.iter().flat_map(GroupReport::rows).collect();
    out.rows(PREFIX, &OPERATIONS, &rows);
    out.rows(PREFIX, OperationCounters::METRICS, &rows);
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
