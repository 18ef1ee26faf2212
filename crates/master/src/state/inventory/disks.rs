//! Copies on disk: objects that get or lose one, or give their memory up because they have one, and new
//! objects that wait for a disk.

use mooncake_base::Moment;

use crate::state::{
    catalog::{Catalog, object::Flags},
    ids::{DiskSlot, ObjectSlot},
    inventory::{Inventory, offloads::WaitingObject},
    ledger::effect::Effect,
    pool::{
        disks::{Disks, PoolDisk},
        freed::FreedTo,
    },
    replica::DISK_ORDINAL,
};

impl Inventory {
    /// Returns the disk that has a copy of the object, also if it cannot be read now.
    pub(in crate::state) fn disk_copy(&self, slot: ObjectSlot) -> Option<DiskSlot> {
        let disk = self.catalog.disk_copies.get(slot)?;
        self.pool.disks.at(disk).is_kept().then_some(disk)
    }
}

/// Returns the disk from which the object can be read.
pub(in crate::state) fn readable_disk(inventory: &Inventory, slot: ObjectSlot) -> Option<DiskSlot> {
    let disk = inventory.catalog.disk_copies.get(slot)?;
    inventory.pool.disks.at(disk).is_readable().then_some(disk)
}

/// Records that a disk has a copy of a complete object, which has none on another disk.
pub(in crate::state) fn add_copy(inventory: &mut Inventory, slot: ObjectSlot, disk: DiskSlot) {
    inventory.offloads.record_named(disk, slot);
    if inventory.disk_copy(slot) == Some(disk) {
        return;
    }
    inventory.take_back(slot);
    forget_copy(inventory, slot);
    let Inventory { catalog, pool, log, .. } = inventory;
    place_copy(catalog, &mut pool.disks, slot, disk);
    let object = catalog.objects.at(slot);
    log.effects.record(|| Effect::ReplicaAdded {
        object: catalog.objects.logged_name(object),
        copy: pool.disks.at(disk).logged_copy(),
    });
    if object.flags.has(Flags::PARKED) {
        // Perhaps because of its lease, which no longer keeps its memory.
        inventory.catalog.end_parking(slot);
    }
}

/// Enters the copy on disk of an object that has none.
pub(in crate::state) fn place_copy(
    catalog: &mut Catalog,
    disks: &mut Disks,
    slot: ObjectSlot,
    disk: DiskSlot,
) {
    catalog.disk_copies.insert(slot, disk);
    let object = catalog.objects.at(slot);
    catalog.tenants.usage(object.tenant).on_disk += object.length;
    disks.at_mut(disk).objects += 1;
}

/// Drops the copy on disk of an object; the object is removed with its last copy.
pub(in crate::state) fn drop_copy(inventory: &mut Inventory, now: Moment, slot: ObjectSlot) {
    if inventory.catalog.objects.at(slot).replicas.is_empty() {
        inventory.drop_value(now, slot);
        inventory.catalog.remove_if_empty(slot);
        return;
    }
    // The log may say already that the memory is given up.
    inventory.take_back(slot);
    forget_copy(inventory, slot);
    let Inventory { catalog, log, .. } = inventory;
    let object = catalog.objects.logged_name(catalog.objects.at(slot));
    log.effects.record(|| Effect::ReplicaDropped { object, ordinal: DISK_ORDINAL });
}

/// Forgets the copy on disk of an object that is removed or has lost it.
pub(in crate::state) fn forget_copy(inventory: &mut Inventory, slot: ObjectSlot) {
    if let Some(disk) = inventory.catalog.disk_copies.remove(slot) {
        let object = inventory.catalog.objects.at(slot);
        inventory.catalog.tenants.usage(object.tenant).on_disk -= object.length;
        inventory.pool.disks.at_mut(disk).objects -= 1;
    }
}

/// Drops the copy of an object on a disk that left the pool. Returns whether it has one on a disk
/// that did not.
pub(in crate::state) fn drop_lost_copy(inventory: &mut Inventory, slot: ObjectSlot) -> bool {
    let has_copy = inventory.disk_copy(slot).is_some();
    if !has_copy {
        forget_copy(inventory, slot);
    }
    has_copy
}

/// Frees the memory of an object that has a copy on disk. Memory that needs no quarantine goes where `to`
/// says.
pub(in crate::state) fn drop_memory(
    inventory: &mut Inventory,
    now: Moment,
    slot: ObjectSlot,
    to: &mut FreedTo<'_>,
) {
    if !inventory.catalog.objects.at(slot).replicas.is_empty() {
        let position = inventory.catalog.released.position(slot).unwrap_or_else(|| {
            inventory.log.record_release(&inventory.catalog, slot);
            inventory.log.effects.position()
        });
        inventory.catalog.dequeue(slot);
        let copied = inventory.catalog.copying_until(slot);
        let object = inventory.catalog.objects.at_mut(slot);
        let until = object.protection.fence().max(copied);
        inventory.catalog.tenants.uncharge(object.tenant, object.bytes());
        let is_hard_pinned = object.flags.has(Flags::HARD_PINNED);
        for &replica in std::mem::take(&mut object.replicas).iter() {
            if is_hard_pinned {
                inventory.pool.remove_hard_pin(&replica);
            }
            inventory.free_or_quarantine(now, replica, until, 0, position, to);
        }
    }
    leave_memory(inventory, slot);
}

/// Takes an object that has no memory any more out of the orders of eviction.
pub(in crate::state) fn leave_memory(inventory: &mut Inventory, slot: ObjectSlot) {
    inventory.catalog.dequeue(slot);
    inventory.catalog.released.remove(slot);
    let object = inventory.catalog.objects.at_mut(slot);
    inventory.catalog.tenants.remove_object(object.tenant, slot);
    if inventory.catalog.groups.is_condemned(slot) {
        // The eviction of its group goes on with the next member.
        let flags = &mut inventory.catalog.objects.at_mut(slot).flags;
        flags.set(Flags::GROUPED, false);
        let is_hard_pinned = flags.has(Flags::HARD_PINNED);
        inventory.catalog.leave_group(slot, is_hard_pinned);
    }
}

/// Puts an object that has got memory again into the orders of eviction.
pub(in crate::state) fn enter_memory(inventory: &mut Inventory, slot: ObjectSlot) {
    let tenant = inventory.catalog.objects.at(slot).tenant;
    inventory.catalog.tenants.add_object(tenant, slot);
    inventory.catalog.enqueue(slot);
}

/// Lets a new object wait for a disk, unless objects are written when they are evicted.
pub(in crate::state) fn queue_offload(inventory: &mut Inventory, slot: ObjectSlot) {
    if inventory.pool.disks.is_empty() {
        return;
    }
    let Some(rules) = &inventory.rules.offload else { return };
    if rules.is_on_eviction {
        return;
    }
    if inventory.offloads.waiting() >= rules.queue_max {
        inventory.log.counters.offloads_refused += 1;
        return;
    }
    let version = inventory.catalog.objects.at(slot).version;
    if let Some(disk) = disk_for(inventory, slot, |_| true) {
        inventory.offloads.push(disk, WaitingObject { object: slot, version, tries: 0 });
        inventory.log.has_offloads = true;
    }
}

/// Returns the disk that is to take an object over: one of the host that has its memory, else the one
/// with the most space.
pub(in crate::state) fn disk_for(
    inventory: &Inventory,
    slot: ObjectSlot,
    is_usable: impl Fn(DiskSlot) -> bool,
) -> Option<DiskSlot> {
    let Inventory { pool, catalog, .. } = inventory;
    let object = catalog.objects.at(slot);
    let host = &pool.segments.at(object.replicas.first()?.segment).host;
    let disks = pool.disks.kept().filter(|&(slot, disk)| {
        disk.is_readable() && disk.spec.capacity >= object.length && is_usable(slot)
    });
    let free = |disk: &PoolDisk| disk.spec.capacity.saturating_sub(disk.used);
    let best = disks.max_by_key(|(_, disk)| (disk.host == *host, free(disk)));
    best.map(|(slot, _)| slot)
}
