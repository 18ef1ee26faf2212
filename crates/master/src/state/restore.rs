//! Restores a working state from the replayed log after a restart.

use std::time::Duration;

use mooncake_base::{Moment, ObjectKey, TenantId};
use rustc_hash::FxHashMap;

use crate::state::{
    State,
    calls::put::write::Write,
    catalog::{
        annotations::Annotation,
        object::{Flags, NO_WRITE},
    },
    ids::{DiskSlot, KeyHash, ObjectSlot, SegmentSlot, Slot, TenantIndex},
    inventory::{Inventory, disks::place_copy, recovery::Recovery},
    ledger::{
        effect::{Effect, LoggedCopy, LoggedPin},
        replay::{
            Image, LiveObject, LoggedCopies, LoggedDisk, LoggedExtras, LoggedObjects,
            LoggedSegment, LoggedWrite, QuarantinedRange,
        },
    },
    options::RequestedPin,
    pool::{
        Pool,
        allocator::Allocator,
        disks::DiskPresence,
        segment::{Segment, SegmentNumber, SegmentStatus},
    },
    random::Random,
    replica::{DISK_ORDINAL, Replica},
    rules::Rules,
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
    /// Slots of the restored disks.
    disks: FxHashMap<SegmentNumber, DiskSlot>,
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
            disks: FxHashMap::default(),
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
        for (number, disk) in image.disks {
            self.restore_disk(state, number, disk);
        }
        let LoggedObjects { table, copies, extras } = image.objects;
        let seed = std::mem::replace(&mut state.inventory.catalog.objects, table).seed();
        for (tenant, bytes) in image.quotas {
            // Without multi-tenancy quotas no longer apply.
            let _ = state.set_quota(&TenantId::new(&tenant), bytes);
        }
        self.restore_objects(state, seed, copies, extras);
        let mut writes: Vec<LoggedWrite> = image.writes.into_values().collect();
        writes.sort_unstable_by_key(|write| write.value.version);
        for write in writes {
            self.restore_write(state, write);
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

    /// Restores a disk, which is away until its owner mounts it.
    fn restore_disk(&mut self, state: &mut State, number: SegmentNumber, logged: LoggedDisk) {
        let LoggedDisk { client, spec } = logged;
        let until = self.now + state.inventory.rules.disk_away_ttl;
        state.inventory.timers.push(until, Timer::DiskAway(spec.id));
        let away = DiskPresence::Away(until);
        // The limit held when the disk was mounted.
        let Some(slot) = state.inventory.pool.disks.insert(number, client, spec, away) else {
            return;
        };
        state.inventory.pool.disks.at_mut(slot).is_recovered = true;
        self.disks.insert(number, slot);
    }

    /// Restores the objects in the table that the replay filled: there is never a second one.
    fn restore_objects(
        &mut self,
        state: &mut State,
        seed: u64,
        mut copies: Vec<LoggedCopies>,
        mut extras: FxHashMap<ObjectSlot, LoggedExtras>,
    ) {
        let table = &state.inventory.catalog.objects;
        let slots = ObjectSlot::range(0, table.slot_count());
        let mut order: Vec<(u64, ObjectSlot)> = Vec::with_capacity(table.len() as usize);
        order.extend(slots.filter_map(|slot| Some((table.get(slot)?.version, slot))));
        order.sort_unstable();
        // The latest grant wins: if two objects claim the same memory, the later version has it.
        for &(_, slot) in order.iter().rev() {
            let copies = std::mem::take(&mut copies[slot.index()]);
            if !self.restore_copies(state, slot, &copies) {
                state.inventory.catalog.objects.remove(slot);
                extras.remove(&slot);
            }
        }
        drop(copies);
        state.inventory.catalog.objects.rehash(seed);
        // By version, which is the order of puts and of eviction.
        for (_, slot) in order {
            if state.inventory.catalog.objects.get(slot).is_some() {
                let extras = extras.remove(&slot).unwrap_or_default();
                self.restore_object(state, slot, extras);
            }
        }
    }

    /// Allocates the replicas at their logged locations. Returns whether the object has any.
    fn restore_copies(
        &mut self,
        state: &mut State,
        slot: ObjectSlot,
        copies: &[LoggedCopy],
    ) -> bool {
        let Inventory { catalog, pool, log, .. } = &mut state.inventory;
        let object = catalog.objects.at(slot);
        let mut replicas = Vec::with_capacity(copies.len());
        let mut disk = None;
        for copy in copies {
            if copy.ordinal == DISK_ORDINAL {
                disk = self.disks.get(&copy.segment).copied();
                continue;
            }
            match self.allocate_at(pool, copy, object.length) {
                Ok(replica) => replicas.push(replica),
                Err(Misplaced::Lost) => {}
                Err(Misplaced::Conflict) => {
                    self.report.conflicts += 1;
                    let (object, ordinal) = (catalog.objects.logged_name(object), copy.ordinal);
                    log.effects.record(|| Effect::ReplicaDropped { object, ordinal });
                }
            }
        }
        let is_hard_pinned = object.flags.has(Flags::HARD_PINNED);
        for replica in &replicas {
            let segment = pool.segments.at_mut(replica.segment);
            segment.allocator.set_owner(replica.block, slot.number());
            if is_hard_pinned {
                pool.add_hard_pin(replica);
            }
        }
        if replicas.is_empty() && disk.is_none() {
            let object = catalog.objects.logged_name(object);
            log.effects.record(|| Effect::Dropped { object });
            return false;
        }
        catalog.objects.at_mut(slot).replicas = replicas.into();
        if let Some(disk) = disk {
            place_copy(catalog, &mut pool.disks, slot, disk);
        }
        true
    }

    fn allocate_at(
        &self,
        pool: &mut Pool,
        copy: &LoggedCopy,
        length: u64,
    ) -> Result<Replica, Misplaced> {
        let &segment = self.slots.get(&copy.segment).ok_or(Misplaced::Lost)?;
        let at = |allocator: &mut Allocator| allocator.allocate_at(copy.offset, length);
        let block = pool.segments.with_allocator(segment, at).ok_or(Misplaced::Conflict)?;
        Ok(Replica { segment, block, ordinal: copy.ordinal })
    }

    /// Puts an object that has its replicas again in order with the others.
    fn restore_object(&mut self, state: &mut State, slot: ObjectSlot, extras: LoggedExtras) {
        let object = state.inventory.catalog.objects.at_mut(slot);
        object.protection.extend_lease(self.lease);
        // The earlier master may have given its address away.
        object.protection.give_address();
        object.protection.extend_fence(self.fence);
        let (tenant, bytes) = (object.tenant, object.bytes());
        if !extras.group.is_empty() {
            state.inventory.catalog.groups.join(tenant, &extras.group, slot);
        }
        state.inventory.catalog.objects.complete += 1;
        state.inventory.catalog.tenants.charge(tenant, bytes);
        if bytes > 0 {
            state.inventory.catalog.tenants.add_object(tenant, slot);
        }
        if let Some(ttl) = extras.pin {
            state.inventory.pin(self.now, slot, ttl);
        }
        if let Some(logged) = extras.annotation {
            let expires = logged.expires.map(|at| state.inventory.rules.moment_of(at));
            let annotation = Annotation { expires, tags: logged.tags };
            state.inventory.catalog.annotations.insert(slot, annotation);
        }
        state.inventory.catalog.enqueue(slot);
        self.report.objects += 1;
    }

    /// Restores a put as if it had started now: its writer may still end it.
    fn restore_write(&mut self, state: &mut State, logged: LoggedWrite) {
        let (replicas, is_whole) = self.restore_write_copies(state, &logged.value);
        let tenant = logged.tenant;
        let object = match is_whole {
            true if logged.is_displaced => Some(None),
            true => write_object(state, tenant, &logged.key).map(Some),
            false => None,
        };
        let Some(object) = object else {
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
            match self.allocate_at(&mut state.inventory.pool, copy, value.length) {
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
