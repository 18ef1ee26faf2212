//! Reports of an engine: the snapshot of its counters, and the periodic log line.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use mooncake_base::{Clock, SystemClock};
use mooncake_os::fork;

use tokio::{runtime::Handle, sync::Notify, time::Instant};

use super::{Engine, Inner};
use crate::metrics::EngineSnapshot;

/// Minimum interval between log lines.
const REPORT_INTERVAL_MIN: Duration = Duration::from_millis(10);

/// Pause before a change is published again that the metadata server did not take.
const REPUBLISH_INTERVAL: Duration = Duration::from_secs(5);
/// How often connections are looked for that nobody uses.
const IDLE_INTERVAL: Duration = Duration::from_secs(30);

/// Log target of the transfer statistics.
const TARGET: &str = "mooncake::metric";

impl Engine {
    /// Starts the tasks of the engine.
    pub(super) fn start_tasks(&self, runtime: &Handle) {
        self.report_on(runtime);
        self.republish_on(runtime);
        self.close_idle_on(runtime);
    }

    /// Starts the task that logs transfer statistics at an interval, if enabled. Idle intervals log
    /// nothing.
    fn report_on(&self, runtime: &Handle) {
        let Some(interval) = self.inner.config.report_interval else { return };
        let engine = Arc::downgrade(&self.inner);
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

    /// Starts the task that publishes changes of RDMA devices on the metadata server. Peers that ask the
    /// engine itself always get the current state.
    fn republish_on(&self, runtime: &Handle) {
        if self.inner.config.is_p2p() || self.inner.config.is_unpublished {
            return;
        }
        let changed = Arc::new(Notify::new());
        let engine = Arc::downgrade(&self.inner);
        self.inner.rdma.observe({
            let changed = Arc::clone(&changed);
            move || changed.notify_one()
        });
        let task = runtime.spawn(async move {
            loop {
                changed.notified().await;
                let Some(inner) = engine.upgrade() else { return };
                let announced = tokio::task::spawn_blocking(move || inner.announce()).await;
                if let Ok(Err(error)) = announced {
                    tracing::warn!(%error, "the metadata server has an old address of RDMA devices");
                    tokio::time::sleep(REPUBLISH_INTERVAL).await;
                    changed.notify_one();
                }
            }
        });
        *self.inner.republisher.lock() = Some(task);
    }

    /// Starts the task that closes connections which were not used for a while, and drops lost paths.
    fn close_idle_on(&self, runtime: &Handle) {
        let engine = Arc::downgrade(&self.inner);
        let task = runtime.spawn(async move {
            loop {
                tokio::time::sleep(IDLE_INTERVAL).await;
                let Some(inner) = engine.upgrade() else { return };
                let now = SystemClock.now();
                inner.transports.iter().for_each(|transport| transport.close_idle(now));
                inner.drop_lost_peers();
            }
        });
        *self.inner.idle_closer.lock() = Some(task);
    }

    /// Returns the transfer counters and the usage of all pools and queues.
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
            devices: inner.rdma.usage(),
        }
    }
}

impl Inner {
    /// Returns the counters of all transports only.
    fn totals(&self) -> EngineSnapshot {
        EngineSnapshot { transports: self.metrics.snapshot(), ..EngineSnapshot::default() }
    }
}
