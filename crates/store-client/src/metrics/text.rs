//! Formats a snapshot: for Prometheus, under upstream's metric names where there are some, and as
//! human-readable text.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use mooncake_base::{
    ByteSize,
    exposition::{Exposition, Labels, Metric},
};

use super::{CallCount, Latency, MetricsSnapshot, OperationCount, TransportCount};
use crate::config::MetricsConfig;

/// Upstream's metrics: of all transports together, of each operation, and of each call to the master.
static UPSTREAM_TRANSFERS: [Metric<BTreeMap<&str, TransportCount>>; 2] = [
    Metric::counter("read_bytes", "Bytes read from replicas.", |rows| {
        rows.values().map(|row| row.read_bytes).sum()
    }),
    Metric::counter("write_bytes", "Bytes written to replicas.", |rows| {
        rows.values().map(|row| row.written_bytes).sum()
    }),
];
static UPSTREAM_OPERATIONS: [Metric<OperationCount>; 3] = [
    Metric::counter("count", "Operations.", |row| row.latency.count()),
    Metric::counter("bytes", "Bytes of operations.", |row| row.objects.bytes),
    Metric::counter("failures", "Objects that failed.", |row| row.objects.failed),
];
static UPSTREAM_CALLS: [Metric<CallCount>; 2] = [
    Metric::counter("count", "Calls to the master.", |row| row.latency.count()),
    Metric::counter("failures", "Calls without a response.", |row| row.failed),
];

/// Our own of each operation.
static OPERATIONS: [Metric<OperationCount>; 3] = [
    Metric::counter("objects_total", "Objects that succeeded.", |row| row.objects.done),
    Metric::counter("bytes_total", "Bytes of these objects.", |row| row.objects.bytes),
    Metric::counter("failures_total", "Objects that failed.", |row| row.objects.failed),
];

impl MetricsSnapshot {
    /// Returns names and values of the counters of replicas, as the metrics page has them.
    pub fn copies(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Self::REPLICAS.iter().map(|metric| metric.entry(self))
    }

    /// Returns the counters in the Prometheus text format. A non-empty `cluster` becomes a label of
    /// each sample.
    pub fn prometheus(&self, config: &MetricsConfig) -> String {
        self.exposition(config).finish()
    }

    /// Like [`prometheus`](Self::prometheus), as an exposition that can be extended.
    pub(crate) fn exposition(&self, config: &MetricsConfig) -> Exposition {
        let mut labels = vec![("client_mode", "real")];
        if !config.cluster.is_empty() {
            labels.push(("cluster_id", &config.cluster));
        }
        let mut out = Exposition::default();
        if config.has_upstream_names {
            self.add_transfers(&mut out, &labels);
            self.add_operations(&mut out, &labels);
            self.add_calls(&mut out, &labels);
            self.disk.add_upstream(&mut out, &labels);
        }
        self.add_own_operations(&mut out, &labels);
        self.add_durations(&mut out, &labels);
        self.add_copies(&mut out, &labels);
        self.add_peers(&mut out, &labels);
        self.disk.add_own(&mut out, &labels);
        out
    }

    /// Returns the counters as human-readable text. With `uptime`, includes bytes per second.
    pub fn summary(&self, uptime: Option<Duration>) -> String {
        let mut out = String::new();
        for (what, count) in [("read", self.reads), ("written", self.puts)] {
            let _ = write!(out, "{what}: {} objects, {}", count.done, ByteSize(count.bytes));
            if let Some(uptime) = uptime {
                let rate = count.bytes as f64 / uptime.as_secs_f64().max(1e-3);
                let _ = write!(out, ", {}/s", ByteSize(rate as u64));
            }
            let _ = writeln!(out, ", {} failed", count.failed);
        }
        let _ = writeln!(out, "found: {} keys, missed: {}", self.hits, self.misses);
        for (name, row) in &self.operations {
            let bytes = ByteSize(row.objects.bytes);
            let _ = writeln!(out, "{name}: {}, {bytes}", latency_summary(&row.latency));
        }
        for (name, row) in &self.rpcs {
            let _ = writeln!(
                out,
                "call {name}: {}, {} failed",
                latency_summary(&row.latency),
                row.failed
            );
        }
        for (name, row) in &self.by_transport {
            let (read, written) = (ByteSize(row.read_bytes), ByteSize(row.written_bytes));
            let _ = writeln!(out, "over {name}: {read} read, {written} written");
        }
        self.disk.summary(&mut out);
        for (peer, errors) in &self.peer_errors {
            let _ = writeln!(out, "peer {peer}: {errors} failed transfers");
        }
        out
    }

    fn add_transfers(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let rows = [(labels.to_vec(), &self.by_transport)];
        out.rows("mooncake_transfer_", &UPSTREAM_TRANSFERS, &rows);
        for (name, latency) in &self.transfers {
            let name = format!("mooncake_transfer_{name}_latency");
            out.head(&name, "histogram", "Transfer latency in microseconds.");
            histogram(out, &name, labels, latency);
        }
    }

    fn add_operations(&self, out: &mut Exposition, labels: &Labels<'_>) {
        for (way, is_read) in [("read", true), ("write", false)] {
            let rows = self.operations.iter().filter(|(_, row)| row.is_read == is_read);
            let rows: Vec<_> = rows.map(|(op, row)| (with(labels, "op_name", op), row)).collect();
            out.rows(&format!("mooncake_transfer_{way}_operation_"), &UPSTREAM_OPERATIONS, &rows);
            let name = format!("mooncake_transfer_{way}_operation_latency");
            out.head(&name, "histogram", "Operation latency in microseconds.");
            for (labels, row) in &rows {
                histogram(out, &name, labels, &row.latency);
            }
        }
    }

    fn add_calls(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let rows = self.rpcs.iter().map(|(call, row)| (with(labels, "rpc_name", call), row));
        let rows: Vec<_> = rows.collect();
        out.rows("mooncake_client_rpc_", &UPSTREAM_CALLS, &rows);
        let name = "mooncake_client_rpc_latency";
        out.head(name, "histogram", "Latency of calls to the master in microseconds.");
        for (labels, row) in &rows {
            histogram(out, name, labels, &row.latency);
        }
    }

    fn add_own_operations(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let rows = self.operations.iter();
        let rows: Vec<_> = rows.map(|(name, row)| (with(labels, "operation", name), row)).collect();
        out.rows("mooncake_client_operation_", &OPERATIONS, &rows);
        let rows = self.rpcs.iter().map(|(call, row)| (with(labels, "call", call), row));
        out.rows("mooncake_client_call_", CallCount::METRICS, &rows.collect::<Vec<_>>());
    }

    fn add_durations(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let operations = self.operations.iter().map(|(name, row)| (*name, &row.latency));
        let transfers = self.transfers.iter().map(|(name, latency)| (*name, latency));
        let calls = self.rpcs.iter().map(|(name, row)| (*name, &row.latency));
        let mut add = |kind, help, rows: &mut dyn Iterator<Item = (&str, &Latency)>| {
            let rows = rows.map(|(row, latency)| (with(labels, kind, row), latency));
            out.durations(&format!("mooncake_client_{kind}_duration_seconds"), help, rows);
        };
        add("operation", "Duration of puts and gets; a batch counts as one.", &mut { operations });
        add("transfer", "Duration of the transfers of bytes within them.", &mut { transfers });
        add("call", "Duration of calls to the master.", &mut { calls });
    }

    fn add_copies(&self, out: &mut Exposition, labels: &Labels<'_>) {
        out.rows("mooncake_client_", Self::REPLICAS, &[(labels.to_vec(), self)]);
        let name = "mooncake_client_served_bytes_total";
        out.head(name, "counter", "Bytes by the transport that moved them.");
        for (transport, row) in &self.by_transport {
            for (way, bytes) in [("read", row.read_bytes), ("write", row.written_bytes)] {
                let more = [("transport", *transport), ("direction", way)];
                out.sample(name, &[labels, &more].concat(), bytes);
            }
        }
    }

    fn add_peers(&self, out: &mut Exposition, labels: &Labels<'_>) {
        let name = "mooncake_client_peer_errors_total";
        out.head(name, "counter", "Failed transfers by peer.");
        for (peer, errors) in &self.peer_errors {
            out.sample(name, &[labels, &[("peer", peer.as_str())]].concat(), errors);
        }
    }
}

/// Returns the labels with one more.
pub(super) fn with<'a>(
    labels: &Labels<'a>,
    name: &'a str,
    value: &'a str,
) -> Vec<(&'a str, &'a str)> {
    [labels, &[(name, value)]].concat()
}

pub(super) fn histogram(out: &mut Exposition, name: &str, labels: &Labels<'_>, latency: &Latency) {
    out.histogram(name, labels, latency.octaves(), latency.sum().as_micros());
}

fn latency_summary(latency: &Latency) -> String {
    let at = |part| latency.quantile(part).unwrap_or_default();
    format!("{} times, p50 {:?}, p99 {:?}", latency.count(), at(0.5), at(0.99))
}

#[cfg(test)]
mod tests {
    use mooncake_transfer_engine::{Opcode, TransportKind};

    use super::super::{Metrics, Operation, OutcomeTotals};
    use mooncake_proto::calls::Method;

    use super::*;

    fn sample_snapshot() -> MetricsSnapshot {
        let metrics = Metrics::default();
        let took = Duration::from_micros(3);
        let sum = OutcomeTotals { done: 2, failed: 1, bytes: 100 };
        metrics.count_operation(Operation::GetBatch, sum, took);
        metrics.count_call(Method::Locate, true, took);
        metrics.count_transfer(Opcode::Read, 2, took);
        metrics.count_copies(Some(TransportKind::Shm), Opcode::Read, sum);
        metrics.count_peer_error("host:1");
        metrics.snapshot()
    }

    /// The metrics of clients of a cluster, with or without upstream's names.
    fn exposed(cluster: &str, has_upstream_names: bool) -> String {
        let cluster = cluster.to_owned();
        let config = MetricsConfig { cluster, has_upstream_names, ..MetricsConfig::default() };
        sample_snapshot().prometheus(&config)
    }

    #[test]
    fn upstream_names_can_be_left_out() {
        let text = exposed("", false);
        let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        assert!(names.clone().count() > 10);
        for name in names {
            assert!(name.starts_with("mooncake_client_"), "{name}");
            assert!(!name.starts_with("mooncake_client_rpc_"), "{name}");
        }
        let sum = "mooncake_client_operation_duration_seconds_sum{client_mode=\"real\",operation=\"get_batch\"} 0.000003";
        assert!(text.lines().any(|line| line == sum), "{text}");
        assert!(exposed("", true).contains(&text), "both have our names");
    }

    #[test]
    fn exposes_every_upstream_metric_name() {
        let text = exposed("", true);
        for name in "transfer_read_bytes transfer_write_bytes transfer_get_latency \
            transfer_put_latency transfer_batch_get_latency transfer_batch_put_latency \
            transfer_read_operation_count transfer_read_operation_bytes \
            transfer_read_operation_latency transfer_write_operation_count \
            transfer_write_operation_bytes transfer_write_operation_latency client_rpc_count \
            client_rpc_latency ssd_read_bytes_total"
            .split_whitespace()
        {
            assert!(text.contains(&format!("# TYPE mooncake_{name} ")), "{name}");
        }
    }

    #[test]
    fn samples_carry_values_and_labels() {
        let text = exposed("c1", true);
        let labels = "client_mode=\"real\",cluster_id=\"c1\"";
        for line in [
            format!("mooncake_transfer_read_bytes{{{labels}}} 100"),
            format!("mooncake_transfer_read_operation_count{{{labels},op_name=\"get_batch\"}} 1"),
            format!("mooncake_client_rpc_count{{{labels},rpc_name=\"GetReplicaList\"}} 1"),
            format!("mooncake_transfer_batch_get_latency_bucket{{{labels},le=\"2\"}} 0"),
            format!("mooncake_transfer_batch_get_latency_bucket{{{labels},le=\"4\"}} 1"),
            format!("mooncake_client_peer_errors_total{{{labels},peer=\"host:1\"}} 1"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!exposed("", true).contains("cluster_id"));
    }

    #[test]
    fn summary_shows_rate_only_if_requested() {
        let text = sample_snapshot().summary(Some(Duration::from_secs(2)));
        assert!(text.contains("read: 2 objects, 100 B, 50 B/s, 1 failed"), "{text}");
        assert!(!sample_snapshot().summary(None).contains("/s"));
    }
}
