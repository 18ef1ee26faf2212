//! Disks that clients mount, and objects that they take over.

pub(in crate::state) mod own_disk;

use std::time::Duration;

use mooncake_base::{ClientId, Error, ErrorCode, Moment, Result, SegmentId, TenantId, Version};
use smallvec::SmallVec;

use self::own_disk::OwnDisk;
use crate::state::{
    ids::DiskSlot,
    inventory::{Inventory, mounted_disks, read},
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
    /// Those that were handed over before and not reported are handed over again.
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
        // The owner reports what it took before it asks for more: the answer that named these was lost.
        self.inventory.offloads_mut().repeat_unreported(disk);
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
