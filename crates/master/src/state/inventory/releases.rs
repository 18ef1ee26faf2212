//! Releases the next victims ahead of need, so that puts need not wait for the log.

use std::ops::ControlFlow;

use mooncake_base::Moment;

use crate::state::{
    catalog::{group::GROUP_SLICE, object::Flags},
    ids::ObjectSlot,
    inventory::{
        Inventory,
        ahead::{LOOKED_AT_MAX, ORDER_PATIENCE, RELEASED_MAX, RELEASED_SLICE},
        hold::{MemoryHold, memory_hold},
        released::release,
    },
};

/// A put of `need` bytes has to wait for the log: raises the target, and releases the next
/// victims ahead, but for `spared`. Returns the log position to wait for: `evicted`, that behind
/// the records of what the put evicted, or that behind the other releases.
pub(in crate::state) fn raise_ahead(
    inventory: &mut Inventory,
    now: Moment,
    need: u64,
    evicted: u64,
    spared: Option<ObjectSlot>,
) -> u64 {
    inventory.ahead.put_waits(now, need, inventory.segments().mounted_bytes);
    // A sync of the last releases is under way. Puts that wait at the same time do not all look
    // through the order.
    if !inventory.pool.unsynced.is_synced(inventory.ahead.position) {
        return evicted;
    }
    inventory.ahead.is_filling = !release_ahead(inventory, now, spared);
    inventory.log().log_position()
}

/// Releases more objects ahead after an allocation, but for `spared`, if few of those that were
/// released are left.
pub(in crate::state) fn prepare_ahead(
    inventory: &mut Inventory,
    now: Moment,
    need: u64,
    spared: Option<ObjectSlot>,
) {
    let target = inventory.ahead.target;
    if target == 0 {
        return;
    }
    debug_assert!(
        inventory.segments().used_bytes <= inventory.segments().mounted_bytes,
        "allocated memory is mounted"
    );
    let free = inventory.segments().mounted_bytes.saturating_sub(inventory.segments().used_bytes);
    if free >= 4 * target.max(need) {
        // Memory came from elsewhere.
        (inventory.ahead.target, inventory.ahead.low, inventory.ahead.is_filling) = (0, 0, false);
        return;
    }
    if inventory.ahead.low > 0 && inventory.catalog.released.bytes() <= inventory.ahead.low {
        release_soon(inventory);
    }
    if inventory.ahead.is_filling && release_ahead(inventory, now, spared) {
        inventory.ahead.is_filling = false;
        inventory.pool.unsynced.is_sync_wanted = true;
        inventory.ahead.sync_requested(now, inventory.segments().mounted_bytes);
    }
}

/// Returns whether puts should evict objects whose release is on disk rather than the next
/// victims, among which are some that became evictable just now.
pub(in crate::state) fn prefers_released(inventory: &Inventory, now: Moment) -> bool {
    !inventory.catalog.released.is_empty()
        && inventory.ahead.waited.is_some_and(|last| now.since(last) < ORDER_PATIENCE)
}

/// Returns whether the release of all these objects is on disk.
pub(in crate::state) fn are_released(inventory: &Inventory, objects: &[ObjectSlot]) -> bool {
    objects.iter().all(|&object| {
        let position = inventory.catalog.released.position(object);
        position.is_some_and(|position| inventory.pool.unsynced.is_synced(position))
    })
}

/// Makes the next put release more objects, unless a sync of the last releases is under way.
pub(in crate::state) fn release_soon(inventory: &mut Inventory) {
    inventory.ahead.is_filling |= inventory.pool.unsynced.is_synced(inventory.ahead.position);
}

/// Records the release of some of the next victims, towards the target. They stay readable until
/// they are evicted. Returns `false` if the next call would release more.
fn release_ahead(inventory: &mut Inventory, now: Moment, spared: Option<ObjectSlot>) -> bool {
    let (mut bytes, mut steps) = (0, LOOKED_AT_MAX);
    let mut found = Vec::new();
    let (catalog, target) = (inventory.catalog(), inventory.ahead.target);
    let found_max = RELEASED_SLICE.min(RELEASED_MAX.saturating_sub(catalog.released.count()));
    catalog.queue.plain.visit_next(&mut |object| {
        if bytes >= target || steps == 0 || found.len() >= found_max {
            return ControlFlow::Break(());
        }
        steps -= 1;
        if catalog.released.contains(object) {
            bytes += catalog.objects.at(object).bytes();
        } else if may_be_released(inventory, now, object, spared, &mut steps) {
            bytes += catalog.objects.at(object).bytes();
            found.push(object);
        }
        ControlFlow::Continue(())
    });
    let is_done = found.len() < RELEASED_SLICE;
    for object in found {
        for member in inventory.catalog().first_of_group(object) {
            if !inventory.catalog.released.contains(member) {
                release(inventory, member);
            }
        }
        inventory.ahead.position = inventory.log().log_position();
    }
    // Where fewer objects than that may be evicted, the log is not synced for each of them.
    inventory.ahead.low = inventory.catalog.released.bytes().min(target) / 2;
    is_done
}

/// Returns whether the object and its group may be evicted now. Subtracts the other members that
/// it examines from `steps`.
fn may_be_released(
    inventory: &Inventory,
    now: Moment,
    object: ObjectSlot,
    spared: Option<ObjectSlot>,
    steps: &mut usize,
) -> bool {
    let members = inventory.groups().members(object);
    let group = if members.is_empty() { std::slice::from_ref(&object) } else { members };
    // A condemned or large group is evicted in slices.
    if group.len() > GROUP_SLICE || inventory.groups().is_condemned(object) {
        return false;
    }
    group.iter().all(|&member| {
        *steps = steps.saturating_sub(usize::from(member != object));
        let object = inventory.object(member);
        let mut copies = object.replicas.iter();
        spared != Some(member)
            && !object.flags.has(Flags::SOFT_PINNED)
            && memory_hold(inventory, now, member) == MemoryHold::None
            && copies.all(|copy| inventory.segment(copy.segment).is_mounted())
    })
}
