//! What puts change of objects and memory: they begin, go on, end without a value, and publish one.

use mooncake_base::{KeyRef, Moment, Result, TenantId};

use crate::state::{
    catalog::{annotations::Annotation, object::Flags},
    ids::{KeyHash, ObjectSlot, TenantIndex, WriteSlot},
    inventory::{Inventory, disks},
    lease::Timestamp,
    ledger::effect::Effect,
    options::{RequestedPin, Terms},
    replica::{Replica, Replicas},
};

/// A value that a put publishes.
#[derive(Debug)]
pub(in crate::state) struct NewValue {
    pub(in crate::state) version: u64,
    pub(in crate::state) length: u64,
    pub(in crate::state) data_type: u8,
    pub(in crate::state) replicas: Replicas,
    /// Hash of the key.
    pub(in crate::state) hash: KeyHash,
    pub(in crate::state) checksum: Option<u64>,
    /// Empty: none.
    pub(in crate::state) group: Box<[u8]>,
    pub(in crate::state) soft_pin: RequestedPin,
    pub(in crate::state) is_hard_pinned: bool,
    pub(in crate::state) terms: Option<Box<Terms>>,
}

/// Returns the tenant, to put objects of it.
///
/// # Errors
/// `TENANT_NOT_REGISTERED`: quotas are enforced, and the tenant has none.
pub(in crate::state) fn writing_tenant(
    inventory: &mut Inventory,
    tenant: &TenantId,
) -> Result<TenantIndex> {
    inventory.catalog.tenants.check_tenant(tenant)?;
    inventory.catalog.objects.intern_tenant(tenant)
}

/// Inserts an object without a value.
///
/// # Errors
/// The table of objects is full.
pub(in crate::state) fn insert_object(
    inventory: &mut Inventory,
    hash: KeyHash,
    tenant: TenantIndex,
    key: KeyRef<'_>,
) -> Result<ObjectSlot> {
    inventory.catalog.objects.insert_hashed(hash, tenant, key)
}

/// Begins a put of an object into allocated memory, and charges its tenant. Returns the version.
pub(in crate::state) fn begin(
    inventory: &mut Inventory,
    slot: ObjectSlot,
    tenant: TenantIndex,
    length: u64,
    replicas: &Replicas,
    until: Moment,
) -> u64 {
    inventory.catalog.tenants.charge(tenant, length * replicas.len() as u64);
    let version = inventory.next_version;
    inventory.next_version += 1;
    inventory.pool.begin_write(Some(slot), replicas, until);
    version
}

/// Extends the time for which bytes of a put may arrive.
pub(in crate::state) fn extend(inventory: &mut Inventory, replicas: &Replicas, until: Moment) {
    inventory.pool.extend_write(replicas, until);
}

/// Records that no more bytes of a put arrive. The memory stays allocated.
pub(in crate::state) fn end(inventory: &mut Inventory, replicas: &Replicas) {
    for replica in replicas.iter() {
        inventory.pool.end_write(replica);
    }
}

/// Enters the newest put of an object, which links to the others.
pub(in crate::state) fn set_newest(inventory: &mut Inventory, slot: ObjectSlot, number: WriteSlot) {
    inventory.catalog.objects.at_mut(slot).newest_write = number;
}

/// Frees a replica of a put after `until`, and uncharges its tenant.
pub(in crate::state) fn release_copy(
    inventory: &mut Inventory,
    now: Moment,
    tenant: TenantIndex,
    length: u64,
    replica: Replica,
    until: Timestamp,
) {
    inventory.catalog.tenants.uncharge(tenant, length);
    inventory.release(now, replica, until);
}

/// Protects the memory of a published object until no late byte can arrive.
pub(in crate::state) fn await_late_bytes(
    inventory: &mut Inventory,
    slot: ObjectSlot,
    until: Moment,
) {
    inventory.catalog.objects.at_mut(slot).protection.extend_fence(until);
    inventory.catalog.groups.record_protection(slot);
}

/// Publishes a value in place of the earlier one. `failed` are the ordinals of its replicas that
/// were dropped.
pub(in crate::state) fn publish(
    inventory: &mut Inventory,
    now: Moment,
    slot: ObjectSlot,
    value: NewValue,
    failed: &[u8],
) {
    let (version, checksum) = (value.version, value.checksum);
    let pin = match value.soft_pin {
        RequestedPin::Preserve => inventory.catalog.pins.ttl(now, slot),
        RequestedPin::None => None,
        RequestedPin::For(ttl) => Some(ttl),
    };
    inventory.drop_value(now, slot);
    let annotation = value
        .terms
        .map(|terms| Annotation { expires: terms.ttl.map(|ttl| now + ttl), tags: terms.tags });
    debug_assert!(version < inventory.next_version, "a version is granted before it is published");
    debug_assert!(!value.replicas.is_empty(), "a value that is published has a replica");
    let Inventory { log, catalog, pool, rules, .. } = inventory;
    // Before the value, so that no cut of the log leaves a value that never expires.
    if let Some(annotation) = &annotation {
        log.annotate(&catalog.objects, rules, slot, version, annotation);
    }
    log.effects.record(|| Effect::Published { version, failed, checksum, pin });
    if value.is_hard_pinned {
        for replica in value.replicas.iter() {
            pool.add_hard_pin(replica);
        }
    }
    catalog.objects.set_checksum(slot, checksum);
    let object = catalog.objects.at_mut(slot);
    object.version = version;
    object.length = value.length;
    object.data_type = value.data_type;
    object.replicas = value.replicas;
    object.flags.set(Flags::COMPLETE, true);
    object.flags.set(Flags::HARD_PINNED, value.is_hard_pinned);
    object.flags.set(Flags::GROUPED, !value.group.is_empty());
    if object.protection.is_leased(now) {
        // The lease of the earlier value.
        log.leases.note(version);
    }
    let tenant = object.tenant;
    if !value.group.is_empty() {
        catalog.groups.join(tenant, &value.group, slot);
        // The group is to be evicted with the new object or not at all.
        inventory.take_back(slot);
    }
    let catalog = &mut inventory.catalog;
    catalog.objects.complete += 1;
    catalog.tenants.add_object(tenant, slot);
    if let Some(ttl) = pin {
        inventory.pin(now, slot, ttl);
    }
    let Inventory { log, catalog, .. } = inventory;
    if let Some(annotation) = annotation {
        catalog.annotations.insert(slot, annotation);
    }
    catalog.enqueue_hashed(slot, value.hash);
    log.emit_stored(catalog, slot);
    disks::queue_offload(inventory, slot);
}
