//! What the owner of a disk reports: records that were written, lost or refused, and all that it has.

use mooncake_base::{KeyRef, Moment, TenantId, Version};

use crate::state::{
    ids::{DiskSlot, ObjectSlot, Slot},
    inventory::{
        Inventory, disks,
        mounted_disks::{self, ADOPTED_SKIP, AdoptedObject},
        moves,
        offloads::{TRIES_MAX, WaitingObject},
    },
};

/// Objects that one slice of a confirmation looks at.
const CONFIRM_SLICE: u32 = 65_536;

/// Versions above this leave no room for the ordinal of a replica.
const VERSION_MAX: u64 = 1 << 48;

/// A version of an object, as the owner of a disk names it.
#[derive(Debug, Clone, Copy)]
pub struct RecordName<'a> {
    /// The tenant.
    pub tenant: &'a TenantId,
    /// The key.
    pub key: &'a [u8],
    /// The version.
    pub version: Version,
    /// The length in bytes.
    pub length: u64,
}

/// A disk that its owner has open, while the state is locked: it may be gone afterwards.
#[derive(Debug)]
pub struct OwnDisk<'a> {
    pub(super) inventory: &'a mut Inventory,
    pub(super) slot: DiskSlot,
}

impl OwnDisk<'_> {
    /// Records how many bytes the records take.
    pub fn set_used(&mut self, bytes: u64) {
        mounted_disks::set_used(self.inventory, self.slot, bytes);
    }

    /// Records that the disk has a record. Returns `false` if it is not the present version of its
    /// object, so that nobody will ask for it.
    pub fn record_added(&mut self, now: Moment, record: &RecordName<'_>) -> bool {
        let Some(object) = self.present_version(now, record) else {
            let rules = self.inventory.rules().offload.as_ref();
            return rules.is_some_and(|rules| rules.adopts_records) && self.adopt(record);
        };
        let elsewhere = disks::readable_disk(self.inventory, object);
        let length = self.inventory.object(object).length;
        if elsewhere.is_some_and(|disk| disk != self.slot) || length != record.length {
            return false;
        }
        self.end_taken(object, record.version);
        self.inventory.counters_mut().offloads_done += 1;
        self.inventory.counters_mut().offloaded_bytes += length;
        self.inventory.offloads_mut().record_written(self.slot);
        let is_wanted = self.inventory.offloads().moves_to(object).is_some();
        self.inventory.offloads_mut().end_move(object);
        disks::add_copy(self.inventory, object, self.slot);
        if is_wanted {
            self.inventory.offloads_mut().record_report(now, self.slot);
            moves::evict_moved(self.inventory, now, object);
        }
        true
    }

    /// Records that the disk lost a record. An object that was taken over and lost before it was reported, or
    /// that is too long for the disk, is not handed over again for a while.
    pub fn record_lost(&mut self, now: Moment, record: &RecordName<'_>) {
        let Some(object) = self.present_version(now, record) else { return };
        if self.inventory.disk_copy(object) == Some(self.slot) {
            self.inventory.counters_mut().disk_copies_lost += 1;
            disks::drop_copy(self.inventory, now, object);
        } else if self.end_taken(object, record.version).is_some() {
            self.inventory.offloads_mut().set_aside(now, object, record.version.0);
            self.inventory.offloads_mut().record_report(now, self.slot);
        }
    }

    /// Records that an object could not be written to the disk. It is handed over again, a few times.
    pub fn record_refused(&mut self, now: Moment, record: &RecordName<'_>) {
        let Some(object) = self.present_version(now, record) else { return };
        let tries = self.end_taken(object, record.version).unwrap_or(TRIES_MAX);
        let version = record.version.0;
        if tries < TRIES_MAX {
            let waiting = WaitingObject { object, version, tries };
            mounted_disks::repeat_offload(self.inventory, self.slot, waiting);
        } else {
            self.inventory.counters_mut().offloads_failed += 1;
            self.inventory.offloads_mut().give_up(now, self.slot, object, version);
        }
        self.inventory.offloads_mut().record_report(now, self.slot);
    }

    /// Records that the owner has named every object that the disk has. Returns `false` if it did not
    /// announce that when it mounted the disk.
    pub fn end_naming(&mut self) -> bool {
        self.inventory.offloads_mut().end_naming(self.slot)
    }

    /// Drops those copies on the disk, among the objects of one slice from `next` on, that its owner
    /// did not name. Returns whether it has looked at all objects, or the owner names them anew.
    pub fn drop_unnamed(&mut self, now: Moment, next: &mut u32) -> bool {
        let count = self.inventory.objects().slot_count();
        let end = next.saturating_add(CONFIRM_SLICE).min(count);
        for object in ObjectSlot::range(*next, end) {
            let Some(is_named) = self.inventory.offloads().is_named(self.slot, object) else {
                return true;
            };
            let is_lost = !is_named && self.inventory.disk_copy(object) == Some(self.slot);
            if is_lost && self.inventory.objects().get(object).is_some() {
                disks::drop_copy(self.inventory, now, object);
            }
        }
        *next = end;
        if end == count {
            self.inventory.offloads_mut().forget_named(self.slot);
        }
        end == count
    }

    /// Finds the object that a record is the present version of.
    fn present_version(&mut self, now: Moment, record: &RecordName<'_>) -> Option<ObjectSlot> {
        let tenant = self.inventory.objects().tenant_index(record.tenant)?;
        let slot = self.inventory.find(now, tenant, record.key)?;
        let object = self.inventory.object(slot);
        (object.is_complete() && object.version() == record.version).then_some(slot)
    }

    /// Makes an object of a record that no object has the key of. Returns whether it did.
    fn adopt(&mut self, record: &RecordName<'_>) -> bool {
        let versions = 1..VERSION_MAX - ADOPTED_SKIP;
        let is_sane = record.length > 0 && versions.contains(&record.version.0);
        let (Ok(key), true) = (KeyRef::new(record.key), is_sane) else { return false };
        let version = record.version.0;
        let object = AdoptedObject { tenant: record.tenant, key, version, length: record.length };
        mounted_disks::adopt(self.inventory, self.slot, &object)
    }

    /// Ends the reading of an object that was handed over. Returns how often it was.
    fn end_taken(&mut self, object: ObjectSlot, version: Version) -> Option<u8> {
        let (tries, fence) =
            self.inventory.offloads_mut().end_taken(self.slot, object, version.0)?;
        if let Some(ticket) = fence {
            self.inventory.release_fence(ticket);
        }
        Some(tries)
    }
}
