//! Puts: start allocates, the client writes, end publishes and revoke frees.

mod client_lists;
pub(in crate::state) mod expiry;
mod finish;
pub(in crate::state) mod record;
pub(in crate::state) mod write;

use std::sync::Arc;

use mooncake_base::{
    ClientId, Error, ErrorCode, KeyRef, Moment, ReplicaId, Result, TenantId, Version, key::Printed,
};
use smallvec::SmallVec;

use crate::state::{
    calls::{
        put::write::{Write, Writes},
        reclaim::{Allocation, Pending, Reclaimer, SearchId, Searches},
    },
    catalog::object::{NO_WRITE, REPLICAS_MAX},
    ids::{KeyHash, ObjectSlot, TenantIndex},
    inventory::{
        Inventory,
        errors::other_version,
        prepared, puts,
        quota::{self, QuotaVerdict},
        segments,
    },
    lease::Timestamp,
    options::{PutOptions, RequestedPin, SoftPin, Terms, check_ttl},
    pool::{
        allocation::Place,
        request::{AllocRequest, SegmentFilter},
        segment::SegmentSet,
    },
    replica::Replicas,
};

/// Maximum unfinished puts of one key (upserts by several clients).
const WRITERS_PER_KEY_MAX: usize = 64;

/// Maximum number of endpoints that a put avoids. Clients name those first that failed last.
const AVOIDED_ENDPOINTS_MAX: usize = 256;

/// Maximum length of a group name.
const GROUP_BYTES_MAX: usize = 64 * 1024;

/// An object to put.
#[derive(Debug)]
pub struct Put<'a> {
    /// Key of the object.
    pub key: KeyRef<'a>,
    /// Length, at least 1 byte.
    pub length: u64,
    /// Group that is evicted as a whole; empty: none.
    pub group: &'a [u8],
    /// Placement and retention.
    pub options: &'a PutOptions,
    /// Replace an existing object (upsert) instead of refusing.
    pub is_replacing: bool,
    /// Replace only this version of the object, at the start and at the end of the put.
    pub if_version: Option<Version>,
    /// Request id that the client uses only once; 0: none. A repeated call gets the same result.
    pub request: u64,
}

/// The client and tenant of a call's puts, looked up once. Valid until the state is used otherwise.
#[derive(Debug)]
pub(crate) struct PutOwner {
    client: ClientId,
    tenant: TenantIndex,
    /// Empty if unknown.
    host: Arc<str>,
    /// Segments of peers that the client could not reach, used only if no other has room.
    avoided: SegmentSet,
}

#[cfg(test)]
impl PutOwner {
    /// Returns the avoided segments.
    pub(in crate::state) fn avoided_segments(&self) -> Vec<crate::state::SegmentSlot> {
        let slots = (0..1 << 16).map(crate::state::SegmentSlot::new);
        slots.filter(|&slot| self.avoided.contains(slot)).collect()
    }
}

/// A writer's reference to an unfinished put.
#[derive(Debug, Clone, Copy)]
pub struct PutRef<'a> {
    /// The key; may be empty, since the version identifies the put.
    pub key: &'a [u8],
    /// Version that [`PutCalls::put_start`] returned.
    pub version: Version,
    /// Replicas that could not be written, or on which a write may still be in flight.
    pub failed_replicas: &'a [ReplicaId],
    /// Checksum for readers.
    pub checksum: Option<u64>,
}

impl PutRef<'_> {
    /// The put of a version, of which nothing else is known.
    pub fn of(version: Version) -> Self {
        Self { key: &[], version, failed_replicas: &[], checksum: None }
    }
}

/// The progress of a put that has to wait for memory; empty at first. Pass the same one to each
/// call about the put.
#[derive(Debug, Default)]
pub struct PutProgress {
    search: Option<SearchId>,
    /// Whether nothing fits into the segments that are not avoided.
    uses_avoided: bool,
}

/// The outcome of one call about a put.
#[derive(Debug)]
pub enum PutStep {
    /// The put may be written.
    Started(Started),
    /// Unlock the state and call again.
    Pending(Pending),
}

/// A put that may be written now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// Version that the object gets when the put ends.
    pub version: Version,
    /// Where to write, one place per replica, at least one.
    pub places: SmallVec<[Place; 1]>,
    /// The log says already that this memory rests after a restart: the answer need not wait for the
    /// record of the put.
    pub is_prepared: bool,
}

/// A put that started and has neither ended nor been revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnfinishedPut {
    /// Version of the put.
    pub version: Version,
    /// Request id of the put; 0: none.
    pub request: u64,
}

/// The reason for abandoning the puts of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum AbandonReason {
    /// Heartbeats stopped; the client may still write.
    Vanished,
    /// The client leaves or is dead; bytes sent before may still arrive.
    Leaving,
}

/// The calls about puts, with the parts that they change.
#[derive(Debug)]
pub struct PutCalls<'a> {
    pub(in crate::state) inventory: &'a mut Inventory,
    pub(in crate::state) searches: &'a mut Searches,
    pub(in crate::state) writes: &'a mut Writes,
}

impl PutCalls<'_> {
    fn reclaimer(&mut self) -> Reclaimer<'_> {
        Reclaimer { inventory: self.inventory, searches: self.searches }
    }

    /// Looks up the client and tenant that put.
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
        // In case `advance` is late.
        segments::open_due(self.inventory, now);
        self.release_due(now);
        self.inventory.clients().check(client)?;
        let tenant = puts::writing_tenant(self.inventory, tenant)?;
        let host = self.inventory.clients().host(client);
        Ok(PutOwner { client, tenant, host, avoided: SegmentSet::default() })
    }

    /// Lets the owner's puts use segments of these endpoints only if no other segment has room.
    /// Ignores endpoints beyond [`AVOIDED_ENDPOINTS_MAX`].
    pub(crate) fn avoiding(&self, put_owner: PutOwner, endpoints: &[String]) -> PutOwner {
        if endpoints.is_empty() {
            return put_owner;
        }
        let named = &endpoints[..endpoints.len().min(AVOIDED_ENDPOINTS_MAX)];
        PutOwner { avoided: self.inventory.segments().at_endpoints(named), ..put_owner }
    }

    /// Returns the hashes of the keys that the owner puts next, and prefetches their table entries.
    pub(crate) fn prefetch_hashes<'k>(
        &self,
        put_owner: Option<&PutOwner>,
        keys: impl Iterator<Item = &'k [u8]>,
    ) -> Vec<KeyHash> {
        self.inventory.objects().prefetch_hashes(put_owner.map(|put_owner| put_owner.tenant), keys)
    }

    /// Allocates the replicas of an object and lets the client write them within the rules'
    /// `write_window`. Evicts as needed.
    ///
    /// # Errors
    /// `OBJECT_ALREADY_EXISTS` (unless replacing): the object exists or is being written; or it does
    /// not have the version to replace.
    /// `NO_AVAILABLE_HANDLE`: out of memory; the context lists what holds it, and has
    /// `retry_after_ms` if the end of a fence is enough. `CLIENT_NOT_FOUND`: register first.
    /// `INVALID_PARAMS`: no bytes, no replicas, or too long a pin. `OBJECT_REPLICA_BUSY`: too many
    /// writers of one key. `TENANT_NOT_REGISTERED`,
    /// `TENANT_QUOTA_EXCEEDED`: the tenant has no quota, or would exceed it.
    pub fn put_start(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: Put<'_>,
    ) -> Result<Started> {
        let mut progress = PutProgress::default();
        loop {
            match self.put_step(now, client, tenant, &put, &mut progress)? {
                PutStep::Started(started) => return Ok(started),
                PutStep::Pending(Pending::Yield) => {}
                PutStep::Pending(pending) => {
                    self.cancel_put(progress);
                    let error = self.reclaimer().pending_error(pending);
                    return Err(error
                        .with("key", put.key)
                        .with("pending", format_args!("{pending:?}")));
                }
            }
        }
    }

    /// Does a part of [`put_start`](Self::put_start). While the put is pending, `progress` holds
    /// memory: call again with the same arguments, or [`cancel_put`](Self::cancel_put).
    ///
    /// # Errors
    /// The errors of [`put_start`](Self::put_start); `progress` holds nothing then.
    pub fn put_step(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: &Put<'_>,
        progress: &mut PutProgress,
    ) -> Result<PutStep> {
        let put_owner = self.put_owner(now, client, tenant)?;
        let hash = self.inventory.objects().hash(put_owner.tenant, put.key.as_bytes());
        self.put_step_hashed(now, &put_owner, hash, put, progress)
    }

    /// Builds the error of a put that is pending for too long.
    pub fn pending_error(&mut self, pending: Pending) -> Error {
        self.reclaimer().pending_error(pending)
    }

    /// Gives up a put that is pending.
    pub fn cancel_put(&mut self, progress: PutProgress) {
        self.reclaimer().cancel_search(progress.search);
    }

    /// Does a part of a put like [`put_step`](Self::put_step), with a key whose hash is known.
    pub(crate) fn put_step_hashed(
        &mut self,
        now: Moment,
        put_owner: &PutOwner,
        hash: KeyHash,
        put: &Put<'_>,
        progress: &mut PutProgress,
    ) -> Result<PutStep> {
        let step = self.try_put_step(now, put_owner, hash, put, progress);
        if progress.search.is_some() && !matches!(step, Ok(PutStep::Pending(_))) {
            self.reclaimer().cancel_search(progress.search.take());
        }
        step
    }

    fn try_put_step(
        &mut self,
        now: Moment,
        put_owner: &PutOwner,
        hash: KeyHash,
        put: &Put<'_>,
        progress: &mut PutProgress,
    ) -> Result<PutStep> {
        let &PutOwner { client, tenant, .. } = put_owner;
        let soft_pin = self.check_put(put)?;
        let existing = self.existing(now, hash, tenant, put.key);
        if let Some(slot) = existing {
            if let Some(started) = self.repeated_start(slot, client, put) {
                return Ok(PutStep::Started(started));
            }
            self.check_version(slot, put.if_version)?;
            // The writer may count an object that exists as stored.
            let checked = self.check_existing(slot, put.is_replacing);
            checked.inspect_err(|_| self.inventory.take_back(slot))?;
        } else if let Some(version) = put.if_version {
            return Err(other_version(put.key.as_bytes(), version, None));
        }
        self.check_counts(put_owner, existing.is_none(), put.key)?;
        // The value of an unreachable object stays until the new one is published: if the put fails
        // and a holder comes back, it is readable again.
        let is_replacing =
            put.is_replacing || existing.is_some_and(|slot| self.inventory.is_unreachable(slot));
        let is_first_step = progress.search.is_none();
        let prepared_before = self.inventory.pool().prepared_taken();
        let allocated = self.allocate_put(now, put_owner, put, existing, progress);
        let replicas = match allocated.map_err(|error| error.with("key", put.key))? {
            Allocation::Ready(replicas) => replicas,
            Allocation::Pending(pending) => return Ok(PutStep::Pending(pending)),
        };
        let taken = self.inventory.pool().prepared_taken() - prepared_before;
        let is_prepared = is_first_step && taken == replicas.len() as u64;
        // The object may have been evicted with a large group, whose members leave one by one.
        let existing = existing.filter(|&slot| self.inventory.objects().get(slot).is_some());
        let slot = match existing {
            Some(slot) => {
                // An unclaimed object does not block writers, and must not come back.
                if !is_replacing && self.inventory.is_unclaimed(slot) {
                    self.inventory.drop_value(now, slot);
                }
                slot
            }
            None => self.insert_object(now, put_owner, hash, put, &replicas)?,
        };
        let until = now + self.inventory.rules().late_end();
        let version = puts::begin(self.inventory, slot, tenant, put.length, &replicas, until);
        let started = Started {
            version: Version(version),
            places: self.inventory.pool().places(version, put.length, replicas.iter()),
            is_prepared,
        };
        let number = self.writes.insert(Write {
            object: Some(slot),
            hash,
            tenant,
            next: self.inventory.object(slot).newest_write,
            version,
            client,
            request: put.request,
            window_began: now,
            length: put.length,
            replicas,
            soft_pin,
            is_hard_pinned: put.options.is_hard_pinned,
            is_replacing,
            data_type: put.options.data_type,
            group: put.group.into(),
            terms: terms(put),
        });
        puts::set_newest(self.inventory, slot, number);
        self.log_put_started(number);
        if self.inventory.pool().prepares() {
            // Behind the record of this put: once memory is prepared, the log has a version of this run,
            // and the next master passes those of puts that started since.
            let replicas = &self.writes.at(number).replicas;
            prepared::prepare_more(self.inventory, replicas, put.length);
        }
        Ok(PutStep::Started(started))
    }

    /// Adds the object of a put. Frees the replicas if that fails.
    #[inline]
    fn insert_object(
        &mut self,
        now: Moment,
        put_owner: &PutOwner,
        hash: KeyHash,
        put: &Put<'_>,
        replicas: &Replicas,
    ) -> Result<ObjectSlot> {
        let inserted = puts::insert_object(self.inventory, hash, put_owner.tenant, put.key);
        inserted.inspect_err(|_| {
            // No client knows of these blocks yet.
            for &copy in replicas.iter() {
                self.inventory.release(now, copy, Timestamp::default());
            }
        })
    }

    /// Tells the state up to which position of the log answers need not wait. It prepares memory for
    /// puts from then on, so that their starts need not wait either; `None`: waits take little time.
    pub fn set_answerable(&mut self, position: Option<u64>) {
        prepared::set_answerable(self.inventory, position);
    }

    /// Allocates the replicas of a put, if the quota of its tenant allows them.
    fn allocate_put(
        &mut self,
        now: Moment,
        put_owner: &PutOwner,
        put: &Put<'_>,
        existing: Option<ObjectSlot>,
        progress: &mut PutProgress,
    ) -> Result<Allocation> {
        let replicas = put.options.replicas.min(REPLICAS_MAX);
        let growth = quota::growth(self.inventory, put.length, replicas, existing);
        match self.inventory.admit(now, put_owner.tenant, growth, existing)? {
            QuotaVerdict::Granted => {}
            QuotaVerdict::Later => return Ok(Allocation::Pending(Pending::Yield)),
            QuotaVerdict::Disks(progress) => {
                return Ok(Allocation::Pending(Pending::Disks(progress)));
            }
        }
        let request = AllocRequest {
            length: put.length,
            replicas,
            filter: if put_owner.avoided.is_empty() || progress.uses_avoided {
                SegmentFilter::All
            } else {
                SegmentFilter::Avoiding(&put_owner.avoided)
            },
            host: &put_owner.host,
            options: put.options,
            spared: existing,
        };
        let mut allocated = self.reclaimer().allocate_copies(now, &request, &mut progress.search);
        if allocated.is_err() && matches!(request.filter, SegmentFilter::Avoiding(_)) {
            progress.uses_avoided = true;
            self.reclaimer().cancel_search(progress.search.take());
            let request = AllocRequest { filter: SegmentFilter::All, ..request };
            allocated = self.reclaimer().allocate_copies(now, &request, &mut progress.search);
        }
        self.inventory.counters_mut().puts_without_room += u64::from(allocated.is_err());
        allocated
    }

    /// Begins a new write window for an unfinished put, whose writer may go on for another
    /// `write_window` from now. Nothing is logged: a restart begins a window, too.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `ILLEGAL_CLIENT`: as [`put_end`](Self::put_end). The window ends as before.
    pub fn put_renew(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: PutRef<'_>,
    ) -> Result<()> {
        let (_, number) = self.find_write(now, client, tenant, &put)?;
        self.writes.renew(number, now);
        let until = now + self.inventory.rules().late_end();
        puts::extend(self.inventory, &self.writes.at(number).replicas, until);
        Ok(())
    }

    /// Publishes the written value in place of the earlier one. `put.failed_replicas` are dropped;
    /// their memory is quarantined until no late byte can arrive.
    ///
    /// A put that does not replace, but ends after another put was published, counts as replaced by
    /// that one. The end of a put whose value is the present one of `put.key` succeeds again.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`: no such put (any more): it was displaced, released or revoked.
    /// `ILLEGAL_CLIENT`: another client's put. `REPLICA_IS_GONE`: no replica is left.
    /// `OBJECT_ALREADY_EXISTS`: the object no longer has the version that the put replaces.
    pub fn put_end(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: PutRef<'_>,
    ) -> Result<()> {
        self.put_end_late(now, client, tenant, put, &[])
    }

    /// Publishes the written value like [`put_end`](Self::put_end). Replicas in `late` are kept, but
    /// bytes of an earlier attempt may still arrive there: their memory is not reused before that is
    /// over.
    ///
    /// # Errors
    /// The errors of [`put_end`](Self::put_end).
    pub fn put_end_late(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: PutRef<'_>,
        late: &[ReplicaId],
    ) -> Result<()> {
        let (slot, number) = match self.find_write(now, client, tenant, &put) {
            Ok(found) => found,
            Err(_) if self.is_published(now, tenant, &put) => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut write = self.remove_write(slot, number);
        let failed = self.drop_failed_copies(now, &mut write, put.failed_replicas);
        if write.replicas.is_empty() {
            self.log_put_dropped(write.version);
            let error = Error::new(ErrorCode::REPLICA_IS_GONE, "no copy of the object is left")
                .with("key", Printed(self.inventory.objects().key(self.inventory.object(slot))))
                .with("version", put.version);
            self.inventory.remove_if_empty(slot);
            return Err(error);
        }
        let late_until = self.late_until(now, &write, late);
        let is_late = !write.is_replacing && self.inventory.drop_lost_replicas(slot);
        let if_version = write.terms.as_ref().and_then(|terms| terms.if_version);
        if let Err(error) = self.check_version(slot, if_version.map(Version)) {
            self.log_put_dropped(write.version);
            self.release_put_memory(now, &write, late_until);
            self.inventory.remove_if_empty(slot);
            return Err(error);
        }
        if is_late {
            self.log_put_dropped(write.version);
            self.release_put_memory(now, &write, late_until);
            return Ok(());
        }
        self.publish(now, slot, write, &put, &failed);
        if late_until > now.into() {
            puts::await_late_bytes(self.inventory, slot, late_until.moment());
        }
        Ok(())
    }

    /// Frees the memory of an unfinished put. `put.failed_replicas` names replicas on which a write
    /// may still be in flight: their memory is quarantined until no late byte can arrive.
    ///
    /// # Errors
    /// The errors of [`put_end`](Self::put_end), except `REPLICA_IS_GONE`.
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
        self.inventory.remove_if_empty(slot);
        Ok(())
    }

    /// Checks a put and returns its soft pin.
    fn check_put(&self, put: &Put<'_>) -> Result<RequestedPin> {
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
        check_ttl(put.options.ttl).map_err(|error| error.with("key", put.key))?;
        match put.options.soft_pin {
            SoftPin::Preserve => Ok(RequestedPin::Preserve),
            SoftPin::Disable => Ok(RequestedPin::None),
            SoftPin::Enable(None) => Ok(RequestedPin::For(self.inventory.rules().soft_pin_ttl)),
            SoftPin::Enable(Some(ttl)) if ttl <= self.inventory.rules().soft_pin_ttl_max => {
                Ok(RequestedPin::For(ttl))
            }
            SoftPin::Enable(Some(ttl)) => Err(Error::invalid("the soft pin is too long")
                .with("key", put.key)
                .with("ttl_ms", ttl.as_millis())
                .with("limit_ms", self.inventory.rules().soft_pin_ttl_max.as_millis())),
        }
    }

    /// Finds the object of the key after displacing puts that took too long.
    fn existing(
        &mut self,
        now: Moment,
        hash: KeyHash,
        tenant: TenantIndex,
        key: KeyRef<'_>,
    ) -> Option<ObjectSlot> {
        let slot = self.inventory.find_hashed(now, hash, tenant, key.as_bytes())?;
        self.discard_stale_writes(now, slot);
        self.inventory.objects().get(slot).map(|_| slot)
    }

    /// Returns the earlier result if this call is a repetition.
    fn repeated_start(&self, slot: ObjectSlot, client: ClientId, put: &Put<'_>) -> Option<Started> {
        let is_same = |write: &&Write| {
            write.request == put.request && write.client == client && write.length == put.length
        };
        if put.request == 0 {
            return None;
        }
        let writes = self.writes.chain(self.inventory.object(slot).newest_write);
        let write = writes.map(|number| self.writes.at(number)).find(is_same)?;
        Some(Started {
            version: Version(write.version),
            places: self.inventory.pool().places(
                write.version,
                write.length,
                write.replicas.iter(),
            ),
            is_prepared: false,
        })
    }

    /// Checks that the put exceeds neither the objects of its tenant nor the unfinished puts of its
    /// client: each takes memory of the master, however few bytes it has.
    fn check_counts(&mut self, owner: &PutOwner, is_new: bool, key: KeyRef<'_>) -> Result<()> {
        let rules = self.inventory.rules();
        let objects = self.inventory.objects().count_of(owner.tenant);
        let puts_max = rules.unfinished_puts_per_client_max;
        // No client has more puts than all of them together.
        let may_exceed = self.writes.len() as u64 >= puts_max;
        let (code, text, limit, option) =
            if may_exceed && self.writes.count_of(owner.client) >= puts_max {
                (
                    ErrorCode::NO_AVAILABLE_HANDLE,
                    "the client has too many unfinished puts",
                    puts_max,
                    "max_unfinished_puts_per_client",
                )
            } else if is_new && objects >= rules.objects_per_tenant_max {
                (
                    ErrorCode::TENANT_QUOTA_EXCEEDED,
                    "the tenant has too many objects",
                    rules.objects_per_tenant_max,
                    "max_objects_per_tenant",
                )
            } else {
                return Ok(());
            };
        self.inventory.counters_mut().puts_over_count += 1;
        let error = Error::new(code, text).with("key", key);
        Err(error.with("limit", limit).with("option", format_args!("--{option}")))
    }

    /// Checks that the object has the version that a put replaces.
    fn check_version(&self, slot: ObjectSlot, expected: Option<Version>) -> Result<()> {
        let Some(expected) = expected else { return Ok(()) };
        let object = self.inventory.object(slot);
        let present = object.is_complete().then(|| object.version());
        if present == Some(expected) {
            return Ok(());
        }
        Err(other_version(self.inventory.objects().key(object), expected, present))
    }

    /// Checks whether a put of an existing key may start.
    fn check_existing(&self, slot: ObjectSlot, is_replacing: bool) -> Result<()> {
        let object = self.inventory.object(slot);
        let is_hidden = self.inventory.is_unclaimed(slot) || self.inventory.is_unreachable(slot);
        let is_free = is_hidden && object.newest_write == NO_WRITE;
        if !is_replacing && !is_free {
            let why = if object.is_complete() && !is_hidden {
                "an object with that key exists"
            } else {
                "another put of that key is unfinished"
            };
            let key = Printed(self.inventory.objects().key(object));
            return Err(Error::new(ErrorCode::OBJECT_ALREADY_EXISTS, why).with("key", key));
        }
        let writers = self.writes.chain(object.newest_write).count();
        if writers >= WRITERS_PER_KEY_MAX {
            return Err(Error::new(ErrorCode::OBJECT_REPLICA_BUSY, "too many writers of one key")
                .with("key", Printed(self.inventory.objects().key(object)))
                .with("limit", WRITERS_PER_KEY_MAX));
        }
        Ok(())
    }
}

/// Returns what few puts ask for.
fn terms(put: &Put<'_>) -> Option<Box<Terms>> {
    let (if_version, ttl) = (put.if_version.map(|version| version.0), put.options.ttl);
    let tags = &put.options.tags;
    let is_plain = if_version.is_none() && ttl.is_none() && tags.is_empty();
    (!is_plain).then(|| Box::new(Terms { if_version, ttl, tags: tags.clone() }))
}

/// Returns the newest unfinished put of the client that prevents a plain put of the key.
pub(in crate::state) fn unfinished_put(
    inventory: &Inventory,
    writes: &Writes,
    client: ClientId,
    tenant: &TenantId,
    key: &[u8],
) -> Option<UnfinishedPut> {
    let slot = inventory.objects().find(inventory.objects().tenant_index(tenant)?, key)?;
    let object = inventory.object(slot);
    if object.is_complete() && !inventory.is_unclaimed(slot) && !inventory.is_unreachable(slot) {
        return None;
    }
    let writes = writes.chain(object.newest_write).map(|number| writes.at(number));
    let own = writes.into_iter().find(|write| write.client == client)?;
    Some(UnfinishedPut { version: Version(own.version), request: own.request })
}
