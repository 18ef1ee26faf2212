//! Objects that are released ahead of need: the log has the record of their release, so that their
//! memory needs no wait for the log when it is given away. Until then they are objects like others:
//! readable, and at their place in the order of eviction.

use smallvec::{SmallVec, smallvec};

use crate::state::{
    Effect, LoggedPin, Value,
    catalog::{
        Catalog,
        object::{Flags, Object},
        split_map::SplitMap,
    },
    ids::ObjectSlot,
    inventory::Inventory,
    pool::Pool,
    reclaim::GROUP_SLICE,
};

/// Objects whose release is recorded, but that were not evicted.
#[derive(Debug, Default)]
pub(in crate::state) struct ReleasedObjects {
    by_object: SplitMap<ObjectSlot, Release>,
    bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct Release {
    /// Log position behind the record of the release.
    position: u64,
    /// Bytes of the object's replicas at that time.
    bytes: u64,
}

impl ReleasedObjects {
    pub(in crate::state) fn is_empty(&self) -> bool {
        self.by_object.is_empty()
    }

    pub(in crate::state) fn contains(&self, object: ObjectSlot) -> bool {
        !self.is_empty() && self.by_object.contains_key(&object)
    }

    /// Returns the log position behind the record of an object's release.
    pub(in crate::state) fn position(&self, object: ObjectSlot) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        self.by_object.get(&object).map(|release| release.position)
    }

    /// Adds an object whose release was recorded below the position.
    pub(in crate::state) fn insert(&mut self, object: ObjectSlot, position: u64, bytes: u64) {
        self.by_object.insert(object, Release { position, bytes });
        self.bytes += bytes;
    }

    /// Forgets an object: it was evicted or removed, or is recorded as live again. Returns whether
    /// it was released.
    pub(in crate::state) fn remove(&mut self, object: ObjectSlot) -> bool {
        if self.is_empty() {
            return false;
        }
        let Some(release) = self.by_object.remove(&object) else { return false };
        self.bytes -= release.bytes;
        true
    }

    /// Returns the number of objects.
    pub(in crate::state) fn count(&self) -> usize {
        self.by_object.len()
    }

    /// Returns the bytes of their replicas.
    pub(in crate::state) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Inventory {
    /// Takes back the release of an object that is used or about to change, and of its group, since
    /// a restart must not leave a part of a group: both are recorded as live again. Memory that is
    /// freed later waits for the record of its later release.
    pub(in crate::state) fn take_back(&mut self, object: ObjectSlot) {
        if !self.catalog.released.is_empty() {
            take_back_group(self, object);
        }
    }
}

fn take_back_group(inventory: &mut Inventory, object: ObjectSlot) {
    let catalog = &inventory.catalog;
    let members: SmallVec<[ObjectSlot; 1]> = match catalog.groups.members(object) {
        [] => smallvec![object],
        // Only small groups are released, and the member that joins one takes it back.
        members if members.len() > GROUP_SLICE + 1 => smallvec![object],
        members => {
            let is_released = |&member: &ObjectSlot| catalog.released.contains(member);
            members.iter().copied().filter(is_released).collect()
        }
    };
    for member in members {
        if inventory.catalog.released.remove(member) {
            record_live(inventory, member);
        }
    }
}

/// Records an object as live after its release was recorded.
fn record_live(inventory: &mut Inventory, slot: ObjectSlot) {
    let Inventory { log, catalog, pool, rules, .. } = inventory;
    let object = catalog.objects.at(slot);
    let Some(live) = logged_object(catalog, pool, slot, object) else { return };
    log.effects.record(|| live);
    if let Some(annotation) = catalog.annotations.of(slot) {
        log.annotate(&catalog.objects, rules, (slot, object.version), annotation);
    }
}

/// Returns the effect that describes a whole object; `None` if all its replicas are lost.
pub(in crate::state) fn logged_object<'a>(
    catalog: &'a Catalog,
    pool: &Pool,
    slot: ObjectSlot,
    object: &'a Object,
) -> Option<Effect<'a>> {
    let copies = pool.logged_copies(&object.replicas);
    if copies.is_empty() {
        return None;
    }
    let value = Value {
        tenant: catalog.objects.logged_tenant(object.tenant),
        key: catalog.objects.key(object),
        length: object.length,
        copies,
        data_type: object.data_type,
        is_hard_pinned: object.flags.has(Flags::HARD_PINNED),
        group: catalog.groups.name(slot).unwrap_or_default(),
        pin: LoggedPin::None,
    };
    let pin = catalog.pins.requested_ttl(slot);
    let (version, checksum) = (object.version, catalog.objects.checksum(slot));
    Some(Effect::ObjectSnapshot { version, value, checksum, pin })
}
