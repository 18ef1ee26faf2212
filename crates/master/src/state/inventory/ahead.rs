//! Eviction ahead of need, down to the low watermark, and releases ahead of need, so that puts into a
//! full pool need not wait for the log.

use std::time::Duration;

use mooncake_base::Moment;

use crate::state::{
    catalog::order::EvictionPass,
    ids::ObjectSlot,
    inventory::{Inventory, eviction::Verdict, moves},
    pool::freed::FreedTo,
};

/// Objects examined or evicted ahead of need at a time.
const AHEAD_SLICE: usize = 64;

/// Objects of the order of eviction looked at for releases ahead of need, which bounds their number.
pub(in crate::state) const LOOKED_AT_MAX: usize = 4096;

/// Objects released ahead of need at a time, ...
pub(in crate::state) const RELEASED_SLICE: usize = 256;

/// ... and in all.
pub(in crate::state) const RELEASED_MAX: usize = 2 * LOOKED_AT_MAX;

/// Wait before the next try while nothing can be evicted.
const AHEAD_RETRY: Duration = Duration::from_secs(1);

/// Waits of puts for the log, or requests to sync it, within this time of each other make more objects
/// be released ahead.
const DEMAND_PERIOD: Duration = Duration::from_secs(1);

/// Objects are released ahead so that puts need not wait for the log: at most this share of the
/// pool, one in this many.
const TARGET_SHARE: u64 = 32;

/// In a small pool it may be this many bytes, since each sync costs the same, ...
const TARGET_MIN: u64 = 64 << 20;

/// ... but at most this share of it, one in this many.
const TARGET_SHARE_MAX: u64 = 8;

/// A put waits for the log rather than evict another object than the next victim, unless another put
/// waited within this time.
pub(in crate::state) const ORDER_PATIENCE: Duration = Duration::from_secs(1);

/// Objects to release ahead of need, so that one sync of the log serves many puts. None unless puts
/// have waited for the log.
#[derive(Debug, Default)]
pub(in crate::state) struct Ahead {
    /// Bytes of the next victims whose release should be recorded.
    pub(in crate::state) target: u64,
    /// More objects are being released, up to the target.
    pub(in crate::state) is_filling: bool,
    /// More objects are to be released when no more bytes of released ones are left.
    pub(in crate::state) low: u64,
    /// Log position behind the last release ahead.
    pub(in crate::state) position: u64,
    /// When a put last waited for the log.
    pub(in crate::state) waited: Option<Moment>,
    /// When a sync was last asked for.
    requested: Option<Moment>,
}

/// Objects that have to move down before they are evicted.
#[derive(Debug, Default)]
struct Moving {
    objects: Vec<ObjectSlot>,
    bytes: u64,
}

impl Ahead {
    /// Returns the largest target for a pool.
    fn limit(pool_bytes: u64) -> u64 {
        TARGET_MIN.min(pool_bytes / TARGET_SHARE_MAX).max(pool_bytes / TARGET_SHARE)
    }

    /// A put of `need` bytes has to wait for the log: raises the target if that is repeated.
    pub(in crate::state) fn put_waits(&mut self, now: Moment, need: u64, pool_bytes: u64) {
        let limit = Self::limit(pool_bytes);
        let is_repeated = self.waited.is_some_and(|last| now.since(last) < DEMAND_PERIOD);
        let target = if is_repeated { (2 * self.target).max(2 * need) } else { self.target };
        self.target = if limit < need { 0 } else { target.min(limit) };
        self.waited = Some(now);
    }

    /// A sync is asked for: raises the target if the last one was shortly before.
    pub(in crate::state) fn sync_requested(&mut self, now: Moment, pool_bytes: u64) {
        let last = self.requested.replace(now);
        if last.is_some_and(|last| now.since(last) < DEMAND_PERIOD) {
            self.target = (2 * self.target).min(Self::limit(pool_bytes));
        }
    }
}

/// Evicts ahead of need, a slice at a time. Returns when to continue.
pub(in crate::state) fn evict_ahead(inventory: &mut Inventory, now: Moment) -> Option<Moment> {
    let excess = excess_ahead(inventory);
    inventory.is_evicting = excess.is_some();
    let excess = excess?;
    let goal = inventory.log.counters.evicted_bytes + excess;
    inventory.catalog.unpark_due(now, inventory.pool.disks.is_empty());
    moves::move_excess(inventory, now, excess);
    let (mut steps, mut moving) = (AHEAD_SLICE, Moving::default());
    let mut next = now;
    while steps > 0 && inventory.log.counters.evicted_bytes + moving.bytes < goal {
        let is_any = evict_next(inventory, now, EvictionPass::Plain, &mut moving, &mut steps)
            || evict_next(inventory, now, EvictionPass::Soft, &mut moving, &mut steps);
        if !is_any {
            next = now + AHEAD_RETRY;
            break;
        }
    }
    if !moving.objects.is_empty() {
        // They are evicted when their disks have them.
        next = now + AHEAD_RETRY;
    }
    for object in moving.objects.into_iter().rev() {
        inventory.catalog.put_back(object);
    }
    Some(next)
}

/// Takes the next object of an order and evicts it if that is allowed. Returns whether there
/// was one. Subtracts the objects that it examined from `steps`.
fn evict_next(
    inventory: &mut Inventory,
    now: Moment,
    pass: EvictionPass,
    moving: &mut Moving,
    steps: &mut usize,
) -> bool {
    *steps = steps.saturating_sub(1);
    if inventory.evict_condemned(now, &mut FreedTo::Pool) {
        return true;
    }
    let Some(object) = inventory.catalog.pop(pass) else { return false };
    match inventory.classify(now, object, pass, None, steps) {
        Verdict::Move => {
            moves::move_group_down(inventory, now, object);
            moving.bytes += inventory.catalog.objects.at(object).bytes();
            moving.objects.push(object);
        }
        Verdict::Evict => {
            inventory.evict_group(now, object, &mut FreedTo::Pool);
        }
        Verdict::Wait(until) => inventory.catalog.park(object, until),
        Verdict::Demote => inventory.catalog.demote(object),
        Verdict::Skip => inventory.catalog.put_back(object),
        Verdict::Unfinished => {
            inventory.catalog.put_back(object);
            // The next call goes on with it.
            *steps = 0;
        }
    }
    true
}

#[cfg(test)]
impl Inventory {
    /// Forgets that puts waited for the log: no more objects are released ahead.
    pub(in crate::state) fn stop_releases(&mut self) {
        self.ahead = Ahead::default();
    }
}

/// Returns how many bytes are to be evicted ahead of need, if eviction has begun or should begin.
pub(in crate::state) fn excess_ahead(inventory: &Inventory) -> Option<u64> {
    let watermark = inventory.rules.watermark?;
    debug_assert!(
        inventory.pool.unsynced.bytes <= inventory.pool.segments.used_bytes,
        "memory that waits for the log is allocated"
    );
    // Memory that waits for the log will be free without further eviction.
    let used = inventory.pool.segments.used_bytes.saturating_sub(inventory.pool.unsynced.bytes);
    let capacity = inventory.pool.segments.mounted_bytes as f64;
    let low = (watermark.high - watermark.ratio) * capacity;
    let limit = if inventory.is_evicting { low } else { watermark.high * capacity };
    (used as f64 > limit).then(|| (used as f64 - low).ceil() as u64)
}
