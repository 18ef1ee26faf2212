//! Eviction ahead of need, down to the low watermark, and releases ahead of need, so that puts into a
//! full pool need not wait for the log.

use std::{ops::ControlFlow, time::Duration};

use mooncake_base::Moment;

use super::{EvictionPass, GROUP_SLICE, Verdict};
use crate::state::{
    catalog::object::Flags, ids::ObjectSlot, inventory::Inventory, reclaim::Reclaimer,
};

/// Objects examined or evicted ahead of need at a time.
const AHEAD_SLICE: usize = 64;
/// Objects of the order of eviction looked at for releases ahead of need, which bounds their number.
const LOOKED_AT_MAX: usize = 4096;
/// Objects released ahead of need at a time, ...
const RELEASED_SLICE: usize = 256;
/// ... and in all.
const RELEASED_MAX: usize = 2 * LOOKED_AT_MAX;
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
const ORDER_PATIENCE: Duration = Duration::from_secs(1);

/// Objects to release ahead of need, so that one sync of the log serves many puts. None unless puts
/// have waited for the log.
#[derive(Debug, Default)]
pub(in crate::state) struct Ahead {
    /// Bytes of the next victims whose release should be recorded.
    target: u64,
    /// More objects are being released, up to the target.
    is_filling: bool,
    /// More objects are to be released when no more bytes of released ones are left.
    low: u64,
    /// Log position behind the last release ahead.
    position: u64,
    /// When a put last waited for the log.
    waited: Option<Moment>,
    /// When a sync was last asked for.
    requested: Option<Moment>,
}

impl Ahead {
    /// Returns the largest target for a pool.
    fn limit(pool_bytes: u64) -> u64 {
        TARGET_MIN.min(pool_bytes / TARGET_SHARE_MAX).max(pool_bytes / TARGET_SHARE)
    }

    /// A put of `need` bytes has to wait for the log: raises the target if that is repeated.
    fn put_waits(&mut self, now: Moment, need: u64, pool_bytes: u64) {
        let limit = Self::limit(pool_bytes);
        let is_repeated = self.waited.is_some_and(|last| now.since(last) < DEMAND_PERIOD);
        let target = if is_repeated { (2 * self.target).max(2 * need) } else { self.target };
        self.target = if limit < need { 0 } else { target.min(limit) };
        self.waited = Some(now);
    }

    /// A sync is asked for: raises the target if the last one was shortly before.
    fn sync_requested(&mut self, now: Moment, pool_bytes: u64) {
        let last = self.requested.replace(now);
        if last.is_some_and(|last| now.since(last) < DEMAND_PERIOD) {
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
            Verdict::Demote => self.catalog.demote(object),
            Verdict::Skip | Verdict::Unfinished => self.catalog.put_back(object),
        }
        true
    }
}

impl Reclaimer<'_> {
    /// A put of `need` bytes has to wait for the log: raises the target, and releases the next
    /// victims ahead, but for `spared`. Returns the log position to wait for: `evicted`, that behind
    /// the records of what the put evicted, or that behind the other releases.
    pub(super) fn raise_ahead(
        &mut self,
        now: Moment,
        (need, evicted): (u64, u64),
        spared: Option<ObjectSlot>,
    ) -> u64 {
        self.inventory.ahead.put_waits(now, need, self.inventory.pool.segments.mounted_bytes);
        // A sync of the last releases is under way. Puts that wait at the same time do not all look
        // through the order.
        if !self.inventory.pool.unsynced.is_synced(self.inventory.ahead.position) {
            return evicted;
        }
        self.inventory.ahead.is_filling = !self.release_ahead(now, spared);
        self.inventory.log.effects.position()
    }

    /// Releases more objects ahead after an allocation, but for `spared`, if few of those that were
    /// released are left.
    pub(super) fn prepare_ahead(&mut self, now: Moment, need: u64, spared: Option<ObjectSlot>) {
        let target = self.inventory.ahead.target;
        if target == 0 {
            return;
        }
        let free = self
            .inventory
            .pool
            .segments
            .mounted_bytes
            .saturating_sub(self.inventory.pool.segments.used_bytes);
        if free >= 4 * target.max(need) {
            // Memory came from elsewhere.
            (
                self.inventory.ahead.target,
                self.inventory.ahead.low,
                self.inventory.ahead.is_filling,
            ) = (0, 0, false);
            return;
        }
        if self.inventory.ahead.low > 0
            && self.inventory.catalog.released.bytes() <= self.inventory.ahead.low
        {
            self.release_soon();
        }
        if self.inventory.ahead.is_filling && self.release_ahead(now, spared) {
            self.inventory.ahead.is_filling = false;
            self.inventory.pool.unsynced.is_sync_wanted = true;
            self.inventory.ahead.sync_requested(now, self.inventory.pool.segments.mounted_bytes);
        }
    }

    /// Returns whether puts should evict objects whose release is on disk rather than the next
    /// victims, among which are some that became evictable just now.
    pub(super) fn prefers_released(&self, now: Moment) -> bool {
        !self.inventory.catalog.released.is_empty()
            && self.inventory.ahead.waited.is_some_and(|last| now.since(last) < ORDER_PATIENCE)
    }

    /// Returns whether the release of all these objects is on disk.
    pub(super) fn are_released(&self, objects: &[ObjectSlot]) -> bool {
        objects.iter().all(|&object| {
            let position = self.inventory.catalog.released.position(object);
            position.is_some_and(|position| self.inventory.pool.unsynced.is_synced(position))
        })
    }

    /// Makes the next put release more objects, unless a sync of the last releases is under way.
    pub(super) fn release_soon(&mut self) {
        self.inventory.ahead.is_filling |=
            self.inventory.pool.unsynced.is_synced(self.inventory.ahead.position);
    }

    /// Records the release of some of the next victims, towards the target. They stay readable until
    /// they are evicted. Returns `false` if the next call would release more.
    fn release_ahead(&mut self, now: Moment, spared: Option<ObjectSlot>) -> bool {
        let (mut bytes, mut steps) = (0, LOOKED_AT_MAX);
        let mut found = Vec::new();
        let (catalog, target) = (&self.inventory.catalog, self.inventory.ahead.target);
        let found_max = RELEASED_SLICE.min(RELEASED_MAX.saturating_sub(catalog.released.count()));
        catalog.queue.plain.visit_next(&mut |object| {
            if bytes >= target || steps == 0 || found.len() >= found_max {
                return ControlFlow::Break(());
            }
            steps -= 1;
            if catalog.released.contains(object) {
                bytes += catalog.objects.at(object).bytes();
            } else if self.may_be_released(now, object, spared, &mut steps) {
                bytes += catalog.objects.at(object).bytes();
                found.push(object);
            }
            ControlFlow::Continue(())
        });
        let is_done = found.len() < RELEASED_SLICE;
        for object in found {
            for member in self.inventory.catalog.first_of_group(object) {
                if !self.inventory.catalog.released.contains(member) {
                    let Inventory { log, catalog, .. } = &mut *self.inventory;
                    log.record_release(catalog, member);
                    let bytes = self.inventory.catalog.objects.at(member).bytes();
                    self.inventory.catalog.released.insert(
                        member,
                        self.inventory.log.effects.position(),
                        bytes,
                    );
                }
            }
            self.inventory.ahead.position = self.inventory.log.effects.position();
        }
        // Where fewer objects than that may be evicted, the log is not synced for each of them.
        self.inventory.ahead.low = self.inventory.catalog.released.bytes().min(target) / 2;
        is_done
    }

    /// Returns whether the object and its group may be evicted now. Subtracts the other members that
    /// it examines from `steps`.
    fn may_be_released(
        &self,
        now: Moment,
        object: ObjectSlot,
        spared: Option<ObjectSlot>,
        steps: &mut usize,
    ) -> bool {
        let members = self.inventory.catalog.groups.members(object);
        let group = if members.is_empty() { std::slice::from_ref(&object) } else { members };
        // A condemned or large group is evicted in slices.
        if group.len() > GROUP_SLICE || self.inventory.catalog.groups.is_condemned(object) {
            return false;
        }
        group.iter().all(|&member| {
            *steps = steps.saturating_sub(usize::from(member != object));
            let object = self.inventory.catalog.objects.at(member);
            let mut copies = object.replicas.iter();
            spared != Some(member)
                && !object.flags.has(Flags::SOFT_PINNED)
                && self.inventory.protected_until(now, member) <= now.into()
                && copies.all(|copy| self.inventory.pool.segments.at(copy.segment).is_mounted())
        })
    }
}
