//! Prometheus counters of a daemon's relay. The payload of dummy clients does not pass through it.

use std::time::Duration;

use mooncake_base::{
    counters,
    exposition::{Exposition, Metric},
};

counters! {
    /// Counts calls and deaths since the daemon started.
    pub(crate) struct Counters;
    /// The use of a relay at one moment.
    #[derive(Copy)]
    pub(crate) struct RelayUsage {
        pub(crate) dummy_clients: usize,
        pub(crate) dummy_clients_max: usize,
        pub(crate) connections: usize,
        pub(crate) connections_max: usize,
        pub(crate) refused: u64,
    }
    TOTALS {
        /// Calls of dummy clients forwarded to the master.
        calls = counter "calls_total",
        /// Forwarded calls without a response.
        failed = counter "failed_calls_total",
        /// Dummy clients that ended without unregistering.
        died = counter "dead_guests_total",
        /// Duration of all calls.
        nanos,
    }
}

static CLIENTS: [Metric<RelayUsage>; 4] = [
    Metric::gauge("guests", "Dummy clients that are served.", |it| it.dummy_clients as u64),
    Metric::gauge("guests_max", "Dummy clients that are served (limit).", |it| {
        it.dummy_clients_max as u64
    }),
    Metric::gauge("connections", "Connections of dummy clients.", |it| it.connections as u64),
    Metric::gauge("connections_max", "Connections of dummy clients (limit).", |it| {
        it.connections_max as u64
    }),
];

static CONNECTIONS_AND_TIME: [Metric<RelayUsage>; 2] = [
    Metric::counter("refused_connections_total", "Connections refused.", |it| it.refused),
    Metric::total_seconds(
        "call_seconds_total",
        "Total time of forwarded calls in seconds.",
        |it| Duration::from_nanos(it.nanos).as_secs_f64(),
    ),
];

impl Counters {
    /// Counts a forwarded call.
    pub(crate) fn count_call(&self, took: Duration, has_answer: bool) {
        self.calls.increment();
        self.failed.add_nonzero(u64::from(!has_answer));
        self.nanos.add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }
}

impl RelayUsage {
    pub(crate) fn add_to(&self, out: &mut Exposition) {
        for metrics in [&CLIENTS[..], Self::TOTALS, &CONNECTIONS_AND_TIME] {
            out.row("mooncake_daemon_", metrics, self);
        }
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
        counters.died.increment();
        let mut out = Exposition::default();
        let usage = RelayUsage {
            dummy_clients: 3,
            dummy_clients_max: 10,
            connections: 5,
            connections_max: 20,
            refused: 7,
            ..counters.snapshot()
        };
        usage.add_to(&mut out);
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
