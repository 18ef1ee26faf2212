//! Objects that move down to a disk because their memory is wanted.

use std::ops::ControlFlow;

use mooncake_base::Moment;

use crate::state::{
    catalog::order::EvictionPass,
    ids::ObjectSlot,
    inventory::{
        Inventory,
        ahead::excess_ahead,
        eviction::Verdict,
        hold::{MemoryHold, is_queue_full, is_usable, memory_hold, outlet},
        offloads::WaitingObject,
    },
    pool::freed::FreedTo,
};

/// Objects move down ahead of need, so that puts need not wait for disks: this share of the pool, one
/// in this many, ...
const AHEAD_SHARE: u64 = 16;

/// ... or this many bytes in a smaller pool, ...
const AHEAD_MIN: u64 = 64 << 20;

/// ... but at most this share of it, one in this many.
const AHEAD_SHARE_MAX: u64 = 4;

/// Objects of the order of eviction that are looked at for that at a time.
const LOOKED_AT_MAX: usize = 4096;

/// Members of a large group that begin to move down at a time.
const MEMBERS_MAX: usize = 1024;

/// Objects that moved down ahead of need.
#[derive(Debug, Default)]
pub(in crate::state) struct MovedAhead {
    /// Bytes of the next victims that had a copy on disk, or began to move down, when they were looked
    /// at last.
    bytes: u64,
    /// Bytes that had been evicted then.
    evicted: u64,
}

/// Lets an object move down, unless it does already or too many others wait.
fn move_down(inventory: &mut Inventory, now: Moment, slot: ObjectSlot) {
    if let Some(disk) = inventory.offloads.moves_to(slot) {
        if is_usable(inventory, now, disk) {
            return;
        }
        inventory.offloads.end_move(slot);
    }
    let Some(rules) = &inventory.rules.offload else { return };
    if is_queue_full(inventory, rules) {
        return;
    }
    let Some(disk) = outlet(inventory, now, slot) else { return };
    let version = inventory.catalog.objects.at(slot).version;
    let waiting = WaitingObject { object: slot, version, tries: 0 };
    inventory.offloads.begin_move(now, disk, waiting);
    inventory.log.has_offloads = true;
}

/// Lets those of an object and its group move down that have to before the group is evicted.
/// Returns whether there are any.
pub(in crate::state) fn move_group_down(
    inventory: &mut Inventory,
    now: Moment,
    object: ObjectSlot,
) -> bool {
    if inventory.pool.disks.is_empty() || inventory.catalog.groups.is_condemned(object) {
        return false;
    }
    let members = inventory.catalog.groups.members(object);
    let members = if members.is_empty() {
        vec![object]
    } else {
        // Those before were examined: they need not move.
        members.iter().skip(inventory.catalog.groups.examined(object)).copied().collect()
    };
    let mut moves = 0;
    for member in members {
        if moves < MEMBERS_MAX && memory_hold(inventory, now, member) == MemoryHold::Move {
            move_down(inventory, now, member);
            moves += 1;
        }
    }
    moves > 0
}

/// A put waits for disks: lets more of the next victims move down, so that later ones need not.
/// Returns the progress that the put waits for.
pub(in crate::state) fn await_disks(inventory: &mut Inventory, now: Moment, need: u64) -> u64 {
    inventory.log.counters.waits_for_disks += 1;
    inventory.offloads.leave_stalled(now);
    move_ahead(inventory, now, need.saturating_add(ahead_target(inventory)));
    inventory.offloads.progress()
}

/// Lets more of the next victims move down after an eviction, if puts have waited for disks and few
/// of the next victims are on disk.
pub(in crate::state) fn keep_moving_ahead(inventory: &mut Inventory, now: Moment) {
    let MovedAhead { bytes, evicted } = inventory.moved_ahead;
    if bytes > 0 && inventory.log.counters.evicted_bytes - evicted >= bytes / 2 {
        inventory.offloads.leave_stalled(now);
        move_ahead(inventory, now, ahead_target(inventory));
    }
}

/// Evicts an object that a disk has taken over, if memory is still wanted ahead of need.
pub(in crate::state) fn evict_moved(inventory: &mut Inventory, now: Moment, object: ObjectSlot) {
    if !inventory.is_evicting || excess_ahead(inventory).is_none() {
        return;
    }
    let mut steps = 0;
    if let Verdict::Evict = inventory.classify(now, object, EvictionPass::Soft, None, &mut steps) {
        inventory.evict_group(now, object, &mut FreedTo::Pool);
    }
    keep_moving_ahead(inventory, now);
}

fn ahead_target(inventory: &Inventory) -> u64 {
    let pool = inventory.pool.segments.mounted_bytes;
    AHEAD_MIN.min(pool / AHEAD_SHARE_MAX).max(pool / AHEAD_SHARE)
}

/// Lets some of the next victims move down, of which so many bytes are to be evicted ahead of need.
pub(in crate::state) fn move_excess(inventory: &mut Inventory, now: Moment, excess: u64) {
    if inventory.pool.disks.is_empty() {
        return;
    }
    match inventory.moved_ahead.bytes {
        0 => move_ahead(inventory, now, excess.min(ahead_target(inventory))),
        _ => keep_moving_ahead(inventory, now),
    }
}

/// Lets as many of the next victims move down as have so many bytes together.
pub(in crate::state) fn move_ahead(inventory: &mut Inventory, now: Moment, target: u64) {
    let (mut bytes, mut steps) = (0, LOOKED_AT_MAX);
    let mut found = Vec::new();
    inventory.catalog.queue.plain.visit_next(&mut |object| {
        if bytes >= target || steps == 0 {
            return ControlFlow::Break(());
        }
        steps -= 1;
        for member in inventory.catalog.first_of_group(object) {
            match memory_hold(inventory, now, member) {
                MemoryHold::Until(_) => continue,
                MemoryHold::Move => found.push(member),
                MemoryHold::None => {}
            }
            bytes += inventory.catalog.objects.at(member).bytes();
            steps = steps.saturating_sub(1);
        }
        ControlFlow::Continue(())
    });
    for object in found {
        move_down(inventory, now, object);
    }
    inventory.moved_ahead = MovedAhead { bytes, evicted: inventory.log.counters.evicted_bytes };
}
