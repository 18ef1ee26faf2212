//! Reading: locate grants a lease and a fence; verify asks whether a late read still counts.

use crate::state::ids::{KeyHash, ObjectSlot, TenantIndex};
use std::time::Duration;

use mooncake_base::{Error, ErrorCode, Moment, ReplicaId, Result, TenantId, Version, key::Printed};
use smallvec::SmallVec;

use super::{
    Effect, State,
    object::{Flags, NO_WRITE, Object, ObjectState, Replica},
    put::Place,
};

/// Reads of so many bytes are the usual ones, as far as fences go.
const USUAL_BYTES: u64 = 64 << 20;

/// What every fence that was granted stays below, as the log knows it: raised in leaps, so that it
/// is logged seldom, and lowered again.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MaxGranted {
    pub(super) fence: Duration,
    /// When the last fence has ended that was longer than usual.
    raised_until: Moment,
    /// The longest lease that an earlier master may have granted.
    pub(super) lease: Duration,
}

/// What a locate asks for beside the places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LocateOptions {
    /// Grant or refresh the retention lease.
    pub has_lease: bool,
    /// Give the memory to nobody else while the bytes are read.
    pub has_fence: bool,
}

/// The answer to a locate of several keys.
#[derive(Debug, Clone)]
pub struct Located {
    /// One for each key, in their order.
    pub objects: Vec<Result<LocatedObject>>,
    /// How long from `now` the memory of all of them is fenced; zero if no fence was asked for.
    pub fence: Duration,
}

/// Where an object lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedObject {
    /// Which life of the object this is.
    pub version: Version,
    /// Its length in bytes.
    pub length: u64,
    /// Copies that may be read, at least one.
    pub places: SmallVec<[Place; 1]>,
    /// The checksum its writer gave.
    pub checksum: Option<u64>,
    /// What its writer said it is.
    pub data_type: u8,
    /// What the reader may hand back once it has read; none while others read too.
    pub ticket: Option<FenceTicket>,
}

/// A fence that stands for one reader alone, and the object whose memory it covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FenceTicket {
    /// The object, by a number that another may have later.
    pub object: ObjectSlot,
    /// Which life of it.
    pub version: Version,
    /// Never 0, and never the same for two fences of one object.
    pub fence: u64,
}

/// The answer to a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probed {
    /// Absent, being written, or complete.
    pub state: ObjectState,
    /// The length of a complete object, else 0.
    pub length: u64,
}

impl State {
    /// Says where the objects lie. The fence is sized by the bytes of all of them together.
    ///
    /// # Errors
    /// By object: `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: it is being written for the first
    /// time; `TRANSFER_FAIL`: each process that holds a copy has just lost its connection.
    pub fn locate<K: AsRef<[u8]>>(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        keys: &[K],
        options: LocateOptions,
    ) -> Located {
        let (objects, fence) = self.locate_with(now, tenant, keys, options, |_, object| object);
        Located { objects, fence }
    }

    /// As [`locate`](Self::locate), where each answer is at once made into something else.
    pub fn locate_with<K: AsRef<[u8]>, R>(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        keys: &[K],
        options: LocateOptions,
        mut make: impl FnMut(&Self, Result<LocatedObject>) -> R,
    ) -> (Vec<R>, Duration) {
        self.queue.begin_batch(now);
        let tenant = self.objects.tenant_index(tenant);
        let hashes = self.objects.prefetch_hashes(tenant, keys.iter().map(AsRef::as_ref));
        let found: Vec<Result<ObjectSlot>> = keys
            .iter()
            .zip(hashes)
            .map(|(key, hash)| self.readable(tenant, hash, key.as_ref()))
            .collect();
        let bytes = |slot: &ObjectSlot| self.objects.at(*slot).length;
        let fence = match options.has_fence {
            true => {
                self.rules.fence(found.iter().flatten().map(bytes).fold(0, u64::saturating_add))
            }
            false => Duration::ZERO,
        };
        self.raise_max_granted(now, fence);
        let answers = found.into_iter().map(|slot| {
            let object = slot.map(|slot| self.locate_one(now, slot, options, fence));
            make(self, object)
        });
        (answers.collect(), fence)
    }

    /// Whether that copy of that version still stands, and did all the time since it was located.
    pub fn verify(
        &self,
        tenant: &TenantId,
        key: &[u8],
        version: Version,
        replica: ReplicaId,
    ) -> bool {
        let slot =
            self.objects.tenant_index(tenant).and_then(|tenant| self.objects.find(tenant, key));
        let Some(object) = slot.map(|slot| self.objects.at(slot)) else { return false };
        object.is_complete()
            && object.version() == version
            && object.replicas.iter().any(|copy| {
                copy.id(version.0) == replica && self.segments.at(copy.segment).is_claimed()
            })
    }

    /// Whether there is such an object; grants the retention lease if asked to.
    pub fn probe(&mut self, now: Moment, tenant: &TenantId, key: &[u8], has_lease: bool) -> Probed {
        self.queue.begin_batch(now);
        let tenant = self.objects.tenant_index(tenant);
        let hash = tenant.map_or(KeyHash::new(0), |tenant| self.objects.hash(tenant, key));
        self.probe_one(now, tenant, hash, key, has_lease)
    }

    /// As [`probe`](Self::probe), of several keys: an answer for each, in their order.
    pub fn probe_all<K: AsRef<[u8]>>(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        keys: &[K],
        has_lease: bool,
    ) -> Vec<Probed> {
        self.queue.begin_batch(now);
        let tenant = self.objects.tenant_index(tenant);
        let hashes = self.objects.prefetch_hashes(tenant, keys.iter().map(AsRef::as_ref));
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
        let found = tenant.and_then(|tenant| self.find_hashed(hash, tenant, key));
        let Some(slot) = found else {
            return Probed { state: ObjectState::Absent, length: 0 };
        };
        let object = self.objects.at(slot);
        let (length, is_written) = (object.length, object.newest_write != NO_WRITE);
        if !object.is_complete() || (is_written && self.is_unclaimed(slot)) {
            return Probed { state: ObjectState::Writing, length: 0 };
        }
        if self.is_unclaimed(slot) {
            return Probed { state: ObjectState::Absent, length: 0 };
        }
        if has_lease {
            self.extend_lease(now, slot);
        }
        Probed { state: ObjectState::Complete, length }
    }

    fn raise_max_granted(&mut self, now: Moment, fence: Duration) {
        if fence > self.rules.fence(USUAL_BYTES) {
            self.max_granted.raised_until = self.max_granted.raised_until.max(now + fence);
        }
        if fence > self.max_granted.fence {
            self.set_max_fence(self.rules.fence_max().min(fence * 2));
        }
    }

    /// Few long fences must not make all memory rest for long after a restart.
    pub(super) fn lower_max_granted(&mut self, now: Moment) {
        let usual = self.rules.fence(USUAL_BYTES);
        if self.max_granted.fence > usual && self.max_granted.raised_until.has_passed(now) {
            self.set_max_fence(usual);
        }
    }

    fn set_max_fence(&mut self, fence: Duration) {
        self.max_granted.fence = fence;
        let (fence, lease) = (self.max_granted.fence, self.max_granted.lease);
        self.effects.record(|| Effect::MaxGranted { fence, lease });
    }

    /// An object with a copy that may be read.
    fn readable(
        &mut self,
        tenant: Option<TenantIndex>,
        hash: KeyHash,
        key: &[u8],
    ) -> Result<ObjectSlot> {
        let found = tenant.and_then(|tenant| self.find_hashed(hash, tenant, key));
        let slot = found.ok_or_else(|| not_found(key))?;
        let object = self.objects.at(slot);
        if !object.is_complete() {
            return Err(not_ready(key));
        }
        if self.is_unclaimed(slot) {
            return Err(not_found(key));
        }
        if self.readable_copies(object).next().is_none() {
            return Err(Error::new(
                ErrorCode::TRANSFER_FAIL,
                "each process that holds a copy has lost its connection",
            )
            .with("key", Printed(key)));
        }
        Ok(slot)
    }

    fn locate_one(
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
            let object = self.objects.at_mut(slot);
            let own = object.protection.grant_fence(now, now + fence);
            let end = object.protection.fence().moment();
            let version = object.version();
            ticket = own.map(|fence| FenceTicket { object: slot, version, fence: fence.to_bits() });
            for replica in object.replicas.iter() {
                let segment = self.segments.at_mut(replica.segment);
                segment.busy_until = segment.busy_until.max(end);
            }
        }
        let object = self.objects.at(slot);
        LocatedObject {
            version: object.version(),
            length: object.length,
            places: self.places(object.version, object.length, self.readable_copies(object)),
            checksum: self.objects.checksum(slot),
            data_type: object.data_type,
            ticket,
        }
    }

    /// A use that leases. That an object is used again and again tells the order of eviction
    /// nothing new a moment later: it cannot go before the lease ends.
    fn extend_lease(&mut self, now: Moment, slot: ObjectSlot) {
        let object = self.objects.at_mut(slot);
        let is_new = object.protection.renew_lease(now, self.rules.lease_ttl);
        if is_new || object.flags.has(Flags::PARKED) || object.flags.has(Flags::SOFT_PINNED) {
            self.touch(now, slot);
        }
    }

    fn readable_copies<'a>(&'a self, object: &'a Object) -> impl Iterator<Item = &'a Replica> {
        let copies = object.replicas.iter();
        copies.filter(|copy| self.segments.at(copy.segment).is_readable())
    }
}

pub(super) fn not_found(key: &[u8]) -> Error {
    Error::new(ErrorCode::OBJECT_NOT_FOUND, "no object has that key").with("key", Printed(key))
}

pub(super) fn not_ready(key: &[u8]) -> Error {
    Error::new(ErrorCode::REPLICA_IS_NOT_READY, "the object is still being written")
        .with("key", Printed(key))
}
