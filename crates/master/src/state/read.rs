//! Reads: locate grants a lease and a fence; verify checks whether a late read is still valid.

pub(super) mod lease;

use std::time::Duration;

use mooncake_base::{Error, ErrorCode, Moment, ReplicaId, Result, TenantId, Version, key::Printed};
use smallvec::SmallVec;

use crate::state::{
    Effect, Rules,
    catalog::object::{Flags, NO_WRITE, ObjectState},
    ids::{KeyHash, ObjectSlot, TenantIndex},
    inventory::Inventory,
    log::Log,
    put::Place,
};

/// The first bound of fences: reads of up to 64 MiB need no other.
const BOUND_MIN: Duration = Duration::from_secs(1);
/// A raised bound is kept for this long after the last fence that needs it, so that it is logged
/// seldom.
const BOUND_KEPT: Duration = Duration::from_secs(10);

/// Upper bounds of all granted fences and leases, as the log records them.
///
/// The bound of fences is zero until the first read, and then a power of two of seconds. It is
/// raised when a read needs more than half of it, and falls again. A read does not wait until a
/// raised bound is in the log: it gets a shorter fence until then.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MaxGranted {
    /// The recorded bound of fences.
    pub(super) fence: Duration,
    /// Log position behind its record.
    recorded_at: u64,
    /// Effects up to this position survive a restart; `None`: without a log nothing has to.
    durable: Option<u64>,
    /// The bound of the fences granted now.
    durable_fence: Duration,
    /// Until then the bound is not lowered.
    pub(super) raised_until: Moment,
    /// Maximum lease that an earlier master may have granted.
    pub(super) lease: Duration,
}

impl MaxGranted {
    /// Returns whether memory that must rest for `time` rests after a restart without a record.
    pub(super) fn covers(&self, time: Duration) -> bool {
        time <= self.fence.min(BOUND_MIN)
    }

    /// Returns the fence that may be granted to a read that needs `fence`.
    pub(in crate::state) fn grantable(&self, fence: Duration) -> Duration {
        if self.durable.is_some() { fence.min(self.durable_fence) } else { fence }
    }

    /// Records that effects up to this position survive a restart of the master.
    pub(super) fn confirm_durable(&mut self, position: u64) {
        if self.durable != Some(position) {
            self.durable = Some(position);
            self.confirm();
        }
    }

    /// Records a larger bound in the log before a fence needs it. Returns whether it did.
    pub(in crate::state) fn raise(
        &mut self,
        now: Moment,
        fence: Duration,
        rules: &Rules,
        log: &mut Log,
    ) -> bool {
        let needed = rules.fence_max().min(fence * 2);
        if needed > BOUND_MIN {
            self.raised_until = self.raised_until.max(now + fence + BOUND_KEPT);
        }
        if needed <= self.fence {
            return false;
        }
        let seconds = needed.max(BOUND_MIN).as_secs_f64().ceil() as u64;
        let bound = Duration::from_secs(seconds.next_power_of_two());
        self.fence = bound.min(rules.fence_max());
        self.record(log);
        true
    }

    /// Lowers the bound again, so that a few long fences do not quarantine all memory after a
    /// restart.
    pub(super) fn lower(&mut self, now: Moment, log: &mut Log) {
        if self.fence > BOUND_MIN && self.raised_until.has_passed(now) {
            self.fence = BOUND_MIN;
            self.record(log);
        }
    }

    /// Records both bounds in the log.
    pub(super) fn record(&mut self, log: &mut Log) {
        let (fence, lease) = (self.fence, self.lease);
        log.effects.record(|| Effect::MaxGranted { fence, lease });
        self.recorded_at = log.effects.position();
        self.confirm();
    }

    fn confirm(&mut self) {
        self.durable_fence = match self.durable {
            Some(durable) if durable < self.recorded_at => self.durable_fence.min(self.fence),
            _ => self.fence,
        };
    }
}

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
    /// Readable replicas, at least one.
    pub places: SmallVec<[Place; 1]>,
    /// Checksum that the writer gave.
    pub checksum: Option<u64>,
    /// Data type that the writer gave.
    pub data_type: u8,
    /// Ticket to release the fence after the read; `None` while others read, too.
    pub ticket: Option<FenceTicket>,
    /// Slot of the object; it may be reused.
    pub slot: ObjectSlot,
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
    /// Finds objects that are located together, in the order of the keys.
    pub(super) fn find_readable<K: AsRef<[u8]>>(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        keys: &[K],
    ) -> Vec<Result<ObjectSlot>> {
        self.catalog.queue.begin_batch(now);
        let tenant = self.catalog.objects.tenant_index(tenant);
        let hashes = self.catalog.objects.prefetch_hashes(tenant, keys.iter().map(AsRef::as_ref));
        keys.iter()
            .zip(hashes)
            .map(|(key, hash)| self.readable(now, tenant, hash, key.as_ref()))
            .collect()
    }

    /// Returns whether the replica of that version exists and has existed since the locate.
    pub(in crate::state) fn verify(
        &self,
        tenant: &TenantId,
        key: &[u8],
        version: Version,
        replica: ReplicaId,
    ) -> bool {
        let slot = self
            .catalog
            .objects
            .tenant_index(tenant)
            .and_then(|tenant| self.catalog.objects.find(tenant, key));
        let Some(object) = slot.map(|slot| self.catalog.objects.at(slot)) else { return false };
        object.is_complete()
            && object.version() == version
            && object.replicas.iter().any(|copy| {
                copy.id(version.0) == replica && self.pool.segments.at(copy.segment).is_claimed()
            })
    }

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
        self.probe_one(now, tenant, hash, key, has_lease)
    }

    /// Probes several keys like [`probe`](Self::probe): one result per key, in order.
    pub(in crate::state) fn probe_all<K: AsRef<[u8]>>(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        keys: &[K],
        has_lease: bool,
    ) -> Vec<Probed> {
        self.catalog.queue.begin_batch(now);
        let tenant = self.catalog.objects.tenant_index(tenant);
        let hashes = self.catalog.objects.prefetch_hashes(tenant, keys.iter().map(AsRef::as_ref));
        keys.iter()
            .zip(hashes)
            .map(|(key, hash)| self.probe_one(now, tenant, hash, key.as_ref(), has_lease))
            .collect()
    }

    fn probe_one(
        &mut self,
        now: Moment,
        tenant: Option<TenantIndex>,
        hash: KeyHash,
        key: &[u8],
        has_lease: bool,
    ) -> Probed {
        let found = tenant.and_then(|tenant| self.find_hashed(now, hash, tenant, key));
        let Some(slot) = found else {
            return Probed { state: ObjectState::Absent, length: 0 };
        };
        let object = self.catalog.objects.at(slot);
        let (length, is_written) = (object.length, object.newest_write != NO_WRITE);
        let is_hidden = self.is_unclaimed(slot) || self.is_unreachable(slot);
        if !object.is_complete() || (is_written && is_hidden) {
            return Probed { state: ObjectState::Writing, length: 0 };
        }
        if is_hidden {
            return Probed { state: ObjectState::Absent, length: 0 };
        }
        if has_lease {
            self.extend_lease(now, slot);
        }
        Probed { state: ObjectState::Complete, length }
    }

    /// Finds an object with a readable replica.
    fn readable(
        &mut self,
        now: Moment,
        tenant: Option<TenantIndex>,
        hash: KeyHash,
        key: &[u8],
    ) -> Result<ObjectSlot> {
        let found = tenant.and_then(|tenant| self.find_hashed(now, hash, tenant, key));
        let slot = found.ok_or_else(|| not_found(key))?;
        let object = self.catalog.objects.at(slot);
        if !object.is_complete() {
            return Err(not_ready(key));
        }
        if self.is_unclaimed(slot) {
            return Err(not_found(key));
        }
        if self.pool.readable_copies(object).next().is_none() {
            return Err(Error::new(
                ErrorCode::TRANSFER_FAIL,
                "every process that holds a replica has lost its connection",
            )
            .with("key", Printed(key)));
        }
        Ok(slot)
    }

    /// Grants what a reader needs, and returns where to read.
    pub(super) fn locate_one(
        &mut self,
        now: Moment,
        slot: ObjectSlot,
        options: LocateOptions,
        fence: Duration,
    ) -> LocatedObject {
        if options.has_lease {
            self.extend_lease(now, slot);
        } else {
            self.touch(now, slot);
        }
        let mut ticket = None;
        if options.has_fence {
            let object = self.catalog.objects.at_mut(slot);
            let own = object.protection.grant_fence(now, now + fence);
            let end = object.protection.fence().moment();
            let (version, flags) = (object.version(), object.flags);
            ticket = own.map(|fence| FenceTicket { object: slot, version, fence: fence.to_bits() });
            for replica in object.replicas.iter() {
                self.pool.segments.at_mut(replica.segment).extend_busy(end);
            }
            if flags.has(Flags::GROUPED) {
                self.catalog.groups.record_protection(slot);
            }
        }
        let object = self.catalog.objects.at(slot);
        LocatedObject {
            version: object.version(),
            length: object.length,
            places: self.pool.places(
                object.version,
                object.length,
                self.pool.readable_copies(object),
            ),
            checksum: self.catalog.objects.checksum(slot),
            data_type: object.data_type,
            ticket,
            slot,
        }
    }

    /// Renews the lease. A use shortly after another one does not count for the order of eviction:
    /// the object cannot be evicted before the lease ends.
    fn extend_lease(&mut self, now: Moment, slot: ObjectSlot) {
        self.take_back(slot);
        let object = self.catalog.objects.at_mut(slot);
        let is_new = object.protection.renew_lease(now, self.rules.lease_ttl);
        let flags = object.flags;
        if flags.has(Flags::GROUPED) {
            self.catalog.groups.record_protection(slot);
        }
        if is_new || flags.has(Flags::PARKED) || flags.has(Flags::SOFT_PINNED) {
            self.touch(now, slot);
        }
    }

    /// Returns whether no replica can be read for now, since the clients that hold them have lost
    /// their connections. The object is readable again when one of them comes back.
    pub(super) fn is_unreachable(&self, slot: ObjectSlot) -> bool {
        if !self.clients.has_suspects() {
            return false;
        }
        let object = self.catalog.objects.at(slot);
        object.is_complete()
            && !self.is_unclaimed(slot)
            && self.pool.readable_copies(object).next().is_none()
    }
}

pub(super) fn not_found(key: &[u8]) -> Error {
    Error::new(ErrorCode::OBJECT_NOT_FOUND, "no object has that key").with("key", Printed(key))
}

pub(super) fn not_ready(key: &[u8]) -> Error {
    Error::new(ErrorCode::REPLICA_IS_NOT_READY, "the object is still being written")
        .with("key", Printed(key))
}
