//! Sweeps: the replicas of segments that left the pool are dropped, a slice of objects at a time.

use crate::state::{
    catalog::object::Flags,
    ids::{DiskSlot, ObjectSlot, SegmentSlot, Slot},
    inventory::{Inventory, disks},
    replica::{Replica, Replicas},
};

/// Objects that one slice of a sweep checks.
const SWEEP_SLICE: u32 = 4096;

/// Segments that left the pool and whose replicas are still to be dropped.
#[derive(Debug)]
pub(in crate::state) struct Sweeps {
    /// Objects that one slice checks.
    slice: u32,
    segments: Vec<SegmentSlot>,
    next: u32,
    /// Segments that left during a sweep; the next sweep handles them.
    waiting: Vec<SegmentSlot>,
    /// The same for disks.
    disks: Vec<DiskSlot>,
    waiting_disks: Vec<DiskSlot>,
}

impl Default for Sweeps {
    fn default() -> Self {
        Self {
            slice: SWEEP_SLICE,
            segments: Vec::new(),
            next: 0,
            waiting: Vec::new(),
            disks: Vec::new(),
            waiting_disks: Vec::new(),
        }
    }
}

impl Sweeps {
    pub(in crate::state) fn begin(&mut self, segment: SegmentSlot) {
        if self.next == 0 {
            self.segments.push(segment);
        } else {
            self.waiting.push(segment);
        }
    }

    pub(in crate::state) fn begin_disk(&mut self, disk: DiskSlot) {
        if self.next == 0 {
            self.disks.push(disk);
        } else {
            self.waiting_disks.push(disk);
        }
    }

    pub(in crate::state) fn is_idle(&self) -> bool {
        self.segments.is_empty() && self.disks.is_empty()
    }
}

impl Inventory {
    /// Drops replicas in segments that left the pool. Returns whether the object is still readable.
    pub(in crate::state) fn drop_lost_replicas(&mut self, slot: ObjectSlot) -> bool {
        let object = self.catalog.objects.at(slot);
        if self.sweeps.is_idle() || !object.is_complete() {
            return object.is_complete();
        }
        let has_disk_copy = disks::drop_lost_copy(self, slot);
        let object = self.catalog.objects.at(slot);
        let is_mounted = |replica: &&Replica| self.pool.segments.at(replica.segment).is_mounted();
        let replicas = &object.replicas[..];
        let kept: Vec<Replica> = replicas.iter().filter(is_mounted).copied().collect();
        let has_memory = !kept.is_empty();
        let is_kept = has_memory || has_disk_copy;
        if kept.len() == replicas.len() && is_kept {
            return true;
        }
        let before = object.bytes();
        let object = self.catalog.objects.at_mut(slot);
        object.replicas = Replicas::from(kept);
        self.catalog.tenants.uncharge(object.tenant, before - object.bytes());
        if object.flags.has(Flags::PARKED) {
            self.catalog.queue.parked_bytes -= before - object.bytes();
        }
        if !is_kept {
            self.clear_value(slot);
        } else if !has_memory {
            disks::leave_memory(self, slot);
        }
        is_kept
    }
}

/// Runs one slice of a sweep. Returns whether work is left.
pub(in crate::state) fn sweep(inventory: &mut Inventory) -> bool {
    if inventory.sweeps.is_idle() {
        return false;
    }
    let start = inventory.sweeps.next;
    let end =
        start.saturating_add(inventory.sweeps.slice).min(inventory.catalog.objects.slot_count());
    for slot in ObjectSlot::range(start, end) {
        if inventory.catalog.objects.get(slot).is_some() {
            inventory.drop_lost_replicas(slot);
            inventory.catalog.remove_if_empty(slot);
        }
    }
    inventory.sweeps.next = end;
    if end == inventory.catalog.objects.slot_count() {
        for segment in std::mem::take(&mut inventory.sweeps.segments) {
            inventory.pool.segments.free_slot(segment);
        }
        for disk in std::mem::take(&mut inventory.sweeps.disks) {
            inventory.pool.disks.free_slot(disk);
        }
        inventory.sweeps.segments = std::mem::take(&mut inventory.sweeps.waiting);
        inventory.sweeps.disks = std::mem::take(&mut inventory.sweeps.waiting_disks);
        inventory.sweeps.next = 0;
    }
    !inventory.sweeps.is_idle()
}

/// Limits how many objects one slice of a sweep checks.
#[cfg(feature = "test-util")]
pub(in crate::state) fn limit_slices(inventory: &mut Inventory, objects: u32) {
    inventory.sweeps.slice = objects;
}

/// Returns whether objects are left to sweep.
#[cfg(feature = "test-util")]
pub(in crate::state) fn is_sweeping(inventory: &Inventory) -> bool {
    !inventory.sweeps.is_idle()
}
