//! What keeps the memory of an object from eviction.

use std::time::Duration;

use mooncake_base::Moment;

use crate::state::{
    catalog::object::Flags,
    ids::{DiskSlot, ObjectSlot},
    inventory::{
        Inventory,
        disks::{disk_for, readable_disk},
    },
    lease::Timestamp,
    rules::OffloadRules,
};

/// Wait before an object is examined again that is never evicted, or that no disk takes now.
const EXAMINED_AGAIN: Duration = Duration::from_secs(1);

/// What keeps the memory of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum MemoryHold {
    /// Nothing: the object may be evicted. A copy on disk stays.
    None,
    /// It is protected until then.
    Until(Timestamp),
    /// It may be evicted once a disk has a copy, and some disk takes it.
    Move,
}

/// Returns what keeps the memory of the object itself, apart from its group.
pub(in crate::state) fn memory_hold(
    inventory: &Inventory,
    now: Moment,
    slot: ObjectSlot,
) -> MemoryHold {
    if inventory.pool.disks.is_empty() {
        let end = inventory.catalog.objects.at(slot).protection.protected_until();
        return match other_protection(inventory, now, slot).max(end) {
            end if end > now.into() => MemoryHold::Until(end),
            _ => MemoryHold::None,
        };
    }
    if inventory.offloads.moves_to(slot).is_some_and(|disk| is_usable(inventory, now, disk)) {
        return MemoryHold::Move;
    }
    let object = inventory.catalog.objects.at(slot);
    let end = other_protection(inventory, now, slot).max(object.protection.memory_until());
    if end > now.into() {
        return MemoryHold::Until(end);
    }
    let is_leased = object.protection.is_leased(now);
    let until = |retry: Option<Moment>| {
        let end = object.protection.lease();
        MemoryHold::Until(retry.map_or(end, |retry| end.min(retry.into())))
    };
    if inventory.disk_copy(slot).is_some() {
        return if is_leased && readable_disk(inventory, slot).is_none() {
            until(Some(now + EXAMINED_AGAIN))
        } else {
            MemoryHold::None
        };
    }
    let Some(rules) = &inventory.rules.offload else { return MemoryHold::None };
    if !is_leased && (!rules.is_on_eviction || is_dropped_when_full(inventory, rules)) {
        return MemoryHold::None;
    }
    let given_up = inventory.offloads.given_up_until(now, slot, object.version);
    if given_up.is_none() && outlet(inventory, now, slot).is_some() {
        MemoryHold::Move
    } else if is_leased {
        until(Some(given_up.unwrap_or(now + EXAMINED_AGAIN)))
    } else {
        MemoryHold::None
    }
}

/// Returns until when something else than lease and fence keeps the object.
fn other_protection(inventory: &Inventory, now: Moment, slot: ObjectSlot) -> Timestamp {
    let mut end = inventory.catalog.copying_until(slot);
    if inventory.is_unclaimed(slot) {
        end = end.max(inventory.recovery.end().into());
    }
    if inventory.catalog.objects.at(slot).flags.has(Flags::HARD_PINNED) {
        end = end.max((now + EXAMINED_AGAIN).into());
    }
    end
}

/// Returns whether eviction drops objects that would have to wait for a disk.
fn is_dropped_when_full(inventory: &Inventory, rules: &OffloadRules) -> bool {
    rules.moves_max == 0 || (rules.drops_when_full && is_queue_full(inventory, rules))
}

/// Returns whether as many objects wait or move down as may.
pub(super) fn is_queue_full(inventory: &Inventory, rules: &OffloadRules) -> bool {
    inventory.offloads.moving() >= rules.moves_max
        || inventory.offloads.waiting() >= rules.queue_max
}

/// Returns whether objects move down to the disk.
pub(super) fn is_usable(inventory: &Inventory, now: Moment, disk: DiskSlot) -> bool {
    inventory.pool.disks.at(disk).is_readable() && !inventory.offloads.is_left_alone(now, disk)
}

/// Returns the disk that an object without a copy on disk moves down to, or would.
pub(super) fn outlet(inventory: &Inventory, now: Moment, slot: ObjectSlot) -> Option<DiskSlot> {
    let version = inventory.catalog.objects.at(slot).version;
    match inventory.offloads.disk_of(slot, version) {
        Some(disk) => is_usable(inventory, now, disk).then_some(disk),
        None => disk_for(inventory, slot, |disk| is_usable(inventory, now, disk)),
    }
}
