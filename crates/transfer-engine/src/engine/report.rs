//! What an engine tells of itself: a snapshot of everything it counts.

use std::sync::atomic::Ordering;

use super::Engine;
use crate::{metrics::EngineSnapshot, process};

impl Engine {
    /// What it has moved up to now, and how full its pools are.
    pub fn snapshot(&self) -> EngineSnapshot {
        let inner = &self.inner;
        if process::is_forked_since(inner.generation) {
            return EngineSnapshot::default();
        }
        let ways = inner.ways();
        let mut peers: Vec<_> =
            inner.peers.read().values().map(|peer| peer.snapshot(ways)).collect();
        peers.sort_by(|a, b| a.name.cmp(&b.name));
        let regions = inner.lent.regions.all();
        let (batches_waiting, movers) = inner.movers.load();
        EngineSnapshot {
            transports: inner.metrics.snapshot(),
            peers,
            peers_max: inner.config.peers_max,
            peers_evicted: inner.evicted.load(Ordering::Relaxed),
            regions: regions.len(),
            region_bytes: regions.iter().map(|region| region.length).sum(),
            incoming: inner.data.connections(),
            refused: inner.refusals.snapshot(),
            batches_waiting,
            movers,
        }
    }
}
