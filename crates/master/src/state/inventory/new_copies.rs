//! Memory for new replicas of a complete object, while a client writes them.

use mooncake_base::{Moment, ReplicaId};

use crate::state::{
    catalog::object::Flags,
    ids::{ObjectSlot, SegmentSlot, TenantIndex},
    inventory::Inventory,
    lease::Timestamp,
    ledger::effect::Effect,
    replica::Replica,
};

/// New replicas that a client writes.
#[derive(Debug)]
pub(in crate::state) struct NewCopies {
    /// No byte is written later, also if the writer or a holder was stopped meanwhile.
    late_until: Moment,
    /// The tenant charged for the replicas, and the bytes per replica.
    tenant: TenantIndex,
    length: u64,
    replicas: Vec<Replica>,
}

impl NewCopies {
    /// Returns the bytes of all replicas.
    pub(in crate::state) fn bytes(&self) -> u64 {
        self.length * self.replicas.len() as u64
    }

    /// Returns the replicas.
    pub(in crate::state) fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// Returns the tenant that is charged for them.
    pub(in crate::state) fn tenant(&self) -> TenantIndex {
        self.tenant
    }

    /// Drops the replicas in segments that left the pool. Returns the bytes to uncharge.
    pub(in crate::state) fn forget_segments(
        &mut self,
        is_gone: impl Fn(SegmentSlot) -> bool,
    ) -> u64 {
        let before = self.bytes();
        self.replicas.retain(|replica| !is_gone(replica.segment));
        before - self.bytes()
    }
}

/// Begins to write new replicas of an object: charges its tenant, and quarantines their memory after a
/// restart.
pub(in crate::state) fn begin_copies(
    inventory: &mut Inventory,
    now: Moment,
    slot: ObjectSlot,
    replicas: Vec<Replica>,
) -> NewCopies {
    let object = inventory.catalog.objects.at(slot);
    let (tenant, length) = (object.tenant, object.length);
    let late_end = inventory.rules.late_end();
    let late_until = now + late_end;
    inventory.pool.begin_write(Some(slot), &replicas, late_until);
    for replica in &replicas {
        let segment = inventory.pool.segments.at(replica.segment);
        // If the master dies before the write is complete, bytes may still arrive.
        let (number, time) = (segment.number, late_end);
        let offset = segment.allocator.offset(replica.block);
        inventory.log.effects.record(|| Effect::Quarantined { number, offset, length, time });
    }
    inventory.catalog.tenants.charge(tenant, length * replicas.len() as u64);
    NewCopies { late_until, tenant, length, replicas }
}

/// What became of new replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) struct WrittenCopies {
    /// Replicas that were written.
    pub(in crate::state) written: usize,
    /// Bytes of those that were added to the object.
    pub(in crate::state) added_bytes: u64,
}

/// Ends the writing of replicas of that version. Those that were written are added to the object; if it
/// is `None`, it was replaced or removed. The memory of those in `failed` is quarantined until no late
/// byte can arrive.
pub(in crate::state) fn end_copies(
    inventory: &mut Inventory,
    now: Moment,
    slot: Option<ObjectSlot>,
    version: u64,
    copies: NewCopies,
    failed: &dyn Fn(ReplicaId) -> bool,
) -> WrittenCopies {
    let NewCopies { late_until, tenant, length, replicas } = copies;
    let mut outcome = WrittenCopies { written: 0, added_bytes: 0 };
    for replica in replicas {
        inventory.pool.end_write(&replica);
        let has_failed = failed(replica.id(version));
        outcome.written += usize::from(!has_failed);
        if !has_failed && let Some(slot) = slot {
            inventory.add_copy(slot, replica);
            outcome.added_bytes += length;
        } else {
            inventory.catalog.tenants.uncharge(tenant, length);
            let until = if has_failed { late_until.into() } else { Timestamp::default() };
            inventory.release(now, replica, until);
        }
    }
    outcome
}

/// Keeps an object from eviction while a client copies it, until then.
pub(in crate::state) fn protect_copied(inventory: &mut Inventory, slot: ObjectSlot, until: Moment) {
    inventory.catalog.protect_copied(slot, until);
}

/// Lets a client read the memory of an object until then, to copy it.
pub(in crate::state) fn lend_source(
    inventory: &mut Inventory,
    slot: ObjectSlot,
    source: SegmentSlot,
    until: Moment,
) {
    inventory.pool.segments.at_mut(source).extend_busy(until);
    inventory.catalog.protect_copied(slot, until);
}

/// Records that no client copies an object any more.
pub(in crate::state) fn end_copying(inventory: &mut Inventory, slot: ObjectSlot) {
    let catalog = &mut inventory.catalog;
    catalog.objects.at_mut(slot).flags.set(Flags::BEING_COPIED, false);
    catalog.copied.remove(&slot);
    catalog.unpark_early(slot);
}
