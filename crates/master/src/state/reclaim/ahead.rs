//! Eviction ahead of need: down to the low watermark, and for puts that would wait for the log.

use std::time::Duration;

use mooncake_base::Moment;

use super::{EvictionPass, Verdict};
use crate::state::{
    ids::{KeyHash, ObjectSlot},
    inventory::Inventory,
    reclaim::eviction::EvictionPolicy,
};

/// Objects examined or evicted ahead of need at a time.
const AHEAD_SLICE: usize = 64;
/// Wait before the next try while nothing can be evicted.
const AHEAD_RETRY: Duration = Duration::from_secs(1);
/// Puts that waited for the log within this time make more memory be evicted ahead.
const DEMAND_PERIOD: Duration = Duration::from_secs(1);
/// Memory evicted ahead so that puts need not wait for the log: at most this share of the pool, one
/// in this many.
const PREPARED_SHARE: u64 = 32;
/// A small pool may have this many bytes evicted ahead, since each sync costs the same, ...
const PREPARED_MIN: u64 = 64 << 20;
/// ... but at most this share of it, one in this many.
const PREPARED_SHARE_MAX: u64 = 8;

/// Syncs that are asked for within this time of each other make more memory be evicted ahead: a
/// sync takes some hundred microseconds of processor and disk.
const SYNC_PERIOD: Duration = Duration::from_millis(5);

/// Memory to evict ahead of need, so that one sync of the log serves many puts. Zero unless puts
/// have waited for the log.
#[derive(Debug, Default)]
pub(in crate::state) struct Ahead {
    /// Bytes that should be free or wait for the log.
    target: u64,
    /// When a put last waited for the log.
    waited: Option<Moment>,
    /// When a sync was last asked for.
    requested: Option<Moment>,
}

impl Ahead {
    /// Returns the largest target for a pool.
    fn limit(pool_bytes: u64) -> u64 {
        PREPARED_MIN.min(pool_bytes / PREPARED_SHARE_MAX).max(pool_bytes / PREPARED_SHARE)
    }

    /// A put of `need` bytes has to wait for the log: raises the target if that is repeated.
    fn put_waits(&mut self, now: Moment, need: u64, pool_bytes: u64) {
        let limit = Self::limit(pool_bytes);
        let is_repeated = self.waited.is_some_and(|last| now.since(last) < DEMAND_PERIOD);
        let target = if is_repeated { (2 * self.target).max(2 * need) } else { 0 };
        self.target = if limit < need { 0 } else { target.min(limit) };
        self.waited = Some(now);
    }

    /// A sync is asked for: raises the target if the last one was shortly before.
    fn sync_requested(&mut self, now: Moment, pool_bytes: u64) {
        let last = self.requested.replace(now);
        if last.is_some_and(|last| now.since(last) < SYNC_PERIOD) {
            self.target = (2 * self.target).min(Self::limit(pool_bytes));
        }
    }
}

impl Inventory {
    /// Evicts ahead of need, a slice at a time. Returns when to continue.
    pub(in crate::state) fn evict_ahead(&mut self, now: Moment) -> Option<Moment> {
        let watermark = self.rules.watermark?;
        // Memory that waits for the log will be free without further eviction.
        let used = self.pool.segments.used_bytes.saturating_sub(self.pool.unsynced.bytes);
        let capacity = self.pool.segments.mounted_bytes as f64;
        let low = (watermark.high - watermark.ratio) * capacity;
        let limit = if self.is_evicting { low } else { watermark.high * capacity };
        self.is_evicting = used as f64 > limit;
        if !self.is_evicting {
            return None;
        }
        let goal = self.log.counters.evicted_bytes + (used as f64 - low).ceil() as u64;
        self.catalog.unpark_due(now);
        let mut steps = AHEAD_SLICE;
        while steps > 0 && self.log.counters.evicted_bytes < goal {
            let is_any = self.evict_next(now, EvictionPass::Plain, None, &mut steps)
                || self.evict_next(now, EvictionPass::Soft, None, &mut steps);
            if !is_any {
                return Some(now + AHEAD_RETRY);
            }
        }
        Some(now)
    }

    /// Raises the target because a put of `need` bytes has to wait for the log, and evicts towards
    /// it, but for `spared`.
    pub(super) fn raise_ahead(&mut self, now: Moment, need: u64, spared: Option<ObjectSlot>) {
        self.ahead.put_waits(now, need, self.pool.segments.mounted_bytes);
        self.evict_towards(now, self.ahead.target, spared);
    }

    /// Evicts ahead after an allocation, but for `spared`, if memory that needs no sync runs out.
    pub(super) fn prepare_ahead(&mut self, now: Moment, need: u64, spared: Option<ObjectSlot>) {
        let target = self.ahead.target;
        if target == 0 {
            return;
        }
        let free = self.pool.segments.mounted_bytes.saturating_sub(self.pool.segments.used_bytes);
        if free >= 4 * target.max(need) {
            // Memory came from elsewhere.
            self.ahead.target = 0;
        } else if free < target / 2 {
            self.evict_towards(now, target, spared);
            // What was freed before the last request will be free without another one.
            let unrequested = self.pool.unsynced.unrequested;
            if unrequested >= target / 2 || (free < target / 4 && unrequested >= target / 4) {
                self.pool.unsynced.is_sync_wanted = true;
                self.ahead.sync_requested(now, self.pool.segments.mounted_bytes);
            }
        }
    }

    /// Evicts some objects, up to `target` bytes that wait for the log.
    fn evict_towards(&mut self, now: Moment, target: u64, spared: Option<ObjectSlot>) {
        let mut steps = AHEAD_SLICE;
        while steps > 0 && self.pool.unsynced.bytes < target {
            if !self.evict_next(now, EvictionPass::Plain, spared, &mut steps) {
                return;
            }
        }
    }

    /// Takes the next object of an order and evicts it if that is allowed. Returns whether there
    /// was one. Subtracts the objects that it examined from `steps`.
    fn evict_next(
        &mut self,
        now: Moment,
        pass: EvictionPass,
        spared: Option<ObjectSlot>,
        steps: &mut usize,
    ) -> bool {
        *steps = steps.saturating_sub(1);
        if self.evict_condemned(now) {
            return true;
        }
        let Some(object) = self.catalog.pop(pass) else { return false };
        match self.classify(now, object, pass, spared, steps) {
            Verdict::Evict => {
                self.evict_group(now, object);
            }
            Verdict::Wait(until) => self.catalog.park(object, until),
            Verdict::Demote => self.catalog.queue.soft.insert(object, KeyHash::new(0)),
            Verdict::Skip => self.catalog.put_back(object),
        }
        true
    }
}
