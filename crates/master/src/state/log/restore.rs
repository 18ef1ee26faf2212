//! Restores a working state from the replayed log after a restart.

use std::time::Duration;

use mooncake_base::{Moment, ObjectKey, TenantId};
use rustc_hash::FxHashMap;

use crate::state::{
    Effect, LoggedCopy, LoggedPin, ObjectName, Rules, SegmentNumber, State,
    catalog::{
        annotations::Annotation,
        object::{Flags, NO_WRITE, Replica, Replicas},
    },
    client::recovery::Recovery,
    ids::{KeyHash, ObjectSlot, SegmentSlot, TenantIndex},
    log::replay::{Image, LiveObject, LoggedSegment, LoggedWrite, QuarantinedRange, TenantObjects},
    pool::{
        allocator::Allocator,
        segment::{Segment, SegmentStatus},
    },
    put::{options::RequestedPin, write::Write},
    random::Random,
    timer::Timer,
};

/// Versions skipped because they may have been used and lost with the unsynced end of the log.
const VERSIONS_PASSED: u64 = 1 << 24;
/// The most skips, at random, where the log of whole runs may be lost. Such a run has skipped as
/// many versions from the same log, and the next one must not use its versions again.
const SKIPS_MAX: usize = 1 << 12;

/// Result of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Restored {
    /// Unclaimed segments.
    pub segments: u64,
    /// Objects in these segments.
    pub objects: u64,
    /// Unfinished puts.
    pub writes: u64,
    /// Tasks that will continue.
    pub tasks: u64,
    /// Drain jobs that will continue.
    pub jobs: u64,
    /// Objects and puts dropped because another one has their memory, or because they lie beyond
    /// their segment: the log was damaged in a way that its checksums did not detect.
    pub conflicts: u64,
}

/// A restore in progress.
struct Restoration {
    now: Moment,
    /// End of the longest fence granted before.
    fence: Moment,
    /// End of the longest lease granted before.
    lease: Moment,
    /// Slots of the restored segments.
    slots: FxHashMap<SegmentNumber, SegmentSlot>,
    report: Restored,
}

/// Reason why a replica cannot be restored.
enum Misplaced {
    /// The segment left the pool.
    Lost,
    /// The memory is taken.
    Conflict,
}

impl State {
    /// Restores the state after a restart. All of it is unclaimed until the owners announce their
    /// segments; effects are recorded.
    ///
    /// Until the longest fence granted by the earlier master ends, no memory is allocated, since
    /// readers and writers may still use it. Grants that were lost with the unsynced end of the log
    /// last at most `lost_grants_max`.
    pub fn restore(
        rules: Rules,
        seed: u64,
        now: Moment,
        image: Image,
        lost_grants_max: Duration,
    ) -> (Self, Restored) {
        let mut state = Self::new(rules, seed);
        // Without a log, versions begin at random: those of another timeline are not valid here.
        if image.next_version > 0 {
            let skips = match lost_grants_max.is_zero() {
                true => 1,
                // A killed master has skipped once.
                false => 2 + Random::new(!seed).below(SKIPS_MAX) as u64,
            };
            state.inventory.next_version =
                image.next_version.saturating_add(skips * VERSIONS_PASSED);
        }
        state.inventory.pool.segments.set_next_number(image.next_number);
        // Recorded, so that a restart soon after this one lets memory rest as long.
        state.inventory.max_granted.fence = image.fence.max(lost_grants_max);
        state.inventory.max_granted.raised_until = now + lost_grants_max;
        state.inventory.max_granted.lease = image.lease;
        state.record_effects();
        let mut restoration = Restoration {
            now,
            fence: now + image.fence.max(lost_grants_max),
            lease: now + image.lease,
            slots: FxHashMap::default(),
            report: Restored::default(),
        };
        let is_doubtful = !lost_grants_max.is_zero();
        state.inventory.recovery =
            Recovery::begin(now, restoration.fence, is_doubtful, &state.inventory.rules);
        restoration.run(&mut state, image);
        (state, restoration.report)
    }
}

impl Restoration {
    fn run(&mut self, state: &mut State, image: Image) {
        for (number, segment) in image.segments {
            let slot = self.restore_segment(state, number, segment);
            self.slots.insert(number, slot);
            self.report.segments += 1;
        }
        for (tenant, bytes) in image.quotas {
            // Without multi-tenancy quotas no longer apply.
            let _ = state.set_quota(&TenantId::new(&tenant), bytes);
        }
        self.restore_objects(state, &image.tenants, image.objects);
        let mut writes: Vec<LoggedWrite> = image.writes.into_values().collect();
        writes.sort_unstable_by_key(|write| write.value.version);
        for write in writes {
            self.restore_write(state, &image.tenants, write);
        }
        for range in image.quarantined {
            self.restore_quarantined(state, &range);
        }
        let records = state.tasks().restore_records(self.now, image.tasks, image.next_ordinal);
        (self.report.tasks, self.report.jobs) = (records.tasks, records.jobs);
        self.report.conflicts += records.damaged;
    }

    fn restore_segment(
        &self,
        state: &mut State,
        number: SegmentNumber,
        logged: LoggedSegment,
    ) -> SegmentSlot {
        let spec = logged.spec;
        let (id, incarnation) = (spec.id, spec.incarnation);
        let status = SegmentStatus::from_code(logged.status);
        let unmount_at =
            (status == SegmentStatus::GracefullyUnmounting).then(|| self.now + logged.grace);
        if status.code() != logged.status {
            let (status, grace) = (status.code(), Duration::ZERO);
            state.inventory.log.effects.record(|| Effect::SegmentStatus { number, status, grace });
        }
        if let Some(unmount_at) = unmount_at {
            state.inventory.timers.push(unmount_at, Timer::Unmount(id, incarnation));
        }
        state.inventory.timers.push(self.fence, Timer::QuarantineEnd(id, incarnation));
        state
            .inventory
            .timers
            .push(state.inventory.recovery.end(), Timer::Unclaimed(id, incarnation));
        state.inventory.recovery.segments += 1;
        let mut segment = Segment::new(number, logged.client, spec, self.fence);
        segment.status = status;
        (segment.is_unclaimed, segment.is_recovered) = (true, true);
        segment.quarantined_until = (!self.fence.has_passed(self.now)).then_some(self.fence);
        segment.unmount_at = unmount_at;
        state.inventory.pool.segments.insert(segment)
    }

    fn restore_objects(
        &mut self,
        state: &mut State,
        tenants: &[TenantId],
        objects: Vec<TenantObjects>,
    ) {
        state.inventory.catalog.objects.reserve(objects.iter().map(TenantObjects::len).sum());
        // Indices are sorted instead of the objects, since objects are large.
        let mut order: Vec<(u64, usize, u32)> = Vec::new();
        for (tenant, keys) in objects.iter().enumerate() {
            order.extend(keys.iter().map(|(slot, _, live)| (live.version, tenant, slot)));
        }
        order.sort_unstable();
        // The latest grant wins: if two objects claim the same memory, the later version has it.
        let mut found: Vec<Replicas> = Vec::with_capacity(order.len());
        for &(_, tenant, slot) in order.iter().rev() {
            if let Some((key, live)) = objects[tenant].get(slot) {
                found.push(self.restore_copies(state, &tenants[tenant], key, live).into());
            }
        }
        // By version, which is the order of puts and of eviction.
        let mut objects: Vec<_> = objects.into_iter().map(TenantObjects::into_slots).collect();
        for ((_, tenant, slot), replicas) in order.into_iter().zip(found.into_iter().rev()) {
            // Taken out, so that its memory is freed early.
            let object = objects[tenant][slot as usize].take();
            if let Some((key, live)) = object.filter(|_| !replicas.is_empty()) {
                self.restore_object(state, &tenants[tenant], &key, &live, replicas);
            }
        }
    }

    /// Allocates the replicas at their logged locations.
    fn restore_copies(
        &mut self,
        state: &mut State,
        tenant: &TenantId,
        key: &ObjectKey,
        live: &LiveObject,
    ) -> Vec<Replica> {
        let mut replicas = Vec::with_capacity(live.copies.len());
        let name =
            || ObjectName { tenant: tenant.as_str(), key: key.as_bytes(), version: live.version };
        for copy in &live.copies {
            match self.allocate_at(state, copy, live.length) {
                Ok(replica) => replicas.push(replica),
                Err(Misplaced::Lost) => {}
                Err(Misplaced::Conflict) => {
                    self.report.conflicts += 1;
                    let ordinal = copy.ordinal;
                    let effect = || Effect::ReplicaDropped { object: name(), ordinal };
                    state.inventory.log.effects.record(effect);
                }
            }
        }
        if replicas.is_empty() {
            state.inventory.log.effects.record(|| Effect::Dropped { object: name() });
        }
        replicas
    }

    fn allocate_at(
        &self,
        state: &mut State,
        copy: &LoggedCopy,
        length: u64,
    ) -> Result<Replica, Misplaced> {
        let &segment = self.slots.get(&copy.segment).ok_or(Misplaced::Lost)?;
        let at = |allocator: &mut Allocator| allocator.allocate_at(copy.offset, length);
        let block =
            state.inventory.pool.segments.with_allocator(segment, at).ok_or(Misplaced::Conflict)?;
        Ok(Replica { segment, block, ordinal: copy.ordinal })
    }

    fn restore_object(
        &mut self,
        state: &mut State,
        tenant: &TenantId,
        key: &ObjectKey,
        live: &LiveObject,
        replicas: Replicas,
    ) {
        // Both limits held when the object was put.
        let Ok(tenant) = state.inventory.catalog.objects.intern_tenant(tenant) else { return };
        let Ok(slot) = state.inventory.catalog.objects.insert(tenant, key.into()) else { return };
        for replica in replicas.iter() {
            let segment = state.inventory.pool.segments.at_mut(replica.segment);
            segment.allocator.set_owner(replica.block, slot.number());
            if live.is_hard_pinned {
                state.inventory.pool.add_hard_pin(replica);
            }
        }
        let bytes = live.length * replicas.len() as u64;
        state.inventory.catalog.objects.set_checksum(slot, live.checksum);
        let object = state.inventory.catalog.objects.at_mut(slot);
        object.version = live.version;
        object.length = live.length;
        object.data_type = live.data_type;
        object.replicas = replicas;
        object.flags.set(Flags::COMPLETE, true);
        object.flags.set(Flags::HARD_PINNED, live.is_hard_pinned);
        object.flags.set(Flags::GROUPED, !live.group.is_empty());
        object.protection.extend_lease(self.lease);
        object.protection.extend_fence(self.fence);
        if !live.group.is_empty() {
            state.inventory.catalog.groups.join(tenant, &live.group, slot);
        }
        state.inventory.catalog.objects.complete += 1;
        state.inventory.catalog.tenants.charge(tenant, bytes);
        state.inventory.catalog.tenants.add_object(tenant, slot);
        if let Some(ttl) = live.pin {
            state.inventory.pin(self.now, slot, ttl);
        }
        if let Some(logged) = &live.annotation {
            let expires = logged.expires.map(|at| state.inventory.rules.moment_of(at));
            let tags = logged.tags.clone();
            state.inventory.catalog.annotations.insert(slot, Annotation { expires, tags });
        }
        state.inventory.catalog.enqueue(slot);
        self.report.objects += 1;
    }

    /// Restores a put as if it had started now: its writer may still end it.
    fn restore_write(&mut self, state: &mut State, tenants: &[TenantId], logged: LoggedWrite) {
        let (replicas, is_whole) = self.restore_write_copies(state, &logged.value);
        let tenant = state.inventory.catalog.objects.intern_tenant(&tenants[logged.tenant]).ok();
        let object = match tenant {
            Some(tenant) if is_whole && logged.is_displaced => Some((tenant, None)),
            Some(tenant) if is_whole => {
                write_object(state, tenant, &logged.key).map(|slot| (tenant, Some(slot)))
            }
            _ => None,
        };
        let Some((tenant, object)) = object else {
            self.report.conflicts += 1;
            for replica in replicas {
                state.inventory.pool.segments.free(replica.segment, replica.block);
            }
            state
                .inventory
                .log
                .effects
                .record(|| Effect::WriteDropped { version: logged.value.version });
            return;
        };
        let end = self.now + state.inventory.rules.late_end();
        state.inventory.pool.begin_write(object, &replicas, end);
        state.inventory.catalog.tenants.charge(tenant, logged.value.length * replicas.len() as u64);
        let number = state.writes.insert(Write {
            object,
            hash: object
                .map_or(KeyHash::new(0), |slot| state.inventory.catalog.objects.key_hash(slot)),
            tenant,
            next: object
                .map_or(NO_WRITE, |slot| state.inventory.catalog.objects.at(slot).newest_write),
            version: logged.value.version,
            client: logged.client,
            request: logged.request,
            window_began: self.now,
            length: logged.value.length,
            replicas: replicas.into(),
            soft_pin: match logged.pin {
                LoggedPin::Preserve => RequestedPin::Preserve,
                LoggedPin::None => RequestedPin::None,
                LoggedPin::For(ttl) => RequestedPin::For(ttl),
            },
            is_hard_pinned: logged.value.is_hard_pinned,
            is_replacing: logged.is_replacing,
            data_type: logged.value.data_type,
            group: logged.value.group,
            terms: logged.terms,
        });
        if let Some(slot) = object {
            state.inventory.catalog.objects.at_mut(slot).newest_write = number;
        }
        self.report.writes += 1;
    }

    /// Allocates the replicas of a put. Returns them and whether there was no conflict.
    fn restore_write_copies(&self, state: &mut State, value: &LiveObject) -> (Vec<Replica>, bool) {
        let mut replicas = Vec::with_capacity(value.copies.len());
        let mut is_whole = true;
        for copy in &value.copies {
            match self.allocate_at(state, copy, value.length) {
                Ok(replica) => replicas.push(replica),
                Err(Misplaced::Lost) => {}
                Err(Misplaced::Conflict) => is_whole = false,
            }
        }
        (replicas, is_whole)
    }

    fn restore_quarantined(&self, state: &mut State, range: &QuarantinedRange) {
        let Some(&slot) = self.slots.get(&range.number) else { return };
        // An object that has this memory now was put there after the quarantine.
        let at = |allocator: &mut Allocator| allocator.allocate_at(range.offset, range.length);
        if let Some(block) = state.inventory.pool.segments.with_allocator(slot, at) {
            let until = (self.now + range.time).into();
            state.inventory.pool.quarantine_block(until, 0, (slot, block), 0);
        }
    }
}

/// Finds the object of a put, or adds it.
fn write_object(state: &mut State, tenant: TenantIndex, key: &ObjectKey) -> Option<ObjectSlot> {
    match state.inventory.catalog.objects.find(tenant, key.as_bytes()) {
        Some(slot) => Some(slot),
        // The limit held when the put started.
        None => state.inventory.catalog.objects.insert(tenant, key.into()).ok(),
    }
}
