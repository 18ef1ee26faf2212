//! Eviction of an object with its group, and whether that is allowed.

use std::time::Duration;

use mooncake_base::Moment;

use crate::state::{
    catalog::{group::GROUP_SLICE, object::Flags, order::EvictionPass},
    ids::ObjectSlot,
    inventory::{Inventory, disks},
    lease::Timestamp,
};

/// Wait before a group with a hard-pinned member is examined again.
const GROUP_RETRY: Duration = Duration::from_secs(1);

/// The decision about the next object of the order.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) enum Verdict {
    Evict,
    /// Protected until then.
    Wait(Timestamp),
    /// Soft-pinned: evicted after all others.
    Demote,
    /// Not useful, or spared by this request.
    Skip,
    /// Its group takes more steps to examine. The next call goes on with it.
    Unfinished,
}

impl Inventory {
    /// Decides whether an object and its group may be evicted. Subtracts the other members that it
    /// examines from `steps`.
    pub(in crate::state) fn classify(
        &mut self,
        now: Moment,
        object: ObjectSlot,
        pass: EvictionPass,
        spared: Option<ObjectSlot>,
        steps: &mut usize,
    ) -> Verdict {
        if !self.drop_lost_replicas(object) {
            // The replicas are lost; the sweep removes the rest.
            return Verdict::Skip;
        }
        if self.catalog.groups.is_condemned(object) {
            return Verdict::Evict;
        }
        let flags = self.catalog.objects.at(object).flags;
        if flags.has(Flags::GROUPED) {
            return self.classify_group(now, object, pass, spared, steps);
        }
        let end = self.protected_until(now, object);
        if spared == Some(object) {
            Verdict::Skip
        } else if end > now.into() {
            Verdict::Wait(end)
        } else if pass == EvictionPass::Plain && flags.has(Flags::SOFT_PINNED) {
            Verdict::Demote
        } else {
            Verdict::Evict
        }
    }

    /// Decides whether the group of an object may be evicted, like [`classify`](Self::classify).
    fn classify_group(
        &mut self,
        now: Moment,
        object: ObjectSlot,
        pass: EvictionPass,
        spared: Option<ObjectSlot>,
        steps: &mut usize,
    ) -> Verdict {
        // A group is not looked through while the member that kept it before still does.
        let blocker =
            self.catalog.groups.blocker(object).map(|member| self.protected_until(now, member));
        if let Some(until) = blocker.filter(|&until| until > now.into()) {
            return Verdict::Wait(until);
        }
        let group = self.catalog.groups.index(object);
        if spared.is_some_and(|spared| self.catalog.groups.index(spared) == group) {
            return Verdict::Skip;
        }
        let members = self.catalog.groups.members(object);
        let mut examined = self.catalog.groups.examined(object);
        // A small group is examined at once.
        let slice = (*steps).max(GROUP_SLICE);
        let mut found = None;
        for &member in members[examined..].iter().take(slice) {
            let end = self.protected_until(now, member);
            if end > now.into() {
                found = Some((end, member));
                break;
            }
            examined += 1;
            *steps = steps.saturating_sub(usize::from(member != object));
        }
        let is_whole = examined == members.len();
        self.catalog.groups.set_examined(object, examined);
        if let Some((end, blocker)) = found {
            self.catalog.groups.set_blocker(object, blocker);
            Verdict::Wait(end)
        } else if !is_whole {
            *steps = 0;
            Verdict::Unfinished
        } else if pass == EvictionPass::Plain && self.catalog.groups.has_soft_pin(object) {
            Verdict::Demote
        } else {
            Verdict::Evict
        }
    }

    /// Returns until when the object itself, apart from its group, may not be evicted.
    pub(in crate::state) fn protected_until(&self, now: Moment, slot: ObjectSlot) -> Timestamp {
        let object = self.catalog.objects.at(slot);
        let mut end = object.protection.protected_until().max(self.catalog.copying_until(slot));
        if self.is_unclaimed(slot) {
            end = end.max(self.recovery.end().into());
        }
        if object.flags.has(Flags::HARD_PINNED) {
            end = end.max((now + GROUP_RETRY).into());
        }
        end
    }

    /// Evicts an object and its group: the first members at once, and the others in further calls
    /// of [`evict_condemned`](Self::evict_condemned). Returns the number of evicted objects.
    pub(in crate::state) fn evict_group(&mut self, now: Moment, object: ObjectSlot) -> usize {
        let first = self.catalog.first_of_group(object);
        if self.catalog.groups.members(object).len() > GROUP_SLICE {
            self.catalog.groups.condemn(object);
        }
        let mut evicted = 0;
        for member in first {
            self.catalog.dequeue(member);
            self.evict(now, member);
            evicted += 1;
        }
        evicted
    }

    /// Evicts a member of a condemned group. Returns whether there was one.
    pub(in crate::state) fn evict_condemned(&mut self, now: Moment) -> bool {
        let Some(member) = self.catalog.groups.next_condemned() else { return false };
        self.catalog.dequeue(member);
        self.evict(now, member);
        true
    }

    pub(in crate::state) fn evict(&mut self, now: Moment, object: ObjectSlot) {
        self.evict_value(now, object);
        self.catalog.remove_if_empty(object);
    }

    /// Evicts the value of an object, or its memory if a disk has a copy; the entry of its key stays.
    pub(in crate::state) fn evict_value(&mut self, now: Moment, object: ObjectSlot) {
        self.log.counters.evicted_keys += 1;
        self.log.counters.evicted_bytes += self.catalog.objects.at(object).bytes();
        if self.disk_copy(object).is_some() {
            return disks::drop_memory(self, now, object);
        }
        self.log.counters.offloads_missed += u64::from(self.wants_offload(object));
        let is_plain = !self.catalog.objects.at(object).flags.has(Flags::SOFT_PINNED);
        match self.catalog.released.position(object) {
            Some(position) => self.drop_released(now, object, position),
            None => self.drop_value(now, object),
        }
        if is_plain {
            self.catalog.queue.plain.on_evicted(object, self.catalog.objects.key_hash(object));
        }
    }
}
