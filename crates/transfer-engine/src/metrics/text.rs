//! Metrics as text: a Prometheus page, and one log line.

use std::{
    fmt::{Display, Write as _},
    time::Duration,
};

use mooncake_base::{
    DeviceUsage,
    exposition::{Exposition, Labels, Metric},
    histogram::Latency,
};

use super::{EngineSnapshot, RefusalSnapshot, TransportSnapshot};

/// Prefix of every metric name.
const PREFIX: &str = "mooncake_transfer";

impl EngineSnapshot {
    /// Renders the Prometheus text format.
    pub fn prometheus(&self) -> String {
        let mut page = Page::default();
        page.transports("", &[("", &self.transports)]);
        let peers: Vec<_> =
            self.peers.iter().map(|peer| (peer.name.as_str(), &peer.transports[..])).collect();
        page.transports("peer_", &peers);
        page.0.row(&format!("{PREFIX}_"), &ENGINE_METRICS, self);
        page.head("connections", "gauge", "data connections to a peer");
        for peer in &self.peers {
            let pool = peer.connections;
            for (state, count) in [("open", pool.open), ("idle", pool.idle)] {
                page.sample("connections", &[("peer", &peer.name), ("state", state)], count);
            }
        }
        page.0.row(&format!("{PREFIX}_"), RefusalSnapshot::METRICS, &self.refused);
        page.head("measured_bytes_per_second", "gauge", "measured speed of a path");
        for peer in &self.peers {
            for (kind, measured) in &peer.measured {
                let labels = [
                    ("peer", peer.name.as_str()),
                    ("transport", kind.name()),
                    ("memory", measured.memory()),
                    ("size", measured.size),
                ];
                page.sample("measured_bytes_per_second", &labels, measured.bytes_per_second);
            }
        }
        page.devices(&self.devices);
        page.0.finish()
    }

    /// Describes the difference to an earlier snapshot in one line; `None` if nothing happened.
    ///
    /// The line begins like upstream's, in upstream's units (a MB is 2^20 bytes). The counters of
    /// each transport follow.
    pub fn line_since(&self, before: &Self, passed: Duration) -> Option<String> {
        let mut since = Since::default();
        for now in &self.transports {
            let nothing = TransportSnapshot::default();
            let before = before.transports.iter().find(|before| before.kind == now.kind);
            since.count(now, before.unwrap_or(&nothing), passed);
        }
        (!since.sentences.is_empty()).then(|| since.line(passed))
    }
}

/// The difference between two snapshots.
#[derive(Default)]
struct Since {
    bytes: u64,
    latency: Latency,
    /// One sentence per transport.
    sentences: String,
}

impl Since {
    fn count(&mut self, now: &TransportSnapshot, before: &TransportSnapshot, passed: Duration) {
        let batches = now.batches - before.batches;
        let errors = now.errors - before.errors;
        if batches == 0 && errors == 0 {
            return;
        }
        let latency = now.latency.since(&before.latency);
        let micros = |part| latency.quantile(part).map_or(0, |at| at.as_micros());
        let _ = write!(
            self.sentences,
            " | {} read {:.1} MB/s, wrote {:.1} MB/s, {batches} batches, {errors} errors, \
             p50 {} us, p99 {} us",
            now.kind,
            rate(now.bytes_read - before.bytes_read, passed),
            rate(now.bytes_written - before.bytes_written, passed),
            micros(0.5),
            micros(0.99),
        );
        self.bytes += now.bytes() - before.bytes();
        self.latency.add(&latency);
    }

    fn line(&self, passed: Duration) -> String {
        let count = self.latency.count();
        let mut classes = Vec::new();
        let mut begin = 0;
        for (end, part) in self.latency.octaves() {
            if part > 0 {
                let percent = part as f64 * 100.0 / count as f64;
                let bounds =
                    end.map_or_else(|| format!(">{begin}"), |end| format!("{begin}-{end}"));
                classes.push(format!("{bounds}μs:{percent:.1}%"));
            }
            begin = end.unwrap_or(begin);
        }
        format!(
            "[Metrics] Transfer Engine Stats (over last {:.0}s): Throughput: {:.2} MB/s | \
             Latency Distribution (count={count}): {}{}",
            passed.as_secs_f64(),
            rate(self.bytes, passed),
            classes.join(", "),
            self.sentences,
        )
    }
}

/// Rate in units of 2^20 bytes per second.
fn rate(bytes: u64, passed: Duration) -> f64 {
    bytes as f64 / passed.as_secs_f64().max(1e-3) / f64::from(1 << 20)
}

/// The page under construction, whose metrics have a common prefix.
#[derive(Default)]
struct Page(Exposition);

/// The metrics of an engine without labels.
static ENGINE_METRICS: [Metric<EngineSnapshot>; 18] = [
    Metric::gauge("peers", "open peers", |it| it.peers.len() as u64),
    Metric::gauge("peers_max", "limit of open peers", |it| it.peers_max as u64),
    Metric::counter("peers_evicted_total", "peers evicted to open others", |it| it.peers_evicted),
    Metric::gauge("regions", "registered ranges", |it| it.regions as u64),
    Metric::gauge("region_bytes", "bytes of registered ranges", |it| it.region_bytes),
    Metric::gauge("incoming_connections", "data connections of peers", |it| {
        it.incoming.open as u64
    }),
    Metric::gauge("incoming_connections_max", "limit of them", |it| it.incoming.limit as u64),
    Metric::counter("incoming_refused_total", "refused of them", |it| it.incoming.refused),
    Metric::gauge("pinned_buffers", "pinned buffers for device memory", |it| it.pinned.open as u64),
    Metric::gauge("pinned_buffers_max", "limit of them", |it| it.pinned.limit as u64),
    Metric::counter("pinned_refused_total", "requests that timed out", |it| it.pinned.refused),
    Metric::gauge("batches_waiting", "batches queued for a worker", |it| it.batches.waiting as u64),
    Metric::gauge("batches_waiting_max", "limit of them", |it| it.batches.limit as u64),
    Metric::counter("batches_refused_total", "batches refused, queue full", |it| {
        it.batches.refused
    }),
    Metric::gauge("notifications_waiting", "notifications queued", |it| {
        it.notifications.waiting as u64
    }),
    Metric::gauge("notifications_waiting_max", "limit of them", |it| it.notifications.limit as u64),
    Metric::counter("notifications_refused_total", "notifications refused, queue full", |it| {
        it.notifications.refused
    }),
    Metric::gauge("movers", "worker threads for submitted batches", |it| it.workers as u64),
];

/// The metrics of each RDMA device.
static DEVICE_METRICS: [Metric<DeviceUsage>; 6] = [
    Metric::gauge("active", "1 if the link is up", |one| one.is_active.into()),
    Metric::counter("link_failures_total", "times the device was given up", |one| {
        one.link_failures
    }),
    Metric::counter("slices_total", "slices moved over the device", |one| one.slices),
    Metric::gauge("requests_in_flight", "requests in flight", |one| one.in_flight.into()),
    Metric::gauge("requests_in_flight_max", "limit of them", |one| one.in_flight_max.into()),
    Metric::gauge("queue_pairs", "connected queue pairs", |one| one.queue_pairs as u64),
];

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.0.head(&format!("{PREFIX}_{name}"), kind, help);
    }

    fn sample(&mut self, name: &str, labels: &Labels<'_>, value: impl Display) {
        self.0.sample(&format!("{PREFIX}_{name}"), labels, value);
    }

    /// Renders the use of the RDMA devices; without one nothing.
    fn devices(&mut self, devices: &[DeviceUsage]) {
        if devices.is_empty() {
            return;
        }
        let rows: Vec<_> = devices.iter().map(|one| (vec![("device", &*one.name)], one)).collect();
        self.0.rows(&format!("{PREFIX}_device_"), &DEVICE_METRICS, &rows);
        self.head("device_bytes_total", "counter", "bytes moved over the device");
        for one in devices {
            for (operation, bytes) in [("read", one.bytes_read), ("write", one.bytes_written)] {
                let labels = [("device", one.name.as_str()), ("operation", operation)];
                self.sample("device_bytes_total", &labels, bytes);
            }
        }
        self.head("device_errors_total", "counter", "slices that failed on the device, by reason");
        for one in devices {
            for (reason, count) in &one.errors {
                let labels = [("device", one.name.as_str()), ("reason", reason)];
                self.sample("device_errors_total", &labels, count);
            }
        }
    }

    /// Renders the counters of each transport, in total or per peer.
    fn transports(&mut self, part: &str, owners: &[(&str, &[TransportSnapshot])]) {
        let prefix = format!("{PREFIX}_{part}");
        let rows: Vec<_> = used(owners).collect();
        self.0.rows(&prefix, TransportSnapshot::METRICS, &rows);
        let rows = rows.into_iter().map(|(labels, one)| (labels, &one.latency));
        self.0.durations(&format!("{prefix}latency_seconds"), "duration of a batch", rows);
    }
}

/// Labels and counters of every used transport.
fn used<'a>(
    owners: &'a [(&'a str, &'a [TransportSnapshot])],
) -> impl Iterator<Item = (Vec<(&'static str, &'a str)>, &'a TransportSnapshot)> {
    owners.iter().flat_map(|(owner, transports)| {
        transports.iter().filter(|one| one.is_used()).map(move |one| {
            let peer = (!owner.is_empty()).then_some(("peer", *owner));
            (peer.into_iter().chain([("transport", one.kind.name())]).collect(), one)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        metrics::{Metrics, PeerSnapshot, PoolSnapshot, Progress, Work},
        transfer_entry::Opcode,
        transport::TransportKind,
    };

    fn snapshot(batches: u64) -> EngineSnapshot {
        let metrics = Metrics::default();
        for _ in 0..batches {
            metrics.count(&Work {
                kind: TransportKind::Tcp,
                opcode: Opcode::Write,
                before: Progress::default(),
                after: Progress { entries: 2, bytes: 1_000_000, errors: 1, open: 0 },
                took: Duration::from_micros(700),
            });
        }
        let peer = PeerSnapshot {
            name: "a\"b\\c".to_owned(),
            transport: None,
            errors: 0,
            refusals: Vec::new(),
            transports: metrics.snapshot(),
            connections: PoolSnapshot { open: 3, idle: 1, limit: 4, refused: 0 },
            measured: Vec::new(),
        };
        EngineSnapshot {
            transports: metrics.snapshot(),
            peers: vec![peer],
            ..EngineSnapshot::default()
        }
    }

    #[test]
    fn every_line_is_a_comment_or_a_labelled_number() {
        let page = snapshot(3).prometheus();
        for line in page.lines().filter(|line| !line.starts_with("# ")) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            assert!(name.starts_with("mooncake_transfer_"), "{line}");
            assert_eq!(name.contains('{'), name.ends_with('}'), "{line}");
        }
        for line in [
            "mooncake_transfer_bytes_total{transport=\"tcp\",operation=\"write\"} 3000000",
            "mooncake_transfer_errors_total{transport=\"tcp\"} 3",
            "mooncake_transfer_peer_pieces_total{peer=\"a\\\"b\\\\c\",transport=\"tcp\"} 6",
            "mooncake_transfer_latency_seconds_bucket{transport=\"tcp\",le=\"0.000512\"} 0",
            "mooncake_transfer_latency_seconds_bucket{transport=\"tcp\",le=\"0.001024\"} 3",
            "mooncake_transfer_latency_seconds_bucket{transport=\"tcp\",le=\"+Inf\"} 3",
            "mooncake_transfer_latency_seconds_count{transport=\"tcp\"} 3",
            "mooncake_transfer_connections{peer=\"a\\\"b\\\\c\",state=\"open\"} 3",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
        let heads: Vec<_> = page.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let mut once = heads.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), heads.len(), "a name is declared once");
    }

    #[test]
    fn line_shows_the_difference_and_is_absent_without_one() {
        let (before, now) = (snapshot(1), snapshot(3));
        let line = now.line_since(&before, Duration::from_secs(2)).unwrap();
        let wanted = "[Metrics] Transfer Engine Stats (over last 2s): Throughput: 0.95 MB/s | \
                      Latency Distribution (count=2): 512-1024μs:100.0% | tcp read 0.0 MB/s, \
                      wrote 1.0 MB/s, 2 batches, 2 errors, p50 768 us, p99 768 us";
        assert_eq!(line, wanted);
        assert_eq!(now.line_since(&now, Duration::from_secs(2)), None);
    }
}
