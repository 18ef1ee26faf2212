//! Disks: directories of records that clients keep for the pool.
//!
//! The master knows which objects a disk has, not where they lie in it: the owner finds a record by
//! tenant, key and version. A disk outlives its owner: while nobody has it open it is *away*, and its
//! objects are hidden until a client mounts the directory again.

use mooncake_base::{ClientId, Incarnation, Moment, SegmentId};
use rustc_hash::FxHashMap;

use crate::state::{
    ids::DiskSlot,
    pool::{host::host_of, segment::SegmentNumber},
};

/// Maximum number of disks.
pub(in crate::state) const DISKS_MAX: usize = 4096;

/// Description of a disk by its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskSpec {
    /// Id of the directory.
    pub id: SegmentId,
    /// Counts how often the directory was opened.
    pub incarnation: Incarnation,
    /// "host:port" of the client.
    pub name: String,
    /// Address at which the owner serves the records.
    pub address: String,
    /// Bytes that its records may take.
    pub capacity: u64,
}

/// A disk as others see it.
#[derive(Debug, Clone, Copy)]
pub struct DiskView<'a> {
    /// Description by its owner.
    pub spec: &'a DiskSpec,
    /// The client that has it open, or had it last.
    pub client: ClientId,
    /// Bytes that its records take, as the owner says.
    pub used: u64,
    /// Objects that have a copy in it.
    pub objects: u64,
    /// Objects that wait to be written to it.
    pub waiting: usize,
    /// Whether its objects can be read now.
    pub is_readable: bool,
}

/// Whether a client has a disk open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum DiskPresence {
    /// Its owner serves it.
    Present,
    /// Its owner has lost its connection to the master, and may come back.
    Suspect,
    /// Nobody has it open. Its objects are forgotten at that time.
    Away(Moment),
    /// It left the pool; its copies are still to be dropped.
    Dropped,
}

/// A disk.
#[derive(Debug)]
pub(in crate::state) struct PoolDisk {
    pub(in crate::state) number: SegmentNumber,
    pub(in crate::state) spec: DiskSpec,
    pub(in crate::state) client: ClientId,
    pub(in crate::state) host: Box<str>,
    pub(in crate::state) presence: DiskPresence,
    /// Whether it came from the log of an earlier master.
    pub(in crate::state) is_recovered: bool,
    /// Bytes that its records take, as the owner says.
    pub(in crate::state) used: u64,
    /// Objects that have a copy in it.
    pub(in crate::state) objects: u64,
}

impl PoolDisk {
    /// Returns whether readers may be sent to it.
    pub(in crate::state) fn is_readable(&self) -> bool {
        self.presence == DiskPresence::Present
    }

    /// Returns whether the copies in it exist.
    pub(in crate::state) fn is_kept(&self) -> bool {
        self.presence != DiskPresence::Dropped
    }

    /// Returns whether nobody has it open.
    pub(in crate::state) fn is_away(&self) -> bool {
        matches!(self.presence, DiskPresence::Away(_))
    }
}

/// All disks, each in a slot that stays taken until no object refers to it.
#[derive(Debug, Default)]
pub(in crate::state) struct Disks {
    slots: Vec<Option<PoolDisk>>,
    by_id: FxHashMap<SegmentId, DiskSlot>,
    /// Number of disks that are away.
    away: usize,
}

impl Disks {
    pub(in crate::state) fn at(&self, slot: DiskSlot) -> &PoolDisk {
        self.slots[usize::from(slot.number())]
            .as_ref()
            .expect("a copy names only disks that are kept")
    }

    pub(in crate::state) fn at_mut(&mut self, slot: DiskSlot) -> &mut PoolDisk {
        self.slots[usize::from(slot.number())]
            .as_mut()
            .expect("a copy names only disks that are kept")
    }

    pub(in crate::state) fn by_id(&self, id: SegmentId) -> Option<DiskSlot> {
        self.by_id.get(&id).copied()
    }

    /// Returns the disks that have not left the pool.
    pub(in crate::state) fn kept(&self) -> impl Iterator<Item = (DiskSlot, &PoolDisk)> {
        let numbered = (0..).zip(&self.slots);
        numbered
            .filter_map(|(slot, disk)| Some((DiskSlot::new(slot), disk.as_ref()?)))
            .filter(|(_, disk)| disk.is_kept())
    }

    /// Returns the disks that a client has open.
    pub(in crate::state) fn of_client(&self, client: ClientId) -> Vec<DiskSlot> {
        let is_open = |disk: &PoolDisk| disk.client == client && !disk.is_away();
        self.kept().filter(|(_, disk)| is_open(disk)).map(|(slot, _)| slot).collect()
    }

    /// Returns whether there is no disk.
    pub(in crate::state) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Returns whether some disk is away.
    pub(in crate::state) fn has_away(&self) -> bool {
        self.away > 0
    }

    /// Adds a disk; `None` if there are too many.
    pub(in crate::state) fn insert(
        &mut self,
        number: SegmentNumber,
        client: ClientId,
        spec: DiskSpec,
        presence: DiskPresence,
    ) -> Option<DiskSlot> {
        let free = self.slots.iter().position(Option::is_none);
        let index = match free {
            Some(index) => index,
            None if self.slots.len() < DISKS_MAX => {
                self.slots.push(None);
                self.slots.len() - 1
            }
            None => return None,
        };
        let slot = DiskSlot::new(index as u16);
        self.by_id.insert(spec.id, slot);
        self.away += usize::from(matches!(presence, DiskPresence::Away(_)));
        self.slots[index] = Some(PoolDisk {
            number,
            host: host_of(&spec.name),
            client,
            spec,
            presence,
            is_recovered: false,
            used: 0,
            objects: 0,
        });
        Some(slot)
    }

    /// Changes whether a client has the disk open.
    pub(in crate::state) fn set_presence(&mut self, slot: DiskSlot, presence: DiskPresence) {
        let before = std::mem::replace(&mut self.at_mut(slot).presence, presence);
        debug_assert_ne!(before, DiskPresence::Dropped, "a disk that left does not come back");
        self.away -= usize::from(matches!(before, DiskPresence::Away(_)));
        self.away += usize::from(matches!(presence, DiskPresence::Away(_)));
        if presence == DiskPresence::Dropped {
            let id = self.at(slot).spec.id;
            self.by_id.remove(&id);
        }
    }

    /// Describes the disk anew, for the client that mounts it.
    pub(in crate::state) fn set_owner(&mut self, slot: DiskSlot, client: ClientId, spec: DiskSpec) {
        let disk = self.at_mut(slot);
        disk.host = host_of(&spec.name);
        (disk.client, disk.spec) = (client, spec);
    }

    /// Frees the slot of a disk to which no object refers.
    pub(in crate::state) fn free_slot(&mut self, slot: DiskSlot) {
        let left = self.slots[usize::from(slot.number())].take();
        debug_assert!(
            left.is_none_or(|disk| !disk.is_kept() && disk.objects == 0),
            "a disk keeps its slot while objects have copies in it"
        );
    }
}
