//! Objects whose time is over are dropped.

use mooncake_base::Moment;

use crate::state::{catalog::annotations::Annotation, ids::ObjectSlot, inventory::Inventory};

/// Drops the value of an object whose time is over, leased or not. Readers in flight keep their fence.
pub(in crate::state) fn drop_if_expired(inventory: &mut Inventory, now: Moment, slot: ObjectSlot) {
    if inventory.catalog.annotations.has_expired(now, slot) {
        inventory.log.counters.objects_expired += 1;
        inventory.drop_value(now, slot);
    }
}

/// Removes the object that expired first. Returns whether there was one.
pub(in crate::state) fn remove_expired(inventory: &mut Inventory, now: Moment) -> bool {
    let Some(&(expires, slot)) = inventory.catalog.annotations.by_expiry.first() else {
        return false;
    };
    if !expires.has_passed(now) {
        return false;
    }
    drop_if_expired(inventory, now, slot);
    inventory.catalog.remove_if_empty(slot);
    true
}

/// Lets an object expire then, or never. Its tags stay.
pub(in crate::state) fn set_expiry(
    inventory: &mut Inventory,
    slot: ObjectSlot,
    expires: Option<Moment>,
) {
    inventory.take_back(slot);
    let Inventory { log, catalog, rules, .. } = inventory;
    let tags = catalog.annotations.of(slot).map(|found| found.tags.clone());
    let annotation = Annotation { expires, tags: tags.unwrap_or_default() };
    let version = catalog.objects.at(slot).version;
    log.annotate(&catalog.objects, rules, slot, version, &annotation);
    catalog.annotations.insert(slot, annotation);
}
