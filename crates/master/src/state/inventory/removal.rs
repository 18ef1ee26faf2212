//! Removal of an object, and what protects it.

use mooncake_base::{Error, ErrorCode, Moment, Result, TenantId, Version, key::Printed};

use crate::state::{
    catalog::object::{Flags, Object},
    ids::{ObjectSlot, Slot},
    inventory::{
        Inventory,
        errors::{not_found, not_ready, other_version},
    },
    lease::LeaseAndFence,
};

/// Objects scanned in one slice: about a millisecond of removals, since other calls may have to
/// wait for a slice.
pub(in crate::state) const SLICE: u32 = 1024;

/// Which objects a removal may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemovalTerms {
    /// Takes leased objects, and objects that are being copied.
    pub is_forced: bool,
    /// Leaves hard-pinned objects, forced or not.
    pub spares_hard_pinned: bool,
    /// Takes a single object in this version only.
    pub if_version: Option<Version>,
}

/// A reason for which a removal leaves a complete object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum Protection {
    Lease,
    HardPin,
    RunningCopy,
}

impl RemovalTerms {
    /// Returns what protects the object from this removal.
    pub(in crate::state) fn protection(&self, now: Moment, object: &Object) -> Option<Protection> {
        if self.spares_hard_pinned && object.flags.has(Flags::HARD_PINNED) {
            return Some(Protection::HardPin);
        }
        if self.is_forced {
            return None;
        }
        if object.protection.is_leased(now) {
            Some(Protection::Lease)
        } else {
            object.flags.has(Flags::BEING_COPIED).then_some(Protection::RunningCopy)
        }
    }
}

/// Number of selected complete objects that a removal left, by the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SparedObjects {
    /// Objects with a lease.
    pub leased: u64,
    /// Hard-pinned objects.
    pub hard_pinned: u64,
    /// Objects that a client is copying.
    pub being_copied: u64,
}

impl Inventory {
    /// Removes the object.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: the first put is unfinished, forced or not;
    /// `OBJECT_HAS_LEASE`: it is hard-pinned and the terms spare it, or it has a lease;
    /// `OBJECT_HAS_REPLICATION_TASK`; `OBJECT_ALREADY_EXISTS`: it has another version than
    /// `if_version`.
    pub(in crate::state) fn remove(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        terms: &RemovalTerms,
    ) -> Result<()> {
        let tenant = self.catalog.objects.tenant_index(tenant);
        let slot = tenant.and_then(|tenant| self.find(now, tenant, key));
        let slot = slot.ok_or_else(|| not_found(key))?;
        if self.is_unclaimed(slot) {
            // The object must not come back with its owner.
            self.remove_value(now, slot);
            return Err(not_found(key));
        }
        let object = self.catalog.objects.at(slot);
        if !object.is_complete() {
            return Err(not_ready(key));
        }
        if let Some(expected) = terms.if_version.filter(|&expected| expected != object.version()) {
            return Err(other_version(key, expected, Some(object.version())));
        }
        if let Some(protection) = terms.protection(now, object) {
            return Err(protected(now, protection, object, key));
        }
        self.remove_value(now, slot);
        Ok(())
    }

    pub(in crate::state) fn remove_value(&mut self, now: Moment, slot: ObjectSlot) {
        self.drop_value(now, slot);
        self.catalog.objects.at_mut(slot).protection = LeaseAndFence::default();
        self.catalog.remove_if_empty(slot);
    }
}

/// Visits one slice of the complete objects of a tenant, in no order. Returns the next
/// position, if there is more. Grants no lease.
pub(in crate::state) fn walk(
    inventory: &Inventory,
    tenant: &TenantId,
    from: u32,
    visit: &mut dyn FnMut(&[u8], u64),
) -> Option<u32> {
    let tenant = inventory.catalog.objects.tenant_index(tenant)?;
    let end = from.saturating_add(SLICE).min(inventory.catalog.objects.slot_count());
    for slot in ObjectSlot::range(from, end) {
        let Some(object) = inventory.catalog.objects.get(slot) else { continue };
        let mut copies = object.replicas.iter();
        if object.tenant == tenant
            && object.is_complete()
            && (copies.any(|copy| inventory.pool.segments.at(copy.segment).is_mounted())
                || inventory.disk_copy(slot).is_some())
        {
            visit(inventory.catalog.objects.key(object), object.length);
        }
    }
    (end < inventory.catalog.objects.slot_count()).then_some(end)
}

/// Returns the refusal to remove a protected object.
fn protected(now: Moment, protection: Protection, object: &Object, key: &[u8]) -> Error {
    let (code, why) = match protection {
        Protection::Lease => (ErrorCode::OBJECT_HAS_LEASE, "the object has a lease"),
        Protection::HardPin => (ErrorCode::OBJECT_HAS_LEASE, "the object is hard-pinned"),
        Protection::RunningCopy => {
            (ErrorCode::OBJECT_HAS_REPLICATION_TASK, "a client is copying the object")
        }
    };
    let error = Error::new(code, why).with("key", Printed(key));
    match protection {
        Protection::Lease => {
            error.with("lease_left_ms", object.protection.lease_left(now).as_millis())
        }
        Protection::HardPin | Protection::RunningCopy => error,
    }
}

/// Reports that all objects of a tenant were removed and none is left.
pub(in crate::state) fn report_cleared(inventory: &mut Inventory, tenant: &TenantId) {
    inventory.log.emit_cleared(tenant);
}
