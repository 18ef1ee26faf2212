//! Releases the next victims ahead of need, so that puts need not wait for the log.

use std::ops::ControlFlow;

use mooncake_base::Moment;

use crate::state::{
    calls::reclaim::Reclaimer,
    catalog::{group::GROUP_SLICE, object::Flags},
    ids::ObjectSlot,
    inventory::{
        Inventory,
        ahead::{LOOKED_AT_MAX, ORDER_PATIENCE, RELEASED_MAX, RELEASED_SLICE},
        moves::{self, MemoryHold},
    },
};

impl Reclaimer<'_> {
    /// A put of `need` bytes has to wait for the log: raises the target, and releases the next
    /// victims ahead, but for `spared`. Returns the log position to wait for: `evicted`, that behind
    /// the records of what the put evicted, or that behind the other releases.
    pub(in crate::state) fn raise_ahead(
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
    pub(in crate::state) fn prepare_ahead(
        &mut self,
        now: Moment,
        need: u64,
        spared: Option<ObjectSlot>,
    ) {
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
    pub(in crate::state) fn prefers_released(&self, now: Moment) -> bool {
        !self.inventory.catalog.released.is_empty()
            && self.inventory.ahead.waited.is_some_and(|last| now.since(last) < ORDER_PATIENCE)
    }

    /// Returns whether the release of all these objects is on disk.
    pub(in crate::state) fn are_released(&self, objects: &[ObjectSlot]) -> bool {
        objects.iter().all(|&object| {
            let position = self.inventory.catalog.released.position(object);
            position.is_some_and(|position| self.inventory.pool.unsynced.is_synced(position))
        })
    }

    /// Makes the next put release more objects, unless a sync of the last releases is under way.
    pub(in crate::state) fn release_soon(&mut self) {
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
                && moves::memory_hold(self.inventory, now, member) == MemoryHold::None
                && copies.all(|copy| self.inventory.pool.segments.at(copy.segment).is_mounted())
        })
    }
}
