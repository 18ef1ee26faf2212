//! Objects and memory are restored from the replayed log after a restart.

use std::{collections::BTreeMap, time::Duration};

use mooncake_base::{Moment, ObjectKey, TenantId};
use rustc_hash::FxHashMap;

use crate::state::{
    catalog::{annotations::Annotation, object::Flags},
    ids::{DiskSlot, ObjectSlot, SegmentSlot, Slot, TenantIndex},
    inventory::{Inventory, disks::place_copy, quota, recovery::Recovery},
    ledger::{
        effect::{Effect, LoggedCopy},
        lease_notes::KnownLeases,
        replay::{
            Image, LiveObject, LoggedCopies, LoggedDisk, LoggedExtras, LoggedObjects,
            LoggedSegment, QuarantinedRange,
        },
    },
    pool::{
        Pool,
        allocator::Allocator,
        disks::DiskPresence,
        segment::{Segment, SegmentNumber, SegmentStatus},
    },
    random::Random,
    replica::{DISK_ORDINAL, Replica},
    timer::Timer,
};

/// Versions skipped because they may have been used and lost with the unsynced end of the log.
const VERSIONS_PASSED: u64 = 1 << 24;

/// The most skips, at random, where the log of whole runs may be lost. Such a run has skipped as
/// many versions from the same log, and the next one must not use its versions again.
const SKIPS_MAX: usize = 1 << 12;

/// A restore in progress.
#[derive(Debug)]
pub(in crate::state) struct Restoration {
    now: Moment,
    /// End of the longest fence granted before.
    fence: Moment,
    /// Memory without a record may be used at once.
    is_rest_logged: bool,
    /// End of the longest lease that an object without a note may have.
    lease: Moment,
    known_leases: KnownLeases,
    /// Slots of the restored segments.
    slots: FxHashMap<SegmentNumber, SegmentSlot>,
    /// Slots of the restored disks.
    disks: FxHashMap<SegmentNumber, DiskSlot>,
    /// Segments restored so far.
    pub(in crate::state) segments: u64,
    /// Objects restored so far.
    pub(in crate::state) objects: u64,
    /// Objects dropped so far because another one has their memory, or because they lie beyond their
    /// segment.
    pub(in crate::state) conflicts: u64,
}

/// Reason why a replica cannot be restored.
enum Misplaced {
    /// The segment left the pool.
    Lost,
    /// The memory is taken.
    Conflict,
}

impl Restoration {
    /// Begins to restore an inventory: numbers and versions go on, and no memory is allocated before
    /// the longest fence granted before has ended.
    pub(in crate::state) fn begin(
        inventory: &mut Inventory,
        seed: u64,
        now: Moment,
        image: &mut Image,
        lost_grants_max: Duration,
    ) -> Self {
        // Without a log, versions begin at random: those of another timeline are not valid here.
        if image.next_version > 0 {
            let skips = if lost_grants_max.is_zero() && !image.may_lack_versions {
                1
            } else {
                // A killed master has skipped once.
                2 + Random::new(!seed).below(SKIPS_MAX) as u64
            };
            inventory.next_version = image.next_version.saturating_add(skips * VERSIONS_PASSED);
        }
        inventory.pool.segments.set_next_number(image.next_number);
        let fence = now + image.fence.max(lost_grants_max);
        // Recorded until those fences have ended, so that a restart soon after this one lets memory rest
        // as long.
        inventory.max_granted.fence = image.fence.max(lost_grants_max);
        inventory.max_granted.raised_until = fence;
        inventory.max_granted.lease = image.lease;
        inventory.record_effects();
        if image.next_version > 0 {
            // A later run begins behind the versions of this one, also if this one leaves no other record.
            let (version, number) = (inventory.next_version, image.next_number);
            inventory.record(|| Effect::NextIds { version, number: SegmentNumber(number) });
        }
        let is_doubtful = !lost_grants_max.is_zero();
        let known_leases = std::mem::take(&mut image.known_leases);
        inventory.recovery =
            Recovery::begin(now, fence, now + image.lease, is_doubtful, &inventory.rules);
        Self {
            now,
            fence,
            is_rest_logged: image.is_rest_logged && !is_doubtful,
            lease: known_leases.unknown_until(now, image.lease),
            known_leases,
            slots: FxHashMap::default(),
            disks: FxHashMap::default(),
            segments: 0,
            objects: 0,
            conflicts: 0,
        }
    }

    /// Restores segments and disks, which nobody has announced yet.
    pub(in crate::state) fn restore_memory(
        &mut self,
        inventory: &mut Inventory,
        segments: BTreeMap<SegmentNumber, LoggedSegment>,
        disks: BTreeMap<SegmentNumber, LoggedDisk>,
    ) {
        for (number, segment) in segments {
            let slot = self.restore_segment(inventory, number, segment);
            self.slots.insert(number, slot);
            self.segments += 1;
        }
        for (number, disk) in disks {
            self.restore_disk(inventory, number, disk);
        }
    }

    /// Restores quotas and objects in the table that the replay filled: there is never a second one.
    pub(in crate::state) fn restore_objects(
        &mut self,
        inventory: &mut Inventory,
        objects: LoggedObjects,
        quotas: BTreeMap<Box<str>, u64>,
    ) {
        let LoggedObjects { table, copies, extras } = objects;
        let seed = std::mem::replace(&mut inventory.catalog.objects, table).seed();
        for (tenant, bytes) in quotas {
            // Without multi-tenancy quotas no longer apply.
            let _ = quota::set_quota(inventory, &TenantId::new(&tenant), bytes);
        }
        self.restore_table(inventory, seed, copies, extras);
    }

    fn restore_segment(
        &self,
        inventory: &mut Inventory,
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
            inventory.record(|| Effect::SegmentStatus { number, status, grace });
        }
        if let Some(unmount_at) = unmount_at {
            inventory.set_timer(unmount_at, Timer::Unmount(id, incarnation));
        }
        let rests = !self.is_rest_logged && !self.fence.has_passed(self.now);
        if rests {
            inventory.set_timer(self.fence, Timer::QuarantineEnd(id, incarnation));
        }
        inventory.set_timer(inventory.recovery.end(), Timer::Unclaimed(id, incarnation));
        inventory.recovery.segments += 1;
        let mut segment = Segment::new(number, logged.client, spec, self.fence);
        segment.status = status;
        (segment.is_unclaimed, segment.is_recovered) = (true, true);
        segment.quarantined_until = rests.then_some(self.fence);
        segment.unmount_at = unmount_at;
        inventory.pool.segments.insert(segment)
    }

    /// Restores a disk, which is away until its owner mounts it.
    fn restore_disk(
        &mut self,
        inventory: &mut Inventory,
        number: SegmentNumber,
        logged: LoggedDisk,
    ) {
        let LoggedDisk { client, spec } = logged;
        let until = self.now + inventory.rules().disk_away_ttl;
        inventory.set_timer(until, Timer::DiskAway(spec.id));
        let away = DiskPresence::Away(until);
        // The limit held when the disk was mounted.
        let Some(slot) = inventory.pool.disks.insert(number, client, spec, away) else {
            return;
        };
        inventory.pool.disks.at_mut(slot).is_recovered = true;
        self.disks.insert(number, slot);
    }

    /// Restores the objects of the table.
    fn restore_table(
        &mut self,
        inventory: &mut Inventory,
        seed: u64,
        mut copies: Vec<LoggedCopies>,
        mut extras: FxHashMap<ObjectSlot, LoggedExtras>,
    ) {
        let table = inventory.objects();
        let slots = ObjectSlot::range(0, table.slot_count());
        let mut order: Vec<(u64, ObjectSlot)> = Vec::with_capacity(table.len() as usize);
        order.extend(slots.filter_map(|slot| Some((table.get(slot)?.version, slot))));
        order.sort_unstable();
        // The latest grant wins: if two objects claim the same memory, the later version has it.
        for &(_, slot) in order.iter().rev() {
            let copies = std::mem::take(&mut copies[slot.index()]);
            if !self.restore_copies(inventory, slot, &copies) {
                inventory.catalog.objects.remove(slot);
                extras.remove(&slot);
            }
        }
        drop(copies);
        inventory.catalog.objects.rehash(seed);
        let mut leased = Vec::new();
        // By version, which is the order of puts and of eviction.
        for (version, slot) in order {
            if inventory.objects().get(slot).is_some() {
                let extras = extras.remove(&slot).unwrap_or_default();
                let lease = self.known_leases.end(self.now, version);
                self.restore_object(inventory, slot, extras, lease);
                leased.extend(lease.map(|_| slot));
            }
        }
        // After all others, since they were used last.
        for slot in leased {
            inventory.touch(self.now, slot);
        }
    }

    /// Allocates the replicas at their logged locations. Returns whether the object has any.
    fn restore_copies(
        &mut self,
        inventory: &mut Inventory,
        slot: ObjectSlot,
        copies: &[LoggedCopy],
    ) -> bool {
        let Inventory { catalog, pool, log, .. } = inventory;
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
                    self.conflicts += 1;
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
    fn restore_object(
        &mut self,
        inventory: &mut Inventory,
        slot: ObjectSlot,
        extras: LoggedExtras,
        lease: Option<Moment>,
    ) {
        let object = inventory.catalog.objects.at_mut(slot);
        object.protection.extend_lease(lease.unwrap_or(self.lease).max(self.lease));
        // The earlier master may have given its address away.
        object.protection.give_address();
        object.protection.extend_fence(self.fence);
        let (tenant, bytes) = (object.tenant, object.bytes());
        if !extras.group.is_empty() {
            inventory.catalog.groups.join(tenant, &extras.group, slot);
        }
        inventory.catalog.objects.complete += 1;
        inventory.catalog.tenants.charge(tenant, bytes);
        if bytes > 0 {
            inventory.catalog.tenants.add_object(tenant, slot);
        }
        if let Some(ttl) = extras.pin {
            inventory.pin(self.now, slot, ttl);
        }
        if let Some(logged) = extras.annotation {
            let expires = logged.expires.map(|at| inventory.rules().moment_of(at));
            let annotation = Annotation { expires, tags: logged.tags };
            inventory.catalog.annotations.insert(slot, annotation);
        }
        inventory.catalog.enqueue(slot);
        self.objects += 1;
    }

    /// Allocates the replicas of a put. Returns them and whether there was no conflict.
    pub(in crate::state) fn restore_write_copies(
        &self,
        inventory: &mut Inventory,
        value: &LiveObject,
    ) -> (Vec<Replica>, bool) {
        let mut replicas = Vec::with_capacity(value.copies.len());
        let mut is_whole = true;
        for copy in &value.copies {
            match self.allocate_at(&mut inventory.pool, copy, value.length) {
                Ok(replica) => replicas.push(replica),
                Err(Misplaced::Lost) => {}
                Err(Misplaced::Conflict) => is_whole = false,
            }
        }
        (replicas, is_whole)
    }

    /// Restores memory that must not be used yet.
    pub(in crate::state) fn restore_quarantined(
        &self,
        inventory: &mut Inventory,
        number: SegmentNumber,
        offset: u64,
        QuarantinedRange { length, time }: QuarantinedRange,
    ) {
        let Some(&slot) = self.slots.get(&number) else { return };
        // An object that has this memory now was put there after the quarantine.
        let free = |allocator: &mut Allocator| allocator.allocate_free_in(offset, length);
        let until = self.now + time;
        for block in inventory.pool.segments.with_allocator(slot, free) {
            inventory.pool.segments.at_mut(slot).extend_busy(until);
            inventory.pool.quarantine_block(until.into(), 0, slot, block, 0);
        }
    }
}

/// Finds the object of a put, or adds it.
pub(in crate::state) fn find_or_insert(
    inventory: &mut Inventory,
    tenant: TenantIndex,
    key: &ObjectKey,
) -> Option<ObjectSlot> {
    match inventory.catalog.objects.find(tenant, key.as_bytes()) {
        Some(slot) => Some(slot),
        // The limit held when the put started.
        None => inventory.catalog.objects.insert(tenant, key.into()).ok(),
    }
}

/// Continues a put of an object, which may be displaced.
pub(in crate::state) fn resume_put(
    inventory: &mut Inventory,
    object: Option<ObjectSlot>,
    tenant: TenantIndex,
    length: u64,
    replicas: &[Replica],
    until: Moment,
) {
    inventory.pool.begin_write(object, replicas, until);
    inventory.catalog.tenants.charge(tenant, length * replicas.len() as u64);
}

/// Frees the memory of a put that cannot continue.
pub(in crate::state) fn drop_put(inventory: &mut Inventory, version: u64, replicas: &[Replica]) {
    for replica in replicas {
        inventory.pool.segments.free(replica.segment, replica.block);
    }
    inventory.log.effects.record(|| Effect::WriteDropped { version });
}
