//! What an engine tells of itself: a snapshot of everything it counts.

use std::{sync::atomic::Ordering, time::Duration};

use tokio::{runtime::Handle, time::Instant};

use super::{Engine, Inner};
use crate::{fork, metrics::EngineSnapshot};

/// Lines do not come faster than this.
const REPORT_INTERVAL_MIN: Duration = Duration::from_millis(10);

/// What the lines about transfers are logged under.
const TARGET: &str = "mooncake::metric";

impl Engine {
    /// Logs a line about what was moved every so often, if that is wanted and something was.
    pub(super) fn report_on(&self, runtime: &Handle) {
        let Some(interval) = self.inner.config.report_interval else { return };
        let engine = self.downgrade();
        let name = self.segment_name().to_owned();
        let task = runtime.spawn(async move {
            let mut before = (Instant::now(), EngineSnapshot::default());
            loop {
                tokio::time::sleep(interval.max(REPORT_INTERVAL_MIN)).await;
                let Some(inner) = engine.upgrade() else { return };
                let now = inner.totals();
                drop(inner);
                let passed = before.0.elapsed();
                if let Some(line) = now.line_since(&before.1, passed) {
                    tracing::info!(target: TARGET, segment = name, "{line}");
                }
                before = (Instant::now(), now);
            }
        });
        *self.inner.reporter.lock() = Some(task);
    }

    /// What it has moved up to now, and how full its pools are.
    pub fn snapshot(&self) -> EngineSnapshot {
        let inner = &self.inner;
        if fork::is_forked_since(inner.generation) {
            return EngineSnapshot::default();
        }
        let context = inner.path_context();
        let mut peers: Vec<_> =
            inner.peers.read().values().map(|peer| peer.snapshot(context)).collect();
        peers.sort_by(|a, b| a.name.cmp(&b.name));
        let regions = inner.exported.regions.all();
        let (batches, workers) = inner.workers.load();
        EngineSnapshot {
            transports: inner.metrics.snapshot(),
            peers,
            peers_max: inner.config.peers_max,
            peers_evicted: inner.evicted.load(Ordering::Relaxed),
            regions: regions.len(),
            region_bytes: regions.iter().map(|region| region.length).sum(),
            incoming: inner.data.connections(),
            pinned: inner.devices.known().map(|cuda| cuda.pinned()).unwrap_or_default(),
            refused: inner.refusals.snapshot(),
            batches,
            notifications: inner.handshake.notifications(),
            workers,
        }
    }
}

impl Inner {
    /// What went over each way; the rest is left out.
    fn totals(&self) -> EngineSnapshot {
        EngineSnapshot { transports: self.metrics.snapshot(), ..EngineSnapshot::default() }
    }
}
