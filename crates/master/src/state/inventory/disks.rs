//! Copies on disk: objects that get or lose one, that give their memory up because they have one, and
//! objects that wait to be written to a disk.

use std::collections::VecDeque;

use mooncake_base::Moment;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{
    catalog::{Catalog, object::Flags},
    ids::{DiskSlot, ObjectSlot},
    inventory::{Inventory, read::FenceTicket},
    ledger::effect::Effect,
    pool::disks::Disks,
    replica::DISK_ORDINAL,
};

/// How often an object is handed over for a disk before it stays in memory only.
pub(in crate::state) const TRIES_MAX: u8 = 3;

/// Objects that wait to be written to disks, or are being written.
#[derive(Debug, Default)]
pub(in crate::state) struct Offloads {
    by_disk: FxHashMap<DiskSlot, DiskOffloads>,
    /// Objects that wait, for all disks together.
    waiting: usize,
}

#[derive(Debug, Default)]
struct DiskOffloads {
    queue: VecDeque<WaitingObject>,
    /// What its owner has taken over and not reported, with how often it was handed over.
    taken: FxHashMap<(ObjectSlot, u64), (u8, Option<FenceTicket>)>,
    /// The objects that the owner named since it mounted the disk, if it names all that it has.
    named: Option<NamedObjects>,
}

/// Objects that the owner of a disk says it has.
#[derive(Debug, Default)]
struct NamedObjects {
    objects: FxHashSet<ObjectSlot>,
    /// Whether the owner has named all of them.
    is_complete: bool,
}

/// An object that waits to be written to a disk.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct WaitingObject {
    pub(in crate::state) object: ObjectSlot,
    pub(in crate::state) version: u64,
    pub(in crate::state) tries: u8,
}

impl Offloads {
    /// Returns the number of objects that wait for a disk.
    pub(in crate::state) fn waiting_for(&self, disk: DiskSlot) -> usize {
        self.by_disk.get(&disk).map_or(0, |offloads| offloads.queue.len())
    }

    /// Lets an object wait for the disk.
    pub(in crate::state) fn push(&mut self, disk: DiskSlot, waiting: WaitingObject) {
        self.by_disk.entry(disk).or_default().queue.push_back(waiting);
        self.waiting += 1;
    }

    /// Takes the object that has waited longest for the disk.
    pub(in crate::state) fn pop(&mut self, disk: DiskSlot) -> Option<WaitingObject> {
        let found = self.by_disk.get_mut(&disk)?.queue.pop_front()?;
        self.waiting -= 1;
        Some(found)
    }

    /// Records that the owner of the disk has taken an object over, and the fence that it reads under.
    pub(in crate::state) fn record_taken(
        &mut self,
        disk: DiskSlot,
        taken: WaitingObject,
        fence: Option<FenceTicket>,
    ) {
        let known = &mut self.by_disk.entry(disk).or_default().taken;
        known.insert((taken.object, taken.version), (taken.tries + 1, fence));
    }

    /// Forgets what was handed over of an object; returns how often, and the fence.
    pub(in crate::state) fn end_taken(
        &mut self,
        disk: DiskSlot,
        object: ObjectSlot,
        version: u64,
    ) -> Option<(u8, Option<FenceTicket>)> {
        self.by_disk.get_mut(&disk)?.taken.remove(&(object, version))
    }

    /// Forgets what waits for a disk that is no longer there.
    pub(in crate::state) fn forget(&mut self, disk: DiskSlot) {
        if let Some(offloads) = self.by_disk.remove(&disk) {
            self.waiting -= offloads.queue.len();
        }
    }

    /// Begins to collect the objects that the owner names.
    pub(in crate::state) fn begin_naming(&mut self, disk: DiskSlot) {
        self.by_disk.entry(disk).or_default().named = Some(NamedObjects::default());
    }

    /// Records that the owner has the object.
    pub(in crate::state) fn record_named(&mut self, disk: DiskSlot, object: ObjectSlot) {
        if let Some(named) = self.named_mut(disk) {
            named.objects.insert(object);
        }
    }

    /// Records that the owner has named all objects. Returns `false` if they were not collected.
    pub(in crate::state) fn end_naming(&mut self, disk: DiskSlot) -> bool {
        let named = self.named_mut(disk);
        named.map(|named| named.is_complete = true).is_some()
    }

    /// Returns whether the owner has named the object; `None` while it has not named all.
    pub(in crate::state) fn is_named(&self, disk: DiskSlot, object: ObjectSlot) -> Option<bool> {
        let named = self.by_disk.get(&disk)?.named.as_ref()?;
        named.is_complete.then(|| named.objects.contains(&object))
    }

    /// Forgets what the owner has named.
    pub(in crate::state) fn forget_named(&mut self, disk: DiskSlot) {
        if let Some(offloads) = self.by_disk.get_mut(&disk) {
            offloads.named = None;
        }
    }

    fn named_mut(&mut self, disk: DiskSlot) -> Option<&mut NamedObjects> {
        self.by_disk.get_mut(&disk)?.named.as_mut()
    }
}

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
}

/// Enters the copy on disk of an object that has none.
pub(in crate::state) fn place_copy(
    catalog: &mut Catalog,
    disks: &mut Disks,
    slot: ObjectSlot,
    disk: DiskSlot,
) {
    catalog.disk_copies.insert(slot, disk);
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

/// Frees the memory of an object that has a copy on disk.
pub(in crate::state) fn drop_memory(inventory: &mut Inventory, now: Moment, slot: ObjectSlot) {
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
            inventory.free_or_quarantine(now, replica, (until, 0), position);
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

/// Lets a new object wait for a disk: one of the host that has its memory, else the one with the
/// most space.
pub(in crate::state) fn queue_offload(inventory: &mut Inventory, slot: ObjectSlot) {
    if inventory.pool.disks.is_empty() {
        return;
    }
    let Some(rules) = &inventory.rules.offload else { return };
    if inventory.offloads.waiting >= rules.queue_max {
        inventory.log.counters.offloads_refused += 1;
        return;
    }
    let object = inventory.catalog.objects.at(slot);
    let version = object.version;
    let Some(first) = object.replicas.first() else { return };
    let host = &inventory.pool.segments.at(first.segment).host;
    let best = inventory
        .pool
        .disks
        .kept()
        .filter(|(_, disk)| disk.is_readable() && disk.spec.capacity >= object.length)
        .max_by_key(|(_, disk)| (disk.host == *host, disk.spec.capacity.saturating_sub(disk.used)));
    if let Some((disk, _)) = best {
        inventory.offloads.push(disk, WaitingObject { object: slot, version, tries: 0 });
        inventory.log.has_offloads = true;
    }
}
