//! Writing: start allocates, the client writes, end publishes or revoke gives back.

mod finish;
mod record;

use crate::state::ids::{KeyHash, ObjectSlot, SegmentSlot, TenantIndex};
use std::sync::Arc;

use mooncake_base::{
    ClientId, Error, ErrorCode, KeyRef, Moment, ReplicaId, Result, TenantId, Version, key::Printed,
};
use smallvec::SmallVec;

use super::{
    State,
    lease::Timestamp,
    object::{NO_WRITE, REPLICAS_MAX, Replica},
    put_options::{PutOptions, SoftPin, WishedPin},
    reclaim::{AllocRequest, SegmentFilter},
    write::Write,
};

/// The most puts of one key that may be under way at a time (upserts by several clients).
const WRITERS_PER_KEY_MAX: usize = 64;
/// The longest name of a group.
const GROUP_BYTES_MAX: usize = 64 * 1024;

/// One object to be put.
#[derive(Debug)]
pub struct Put<'a> {
    /// Its key.
    pub key: KeyRef<'a>,
    /// Its length, at least 1 byte.
    pub length: u64,
    /// Objects of one group are evicted together or not at all; empty: no group.
    pub group: &'a [u8],
    /// How it is to be kept.
    pub options: &'a PutOptions,
    /// Replace an existing object (upsert) instead of refusing.
    pub is_replacing: bool,
    /// Not 0: a number that the client gives to no other call. The same call again has the same
    /// answer.
    pub request: u64,
}

/// Who puts, looked up once for the puts of a call. Good as long as nothing else is asked of the
/// state.
#[derive(Debug)]
pub(crate) struct PutOwner {
    client: ClientId,
    tenant: TenantIndex,
    /// Empty if unknown.
    host: Arc<str>,
}

/// A put that was started, named by its writer.
#[derive(Debug, Clone, Copy)]
pub struct PutRef<'a> {
    /// The key; empty if it is not told, since the version says enough.
    pub key: &'a [u8],
    /// What [`State::put_start`] answered.
    pub version: Version,
    /// Copies that could not be written, or on which a write may still be under way.
    pub failed_replicas: &'a [ReplicaId],
    /// What readers may check the bytes against.
    pub checksum: Option<u64>,
}

/// A put that may be written now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The life of the object that this put would begin.
    pub version: Version,
    /// Where to write, one place a copy, at least one.
    pub places: SmallVec<[Place; 1]>,
}

/// Where one copy lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The segment; ask [`State::segment`](super::State::segment) before the state is changed.
    pub segment: SegmentSlot,
    /// From the segment's base.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The copy.
    pub replica: ReplicaId,
}

/// Why the puts of a client will not be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AbandonReason {
    /// Nothing was heard of it; it may still write.
    Vanished,
    /// It leaves or is dead; bytes it sent before may still arrive.
    Leaving,
}

impl State {
    /// Looks the one up who is to put.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `TENANT_NOT_REGISTERED`: quotas are enforced, and the
    /// tenant has none.
    pub(crate) fn put_owner(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
    ) -> Result<PutOwner> {
        // Before anything is looked up, since what is due may take it away.
        self.fire_due_timers(now);
        self.clients.check(client)?;
        self.check_tenant(tenant)?;
        let tenant = self.objects.intern_tenant(tenant)?;
        Ok(PutOwner { client, tenant, host: self.clients.host(client) })
    }

    /// The hashes of keys that the put_owner, if there is one, puts next.
    pub(crate) fn prefetch_hashes<'k>(
        &self,
        put_owner: Option<&PutOwner>,
        keys: impl Iterator<Item = &'k [u8]>,
    ) -> Vec<KeyHash> {
        self.objects.prefetch_hashes(put_owner.map(|put_owner| put_owner.tenant), keys)
    }

    /// Allocates the copies of an object and lets the client write them for the rules'
    /// `write_window`. Evicts what it needs to.
    ///
    /// # Errors
    /// `OBJECT_ALREADY_EXISTS` (unless replacing): there is such an object, or somebody is writing
    /// it. `NO_AVAILABLE_HANDLE`: no room; the context says what holds it, and has `retry_after_ms`
    /// if only the end of a fence is awaited. `CLIENT_NOT_FOUND`: register first.
    /// `INVALID_PARAMS`: no bytes, no copies, or too long a pin. `OBJECT_REPLICA_BUSY`: too many
    /// writers of one key.
    pub fn put_start(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: Put<'_>,
    ) -> Result<Started> {
        let put_owner = self.put_owner(now, client, tenant)?;
        let hash = self.objects.hash(put_owner.tenant, put.key.as_bytes());
        self.put_start_hashed(now, &put_owner, hash, put)
    }

    /// As [`put_start`](Self::put_start), of one of many keys, for who knows its hash.
    pub(crate) fn put_start_hashed(
        &mut self,
        now: Moment,
        put_owner: &PutOwner,
        hash: KeyHash,
        put: Put<'_>,
    ) -> Result<Started> {
        let &PutOwner { client, tenant, ref host } = put_owner;
        let soft_pin = self.check_put(&put)?;
        let existing = self.existing(now, hash, tenant, put.key);
        if let Some(slot) = existing {
            if let Some(started) = self.repeated_start(slot, client, &put) {
                return Ok(started);
            }
            self.check_existing(slot, put.is_replacing)?;
        }
        let copies = put.options.replicas.min(REPLICAS_MAX);
        let growth = self.growth(put.length, copies, existing);
        self.admit(now, tenant, growth, existing).map_err(|error| error.with("key", put.key))?;
        let request = AllocRequest {
            length: put.length,
            replicas: copies,
            filter: SegmentFilter::All,
            host,
            options: put.options,
            spared: existing,
        };
        let replicas = self.allocate_copies(now, &request).map_err(|error| {
            self.counters.puts_without_room += 1;
            error.with("key", put.key)
        })?;
        let slot = match existing {
            Some(slot) => {
                // What nobody has announced is free for writers, and must not come back.
                if !put.is_replacing && self.is_unclaimed(slot) {
                    self.drop_value(now, slot);
                }
                slot
            }
            None => match self.objects.insert_hashed(hash, tenant, put.key) {
                Ok(slot) => slot,
                Err(error) => {
                    // Nothing was promised to anybody yet.
                    replicas.iter().for_each(|&copy| self.release(now, copy, Timestamp::default()));
                    return Err(error);
                }
            },
        };
        self.tenants.charge(tenant, put.length * replicas.len() as u64);
        let version = self.next_version;
        self.next_version += 1;
        let started = Started {
            version: Version(version),
            places: self.places(version, put.length, replicas.iter()),
        };
        self.reserve_write_window(now, &replicas);
        let number = self.writes.insert(Write {
            object: Some(slot),
            hash,
            tenant,
            next: self.objects.at(slot).newest_write,
            version,
            client,
            request: put.request,
            started: now,
            length: put.length,
            replicas,
            soft_pin,
            is_hard_pinned: put.options.is_hard_pinned,
            is_replacing: put.is_replacing,
            data_type: put.options.data_type,
            group: put.group.into(),
        });
        self.objects.at_mut(slot).newest_write = number;
        self.log_put_started(number);
        Ok(started)
    }

    /// Publishes what was written, in the place of what stood there. `put.failed_replicas` are
    /// given up; their memory rests until no late byte can arrive.
    ///
    /// A put that was not to replace anything, and is ended after another one was published,
    /// counts as having stood just before that one.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`: no such put (any more): it was displaced, released or revoked.
    /// `ILLEGAL_CLIENT`: somebody else's. `REPLICA_IS_GONE`: no copy is left.
    pub fn put_end(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: PutRef<'_>,
    ) -> Result<()> {
        let (slot, number) = self.find_write(now, client, tenant, &put)?;
        let mut write = self.remove_write(slot, number);
        self.drop_failed_copies(now, &mut write, put.failed_replicas);
        if write.replicas.is_empty() {
            self.log_put_dropped(write.version);
            let error = Error::new(ErrorCode::REPLICA_IS_GONE, "no copy of the object is left")
                .with("key", Printed(self.objects.key(self.objects.at(slot))))
                .with("version", put.version);
            self.remove_if_empty(slot);
            return Err(error);
        }
        let is_late = !write.is_replacing && self.drop_lost_replicas(slot);
        if is_late {
            self.log_put_dropped(write.version);
            self.release_put_memory(now, &write, Timestamp::default());
            return Ok(());
        }
        self.publish(now, slot, write, &put);
        Ok(())
    }

    /// Gives the space of an unfinished put back. `put.failed_replicas` names copies on which a
    /// write may still be under way: their memory rests until no late byte can arrive.
    ///
    /// # Errors
    /// As [`put_end`](Self::put_end), but for `REPLICA_IS_GONE`.
    pub fn put_revoke(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: PutRef<'_>,
    ) -> Result<()> {
        let (slot, number) = self.find_write(now, client, tenant, &put)?;
        let mut write = self.remove_write(slot, number);
        self.log_put_dropped(write.version);
        self.drop_failed_copies(now, &mut write, put.failed_replicas);
        self.release_put_memory(now, &write, Timestamp::default());
        self.remove_if_empty(slot);
        Ok(())
    }

    /// Where the copies lie.
    pub(super) fn places<'a>(
        &self,
        version: u64,
        length: u64,
        replicas: impl IntoIterator<Item = &'a Replica>,
    ) -> SmallVec<[Place; 1]> {
        let place = |replica: &Replica| Place {
            segment: replica.segment,
            offset: self.segments.at(replica.segment).allocator.offset(replica.block),
            length,
            replica: replica.id(version),
        };
        replicas.into_iter().map(place).collect()
    }

    /// What was asked for, checked; the time of the soft pin in it.
    fn check_put(&self, put: &Put<'_>) -> Result<WishedPin> {
        let refuse = |why: &str| Err(Error::invalid(why).with("key", put.key));
        if put.length == 0 {
            return refuse("an object has at least one byte");
        }
        if put.options.replicas == 0 {
            return refuse("an object has at least one copy");
        }
        if put.group.len() > GROUP_BYTES_MAX {
            return refuse("the name of the group is too long");
        }
        match put.options.soft_pin {
            SoftPin::Preserve => Ok(WishedPin::Preserve),
            SoftPin::Disable => Ok(WishedPin::None),
            SoftPin::Enable(None) => Ok(WishedPin::For(self.rules.soft_pin_ttl)),
            SoftPin::Enable(Some(ttl)) if ttl <= self.rules.soft_pin_ttl_max => {
                Ok(WishedPin::For(ttl))
            }
            SoftPin::Enable(Some(ttl)) => Err(Error::invalid("the soft pin is too long")
                .with("key", put.key)
                .with("ttl_ms", ttl.as_millis())
                .with("limit_ms", self.rules.soft_pin_ttl_max.as_millis())),
        }
    }

    /// What stands under that key, without puts that took too long.
    fn existing(
        &mut self,
        now: Moment,
        hash: KeyHash,
        tenant: TenantIndex,
        key: KeyRef<'_>,
    ) -> Option<ObjectSlot> {
        let slot = self.find_hashed(hash, tenant, key.as_bytes())?;
        self.discard_stale_writes(now, slot);
        self.objects.get(slot).map(|_| slot)
    }

    /// Should the driver be late while nothing takes objects: memory may have rested by now.
    fn fire_due_timers(&mut self, now: Moment) {
        if self.segments.open().is_empty() {
            while self.fire_timer(now) {}
        }
    }

    /// Somebody may write there until his window is over.
    fn reserve_write_window(&mut self, now: Moment, replicas: &[Replica]) {
        for replica in replicas {
            let segment = self.segments.at_mut(replica.segment);
            segment.writing += segment.allocator.size(replica.block);
            segment.busy_until = segment.busy_until.max(now + self.rules.write_end());
        }
    }

    /// What the same call was answered before, if it is this one again.
    fn repeated_start(&self, slot: ObjectSlot, client: ClientId, put: &Put<'_>) -> Option<Started> {
        let is_same = |write: &&Write| {
            write.request == put.request && write.client == client && write.length == put.length
        };
        if put.request == 0 {
            return None;
        }
        let writes = self.writes.chain(self.objects.at(slot).newest_write);
        let write = writes.map(|number| self.writes.at(number)).find(is_same)?;
        Some(Started {
            version: Version(write.version),
            places: self.places(write.version, write.length, write.replicas.iter()),
        })
    }

    /// Whether a put may begin where something stands.
    fn check_existing(&self, slot: ObjectSlot, is_replacing: bool) -> Result<()> {
        let object = self.objects.at(slot);
        let is_free = object.newest_write == NO_WRITE && self.is_unclaimed(slot);
        if !is_replacing && !is_free {
            let why = match object.is_complete() {
                true => "there is an object of that key",
                false => "somebody is writing an object of that key",
            };
            let key = Printed(self.objects.key(object));
            return Err(Error::new(ErrorCode::OBJECT_ALREADY_EXISTS, why).with("key", key));
        }
        let writers = self.writes.chain(object.newest_write).count();
        if writers >= WRITERS_PER_KEY_MAX {
            return Err(Error::new(ErrorCode::OBJECT_REPLICA_BUSY, "too many writers of one key")
                .with("key", Printed(self.objects.key(object)))
                .with("limit", WRITERS_PER_KEY_MAX));
        }
        Ok(())
    }
}
