//! Clearing: drops replicas of objects, all of them or those in one segment.

use mooncake_base::{Moment, TenantId};

use crate::state::{catalog::object::Flags, inventory::Inventory};

/// Drops the replicas of the object in segments of that name, or all if the name is empty; the
/// object is removed with its last replica. Returns whether a replica was dropped. An object
/// that is leased, being written for the first time or being copied is left alone.
pub(in crate::state) fn clear_copies(
    inventory: &mut Inventory,
    now: Moment,
    tenant: &TenantId,
    key: &[u8],
    segment: &str,
) -> bool {
    let tenant = inventory.catalog.objects.tenant_index(tenant);
    let Some(slot) = tenant.and_then(|tenant| inventory.find(now, tenant, key)) else {
        return false;
    };
    let object = inventory.catalog.objects.at(slot);
    let is_held = object.protection.is_leased(now) || object.flags.has(Flags::BEING_COPIED);
    if !object.is_complete() || is_held {
        return false;
    }
    if segment.is_empty() {
        inventory.drop_value(now, slot);
        inventory.catalog.remove_if_empty(slot);
        return true;
    }
    let segments = inventory.pool.segments.named(segment).to_vec();
    inventory.drop_copies(now, slot, &segments) > 0
}
