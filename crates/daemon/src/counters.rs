//! Prometheus counters of a daemon's relay. The payload of dummy clients does not pass through it.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::exposition::Exposition;

/// Totals since the daemon started.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    calls: AtomicU64,
    failed: AtomicU64,
    nanos: AtomicU64,
    died: AtomicU64,
}

/// Current values and limits, and what the connections count.
#[derive(Debug)]
pub(crate) struct Gauges {
    pub(crate) dummy_clients: (usize, usize),
    pub(crate) connections: (usize, usize),
    pub(crate) refused: u64,
}

impl Counters {
    /// Counts a forwarded call.
    pub(crate) fn count_call(&self, took: Duration, has_answer: bool) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.failed.fetch_add(u64::from(!has_answer), Ordering::Relaxed);
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Counts a dummy client that ended without unregistering.
    pub(crate) fn count_death(&self) {
        self.died.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_to(&self, out: &mut Exposition, gauges: &Gauges) {
        for (name, help, (value, most)) in [
            ("mooncake_daemon_guests", "Dummy clients that are served", gauges.dummy_clients),
            ("mooncake_daemon_connections", "Connections of dummy clients", gauges.connections),
        ] {
            out.gauge(name, &format!("{help}."), value);
            out.gauge(&format!("{name}_max"), &format!("{help} (limit)."), most);
        }
        let read = |sum: &AtomicU64| sum.load(Ordering::Relaxed);
        for (name, help, sum) in [
            ("calls_total", "Calls of dummy clients forwarded to the master.", read(&self.calls)),
            ("failed_calls_total", "Forwarded calls without a response.", read(&self.failed)),
            (
                "dead_guests_total",
                "Dummy clients that ended without unregistering.",
                read(&self.died),
            ),
            ("refused_connections_total", "Connections refused.", gauges.refused),
        ] {
            out.counter(&format!("mooncake_daemon_{name}"), help, sum);
        }
        let seconds = Duration::from_nanos(read(&self.nanos)).as_secs_f64();
        let help = "Total time of forwarded calls in seconds.";
        out.counter("mooncake_daemon_call_seconds_total", help, seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exposes_totals_and_gauges() {
        let counters = Counters::default();
        counters.count_call(Duration::from_millis(1500), true);
        counters.count_call(Duration::from_millis(500), false);
        counters.count_death();
        let mut out = Exposition::default();
        let gauges = Gauges { dummy_clients: (3, 10), connections: (5, 20), refused: 7 };
        counters.add_to(&mut out, &gauges);
        for line in [
            "mooncake_daemon_guests 3",
            "mooncake_daemon_guests_max 10",
            "mooncake_daemon_connections 5",
            "mooncake_daemon_calls_total 2",
            "mooncake_daemon_failed_calls_total 1",
            "mooncake_daemon_dead_guests_total 1",
            "mooncake_daemon_refused_connections_total 7",
            "mooncake_daemon_call_seconds_total 2",
        ] {
            assert!(out.text().lines().any(|found| found == line), "{line}\n{}", out.text());
        }
    }
}
