//! The catalog: objects by tenant and key, their groups, the tenants' quotas, and calls that list or
//! remove objects.

pub(in crate::state) mod annotations;
pub(in crate::state) mod disk_copies;
pub mod eviction;
pub(in crate::state) mod group;
pub(in crate::state) mod key_arena;
pub(in crate::state) mod object;
pub(in crate::state) mod order;
pub(in crate::state) mod pins;
pub(in crate::state) mod released;
pub(in crate::state) mod split_map;
pub(in crate::state) mod tenant;

use mooncake_base::Moment;
use rustc_hash::FxHashMap;

use crate::state::{
    catalog::{
        annotations::{Annotation, Annotations},
        disk_copies::DiskCopies,
        group::Groups,
        object::{Flags, NO_WRITE, Objects},
        order::EvictionQueue,
        pins::Pins,
        released::ReleasedObjects,
        tenant::Tenants,
    },
    ids::ObjectSlot,
    lease::Timestamp,
};

/// Objects by key, and the tables that name them by their slots.
///
/// A complete object that is not hard-pinned is in the order of eviction or parked, a grouped one is
/// a member of its group, and one of a tenant with a quota is in the list of the tenant.
#[derive(Debug)]
pub(in crate::state) struct Catalog {
    pub(in crate::state) objects: Objects,
    pub(in crate::state) groups: Groups,
    pub(in crate::state) tenants: Tenants,
    pub(in crate::state) pins: Pins,
    pub(in crate::state) queue: EvictionQueue,
    pub(in crate::state) annotations: Annotations,
    pub(in crate::state) released: ReleasedObjects,
    pub(in crate::state) disk_copies: DiskCopies,
    /// Objects that clients copy, and until when.
    pub(in crate::state) copied: FxHashMap<ObjectSlot, Moment>,
}

impl Catalog {
    /// Removes an object with neither a value nor a put.
    pub(in crate::state) fn remove_if_empty(&mut self, slot: ObjectSlot) {
        let object = self.objects.at(slot);
        if !object.is_complete() && object.newest_write == NO_WRITE {
            self.objects.remove(slot);
        }
    }
}

impl Catalog {
    /// Keeps the object from eviction while a client copies it.
    pub(in crate::state) fn protect_copied(&mut self, slot: ObjectSlot, until: Moment) {
        self.objects.at_mut(slot).flags.set(Flags::BEING_COPIED, true);
        self.groups.record_protection(slot);
        self.copied.insert(slot, until);
    }

    /// Returns the time until which a client may read the object for a task.
    pub(in crate::state) fn copying_until(&self, slot: ObjectSlot) -> Timestamp {
        if self.objects.at(slot).flags.has(Flags::BEING_COPIED) {
            self.copied.get(&slot).map_or_else(Timestamp::default, |&until| until.into())
        } else {
            Timestamp::default()
        }
    }

    /// Returns the expiry and the tags of an object, if it has any.
    pub(in crate::state) fn annotation(&self, slot: ObjectSlot) -> Option<&Annotation> {
        self.annotations.of(slot)
    }

    /// Returns the number of soft-pinned objects.
    pub(in crate::state) fn soft_pinned(&self) -> u64 {
        self.pins.count()
    }

    /// Returns when the protection of the next parked object ends.
    pub(in crate::state) fn next_parked_end(&self) -> Option<Timestamp> {
        self.queue.next_parked_end()
    }
}
