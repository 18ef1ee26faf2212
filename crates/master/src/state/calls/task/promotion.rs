//! Promotions: objects that only a disk has are read by its owner and written to memory of the pool.
//!
//! The memory is allocated when the owner asks for work, never while a caller waits for it, and is held
//! like the target of a task until the owner reports or its window is over. A task whose object has no
//! memory waits for a promotion.

use std::time::Duration;

use mooncake_base::{ClientId, Moment, ReplicaId, Result, SegmentId, TaskId, TenantId};

use crate::state::{
    calls::{
        disks::{DiskCalls, Offload},
        task::{
            CHANGED, FETCH_STEPS, TASK_STEPS, TaskCalls, TaskStatus,
            attempt::{Placed, Placement, Plan, Target},
            confirmation::confirm_task,
            table::{Goal, Task},
        },
    },
    ids::ObjectSlot,
    inventory::{
        disks::readable_disk,
        new_copies::{begin_copies, end_copies},
        promotions::{
            Prefetch, Promotion, RunningPromotion, forget_late, request_for_task, request_promotion,
        },
    },
    lease::Timestamp,
    replica::Replica,
    timer::Timer,
};

/// Maximum number of bytes that all owners of disks write to memory at a time, unless a single object
/// is longer.
const WRITTEN_BYTES_MAX: u64 = 512 << 20;

/// How often a task looks whether its promotion has got lost.
const PROMOTION_PAUSE: Duration = Duration::from_secs(5);

/// Why a promotion did not bring its object into memory.
const NOT_WRITTEN: &str =
    "the owner of the disk could not read the object, or not write it to memory";
const TOO_LATE: &str = "the owner of the disk did not bring the object into memory in time";

/// Objects for the owner of a disk to bring into memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PromotionBatch {
    /// The objects, each with one place to write to.
    pub objects: Vec<Offload>,
    /// How long the owner may write.
    pub window: Duration,
    /// Whether an object waits for memory that is being freed: ask again soon.
    pub is_waiting: bool,
}

/// The begin of a promotion.
enum BegunPromotion {
    Object(Offload),
    /// Memory is still being freed for it.
    Later,
    /// Nothing is left to do.
    Ended,
}

/// The calls about promotions, with what they change.
#[derive(Debug)]
pub struct PromotionCalls<'a> {
    calls: TaskCalls<'a>,
}

impl<'a> PromotionCalls<'a> {
    /// Returns the calls over the state that those about tasks change.
    pub fn new(calls: TaskCalls<'a>) -> Self {
        Self { calls }
    }

    /// Has the owner of a disk bring an object into memory if only the disk has it. Does not wait.
    pub fn prefetch(&mut self, now: Moment, tenant: &TenantId, key: &[u8]) -> Prefetch {
        let inventory = &mut *self.calls.inventory;
        let tenant = inventory.objects().tenant_index(tenant);
        match tenant.and_then(|tenant| inventory.find(now, tenant, key)) {
            Some(slot) => request_promotion(inventory, now, slot),
            None => Prefetch::Unneeded,
        }
    }

    /// Hands objects to the owner of a disk that are to be brought into memory: at most `limit`, and no
    /// more once they reach so many bytes. Their memory is allocated, by eviction if needed.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns the disk.
    pub fn fetch(
        &mut self,
        now: Moment,
        client: ClientId,
        disk: SegmentId,
        limit: usize,
        bytes: u64,
    ) -> Result<PromotionBatch> {
        let disk = DiskCalls { inventory: self.calls.inventory }.own_slot(client, disk)?;
        let window = self.calls.inventory.rules().write_window;
        let mut batch = PromotionBatch { window, ..PromotionBatch::default() };
        let (mut sum, steps) = (0, self.calls.searches.steps);
        while batch.objects.len() < limit && sum < bytes {
            let Some(promotion) = self.calls.inventory.promotions_mut().pop(disk) else { break };
            let is_full = self.calls.inventory.promotions().running_bytes() >= WRITTEN_BYTES_MAX;
            if is_full || self.calls.searches.steps - steps > FETCH_STEPS {
                batch.is_waiting = true;
                self.calls.inventory.promotions_mut().put_back(promotion);
                break;
            }
            self.calls.searches.steps += TASK_STEPS;
            match self.begin(now, &promotion) {
                BegunPromotion::Object(object) => {
                    sum += object.length;
                    batch.objects.push(object);
                }
                BegunPromotion::Later => {
                    batch.is_waiting = true;
                    self.calls.inventory.promotions_mut().put_back(promotion);
                    break;
                }
                BegunPromotion::Ended => {}
            }
        }
        Ok(batch)
    }

    /// Records that the owner of a disk has written a promoted object, or that it has not, or that bytes
    /// may still arrive. Has no effect if the promotion has ended.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns the disk.
    pub fn end(
        &mut self,
        now: Moment,
        client: ClientId,
        disk: SegmentId,
        replica: ReplicaId,
        is_written: bool,
    ) -> Result<()> {
        let disk = DiskCalls { inventory: self.calls.inventory }.own_slot(client, disk)?;
        if self.calls.inventory.promotions().disk_of(replica) != Some(disk) {
            return Ok(());
        }
        if let Some(running) = self.calls.inventory.promotions_mut().end(replica) {
            if !is_written {
                self.calls.inventory.counters_mut().promotions_failed += 1;
            }
            self.finish(now, running, is_written, NOT_WRITTEN);
        }
        Ok(())
    }

    /// Handles the timer of a promotion: its owner did not report in time.
    pub(in crate::state) fn expire(&mut self, now: Moment, replica: ReplicaId) {
        if let Some(running) = self.calls.inventory.promotions_mut().end(replica) {
            self.calls.inventory.counters_mut().promotions_expired += 1;
            self.finish(now, running, false, TOO_LATE);
        }
    }

    /// Allocates the memory for a promotion.
    fn begin(&mut self, now: Moment, promotion: &Promotion) -> BegunPromotion {
        let slot = promotion.object;
        if !self.is_promotable(promotion) {
            self.calls.inventory.counters_mut().promotions_cancelled += 1;
            resume_tasks(&mut self.calls, now, promotion, Err(CHANGED));
            return BegunPromotion::Ended;
        }
        if promotion.is_late(now) {
            self.calls.inventory.counters_mut().promotions_expired += 1;
            resume_tasks(&mut self.calls, now, promotion, Err(TOO_LATE));
            return BegunPromotion::Ended;
        }
        let target = match &promotion.segments[..] {
            [] => Target::Any,
            names => {
                let named =
                    names.iter().flat_map(|name| self.calls.inventory.segments().named(name));
                Target::Only(named.copied().collect())
            }
        };
        let host = self.calls.inventory.disk(promotion.disk).host.clone();
        let placement = Placement { is_charged: true, may_evict: true, host: &host };
        let placed = match self.calls.place_copies(now, slot, placement, &[target]) {
            Ok(Placed::Now(placed, _)) => placed,
            Ok(Placed::Later) => return BegunPromotion::Later,
            Err(error) => {
                self.calls.inventory.counters_mut().promotions_without_room += 1;
                resume_tasks(&mut self.calls, now, promotion, Err(&error.to_string()));
                return BegunPromotion::Ended;
            }
        };
        // The object may have gone with what was evicted for it.
        if !self.is_promotable(promotion) {
            for replica in placed {
                self.calls.inventory.release(now, replica, Timestamp::default());
            }
            self.calls.inventory.counters_mut().promotions_cancelled += 1;
            resume_tasks(&mut self.calls, now, promotion, Err(CHANGED));
            return BegunPromotion::Ended;
        }
        BegunPromotion::Object(self.hand_out(now, promotion, placed))
    }

    /// Begins to write a promoted object.
    fn hand_out(&mut self, now: Moment, promotion: &Promotion, placed: Vec<Replica>) -> Offload {
        let slot = promotion.object;
        let replica = placed[0].id(promotion.version);
        let copies = begin_copies(self.calls.inventory, now, slot, placed);
        let objects = self.calls.inventory.objects();
        let object = objects.at(slot);
        let handed_out = Offload {
            tenant: objects.tenant_name(object.tenant).clone(),
            key: objects.key(object).to_vec(),
            version: object.version(),
            length: object.length,
            places: self.calls.inventory.pool().places(
                object.version,
                object.length,
                copies.replicas(),
            ),
        };
        let running = RunningPromotion { promotion: promotion.clone(), copies };
        self.calls.inventory.promotions_mut().begin(replica, running);
        let until = now + self.calls.inventory.rules().write_end();
        self.calls.inventory.set_timer(until, Timer::Promotion(replica));
        handed_out
    }

    /// Returns whether the object of a promotion is still the same, and only on the disk.
    fn is_promotable(&self, promotion: &Promotion) -> bool {
        let object = self.calls.inventory.objects().get(promotion.object);
        object.is_some_and(|object| {
            object.is_complete()
                && object.version == promotion.version
                && object.replicas.is_empty()
                && readable_disk(self.calls.inventory, promotion.object) == Some(promotion.disk)
        })
    }

    /// Adds the replica of a promotion to its object if that is still the same, and frees the memory
    /// otherwise.
    fn finish(&mut self, now: Moment, running: RunningPromotion, is_written: bool, why: &str) {
        let RunningPromotion { promotion, copies } = running;
        let (slot, version) = (promotion.object, promotion.version);
        let is_same =
            self.is_present(slot, version) && self.calls.inventory.drop_lost_replicas(slot);
        let object = is_same.then_some(slot);
        let ended =
            end_copies(self.calls.inventory, now, object, version, copies, &|_| !is_written);
        let outcome = match (is_same, is_written) {
            (true, true) => {
                self.calls.inventory.counters_mut().promotions_done += 1;
                self.calls.inventory.counters_mut().promoted_bytes += ended.added_bytes;
                self.calls.inventory.extend_lease(now, slot);
                Ok(())
            }
            (false, true) => {
                self.calls.inventory.counters_mut().promotions_cancelled += 1;
                Err(CHANGED)
            }
            (_, false) => Err(why),
        };
        resume_tasks(&mut self.calls, now, &promotion, outcome);
    }

    fn is_present(&self, slot: ObjectSlot, version: u64) -> bool {
        let object = self.calls.inventory.objects().get(slot);
        object.is_some_and(|object| object.is_complete() && object.version == version)
    }
}

/// Plans the next step of a task whose object has no memory.
pub(super) fn plan_from_disk(calls: &TaskCalls<'_>, task: &Task) -> Plan {
    let segments = match &task.goal {
        Goal::Copy { targets } => targets.first(),
        Goal::Move { target, .. } => Some(target),
        Goal::Evacuate { .. } => None,
    };
    let Some(segment) = segments else { return Plan::Finish };
    if calls.inventory.segments().named(segment).is_empty() {
        return Plan::Fail("the target is no longer mounted");
    }
    match readable_disk(calls.inventory, task.subject.slot) {
        Some(_) => Plan::Promote([segment.clone()].into()),
        None => Plan::Retry("the process with the disk sends no heartbeats"),
    }
}

/// Returns the owner of a disk that keeps the object of a drain readable once its memory has left.
pub(super) fn disk_keeper(calls: &TaskCalls<'_>, task: &Task) -> Option<ClientId> {
    match &task.goal {
        Goal::Evacuate { source, targets } if targets.is_empty() => {
            disk_elsewhere(calls, task.subject.slot, *source)
        }
        _ => None,
    }
}

/// Returns the owner of a disk from which the object can be read: another process than that of the
/// segment, since both may be about to leave.
pub(super) fn disk_elsewhere(
    calls: &TaskCalls<'_>,
    slot: ObjectSlot,
    source: SegmentId,
) -> Option<ClientId> {
    let source = calls.inventory.segments().by_id(source)?;
    let disk = readable_disk(calls.inventory, slot)?;
    let owner = calls.inventory.disk(disk).client;
    (calls.inventory.segment(source).client != owner).then_some(owner)
}

/// Assigns a task whose object has no memory that could be read to the owner of its disk.
pub(super) fn assign_to_disk(
    calls: &mut TaskCalls<'_>,
    now: Moment,
    id: TaskId,
    not_before: Moment,
) {
    let Some(task) = calls.tasks.get(id) else { return };
    let disk = calls.inventory.disk_copy(task.subject.slot);
    let disk = disk.map(|disk| calls.inventory.disk(disk));
    let Some(client) = disk.filter(|disk| !disk.is_away()).map(|disk| disk.client) else {
        return calls.fail_task(now, id, CHANGED);
    };
    calls.tasks.queue(id, client, not_before);
    if not_before.has_passed(now) {
        // Nothing is left for the client to copy.
        calls.begin_task(now, client, id);
    }
}

/// Lets a task that is in no queue wait until its object is in memory.
pub(super) fn await_promotion(
    calls: &mut TaskCalls<'_>,
    now: Moment,
    id: TaskId,
    segments: &[Box<str>],
) {
    let Some(task) = calls.tasks.get(id) else { return };
    let (slot, client) = (task.subject.slot, task.client);
    if forget_late(calls.inventory, now, slot) {
        return calls.retry_task(now, id, TOO_LATE);
    }
    match request_for_task(calls.inventory, now, slot, segments, id) {
        Prefetch::Queued => calls.tasks.queue(id, client, now + PROMOTION_PAUSE),
        Prefetch::Unneeded | Prefetch::Refused => {
            calls.retry_task(now, id, "too many objects wait to be brought into memory");
        }
    }
}

/// Goes on with the tasks that waited for a promotion.
fn resume_tasks(
    calls: &mut TaskCalls<'_>,
    now: Moment,
    promotion: &Promotion,
    outcome: Result<(), &str>,
) {
    for &id in &promotion.tasks {
        let Some(task) = calls.tasks.get(id) else { continue };
        if task.status != TaskStatus::Pending {
            continue;
        }
        calls.tasks.unqueue(id);
        match outcome {
            Ok(()) => resume_task(calls, now, id),
            Err(why) => calls.retry_task(now, id, why),
        }
    }
}

/// Goes on with a task that is in no queue, and whose object has come into memory.
fn resume_task(calls: &mut TaskCalls<'_>, now: Moment, id: TaskId) {
    let Some(task) = calls.tasks.get(id) else { return };
    let Some(object) = calls.subject(task) else { return calls.fail_task(now, id, CHANGED) };
    let length = object.length;
    match calls.plan(task, object, task.client) {
        Plan::Finish => confirm_task(calls, now, id, length, None),
        _ => calls.assign_task(now, id, now, None),
    }
}
