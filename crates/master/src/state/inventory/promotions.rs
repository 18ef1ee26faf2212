//! Promotions: objects that only a disk has, and that its owner is to bring into memory.
//!
//! A promotion waits for the owner of the disk, then runs while the owner writes the bytes to memory
//! that was allocated for it. An object has one promotion at a time.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::{Moment, ReplicaId, TaskId};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::state::{
    ids::{DiskSlot, ObjectSlot, SegmentSlot, TenantIndex},
    inventory::{
        Inventory,
        disks::readable_disk,
        new_copies::NewCopies,
        promotion_candidates::{HitVerdict, PromotionCandidates},
    },
    replica::Replica,
};

/// A promotion that its disk has not begun after this time is dropped: the caller has read the object
/// from the disk since.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// An object that is to be brought into memory.
#[derive(Debug, Clone)]
pub(in crate::state) struct Promotion {
    pub(in crate::state) object: ObjectSlot,
    pub(in crate::state) version: u64,
    pub(in crate::state) disk: DiskSlot,
    /// When it was asked for.
    since: Moment,
    /// The names of the segments to use; empty: any.
    pub(in crate::state) segments: Box<[Box<str>]>,
    /// The tasks that wait for it.
    pub(in crate::state) tasks: SmallVec<[TaskId; 1]>,
}

impl Promotion {
    /// Returns whether it has waited for too long.
    pub(in crate::state) fn is_late(&self, now: Moment) -> bool {
        (self.since + WAIT_MAX).has_passed(now)
    }
}

/// A promotion whose bytes are being written.
#[derive(Debug)]
pub(in crate::state) struct RunningPromotion {
    pub(in crate::state) promotion: Promotion,
    pub(in crate::state) copies: NewCopies,
}

/// All promotions.
#[derive(Debug, Default)]
pub(in crate::state) struct Promotions {
    /// Versions in the order in which they were asked for. Those that are not in `waiting` any more are
    /// skipped.
    queues: FxHashMap<DiskSlot, VecDeque<u64>>,
    waiting: FxHashMap<u64, Promotion>,
    running: FxHashMap<ReplicaId, RunningPromotion>,
    /// The replica that is written of each version.
    replicas: FxHashMap<u64, ReplicaId>,
    /// Bytes of those that run.
    running_bytes: u64,
    /// Objects that reads found only on disk.
    pub(in crate::state) candidates: PromotionCandidates,
}

/// What became of a request for a promotion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefetch {
    /// The object has memory, or is not there.
    Unneeded,
    /// The object waits for its disk, or is being written to memory.
    Queued,
    /// Too many objects wait.
    Refused,
}

impl Promotions {
    /// Takes the promotion that has waited longest for the disk.
    pub(in crate::state) fn pop(&mut self, disk: DiskSlot) -> Option<Promotion> {
        let queue = self.queues.get_mut(&disk)?;
        while let Some(version) = queue.pop_front() {
            let waiting = self.waiting.get(&version).is_some_and(|found| found.disk == disk);
            if waiting {
                return self.waiting.remove(&version);
            }
        }
        self.queues.remove(&disk);
        None
    }

    /// Puts a promotion back at the head of its queue.
    pub(in crate::state) fn put_back(&mut self, promotion: Promotion) {
        let version = promotion.version;
        self.queues.entry(promotion.disk).or_default().push_front(version);
        self.waiting.insert(version, promotion);
    }

    /// Records that the bytes of a promotion are being written.
    pub(in crate::state) fn begin(&mut self, replica: ReplicaId, running: RunningPromotion) {
        self.running_bytes += running.copies.bytes();
        self.replicas.insert(running.promotion.version, replica);
        self.running.insert(replica, running);
    }

    /// Returns the disk from which the bytes of a replica come.
    pub(in crate::state) fn disk_of(&self, replica: ReplicaId) -> Option<DiskSlot> {
        self.running.get(&replica).map(|running| running.promotion.disk)
    }

    /// Ends the writing of a replica.
    pub(in crate::state) fn end(&mut self, replica: ReplicaId) -> Option<RunningPromotion> {
        let running = self.running.remove(&replica)?;
        self.running_bytes -= running.copies.bytes();
        self.replicas.remove(&running.promotion.version);
        Some(running)
    }

    /// Forgets what waits for a disk that is no longer there. What its owner is writing ends by a
    /// report or with its window.
    pub(in crate::state) fn forget(&mut self, disk: DiskSlot) -> usize {
        self.queues.remove(&disk);
        let before = self.waiting.len();
        self.waiting.retain(|_, promotion| promotion.disk != disk);
        before - self.waiting.len()
    }

    /// Forgets replicas in segments that left the pool. Returns how many bytes to uncharge from which
    /// tenant.
    pub(in crate::state) fn forget_segments(
        &mut self,
        is_gone: impl Fn(SegmentSlot) -> bool,
    ) -> Vec<(TenantIndex, u64)> {
        let lost = self.running.iter().filter(|(_, running)| {
            running.copies.replicas().iter().any(|replica| is_gone(replica.segment))
        });
        let lost: Vec<ReplicaId> = lost.map(|(&replica, _)| replica).collect();
        let ended = lost.into_iter().filter_map(|replica| self.end(replica));
        ended.map(|running| (running.copies.tenant(), running.copies.bytes())).collect()
    }

    /// Returns the number of objects that wait, or are being written to memory.
    pub(in crate::state) fn underway(&self) -> u64 {
        (self.waiting.len() + self.running.len()) as u64
    }

    /// Returns the bytes that are being written to memory.
    pub(in crate::state) fn running_bytes(&self) -> u64 {
        self.running_bytes
    }

    /// Returns the replicas being written.
    pub(in crate::state) fn placed(&self) -> impl Iterator<Item = &Replica> {
        self.running.values().flat_map(|running| running.copies.replicas())
    }

    /// Returns the promotion of a version that waits or runs.
    fn of_version(&mut self, version: u64) -> Option<&mut Promotion> {
        match self.replicas.get(&version) {
            Some(replica) => self.running.get_mut(replica).map(|running| &mut running.promotion),
            None => self.waiting.get_mut(&version),
        }
    }
}

/// Asks for an object in memory if only a readable disk has it.
pub(in crate::state) fn request_promotion(
    inventory: &mut Inventory,
    now: Moment,
    slot: ObjectSlot,
) -> Prefetch {
    request(inventory, now, slot, &[], None)
}

/// Asks for an object in memory of one of these segments, for a task.
pub(in crate::state) fn request_for_task(
    inventory: &mut Inventory,
    now: Moment,
    slot: ObjectSlot,
    segments: &[Box<str>],
    task: TaskId,
) -> Prefetch {
    request(inventory, now, slot, segments, Some(task))
}

/// Forgets the promotion of an object whose disk has not begun it in time. Returns whether there was one.
pub(in crate::state) fn forget_late(
    inventory: &mut Inventory,
    now: Moment,
    slot: ObjectSlot,
) -> bool {
    let version = inventory.catalog.objects.at(slot).version;
    let waiting = &mut inventory.promotions.waiting;
    let is_late = waiting.get(&version).is_some_and(|promotion| promotion.is_late(now));
    if is_late {
        waiting.remove(&version);
        inventory.log.counters.promotions_expired += 1;
    }
    is_late
}

/// Records a read. One that only a disk has is brought into memory if it is read often.
pub(in crate::state) fn record_read(inventory: &mut Inventory, now: Moment, slot: ObjectSlot) {
    let Some(hits) = inventory.rules.promotion.hits_min else { return };
    let object = inventory.catalog.objects.at(slot);
    if !object.replicas.is_empty() {
        return;
    }
    let version = object.version;
    let Inventory { promotions, log, .. } = inventory;
    if promotions.of_version(version).is_some() {
        return;
    }
    match promotions.candidates.record(now, version, hits, &mut log.counters) {
        HitVerdict::TooFew => log.counters.promotions_too_few_hits += 1,
        HitVerdict::Promote => {
            request_promotion(inventory, now, slot);
        }
    }
}

fn request(
    inventory: &mut Inventory,
    now: Moment,
    slot: ObjectSlot,
    segments: &[Box<str>],
    task: Option<TaskId>,
) -> Prefetch {
    let object = inventory.catalog.objects.at(slot);
    if !object.is_complete() || !object.replicas.is_empty() {
        return Prefetch::Unneeded;
    }
    let version = object.version;
    let Some(disk) = readable_disk(inventory, slot) else { return Prefetch::Unneeded };
    let promotions = &mut inventory.promotions;
    if let Some(known) = promotions.of_version(version) {
        if let Some(task) = task.filter(|task| !known.tasks.contains(task)) {
            known.tasks.push(task);
            // One that runs already brings a replica from which the task copies.
            known.segments = segments.into();
        }
        return Prefetch::Queued;
    }
    if promotions.waiting.len() >= inventory.rules.promotion.queue_max {
        inventory.log.counters.promotions_refused += 1;
        return Prefetch::Refused;
    }
    let tasks = task.into_iter().collect();
    let promotion =
        Promotion { object: slot, version, disk, since: now, segments: segments.into(), tasks };
    promotions.waiting.insert(version, promotion);
    promotions.queues.entry(disk).or_default().push_back(version);
    inventory.log.counters.promotions_admitted += 1;
    inventory.log.has_offloads = true;
    Prefetch::Queued
}
