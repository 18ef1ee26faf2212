//! Reads: locate grants a lease and a fence; verify checks whether a late read is still valid.

use std::time::Duration;

use mooncake_base::{Error, ErrorCode, Moment, ReplicaId, Result, TenantId, Version, key::Printed};
use smallvec::SmallVec;

use crate::state::{
    catalog::object::{Flags, NO_WRITE, ObjectState},
    ids::{DiskSlot, KeyHash, ObjectSlot, TenantIndex},
    inventory::{
        Inventory, disks,
        errors::{not_found, not_ready},
        promotions,
    },
    pool::allocation::Place,
    replica::disk_copy_id,
};

/// Protection that a locate grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LocateOptions {
    /// Grant or renew the retention lease.
    pub has_lease: bool,
    /// Reserve the memory while the bytes are read.
    pub has_fence: bool,
}

/// Result of a locate of several keys.
#[derive(Debug, Clone)]
pub struct Located {
    /// One result per key, in the order of the keys.
    pub objects: Vec<Result<LocatedObject>>,
    /// Length of the fence of all of them, from `now`; zero if no fence was requested.
    pub fence: Duration,
}

/// Location of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedObject {
    /// Version of the object.
    pub version: Version,
    /// Length in bytes.
    pub length: u64,
    /// Readable replicas in memory. None if the object can be read only from its disk.
    pub places: SmallVec<[Place; 1]>,
    /// The readable copy on disk.
    pub disk: Option<DiskPlace>,
    /// Checksum that the writer gave.
    pub checksum: Option<u64>,
    /// Data type that the writer gave.
    pub data_type: u8,
    /// Ticket to release the fence after the read; `None` while others read, too.
    pub ticket: Option<FenceTicket>,
    /// Slot of the object; it may be reused.
    pub slot: ObjectSlot,
}

/// A copy on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DiskPlace {
    /// The disk; call [`disk_of`](crate::state::disk_of) before the state changes.
    pub disk: DiskSlot,
    /// Id of the replica.
    pub replica: ReplicaId,
}

/// A fence granted to one reader only, and the object that it protects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FenceTicket {
    /// Slot of the object; it may be reused.
    pub object: ObjectSlot,
    /// Version of the object.
    pub version: Version,
    /// Never 0, and never the same for two fences of one object.
    pub fence: u64,
}

/// Result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probed {
    /// Absent, being written, or complete.
    pub state: ObjectState,
    /// Length of a complete object, else 0.
    pub length: u64,
}

impl Inventory {
    /// Returns whether the object exists; renews the retention lease on request.
    pub(in crate::state) fn probe(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        has_lease: bool,
    ) -> Probed {
        self.catalog.queue.begin_batch(now);
        let tenant = self.catalog.objects.tenant_index(tenant);
        let hash = tenant.map_or(KeyHash::new(0), |tenant| self.catalog.objects.hash(tenant, key));
        probe_one(self, now, tenant, hash, key, has_lease)
    }

    /// Grants what a reader needs, and returns where to read.
    pub(in crate::state) fn locate_one(
        &mut self,
        now: Moment,
        slot: ObjectSlot,
        options: LocateOptions,
        fence: Duration,
    ) -> LocatedObject {
        if options.has_lease {
            self.extend_lease(now, slot);
            if !options.has_fence {
                // The caller reads the places without a fence.
                self.catalog.objects.at_mut(slot).protection.give_address();
            }
        } else {
            self.touch(now, slot);
        }
        let ticket = if options.has_fence { grant_fence(self, now, slot, fence) } else { None };
        if options.has_fence && self.rules.promotion.hits_min.is_some() {
            promotions::record_read(self, now, slot);
        }
        let object = self.catalog.objects.at(slot);
        LocatedObject {
            version: object.version(),
            length: object.length,
            places: self.pool.places(
                object.version,
                object.length,
                self.pool.readable_copies(&object.replicas),
            ),
            disk: disks::readable_disk(self, slot)
                .map(|disk| DiskPlace { disk, replica: disk_copy_id(object.version) }),
            checksum: self.catalog.objects.checksum(slot),
            data_type: object.data_type,
            ticket,
            slot,
        }
    }

    /// Renews the lease. A use shortly after another one does not count for the order of eviction:
    /// the object cannot be evicted before the lease ends.
    pub(in crate::state) fn extend_lease(&mut self, now: Moment, slot: ObjectSlot) {
        self.take_back(slot);
        let object = self.catalog.objects.at_mut(slot);
        let before = object.protection.lease();
        let is_new = object.protection.renew_lease(now, self.rules.lease_ttl);
        let flags = object.flags;
        if self.log.leases.is_on {
            self.log.leases.extend(object.version, before, object.protection.lease());
        }
        if flags.has(Flags::GROUPED) {
            self.catalog.groups.record_protection(slot);
        }
        if is_new || flags.has(Flags::PARKED) || flags.has(Flags::SOFT_PINNED) {
            self.touch(now, slot);
        }
    }

    /// Returns whether no replica can be read for now, since the clients that hold them have lost
    /// their connections. The object is readable again when one of them comes back.
    pub(in crate::state) fn is_unreachable(&self, slot: ObjectSlot) -> bool {
        if !self.clients.has_suspects() {
            return false;
        }
        let object = self.catalog.objects.at(slot);
        object.is_complete() && !self.is_unclaimed(slot) && !has_readable_copy(self, slot)
    }
}

/// Returns whether the replica of that version exists and has existed since the locate.
pub(in crate::state) fn verify(
    inventory: &Inventory,
    tenant: &TenantId,
    key: &[u8],
    version: Version,
    replica: ReplicaId,
) -> bool {
    let slot = inventory
        .catalog
        .objects
        .tenant_index(tenant)
        .and_then(|tenant| inventory.catalog.objects.find(tenant, key));
    let Some(object) = slot.map(|slot| inventory.catalog.objects.at(slot)) else { return false };
    if !object.is_complete() || object.version() != version {
        return false;
    }
    if replica == disk_copy_id(version.0) {
        return slot.is_some_and(|slot| disks::readable_disk(inventory, slot).is_some());
    }
    object.replicas.iter().any(|copy| {
        copy.id(version.0) == replica && inventory.pool.segments.at(copy.segment).is_claimed()
    })
}

/// Finds objects that are located together, in the order of the keys.
pub(in crate::state) fn find_readable<K: AsRef<[u8]>>(
    inventory: &mut Inventory,
    now: Moment,
    tenant: &TenantId,
    keys: &[K],
) -> Vec<Result<ObjectSlot>> {
    inventory.catalog.queue.begin_batch(now);
    let tenant = inventory.catalog.objects.tenant_index(tenant);
    let hashes = inventory.catalog.objects.prefetch_hashes(tenant, keys.iter().map(AsRef::as_ref));
    keys.iter()
        .zip(hashes)
        .map(|(key, hash)| find_one_readable(inventory, now, tenant, hash, key.as_ref()))
        .collect()
}

/// Finds an object with a readable replica.
fn find_one_readable(
    inventory: &mut Inventory,
    now: Moment,
    tenant: Option<TenantIndex>,
    hash: KeyHash,
    key: &[u8],
) -> Result<ObjectSlot> {
    let found = tenant.and_then(|tenant| inventory.find_hashed(now, hash, tenant, key));
    let slot = found.ok_or_else(|| not_found(key))?;
    let object = inventory.catalog.objects.at(slot);
    if !object.is_complete() {
        return Err(not_ready(key));
    }
    if inventory.is_unclaimed(slot) {
        return Err(not_found(key));
    }
    if !has_readable_copy(inventory, slot) {
        return Err(Error::new(
            ErrorCode::TRANSFER_FAIL,
            "every process that holds a replica has lost its connection",
        )
        .with("key", Printed(key)));
    }
    Ok(slot)
}

/// Probes several keys like [`probe`](Self::probe): one result per key, in order.
pub(in crate::state) fn probe_all<K: AsRef<[u8]>>(
    inventory: &mut Inventory,
    now: Moment,
    tenant: &TenantId,
    keys: &[K],
    has_lease: bool,
) -> Vec<Probed> {
    inventory.catalog.queue.begin_batch(now);
    let tenant = inventory.catalog.objects.tenant_index(tenant);
    let hashes = inventory.catalog.objects.prefetch_hashes(tenant, keys.iter().map(AsRef::as_ref));
    keys.iter()
        .zip(hashes)
        .map(|(key, hash)| probe_one(inventory, now, tenant, hash, key.as_ref(), has_lease))
        .collect()
}

fn probe_one(
    inventory: &mut Inventory,
    now: Moment,
    tenant: Option<TenantIndex>,
    hash: KeyHash,
    key: &[u8],
    has_lease: bool,
) -> Probed {
    let found = tenant.and_then(|tenant| inventory.find_hashed(now, hash, tenant, key));
    let Some(slot) = found else {
        return Probed { state: ObjectState::Absent, length: 0 };
    };
    let object = inventory.catalog.objects.at(slot);
    let (length, is_written) = (object.length, object.newest_write != NO_WRITE);
    let is_hidden = inventory.is_unclaimed(slot) || inventory.is_unreachable(slot);
    if !object.is_complete() || (is_written && is_hidden) {
        return Probed { state: ObjectState::Writing, length: 0 };
    }
    if is_hidden {
        return Probed { state: ObjectState::Absent, length: 0 };
    }
    if has_lease {
        inventory.extend_lease(now, slot);
    }
    Probed { state: ObjectState::Complete, length }
}

/// Returns the length of a fence under which so many bytes can be read, as far as a restart of the
/// master would respect it.
pub(in crate::state) fn grantable_fence(
    inventory: &mut Inventory,
    now: Moment,
    wanted: Duration,
) -> Duration {
    raise_max_granted(inventory, now, wanted);
    inventory.max_granted.grantable(wanted)
}

/// Lets memory rest for so long after a restart, as soon as the log is on disk.
pub(in crate::state) fn raise_max_granted(
    inventory: &mut Inventory,
    now: Moment,
    wanted: Duration,
) {
    let Inventory { max_granted, rules, log, pool, .. } = inventory;
    if max_granted.raise(now, wanted, rules, log) {
        pool.unsynced.is_sync_wanted = true;
    }
}

/// Reserves the memory of an object while it is read. Returns the ticket that releases it; `None`
/// while others read it, too.
pub(in crate::state) fn grant_fence(
    inventory: &mut Inventory,
    now: Moment,
    slot: ObjectSlot,
    fence: Duration,
) -> Option<FenceTicket> {
    let Inventory { catalog, pool, .. } = inventory;
    let object = catalog.objects.at_mut(slot);
    let own = object.protection.grant_fence(now, now + fence);
    let end = object.protection.fence().moment();
    let (version, flags) = (object.version(), object.flags);
    for replica in object.replicas.iter() {
        pool.segments.at_mut(replica.segment).extend_busy(end);
    }
    if flags.has(Flags::GROUPED) {
        catalog.groups.record_protection(slot);
    }
    own.map(|fence| FenceTicket { object: slot, version, fence: fence.to_bits() })
}

/// Returns whether readers may be sent to some copy of a complete object.
fn has_readable_copy(inventory: &Inventory, slot: ObjectSlot) -> bool {
    let object = inventory.catalog.objects.at(slot);
    inventory.pool.readable_copies(&object.replicas).next().is_some()
        || disks::readable_disk(inventory, slot).is_some()
}
