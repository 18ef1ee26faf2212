//! Disks that clients mount, and what their owners report.

use std::time::Duration;

use mooncake_base::{
    ClientId, Error, ErrorCode, KeyRef, Moment, Result, SegmentId, TenantId, Version,
};
use smallvec::SmallVec;

use crate::state::{
    ids::{DiskSlot, ObjectSlot, Slot},
    inventory::{
        Inventory, disks,
        mounted_disks::{self, ADOPTED_SKIP, AdoptedObject},
        moves,
        offloads::{TRIES_MAX, WaitingObject},
        read,
    },
    pool::{
        allocation::Place,
        disks::{DiskPresence, DiskSpec, DiskView},
    },
};

/// The shortest fence under which an owner reads an object that it takes over: it reads and writes many
/// at once.
const FENCE_MIN: Duration = Duration::from_secs(2);

/// Bytes that are handed over at once while puts wait for the report, unless one object is larger.
const URGENT_BYTES: u64 = 16 << 20;

/// Objects that one slice of a confirmation looks at.
const CONFIRM_SLICE: u32 = 65_536;

/// Versions above this leave no room for the ordinal of a replica.
const VERSION_MAX: u64 = 1 << 48;

/// A version of an object, as the owner of a disk names it.
#[derive(Debug, Clone, Copy)]
pub struct RecordName<'a> {
    /// The tenant.
    pub tenant: &'a TenantId,
    /// The key.
    pub key: &'a [u8],
    /// The version.
    pub version: Version,
    /// The length in bytes.
    pub length: u64,
}

/// An object for a disk to take over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offload {
    /// The tenant.
    pub tenant: TenantId,
    /// The key.
    pub key: Vec<u8>,
    /// The version.
    pub version: Version,
    /// The length in bytes.
    pub length: u64,
    /// Where it lies in memory, at least one place.
    pub places: SmallVec<[Place; 1]>,
}

/// Objects for a disk to take over, and how long their memory stays theirs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Offloaded {
    /// The objects.
    pub objects: Vec<Offload>,
    /// Length of the fence of all of them.
    pub fence: Duration,
}

/// The calls about disks, with what they change.
#[derive(Debug)]
pub struct DiskCalls<'a> {
    pub(in crate::state) inventory: &'a mut Inventory,
}

/// A disk that its owner has open, while the state is locked: it may be gone afterwards.
#[derive(Debug)]
pub struct OwnDisk<'a> {
    inventory: &'a mut Inventory,
    slot: DiskSlot,
}

impl DiskCalls<'_> {
    /// Adds a disk to the pool, or gives a known one its owner: its objects are readable again. `used`
    /// are the bytes that its records take; with `reports_all` the owner goes on to name all of them.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD`: the pool has no disk tier. `CLIENT_NOT_FOUND`: register first.
    /// `SEGMENT_ALREADY_EXISTS`: another process has this directory open, or a copy of it.
    /// `INVALID_PARAMS`: no capacity, or too many disks.
    pub fn mount(
        &mut self,
        client: ClientId,
        spec: DiskSpec,
        used: u64,
        reports_all: bool,
    ) -> Result<()> {
        self.inventory.clients().check(client)?;
        if self.inventory.rules().offload.is_none() {
            let why = "this master keeps objects in memory only; start it with --enable_offload";
            return Err(Error::new(ErrorCode::UNABLE_OFFLOAD, why));
        }
        if spec.capacity == 0 {
            return Err(Error::invalid("the disk has no capacity").with("disk", spec.id));
        }
        let presence = if self.inventory.clients().is_suspect(client) {
            DiskPresence::Suspect
        } else {
            DiskPresence::Present
        };
        let slot = match self.inventory.disks().by_id(spec.id) {
            Some(slot) => {
                self.check_owner(slot, client, &spec)?;
                let known = self.inventory.disk(slot);
                let is_same = known.client == client && known.spec == spec;
                mounted_disks::set_owner(self.inventory, slot, client, spec, presence);
                if !is_same {
                    mounted_disks::log_mount(self.inventory, slot);
                }
                slot
            }
            None => {
                let id = spec.id;
                let inserted = mounted_disks::insert(self.inventory, client, spec, presence);
                inserted
                    .ok_or_else(|| Error::invalid("the pool has too many disks").with("disk", id))?
            }
        };
        mounted_disks::set_used(self.inventory, slot, used);
        mounted_disks::begin_ownership(self.inventory, slot);
        if reports_all {
            self.inventory.offloads_mut().begin_naming(slot);
        }
        Ok(())
    }

    /// Checks that a client may take a known disk over.
    fn check_owner(&self, slot: DiskSlot, client: ClientId, spec: &DiskSpec) -> Result<()> {
        let known = self.inventory.disk(slot);
        let why = if known.client != client && known.presence == DiskPresence::Present {
            "another process has this directory open, or a copy of it: remove the copy"
        } else if spec.incarnation < known.spec.incarnation {
            "the directory was opened again since: it is an old copy"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorCode::SEGMENT_ALREADY_EXISTS, why)
            .with("disk", spec.id)
            .with("owner", known.client)
            .with("address", &known.spec.address))
    }

    /// Gives a disk up: its copies are dropped, or hidden until it is mounted again.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns it.
    pub fn unmount(
        &mut self,
        now: Moment,
        client: ClientId,
        id: SegmentId,
        forgets: bool,
    ) -> Result<()> {
        let slot = self.own_slot(client, id)?;
        if forgets {
            mounted_disks::drop_disk(self.inventory, slot);
        } else {
            mounted_disks::set_away(self.inventory, now, slot);
        }
        Ok(())
    }

    /// Handles the timer of a disk that was away.
    pub(in crate::state) fn expire(&mut self, now: Moment, id: SegmentId) {
        let Some(slot) = self.inventory.disks().by_id(id) else { return };
        if let DiskPresence::Away(until) = self.inventory.disk(slot).presence
            && until.has_passed(now)
        {
            mounted_disks::drop_disk(self.inventory, slot);
        }
    }

    /// Drops all disks that came from the log.
    pub(in crate::state) fn drop_recovered(&mut self) {
        let disks = self.inventory.disks().kept();
        let recovered = disks.filter(|(_, disk)| disk.is_recovered).map(|(slot, _)| slot);
        for slot in recovered.collect::<Vec<_>>() {
            mounted_disks::drop_disk(self.inventory, slot);
        }
    }
}

impl DiskCalls<'_> {
    /// Finds a disk that the client has open.
    pub(in crate::state) fn own_slot(&self, client: ClientId, id: SegmentId) -> Result<DiskSlot> {
        let slot = self.inventory.disks().by_id(id).ok_or_else(|| {
            Error::new(ErrorCode::SEGMENT_NOT_FOUND, "no such disk is mounted; mount it first")
                .with("disk", id)
        })?;
        let disk = self.inventory.disk(slot);
        if disk.client != client || disk.is_away() {
            let why = "the disk belongs to another client";
            return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, why)
                .with("disk", id)
                .with("owner", disk.client));
        }
        Ok(slot)
    }
}

impl<'a> DiskCalls<'a> {
    /// Returns every disk, by name.
    pub fn list(&self) -> Vec<DiskView<'_>> {
        let mut views: Vec<_> = self
            .inventory
            .disks()
            .kept()
            .map(|(slot, disk)| DiskView {
                spec: &disk.spec,
                client: disk.client,
                used: disk.used,
                objects: disk.objects,
                waiting: self.inventory.offloads().waiting_for(slot),
                is_readable: disk.is_readable(),
            })
            .collect();
        views.sort_by(|a, b| (&a.spec.name, a.spec.id).cmp(&(&b.spec.name, b.spec.id)));
        views
    }

    /// Hands objects over to the owner of a disk that can still be written to it: at most `limit`, and no
    /// more once they exceed so many bytes. None are before the log says that their memory may be fenced.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns the disk.
    pub fn take_over(
        &mut self,
        now: Moment,
        client: ClientId,
        id: SegmentId,
        limit: usize,
        bytes: u64,
    ) -> Result<Offloaded> {
        let disk = self.own_slot(client, id)?;
        let is_idle = self.inventory.offloads().waiting_for(disk) == 0;
        if is_idle || read::grantable_fence(self.inventory, now, FENCE_MIN).is_zero() {
            return Ok(Offloaded::default());
        }
        let bytes = if self.inventory.offloads().is_next_urgent(disk) {
            // Puts wait for the report of these.
            bytes.min(URGENT_BYTES)
        } else {
            bytes
        };
        let mut taken = Vec::new();
        let mut sum = 0_u64;
        while taken.len() < limit && (sum < bytes || taken.is_empty()) {
            let Some(waiting) = self.inventory.offloads_mut().pop(disk) else { break };
            let slot = waiting.object;
            let object = self.inventory.objects().get(slot);
            let is_meant = object.is_some_and(|object| {
                object.is_complete()
                    && object.version == waiting.version
                    && self.inventory.pool().readable_copies(&object.replicas).next().is_some()
                    && !self.inventory.offloads().is_taken(slot, waiting.version)
            });
            if is_meant && self.inventory.disk_copy(slot).is_none() {
                sum += self.inventory.object(slot).length;
                taken.push(waiting);
                self.inventory.offloads_mut().record_taken(disk, waiting, None);
            } else if !is_meant && !self.inventory.offloads().is_taken(slot, waiting.version) {
                self.inventory.offloads_mut().end_move(slot);
            }
        }
        if taken.is_empty() {
            return Ok(Offloaded::default());
        }
        let wanted = self.inventory.rules().fence(sum).max(FENCE_MIN);
        let fence = read::grantable_fence(self.inventory, now, wanted);
        let mut objects = Vec::with_capacity(taken.len());
        for waiting in taken {
            let slot = waiting.object;
            let ticket = read::grant_fence(self.inventory, now, slot, fence);
            self.inventory.offloads_mut().record_taken(disk, waiting, ticket);
            let object = self.inventory.object(slot);
            objects.push(Offload {
                tenant: self.inventory.objects().tenant_name(object.tenant).clone(),
                key: self.inventory.objects().key(object).to_vec(),
                version: object.version(),
                length: object.length,
                places: self.inventory.pool().places(
                    object.version,
                    object.length,
                    self.inventory.pool().readable_copies(&object.replicas),
                ),
            });
        }
        self.inventory.offloads_mut().expect_report(now, disk, sum);
        Ok(Offloaded { objects, fence })
    }

    /// Returns a disk, for the reports of its owner.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns the disk.
    pub fn own(self, client: ClientId, id: SegmentId) -> Result<OwnDisk<'a>> {
        let slot = self.own_slot(client, id)?;
        Ok(OwnDisk { inventory: self.inventory, slot })
    }
}

impl OwnDisk<'_> {
    /// Records how many bytes the records take.
    pub fn set_used(&mut self, bytes: u64) {
        mounted_disks::set_used(self.inventory, self.slot, bytes);
    }

    /// Records that the disk has a record. Returns `false` if it is not the present version of its
    /// object, so that nobody will ask for it.
    pub fn record_added(&mut self, now: Moment, record: &RecordName<'_>) -> bool {
        let Some(object) = self.present_version(now, record) else {
            let rules = self.inventory.rules().offload.as_ref();
            return rules.is_some_and(|rules| rules.adopts_records) && self.adopt(record);
        };
        let elsewhere = disks::readable_disk(self.inventory, object);
        let length = self.inventory.object(object).length;
        if elsewhere.is_some_and(|disk| disk != self.slot) || length != record.length {
            return false;
        }
        self.end_taken(object, record.version);
        self.inventory.counters_mut().offloads_done += 1;
        self.inventory.counters_mut().offloaded_bytes += length;
        self.inventory.offloads_mut().record_written(self.slot);
        let is_wanted = self.inventory.offloads().moves_to(object).is_some();
        self.inventory.offloads_mut().end_move(object);
        disks::add_copy(self.inventory, object, self.slot);
        if is_wanted {
            self.inventory.offloads_mut().record_report(now, self.slot);
            moves::evict_moved(self.inventory, now, object);
        }
        true
    }

    /// Records that the disk lost a record, be it one that was written and went for a later one before
    /// it was reported. That one is not written again.
    pub fn record_lost(&mut self, now: Moment, record: &RecordName<'_>) {
        let Some(object) = self.present_version(now, record) else { return };
        if self.inventory.disk_copy(object) == Some(self.slot) {
            self.inventory.counters_mut().disk_copies_lost += 1;
            disks::drop_copy(self.inventory, now, object);
        } else if self.end_taken(object, record.version).is_some() {
            self.inventory.offloads_mut().set_aside(now, object, record.version.0);
            self.inventory.offloads_mut().record_report(now, self.slot);
        }
    }

    /// Records that an object could not be written to the disk. It is handed over again, a few times.
    pub fn record_refused(&mut self, now: Moment, record: &RecordName<'_>) {
        let Some(object) = self.present_version(now, record) else { return };
        let tries = self.end_taken(object, record.version).unwrap_or(TRIES_MAX);
        let version = record.version.0;
        if tries < TRIES_MAX {
            let waiting = WaitingObject { object, version, tries };
            mounted_disks::repeat_offload(self.inventory, self.slot, waiting);
        } else {
            self.inventory.counters_mut().offloads_failed += 1;
            self.inventory.offloads_mut().give_up(now, self.slot, object, version);
        }
        self.inventory.offloads_mut().record_report(now, self.slot);
    }

    /// Records that the owner has named every object that the disk has. Returns `false` if it did not
    /// announce that when it mounted the disk.
    pub fn end_naming(&mut self) -> bool {
        self.inventory.offloads_mut().end_naming(self.slot)
    }

    /// Drops those copies on the disk, among the objects of one slice from `next` on, that its owner
    /// did not name. Returns whether it has looked at all objects, or the owner names them anew.
    pub fn drop_unnamed(&mut self, now: Moment, next: &mut u32) -> bool {
        let count = self.inventory.objects().slot_count();
        let end = next.saturating_add(CONFIRM_SLICE).min(count);
        for object in ObjectSlot::range(*next, end) {
            let Some(is_named) = self.inventory.offloads().is_named(self.slot, object) else {
                return true;
            };
            let is_lost = !is_named && self.inventory.disk_copy(object) == Some(self.slot);
            if is_lost && self.inventory.objects().get(object).is_some() {
                disks::drop_copy(self.inventory, now, object);
            }
        }
        *next = end;
        if end == count {
            self.inventory.offloads_mut().forget_named(self.slot);
        }
        end == count
    }

    /// Finds the object that a record is the present version of.
    fn present_version(&mut self, now: Moment, record: &RecordName<'_>) -> Option<ObjectSlot> {
        let tenant = self.inventory.objects().tenant_index(record.tenant)?;
        let slot = self.inventory.find(now, tenant, record.key)?;
        let object = self.inventory.object(slot);
        (object.is_complete() && object.version() == record.version).then_some(slot)
    }

    /// Makes an object of a record that no object has the key of. Returns whether it did.
    fn adopt(&mut self, record: &RecordName<'_>) -> bool {
        let versions = 1..VERSION_MAX - ADOPTED_SKIP;
        let is_sane = record.length > 0 && versions.contains(&record.version.0);
        let (Ok(key), true) = (KeyRef::new(record.key), is_sane) else { return false };
        let version = record.version.0;
        let object = AdoptedObject { tenant: record.tenant, key, version, length: record.length };
        mounted_disks::adopt(self.inventory, self.slot, &object)
    }

    /// Ends the reading of an object that was handed over. Returns how often it was.
    fn end_taken(&mut self, object: ObjectSlot, version: Version) -> Option<u8> {
        let (tries, fence) =
            self.inventory.offloads_mut().end_taken(self.slot, object, version.0)?;
        if let Some(ticket) = fence {
            self.inventory.release_fence(ticket);
        }
        Some(tries)
    }
}
