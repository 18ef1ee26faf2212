//! Releases that were recorded ahead of need are taken back.

use smallvec::{SmallVec, smallvec};

use crate::state::{
    catalog::group::GROUP_SLICE, ids::ObjectSlot, inventory::Inventory,
    ledger::objects::logged_object,
};

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

/// Records the release of an object, which stays readable until it is evicted.
pub(in crate::state) fn release(inventory: &mut Inventory, object: ObjectSlot) {
    let Inventory { log, catalog, .. } = inventory;
    log.record_release(catalog, object);
    let bytes = catalog.objects.at(object).bytes();
    catalog.released.insert(object, log.effects.position(), bytes);
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
        log.annotate(&catalog.objects, rules, slot, object.version, annotation);
    }
}
