//! Disks that come into the pool, change their owner, and leave it.

use mooncake_base::{ClientId, KeyRef, Moment, TenantId};

use crate::state::{
    catalog::object::Flags,
    ids::DiskSlot,
    inventory::{Inventory, disks::place_copy, offloads::WaitingObject},
    ledger::{effect::Effect, objects::logged_object},
    pool::disks::{DiskPresence, DiskSpec},
    timer::Timer,
};

/// Versions that are skipped behind that of an adopted record: the lost log may have given those that
/// follow to records that nobody has reported yet. More than many restarts skip.
pub(in crate::state) const ADOPTED_SKIP: u64 = 1 << 40;

/// Adds a disk to the pool. Returns `None` if there are too many.
pub(in crate::state) fn insert(
    inventory: &mut Inventory,
    client: ClientId,
    spec: DiskSpec,
    presence: DiskPresence,
) -> Option<DiskSlot> {
    let pool = &mut inventory.pool;
    // Segments and disks are numbered together.
    let number = pool.segments.next_number();
    let slot = pool.disks.insert(number, client, spec, presence)?;
    pool.segments.set_next_number(number.0 + 1);
    log_mount(inventory, slot);
    Some(slot)
}

/// Gives a known disk an owner.
pub(in crate::state) fn set_owner(
    inventory: &mut Inventory,
    slot: DiskSlot,
    client: ClientId,
    spec: DiskSpec,
    presence: DiskPresence,
) {
    let disks = &mut inventory.pool.disks;
    disks.set_presence(slot, presence);
    disks.set_owner(slot, client, spec);
}

/// Records the disk and its owner in the log.
pub(in crate::state) fn log_mount(inventory: &mut Inventory, slot: DiskSlot) {
    let Inventory { log, pool, .. } = inventory;
    let disk = pool.disks.at(slot);
    let (number, client) = (disk.number, disk.client);
    log.effects.record(|| Effect::DiskMounted { number, client, spec: disk.spec.clone() });
}

/// Records how many bytes the records of a disk take.
pub(in crate::state) fn set_used(inventory: &mut Inventory, slot: DiskSlot, bytes: u64) {
    inventory.pool.disks.at_mut(slot).used = bytes;
}

/// Lets objects wait again that an earlier owner of the disk had taken over, and others move down to it.
pub(in crate::state) fn begin_ownership(inventory: &mut Inventory, slot: DiskSlot) {
    inventory.offloads.change_owner(slot);
    inventory.log.has_offloads = true;
    inventory.catalog.queue.examine_parked_early();
}

/// Hides the copies on a disk that nobody has open any more.
pub(in crate::state) fn set_away(inventory: &mut Inventory, now: Moment, slot: DiskSlot) {
    let until = now + inventory.rules.disk_away_ttl;
    inventory.pool.disks.set_presence(slot, DiskPresence::Away(until));
    forget_waiting(inventory, slot);
    // An owner that waits for objects learns that it waits in vain.
    inventory.log.has_offloads = true;
    let id = inventory.pool.disks.at(slot).spec.id;
    inventory.timers.push(until, Timer::DiskAway(id));
}

/// Drops a disk and every copy in it.
pub(in crate::state) fn drop_disk(inventory: &mut Inventory, slot: DiskSlot) {
    let disk = inventory.pool.disks.at(slot);
    let (number, is_used) = (disk.number, disk.objects > 0);
    inventory.log.effects.record(|| Effect::SegmentDropped { number });
    forget_waiting(inventory, slot);
    inventory.pool.disks.set_presence(slot, DiskPresence::Dropped);
    if is_used { inventory.sweeps.begin_disk(slot) } else { inventory.pool.disks.free_slot(slot) }
}

/// Forgets the objects that wait for a disk, or to be brought into memory from it.
fn forget_waiting(inventory: &mut Inventory, slot: DiskSlot) {
    inventory.offloads.forget(slot);
    let promotions = inventory.promotions.forget(slot);
    inventory.log.counters.promotions_cancelled += promotions as u64;
}

/// Marks the disks of a client whose connection closed, or that is back.
pub(in crate::state) fn mark_suspect(
    inventory: &mut Inventory,
    client: ClientId,
    is_suspect: bool,
) {
    let Inventory { pool, offloads, catalog, .. } = inventory;
    for slot in pool.disks.of_client(client) {
        let presence = if is_suspect { DiskPresence::Suspect } else { DiskPresence::Present };
        pool.disks.set_presence(slot, presence);
        offloads.record_progress();
        if !is_suspect {
            catalog.queue.examine_parked_early();
        }
    }
}

/// Lets an object that was taken over wait for its disk again.
pub(in crate::state) fn repeat_offload(
    inventory: &mut Inventory,
    disk: DiskSlot,
    waiting: WaitingObject,
) {
    inventory.offloads.repeat(disk, waiting);
    inventory.log.has_offloads = true;
}

/// An object that only a record on a disk tells of.
#[derive(Debug)]
pub(in crate::state) struct AdoptedObject<'a> {
    pub(in crate::state) tenant: &'a TenantId,
    pub(in crate::state) key: KeyRef<'a>,
    pub(in crate::state) version: u64,
    pub(in crate::state) length: u64,
}

/// Makes an object of a record on a disk, unless there is one with its key. Returns whether it did.
pub(in crate::state) fn adopt(
    inventory: &mut Inventory,
    disk: DiskSlot,
    adopted: &AdoptedObject<'_>,
) -> bool {
    let Inventory { catalog, pool, log, next_version, .. } = inventory;
    let Ok(tenant) = catalog.objects.intern_tenant(adopted.tenant) else { return false };
    if catalog.objects.find(tenant, adopted.key.as_bytes()).is_some() {
        return false;
    }
    let Ok(slot) = catalog.objects.insert(tenant, adopted.key) else { return false };
    let object = catalog.objects.at_mut(slot);
    (object.version, object.length) = (adopted.version, adopted.length);
    object.flags.set(Flags::COMPLETE, true);
    catalog.objects.complete += 1;
    *next_version = (*next_version).max(adopted.version + ADOPTED_SKIP);
    place_copy(catalog, &mut pool.disks, slot, disk);
    if let Some(live) = logged_object(catalog, pool, slot, catalog.objects.at(slot)) {
        log.effects.record(|| live);
    }
    log.counters.records_adopted += 1;
    log.emit_stored(catalog, slot);
    inventory.offloads.record_named(disk, slot);
    true
}
