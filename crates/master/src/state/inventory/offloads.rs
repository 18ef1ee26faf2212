//! Objects that wait to be written to disks, and those that the owners of disks have taken over.
//!
//! An object whose memory is wanted *moves down*: it goes in front of the others, and puts wait until
//! its disk has reported it. A disk that writes nothing is left alone for a while, so that no put waits
//! for it in vain.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::Moment;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{
    ids::{DiskSlot, ObjectSlot},
    inventory::read::FenceTicket,
};

/// How often an object is handed over for a disk before it stays in memory only.
pub(in crate::state) const TRIES_MAX: u8 = 3;

/// Objects in a row that a disk could not write before it is left alone.
const GIVEN_UP_MAX: u32 = 2;

/// How long a disk that writes nothing, and an object that could not be written, are left alone.
const LEFT_ALONE: Duration = Duration::from_secs(3);

/// A disk whose owner reports nothing for this long, and the time of the bytes that it took over, writes
/// nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// Rate at which a disk writes at least.
const BYTES_PER_SECOND: u64 = 16 << 20;

/// Objects that wait to be written to disks, or are being written.
#[derive(Debug, Default)]
pub(in crate::state) struct Offloads {
    by_disk: FxHashMap<DiskSlot, DiskOffloads>,
    /// Objects that wait, for all disks together.
    waiting: usize,
    /// Objects that owners have taken over and not reported.
    taken: FxHashMap<ObjectSlot, Taken>,
    /// Objects whose memory is wanted, until their disk has reported them.
    moving: FxHashMap<ObjectSlot, DiskSlot>,
    /// Versions that could not be written, and until when that is not tried again.
    given_up: FxHashMap<ObjectSlot, (u64, Moment)>,
    /// Counts what may let a put go on that waits for disks.
    progress: u64,
}

/// What waits for one disk.
#[derive(Debug, Default)]
struct DiskOffloads {
    /// Objects whose memory is wanted; in front of the others.
    urgent: VecDeque<WaitingObject>,
    queue: VecDeque<WaitingObject>,
    /// Number of objects of this disk whose memory is wanted, those that were taken over included.
    moving: usize,
    /// While some of these are left: when the owner should have reported something.
    due: Moment,
    /// Objects in a row that could not be written.
    given_up: u32,
    /// Until then no object moves down to it.
    left_alone: Moment,
    /// The objects that the owner named since it mounted the disk, if it names all that it has.
    named: Option<NamedObjects>,
}

/// An object that an owner has taken over.
#[derive(Debug)]
struct Taken {
    disk: DiskSlot,
    version: u64,
    /// How often it was handed over.
    tries: u8,
    /// The fence that the owner reads under.
    fence: Option<FenceTicket>,
}

/// Objects that the owner of a disk says it has.
#[derive(Debug, Default)]
struct NamedObjects {
    objects: FxHashSet<ObjectSlot>,
    /// Whether the owner has named all of them.
    is_complete: bool,
}

/// An object that waits to be written to a disk.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct WaitingObject {
    pub(in crate::state) object: ObjectSlot,
    pub(in crate::state) version: u64,
    pub(in crate::state) tries: u8,
}

impl DiskOffloads {
    fn waiting(&self) -> usize {
        self.urgent.len() + self.queue.len()
    }
}

impl Offloads {
    /// Returns the number of objects that wait for a disk.
    pub(in crate::state) fn waiting_for(&self, disk: DiskSlot) -> usize {
        self.by_disk.get(&disk).map_or(0, DiskOffloads::waiting)
    }

    /// Returns the number of objects that wait, for all disks together.
    pub(in crate::state) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Lets an object wait for the disk.
    pub(in crate::state) fn push(&mut self, disk: DiskSlot, waiting: WaitingObject) {
        self.by_disk.entry(disk).or_default().queue.push_back(waiting);
        self.waiting += 1;
    }

    /// Takes the object that is to be written next to the disk.
    pub(in crate::state) fn pop(&mut self, disk: DiskSlot) -> Option<WaitingObject> {
        let offloads = self.by_disk.get_mut(&disk)?;
        let found = offloads.urgent.pop_front().or_else(|| offloads.queue.pop_front())?;
        self.waiting -= 1;
        Some(found)
    }

    /// Returns whether memory is wanted of the object that [`pop`](Self::pop) would return.
    pub(in crate::state) fn is_next_urgent(&self, disk: DiskSlot) -> bool {
        self.by_disk.get(&disk).is_some_and(|offloads| !offloads.urgent.is_empty())
    }

    /// Returns whether some owner has taken this version over.
    pub(in crate::state) fn is_taken(&self, object: ObjectSlot, version: u64) -> bool {
        self.taken.get(&object).is_some_and(|taken| taken.version == version)
    }

    /// Records that the owner of the disk has taken an object over, and the fence that it reads under.
    pub(in crate::state) fn record_taken(
        &mut self,
        disk: DiskSlot,
        waiting: WaitingObject,
        fence: Option<FenceTicket>,
    ) {
        let WaitingObject { object, version, tries } = waiting;
        self.taken.insert(object, Taken { disk, version, tries: tries + 1, fence });
    }

    /// Lets those objects wait again that the owner of the disk took over and did not report.
    pub(in crate::state) fn repeat_unreported(&mut self, disk: DiskSlot) {
        if self.taken.is_empty() {
            return;
        }
        let unreported: Vec<_> = self.taken.extract_if(|_, taken| taken.disk == disk).collect();
        for (object, Taken { version, tries, .. }) in unreported {
            // The disk has not failed to write it.
            self.repeat(disk, WaitingObject { object, version, tries: tries - 1 });
        }
    }

    /// Forgets what was handed over of an object; returns how often, and the fence.
    pub(in crate::state) fn end_taken(
        &mut self,
        disk: DiskSlot,
        object: ObjectSlot,
        version: u64,
    ) -> Option<(u8, Option<FenceTicket>)> {
        let is_meant = |taken: &&Taken| taken.disk == disk && taken.version == version;
        self.taken.get(&object).filter(is_meant)?;
        self.taken.remove(&object).map(|taken| (taken.tries, taken.fence))
    }

    /// Forgets what waits for a disk that is no longer there.
    pub(in crate::state) fn forget(&mut self, disk: DiskSlot) {
        self.taken.retain(|_, taken| taken.disk != disk);
        self.cancel_moves(disk);
        self.progress += 1;
        if let Some(offloads) = self.by_disk.remove(&disk) {
            self.waiting -= offloads.waiting();
        }
    }

    /// Lets objects wait again that the owner of a disk has taken over, since the disk has another one.
    pub(in crate::state) fn change_owner(&mut self, disk: DiskSlot) {
        self.cancel_moves(disk);
        self.repeat_unreported(disk);
        self.progress += 1;
    }

    /// Forgets an object that is gone.
    pub(in crate::state) fn forget_object(&mut self, object: ObjectSlot) {
        if self.by_disk.is_empty() {
            return;
        }
        self.taken.remove(&object);
        self.given_up.remove(&object);
        self.end_move(object);
    }
}

impl Offloads {
    /// Returns the number of changes that may let a put go on that waits for disks.
    pub(in crate::state) fn progress(&self) -> u64 {
        self.progress
    }

    /// Records such a change.
    pub(in crate::state) fn record_progress(&mut self) {
        self.progress += 1;
    }

    /// Returns the number of objects whose memory is wanted.
    pub(in crate::state) fn moving(&self) -> usize {
        self.moving.len()
    }

    /// Returns the disk that an object moves down to.
    pub(in crate::state) fn moves_to(&self, object: ObjectSlot) -> Option<DiskSlot> {
        self.moving.get(&object).copied()
    }

    /// Lets an object move down to the disk, unless the disk's owner has taken it over already.
    pub(in crate::state) fn begin_move(
        &mut self,
        now: Moment,
        disk: DiskSlot,
        waiting: WaitingObject,
    ) {
        let is_taken = self.is_taken(waiting.object, waiting.version);
        let offloads = self.by_disk.entry(disk).or_default();
        if offloads.moving == 0 {
            offloads.due = now + PATIENCE;
        }
        offloads.moving += 1;
        self.moving.insert(waiting.object, disk);
        if !is_taken {
            offloads.urgent.push_back(waiting);
            self.waiting += 1;
        }
    }

    /// Lets an object that was taken over wait again.
    pub(in crate::state) fn repeat(&mut self, disk: DiskSlot, waiting: WaitingObject) {
        if self.moves_to(waiting.object) != Some(disk) {
            return self.push(disk, waiting);
        }
        self.by_disk.entry(disk).or_default().urgent.push_back(waiting);
        self.waiting += 1;
    }

    /// Forgets that the memory of an object is wanted.
    pub(in crate::state) fn end_move(&mut self, object: ObjectSlot) {
        if let Some(disk) = self.moving.remove(&object)
            && let Some(offloads) = self.by_disk.get_mut(&disk)
        {
            offloads.moving -= 1;
        }
    }

    fn cancel_moves(&mut self, disk: DiskSlot) {
        self.moving.retain(|_, of| *of != disk);
        if let Some(offloads) = self.by_disk.get_mut(&disk) {
            offloads.moving = 0;
            self.waiting -= std::mem::take(&mut offloads.urgent).len();
        }
    }

    /// Returns the disk to which the owner has taken the object over, or the object moves down.
    pub(in crate::state) fn disk_of(&self, object: ObjectSlot, version: u64) -> Option<DiskSlot> {
        let taken = self.taken.get(&object).filter(|taken| taken.version == version);
        taken.map(|taken| taken.disk).or_else(|| self.moves_to(object))
    }

    /// Records that the owner of the disk took over so many bytes.
    pub(in crate::state) fn expect_report(&mut self, now: Moment, disk: DiskSlot, bytes: u64) {
        if let Some(offloads) = self.by_disk.get_mut(&disk) {
            let time = Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND as f64);
            offloads.due = now + PATIENCE + time;
        }
    }

    /// Records that the owner of the disk reported an object that moved down.
    pub(in crate::state) fn record_report(&mut self, now: Moment, disk: DiskSlot) {
        if let Some(offloads) = self.by_disk.get_mut(&disk) {
            offloads.due = offloads.due.max(now + PATIENCE);
        }
        self.progress += 1;
    }

    /// Records that the disk wrote an object.
    pub(in crate::state) fn record_written(&mut self, disk: DiskSlot) {
        if let Some(offloads) = self.by_disk.get_mut(&disk) {
            offloads.given_up = 0;
        }
    }

    /// Leaves a version of an object in memory only, for a while.
    pub(in crate::state) fn set_aside(&mut self, now: Moment, object: ObjectSlot, version: u64) {
        self.end_move(object);
        self.given_up.insert(object, (version, now + LEFT_ALONE));
    }

    /// Records that the disk could not write a version of an object.
    pub(in crate::state) fn give_up(
        &mut self,
        now: Moment,
        disk: DiskSlot,
        object: ObjectSlot,
        version: u64,
    ) {
        self.set_aside(now, object, version);
        let Some(offloads) = self.by_disk.get_mut(&disk) else { return };
        offloads.given_up += 1;
        if offloads.given_up >= GIVEN_UP_MAX {
            self.leave_alone(now, disk);
        }
    }

    /// Returns until when a version is not tried again; `None` if it may be.
    pub(in crate::state) fn given_up_until(
        &self,
        now: Moment,
        object: ObjectSlot,
        version: u64,
    ) -> Option<Moment> {
        let &(failed, until) = self.given_up.get(&object)?;
        (failed == version && !until.has_passed(now)).then_some(until)
    }

    /// Returns whether no object moves down to the disk now.
    pub(in crate::state) fn is_left_alone(&self, now: Moment, disk: DiskSlot) -> bool {
        let offloads = self.by_disk.get(&disk);
        offloads.is_some_and(|offloads| !offloads.left_alone.has_passed(now))
    }

    /// Leaves those disks alone whose owners report nothing.
    pub(in crate::state) fn leave_stalled(&mut self, now: Moment) {
        let is_stalled =
            |offloads: &DiskOffloads| offloads.moving > 0 && offloads.due.has_passed(now);
        let all = self.by_disk.iter();
        let stalled: Vec<DiskSlot> =
            all.filter(|(_, offloads)| is_stalled(offloads)).map(|(&disk, _)| disk).collect();
        for disk in stalled {
            // The answer that named them may be lost: they may be handed over again.
            self.taken.retain(|_, taken| taken.disk != disk);
            self.leave_alone(now, disk);
        }
    }

    fn leave_alone(&mut self, now: Moment, disk: DiskSlot) {
        if let Some(offloads) = self.by_disk.get_mut(&disk) {
            (offloads.left_alone, offloads.given_up) = (now + LEFT_ALONE, 0);
        }
        self.cancel_moves(disk);
        self.progress += 1;
    }
}

impl Offloads {
    /// Begins to collect the objects that the owner names.
    pub(in crate::state) fn begin_naming(&mut self, disk: DiskSlot) {
        self.by_disk.entry(disk).or_default().named = Some(NamedObjects::default());
    }

    /// Records that the owner has the object.
    pub(in crate::state) fn record_named(&mut self, disk: DiskSlot, object: ObjectSlot) {
        if let Some(named) = self.named_mut(disk) {
            named.objects.insert(object);
        }
    }

    /// Records that the owner has named all objects. Returns `false` if they were not collected.
    pub(in crate::state) fn end_naming(&mut self, disk: DiskSlot) -> bool {
        let named = self.named_mut(disk);
        named.map(|named| named.is_complete = true).is_some()
    }

    /// Returns whether the owner has named the object; `None` while it has not named all.
    pub(in crate::state) fn is_named(&self, disk: DiskSlot, object: ObjectSlot) -> Option<bool> {
        let named = self.by_disk.get(&disk)?.named.as_ref()?;
        named.is_complete.then(|| named.objects.contains(&object))
    }

    /// Forgets what the owner has named.
    pub(in crate::state) fn forget_named(&mut self, disk: DiskSlot) {
        if let Some(offloads) = self.by_disk.get_mut(&disk) {
            offloads.named = None;
        }
    }

    fn named_mut(&mut self, disk: DiskSlot) -> Option<&mut NamedObjects> {
        self.by_disk.get_mut(&disk)?.named.as_mut()
    }
}
