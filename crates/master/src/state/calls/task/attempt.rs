//! One attempt of a task: replicas still to be made, their allocation, and the outcome.

use std::time::Duration;

use mooncake_base::{
    Backoff, ClientId, Error, ErrorCode, Moment, ReplicaId, Result, TaskId, Version,
};

use crate::state::{
    calls::{
        reclaim::{Allocation, Pending},
        task::{
            CHANGED, TaskCalls, TaskKind, TaskStatus, Work,
            confirmation::{check_confirmation, confirm_task},
            drain::NO_DESTINATION,
            pick_source,
            promotion::{await_promotion, disk_keeper, plan_from_disk},
            table::{Attempt, Goal, Task},
        },
    },
    catalog::object::{Flags, Object},
    ids::{ObjectSlot, SegmentSlot},
    inventory::{
        memory::request_sync,
        new_copies::{begin_copies, end_copies, end_copying, lend_source},
        quota::QuotaVerdict,
    },
    lease::Timestamp,
    ledger::effect::Effect,
    options::PutOptions,
    pool::{
        request::{AllocRequest, SegmentFilter},
        segment::Segment,
    },
    replica::{Replica, Replicas},
    timer::Timer,
};

/// Delays of retries.
const RETRY_PAUSES: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(5));

/// How often a task checks whether an absent segment has come back.
const WAIT_PAUSE: Duration = Duration::from_millis(250);

/// Slices of searches for memory that one attempt runs, besides one for each replica.
const TURNS_MAX: usize = 4;

/// Steps that a slice of evictions for a quota counts.
const ADMIT_STEPS: u64 = 1024;

/// The maximum number of retries per object of a drain.
const DRAIN_RETRIES_MAX: u32 = 3;

/// The next step of a task.
pub(super) enum Plan {
    /// All replicas exist; the source of a move can be removed.
    Finish,
    /// Copy this replica to one segment of each target.
    Copy(Replica, Vec<Target>),
    /// The client no longer holds a replica.
    Reassign,
    /// Retry later.
    Retry(&'static str),
    /// Wait for a segment that may come back.
    Wait,
    /// Bring the object into memory, in one of these segments.
    Promote(Box<[Box<str>]>),
    /// The task cannot succeed.
    Fail(&'static str),
}

/// The memory for the replicas of an attempt.
pub(super) enum Placed {
    /// The replicas, at least one, and why the others failed.
    Now(Vec<Replica>, Option<String>),
    /// Memory is still being freed.
    Later,
}

/// Candidate segments of one replica.
pub(super) enum Target {
    Any,
    Only(Vec<SegmentSlot>),
    Except(Vec<SegmentSlot>),
}

/// How memory for replicas is found.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placement<'a> {
    /// The replicas are in addition to those that the object has, and need a quota.
    pub(super) is_charged: bool,
    /// Whether other objects may be evicted for them.
    pub(super) may_evict: bool,
    /// The host whose memory is preferred; empty: none.
    pub(super) host: &'a str,
}

impl Target {
    fn filter(&self) -> SegmentFilter<'_> {
        match self {
            Self::Any => SegmentFilter::All,
            Self::Only(these) => SegmentFilter::Only(these),
            Self::Except(these) => SegmentFilter::Except(these),
        }
    }
}

impl TaskCalls<'_> {
    /// Starts a task pending for the client; `None` if nothing is left to do.
    pub(super) fn begin_task(&mut self, now: Moment, client: ClientId, id: TaskId) -> Option<Work> {
        let slot = self.tasks.get(id)?.subject.slot;
        if self.inventory.objects().get(slot).is_some() {
            self.inventory.drop_lost_replicas(slot);
        }
        let task = self.tasks.get(id)?;
        let subject = self.subject(task);
        if subject.is_some_and(|object| object.flags.has(Flags::BEING_COPIED)) {
            // Another task is copying the object; this task waits for it.
            return None;
        }
        let plan = subject.map_or(Plan::Fail(CHANGED), |object| self.plan(task, object, client));
        self.tasks.unqueue(id);
        match plan {
            Plan::Copy(source, targets) => self.start_attempt(now, id, source, &targets),
            Plan::Finish => {
                confirm_task(self, now, id, 0, None);
                None
            }
            Plan::Reassign => {
                self.assign_task(now, id, now, Some(client));
                None
            }
            Plan::Retry(why) => {
                self.retry_task(now, id, why);
                None
            }
            Plan::Wait => {
                self.tasks.queue(id, client, now + WAIT_PAUSE);
                None
            }
            Plan::Promote(segments) => {
                await_promotion(self, now, id, &segments);
                None
            }
            Plan::Fail(why) => {
                self.fail_task(now, id, why);
                None
            }
        }
    }

    pub(super) fn plan(&self, task: &Task, object: &Object, client: ClientId) -> Plan {
        let copies = &object.replicas[..];
        if copies.is_empty() {
            return plan_from_disk(self, task);
        }
        let readable: Vec<(Replica, ClientId)> = copies
            .iter()
            .map(|copy| (*copy, self.inventory.segment(copy.segment)))
            .filter(|(_, segment)| segment.is_readable())
            .map(|(copy, segment)| (copy, segment.client))
            .collect();
        let Some(source) = pick_source(&readable, client) else {
            return if copies.iter().any(|copy| self.inventory.segment(copy.segment).is_unclaimed) {
                Plan::Wait
            } else {
                Plan::Retry("no client that holds a replica sends heartbeats")
            };
        };
        let sources = self.sources(&task.goal);
        let is_on = |slots: &[SegmentSlot]| {
            copies.iter().any(|copy| {
                let segment = self.inventory.segment(copy.segment);
                let counts = match task.goal {
                    Goal::Copy { .. } => segment.is_readable(),
                    Goal::Move { .. } | Goal::Evacuate { .. } => segment.may_replace(),
                };
                counts && slots.contains(&copy.segment) && !sources.contains(&copy.segment)
            })
        };
        let targets = match &task.goal {
            Goal::Copy { targets } => {
                let slots =
                    targets.iter().map(|name| self.inventory.segments().named(name).to_vec());
                slots.filter(|slots| !is_on(slots)).map(Target::Only).collect()
            }
            Goal::Move { target, .. } => {
                let slots = self.inventory.segments().named(target).to_vec();
                if is_on(&slots) {
                    Vec::new()
                } else if copies.iter().any(|copy| sources.contains(&copy.segment)) {
                    vec![Target::Only(slots)]
                } else {
                    return Plan::Fail("the object no longer has a replica in the source");
                }
            }
            Goal::Evacuate { targets, .. } => {
                let is_kept = disk_keeper(self, task).is_some();
                match self.drain_target(copies, is_kept, &sources, targets, &is_on) {
                    Ok(target) => target.into_iter().collect(),
                    Err(later) => return later,
                }
            }
        };
        if targets.iter().any(|target| self.is_coming_back(target)) {
            return Plan::Wait;
        }
        let is_gone = |target: &Target| matches!(target, Target::Only(slots) if slots.is_empty());
        if targets.iter().any(is_gone) {
            Plan::Fail("the target is no longer mounted")
        } else if targets.is_empty() {
            Plan::Finish
        } else if !readable.iter().any(|(_, owner)| *owner == client) {
            Plan::Reassign
        } else {
            Plan::Copy(source, targets)
        }
    }

    /// Returns where a replica is needed before another can leave its segment. Returns no target if
    /// there is a replica already, or if no other segment could take one and another replica, or one
    /// on disk, can be read.
    fn drain_target(
        &self,
        copies: &[Replica],
        is_kept: bool,
        sources: &[SegmentSlot],
        targets: &[Box<str>],
        is_on: &dyn Fn(&[SegmentSlot]) -> bool,
    ) -> Result<Option<Target>, Plan> {
        if !copies.iter().any(|copy| sources.contains(&copy.segment)) {
            return Ok(None);
        }
        if !targets.is_empty() {
            let named = targets.iter().flat_map(|name| self.inventory.segments().named(name));
            let slots: Vec<SegmentSlot> = named.copied().collect();
            return Ok((!is_on(&slots)).then_some(Target::Only(slots)));
        }
        let holders: Vec<SegmentSlot> = copies.iter().map(|copy| copy.segment).collect();
        if self.inventory.segments().open().iter().any(|slot| !holders.contains(slot)) {
            return Ok(Some(Target::Except(holders)));
        }
        let others =
            self.inventory.segments().mounted().filter(|(slot, _)| !holders.contains(slot));
        if others.into_iter().any(|(_, segment)| segment.is_coming_back()) {
            Err(Plan::Wait)
        } else if is_kept || is_on(&holders) {
            Ok(None)
        } else {
            Err(Plan::Retry(NO_DESTINATION))
        }
    }

    /// Returns whether a replica is needed in a segment that cannot take it yet, but soon.
    fn is_coming_back(&self, target: &Target) -> bool {
        let Target::Only(slots) = target else { return false };
        let mut wanted = slots.iter().map(|&slot| self.inventory.segment(slot));
        !wanted.clone().any(Segment::accepts_new) && wanted.any(Segment::is_coming_back)
    }

    /// Allocates space for the replicas and lets the client write them.
    fn start_attempt(
        &mut self,
        now: Moment,
        id: TaskId,
        source: Replica,
        targets: &[Target],
    ) -> Option<Work> {
        let task = self.tasks.get(id)?;
        let (slot, key, kind) = (task.subject.slot, task.subject.key.clone(), task.kind);
        let job = task.job;
        let object = self.inventory.object(slot);
        let (version, length) = (object.version, object.length);
        let checksum = self.inventory.objects().checksum(slot);
        let may_evict = job.is_none_or(|job| self.jobs.may_evict(job));
        let before = self.inventory.log().counters().evicted();
        let placement = Placement { is_charged: kind == TaskKind::Copy, may_evict, host: "" };
        let placed = self.place_copies(now, slot, placement, targets);
        let placed = placed.map_err(|error| error.to_string());
        if let Some(job) = job {
            self.jobs.count_evicted(job, before, self.inventory.log().counters().evicted());
        }
        let (placed, why) = match placed {
            Ok(Placed::Now(placed, why)) => (placed, why),
            Ok(Placed::Later) => {
                let client = self.tasks.get(id)?.client;
                self.tasks.queue(id, client, now + WAIT_PAUSE);
                return None;
            }
            Err(why) => {
                // What finds no other memory leaves its own if a disk has it.
                match self.tasks.get(id).and_then(|task| disk_keeper(self, task)) {
                    Some(_) => confirm_task(self, now, id, 0, None),
                    None => self.retry_task(now, id, &why),
                }
                return None;
            }
        };
        // The object may have been evicted with a large group, whose members leave one by one.
        if self.subject(self.tasks.get(id)?).is_none() {
            for replica in placed {
                self.inventory.release(now, replica, Timestamp::default());
            }
            self.fail_task(now, id, CHANGED);
            return None;
        }
        let until = now + self.inventory.rules().write_end();
        let targets = self.inventory.pool().places(version, length, &placed).to_vec();
        let copies = begin_copies(self.inventory, now, slot, placed);
        lend_source(self.inventory, slot, source.segment, until);
        let is_whole = why.is_none();
        let source = *self.inventory.pool().places(version, length, &[source]).first()?;
        self.tasks.run(id, Attempt { copies, is_whole });
        let task = self.tasks.get_mut(id)?;
        task.begun.get_or_insert(now);
        task.updated = now;
        task.message = why.unwrap_or_default();
        let attempt = task.phase;
        self.set_task_timer(id, until);
        let version = Version(version);
        Some(Work { id, attempt, key, version, length, checksum, source, targets })
    }

    /// Allocates as many of the replicas as possible, at least one. Returns why the others failed,
    /// too.
    pub(super) fn place_copies(
        &mut self,
        now: Moment,
        slot: ObjectSlot,
        Placement { is_charged, may_evict, host }: Placement<'_>,
        targets: &[Target],
    ) -> Result<Placed> {
        let object = self.inventory.object(slot);
        let (tenant, length) = (object.tenant, object.length);
        if is_charged {
            let need = length.saturating_mul(targets.len() as u64);
            let mut turns = TURNS_MAX;
            loop {
                match self.inventory.admit(now, tenant, need, Some(slot))? {
                    QuotaVerdict::Granted => break,
                    QuotaVerdict::Later => {}
                    QuotaVerdict::Disks(_) => return Ok(Placed::Later),
                }
                turns -= 1;
                self.searches.steps += ADMIT_STEPS;
                if turns == 0 {
                    // What was evicted stays so when the task is tried again.
                    return Ok(Placed::Later);
                }
            }
        }
        let is_same_node_preferred = !host.is_empty();
        let options = PutOptions { is_same_node_preferred, ..PutOptions::default() };
        let mut placed = Vec::with_capacity(targets.len());
        let mut failure: Option<Error> = None;
        let mut is_pending = false;
        let mut turns = TURNS_MAX;
        for target in targets {
            let request = AllocRequest {
                length,
                replicas: 1,
                filter: target.filter(),
                host,
                options: &options,
                spared: Some(slot),
            };
            let outcome = if may_evict {
                self.place_copy(now, &request, &mut turns)
            } else {
                self.place_copy_in_free_memory(now, &request)
            };
            match outcome {
                Ok(Some(found)) => {
                    let object = self.inventory.objects().get(slot);
                    let present = object.map_or(&[][..], |object| &object.replicas);
                    let ordinal = self.tasks.take_ordinal(present);
                    placed.extend(found.iter().map(|&copy| Replica { ordinal, ..copy }));
                }
                Ok(None) => is_pending = true,
                Err(error) => failure = Some(error),
            }
        }
        if is_pending && placed.is_empty() {
            return Ok(Placed::Later);
        }
        if is_pending {
            failure.get_or_insert_with(|| {
                Error::new(ErrorCode::NO_AVAILABLE_HANDLE, "memory is still being freed")
            });
        }
        match failure {
            Some(error) if placed.is_empty() => Err(error),
            failure => Ok(Placed::Now(placed, failure.map(|error| error.to_string()))),
        }
    }

    /// Allocates one replica; `None` if memory is still being freed for it. Takes the slices of its
    /// search but the first from `turns`.
    fn place_copy(
        &mut self,
        now: Moment,
        request: &AllocRequest<'_>,
        turns: &mut usize,
    ) -> Result<Option<Replicas>> {
        let mut search = None;
        loop {
            match self.reclaimer().allocate_copies(now, request, &mut search)? {
                Allocation::Ready(found) => return Ok(Some(found)),
                Allocation::Pending(Pending::Yield) if *turns > 0 => *turns -= 1,
                Allocation::Pending(_) => break,
            }
        }
        // What was evicted is free when the task is tried again.
        self.reclaimer().cancel_search(search);
        request_sync(self.inventory);
        Ok(None)
    }

    /// Allocates one replica without evicting other objects; `None` if freed memory waits for the
    /// log.
    fn place_copy_in_free_memory(
        &mut self,
        now: Moment,
        request: &AllocRequest<'_>,
    ) -> Result<Option<Replicas>> {
        Ok(match self.reclaimer().allocate_free(now, request)? {
            Allocation::Ready(found) => Some(found),
            Allocation::Pending(_) => {
                request_sync(self.inventory);
                None
            }
        })
    }

    /// Ends an attempt. The replicas in `failed` are dropped, and their space is quarantined until
    /// no late byte can arrive. `reporter` is the client that has just reported the end.
    pub(super) fn end_attempt(
        &mut self,
        now: Moment,
        id: TaskId,
        why: &str,
        failed: &dyn Fn(ReplicaId) -> bool,
        reporter: Option<ClientId>,
    ) {
        let Some(attempt) = self.tasks.stop(id) else { return };
        let Some(task) = self.tasks.get(id) else { return };
        let (slot, version) = (task.subject.slot, task.subject.version);
        // A replica that was lost meanwhile is not brought back.
        let is_same = self.subject(task).is_some() && self.inventory.drop_lost_replicas(slot);
        if is_same {
            end_copying(self.inventory, slot);
        }
        let placed = attempt.copies.replicas().len();
        let object = is_same.then_some(slot);
        let ended = end_copies(self.inventory, now, object, version, attempt.copies, failed);
        let (copied, is_whole) = (ended.added_bytes, attempt.is_whole && ended.written == placed);
        if !is_same {
            self.fail_task(now, id, CHANGED);
        } else if is_whole {
            confirm_task(self, now, id, copied, reporter);
        } else {
            let why = if why.is_empty() { "not all replicas were written" } else { why };
            self.retry_task(now, id, why);
        }
    }

    /// Retries a task that is in no queue after a delay, unless it has no retries left.
    pub(super) fn retry_task(&mut self, now: Moment, id: TaskId, why: &str) {
        let limits = &self.inventory.rules().tasks;
        let Some(task) = self.tasks.get_mut(id) else { return };
        let retries_max = task.job.map_or(limits.retries_max, |_| DRAIN_RETRIES_MAX);
        let timeout = limits.processing_timeout;
        let is_late =
            !timeout.is_zero() && task.begun.is_some_and(|begun| (begun + timeout).has_passed(now));
        if task.retries >= retries_max || is_late {
            let why = format!("failed after {} attempts: {why}", task.retries + 1);
            return self.fail_task(now, id, &why);
        }
        task.retries += 1;
        task.updated = now;
        why.clone_into(&mut task.message);
        let (client, retries) = (task.client, task.retries);
        self.log_task(id);
        let pause = RETRY_PAUSES.pause(retries - 1);
        self.assign_task(now, id, now + pause, Some(client));
    }

    /// Fails a task that is in no queue.
    pub(super) fn fail_task(&mut self, now: Moment, id: TaskId, why: &str) {
        self.finish_task(now, id, Err(why));
    }

    pub(super) fn finish_task(&mut self, now: Moment, id: TaskId, outcome: Result<u64, &str>) {
        let Some(task) = self.tasks.get_mut(id) else { return };
        task.updated = now;
        (task.status, task.message) = match outcome {
            Ok(_) => (TaskStatus::Success, "Task completed successfully".to_owned()),
            Err(why) => (TaskStatus::Failed, why.to_owned()),
        };
        let (slot, version, job) = (task.subject.slot, task.subject.version, task.job);
        match job {
            Some(job) => {
                self.tasks.remove(id);
                self.end_move(now, job, slot, version, outcome);
            }
            None => {
                self.inventory.counters_mut().tasks_done += u64::from(outcome.is_ok());
                self.inventory.counters_mut().tasks_failed += u64::from(outcome.is_err());
                self.log_task(id);
                self.forget_finished(id);
            }
        }
    }

    /// Finishes a task. If too many finished tasks are kept, the oldest is forgotten.
    pub(super) fn forget_finished(&mut self, id: TaskId) {
        if let Some(oldest) = self.tasks.finish(id, self.inventory.rules().tasks.finished_max) {
            self.inventory.record(|| Effect::Task { id: oldest.bits(), record: None });
        }
    }

    /// Sets the timer of the task's present phase.
    pub(super) fn set_task_timer(&mut self, id: TaskId, at: Moment) {
        if let Some(task) = self.tasks.get(id) {
            self.inventory.set_timer(at, Timer::Task(id, task.phase));
        }
    }

    /// Handles the timer of a task: its client did not report, or no client fetched the task.
    pub(in crate::state) fn check_task(&mut self, now: Moment, id: TaskId, phase: u64) {
        let task = self.tasks.get(id).filter(|task| task.phase == phase);
        let Some(task) = task else { return };
        match task.status {
            TaskStatus::Processing if task.confirmation.is_some() => {
                check_confirmation(self, now, id);
            }
            TaskStatus::Processing => {
                let why = "the client did not report in time";
                self.end_attempt(now, id, why, &|_| true, None);
            }
            TaskStatus::Pending => {
                self.tasks.unqueue(id);
                self.fail_task(now, id, "no client fetched the task in time");
            }
            TaskStatus::Failed | TaskStatus::Success => {}
        }
    }
}
