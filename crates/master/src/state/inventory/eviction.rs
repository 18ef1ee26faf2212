//! Eviction of an object with its group, and whether that is allowed.

use mooncake_base::Moment;

use crate::state::{
    catalog::{group::GROUP_SLICE, object::Flags, order::EvictionPass},
    ids::ObjectSlot,
    inventory::{
        Inventory,
        clients::wants_offload,
        disks,
        hold::{MemoryHold, memory_hold},
    },
    lease::Timestamp,
    pool::freed::FreedTo,
};

/// The decision about the next object of the order.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) enum Verdict {
    Evict,
    /// May be evicted once disks have it and its group.
    Move,
    /// Protected until then.
    Wait(Timestamp),
    /// Soft-pinned: evicted after all others.
    Demote,
    /// Not useful, or spared by this request.
    Skip,
    /// Its group takes more steps to examine. The next call goes on with it.
    Unfinished,
}

/// The result of the examination of a group.
struct ExaminedGroup {
    verdict: Verdict,
    /// So many of the first members were found evictable.
    evictable: usize,
    /// The member that keeps the group from eviction.
    blocker: Option<ObjectSlot>,
    /// Other members that were examined.
    steps: usize,
}

impl Inventory {
    /// Drops lost replicas of an object, decides whether it and its group may be evicted, and remembers
    /// what was examined of the group. Subtracts the other members that it examines from `steps`.
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
        if !self.catalog.objects.at(object).flags.has(Flags::GROUPED) {
            return object_verdict(self, now, object, pass, spared);
        }
        if let Some(verdict) = known_verdict(self, now, object, spared) {
            return verdict;
        }
        let examined = examine_group(self, now, object, pass, *steps);
        *steps = steps.saturating_sub(examined.steps);
        self.catalog.groups.record_examination(object, examined.evictable, examined.blocker);
        examined.verdict
    }

    /// Evicts an object and its group: the first members at once, and the others in further calls
    /// of [`evict_condemned`](Self::evict_condemned). Returns the number of evicted objects.
    pub(in crate::state) fn evict_group(
        &mut self,
        now: Moment,
        object: ObjectSlot,
        to: &mut FreedTo<'_>,
    ) -> usize {
        let first = self.catalog.first_of_group(object);
        if self.catalog.groups.members(object).len() > GROUP_SLICE {
            self.catalog.groups.condemn(object);
        }
        let mut evicted = 0;
        for member in first {
            self.catalog.dequeue(member);
            evict(self, now, member, to);
            evicted += 1;
        }
        evicted
    }

    /// Evicts a member of a condemned group. Returns whether there was one.
    pub(in crate::state) fn evict_condemned(&mut self, now: Moment, to: &mut FreedTo<'_>) -> bool {
        let Some(member) = self.catalog.groups.next_condemned() else { return false };
        self.catalog.dequeue(member);
        evict(self, now, member, to);
        true
    }

    /// Evicts the value of an object, or its memory if a disk has a copy; the entry of its key stays.
    pub(in crate::state) fn evict_value(
        &mut self,
        now: Moment,
        object: ObjectSlot,
        to: &mut FreedTo<'_>,
    ) {
        self.log.counters.evicted_keys += 1;
        self.log.counters.evicted_bytes += self.catalog.objects.at(object).bytes();
        if self.disk_copy(object).is_some() {
            return disks::drop_memory(self, now, object, to);
        }
        self.log.counters.offloads_missed += u64::from(wants_offload(self, object));
        if !self.pool.disks.is_empty() {
            self.log.counters.evicted_without_disk += 1;
        }
        let is_plain = !self.catalog.objects.at(object).flags.has(Flags::SOFT_PINNED);
        match self.catalog.released.position(object) {
            Some(position) => self.drop_released(now, object, position, to),
            None => self.drop_value_to(now, object, to),
        }
        if is_plain {
            self.catalog.queue.plain.on_evicted(object, self.catalog.objects.key_hash(object));
        }
    }
}

/// Evicts an object, whose entry goes with its value unless a disk has a copy or a put is unfinished.
fn evict(inventory: &mut Inventory, now: Moment, object: ObjectSlot, to: &mut FreedTo<'_>) {
    inventory.evict_value(now, object, to);
    inventory.catalog.remove_if_empty(object);
}

/// Decides whether an object without a group may be evicted.
fn object_verdict(
    inventory: &Inventory,
    now: Moment,
    object: ObjectSlot,
    pass: EvictionPass,
    spared: Option<ObjectSlot>,
) -> Verdict {
    if spared == Some(object) {
        return Verdict::Skip;
    }
    let hold = memory_hold(inventory, now, object);
    if let MemoryHold::Until(end) = hold {
        Verdict::Wait(end)
    } else if pass == EvictionPass::Plain
        && inventory.catalog.objects.at(object).flags.has(Flags::SOFT_PINNED)
    {
        Verdict::Demote
    } else if hold == MemoryHold::Move {
        Verdict::Move
    } else {
        Verdict::Evict
    }
}

/// Returns the verdict about the group of an object that needs no examination: the member that kept it
/// before still does, or the group is spared.
fn known_verdict(
    inventory: &Inventory,
    now: Moment,
    object: ObjectSlot,
    spared: Option<ObjectSlot>,
) -> Option<Verdict> {
    let groups = &inventory.catalog.groups;
    let hold = groups.blocker(object).map(|member| memory_hold(inventory, now, member));
    if let Some(MemoryHold::Until(end)) = hold {
        return Some(Verdict::Wait(end));
    }
    let is_spared = |spared| groups.index(spared) == groups.index(object);
    spared.is_some_and(is_spared).then_some(Verdict::Skip)
}

/// Examines further members of the group of an object, about as many as `steps`, and decides whether
/// the group may be evicted.
fn examine_group(
    inventory: &Inventory,
    now: Moment,
    object: ObjectSlot,
    pass: EvictionPass,
    steps: usize,
) -> ExaminedGroup {
    let groups = &inventory.catalog.groups;
    let members = groups.members(object);
    let mut examined = groups.examined(object);
    let (mut found, mut first_to_move, mut others) = (None, None, 0);
    // A small group is examined at once.
    for &member in members[examined..].iter().take(steps.max(GROUP_SLICE)) {
        match memory_hold(inventory, now, member) {
            MemoryHold::Until(end) => {
                found = Some((end, member));
                break;
            }
            MemoryHold::Move => first_to_move = first_to_move.or(Some(examined)),
            MemoryHold::None => {}
        }
        examined += 1;
        others += usize::from(member != object);
    }
    let verdict = if let Some((end, _)) = found {
        Verdict::Wait(end)
    } else if pass == EvictionPass::Plain && groups.has_soft_pin(object) {
        Verdict::Demote
    } else if first_to_move.is_some() {
        Verdict::Move
    } else if examined < members.len() {
        Verdict::Unfinished
    } else {
        Verdict::Evict
    };
    ExaminedGroup {
        verdict,
        evictable: first_to_move.unwrap_or(examined),
        blocker: found.map(|(_, member)| member),
        steps: others,
    }
}
