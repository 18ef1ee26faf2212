//! Drain jobs: segments are emptied by moving their objects, a few at a time.
//!
//! A job walks over all objects in slices and creates a task for each object with a replica in its
//! segments, up to a limit of concurrent tasks, until a whole pass finds none. Objects that all
//! attempts of their task failed to move are skipped; then the job fails at the end and its segments
//! accept objects again, apart from those that were drained before. A job that cannot move anything,
//! since no other segment accepts objects, fails at once. A job evicts other objects only if its
//! creator allows that.

mod record;

use std::{cmp::Reverse, collections::VecDeque, time::Duration};

use mooncake_base::{Error, ErrorCode, Incarnation, JobId, Moment, Result, SegmentId};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{
    calls::{
        answers::CallItem,
        task::{
            TaskCalls, TaskKind, TaskSource, drain_goal, promotion::disk_elsewhere, unknown_segment,
        },
    },
    catalog::object::Flags,
    ids::{ObjectSlot, SegmentSlot},
    inventory::segments,
    ledger::effect::Effect,
    pool::segment::{SegmentSet, SegmentStatus},
    random::Random,
    timer::Timer,
};

/// The number of objects examined per call.
const SLICE: u32 = 4096;

/// The default number of concurrent moves.
const CONCURRENCY: u32 = 4;

/// The maximum number of moves of a job that wait for a sign of life of their target without counting
/// as concurrent moves.
const CONFIRMING_MAX: u32 = 4096;

/// The maximum number of concurrent moves.
const CONCURRENCY_MAX: u32 = 1024;

/// The pause between two slices of one pass, in which other calls can lock the state.
const SLICE_PAUSE: Duration = Duration::from_millis(1);

/// Steps that a segment of a job counts in each slice of the job: it is looked up.
const SEGMENTS_PER_STEP: usize = 8;

/// The number of segments up to which the progress of a job is logged with each move…
const LOGGED_SEGMENTS_MAX: usize = 16;

/// … and how often that of a larger one is.
const LOG_PAUSE: Duration = Duration::from_secs(1);

/// The pause between two passes.
const PASS_PAUSE: Duration = Duration::from_millis(500);

/// The maximum number of running jobs.
const RUNNING_MAX: usize = 64;

/// The number of finished jobs kept.
const FINISHED_MAX: usize = 256;

/// Why no object can leave its segment.
pub(super) const NO_DESTINATION: &str = "no other segment accepts objects";

/// The status of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobStatus {
    /// The job was created.
    Created,
    /// The job looks for objects to move.
    Planning,
    /// Objects are being moved.
    Running,
    /// The segments are empty.
    Succeeded,
    /// Some objects could not be moved; the message has the details.
    Failed,
    /// The job was cancelled.
    Canceled,
}

impl JobStatus {
    /// Returns whether the job has ended.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Canceled)
    }
}

/// A job to be created. Segments are given by name.
#[derive(Debug, Clone, Copy)]
pub struct NewJob<'a> {
    /// The segments to drain.
    pub segments: &'a [String],
    /// The target segments; empty for any.
    pub targets: &'a [String],
    /// The number of concurrent moves; 0 means 4.
    pub concurrency: u32,
    /// Evict other objects where a copy does not fit into free memory.
    pub may_evict: bool,
}

/// The public view of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobView {
    /// The job id.
    pub id: JobId,
    /// The status of the job.
    pub status: JobStatus,
    /// The creation time.
    pub created: Moment,
    /// The time of the last change.
    pub updated: Moment,
    /// The names of its segments.
    pub segments: Vec<String>,
    /// Replicas moved.
    pub succeeded: u64,
    /// Replicas that could not be moved.
    pub failed: u64,
    /// Replicas that were blocked when last examined: by another task or by a put in progress.
    pub blocked: u64,
    /// Replicas being moved.
    pub active: u32,
    /// Bytes moved.
    pub moved_bytes: u64,
    /// Other objects that were evicted to make room for copies.
    pub evicted: u64,
    /// Bytes of these objects.
    pub evicted_bytes: u64,
    /// A message about the outcome.
    pub message: String,
}

/// All jobs that have not been forgotten.
#[derive(Debug)]
pub(in crate::state) struct Jobs {
    random: Random,
    by_id: FxHashMap<JobId, Job>,
    running: Vec<JobId>,
    finished: VecDeque<JobId>,
}

#[derive(Debug)]
pub(in crate::state) struct Job {
    segments: Vec<(SegmentId, Incarnation)>,
    targets: Vec<Box<str>>,
    concurrency: u32,
    may_evict: bool,
    is_scheduled: bool,
    /// The position of the present pass, and what it has found.
    cursor: u32,
    found: u64,
    blocked: u64,
    /// Objects that could not be moved, with their versions.
    given_up: FxHashMap<ObjectSlot, u64>,
    /// Moves that wait for a sign of life of their target.
    pub(super) confirming: u32,
    /// Objects being moved.
    busy: FxHashSet<(ObjectSlot, u64)>,
    /// The item of a numbered call that created the job.
    item: Option<CallItem>,
    /// When the job was last logged.
    logged: Moment,
    view: JobView,
}

/// The drain state of one object, from the view of a job.
enum DrainCheck {
    /// No replica in the job's segments, or one that was given up.
    Nothing,
    /// A replica that is being moved.
    Busy,
    /// A replica that is blocked.
    Blocked,
    /// A replica in that segment, to be moved now.
    Copy(SegmentId),
}

impl Jobs {
    pub(in crate::state) fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            by_id: FxHashMap::default(),
            running: Vec::new(),
            finished: VecDeque::new(),
        }
    }

    fn unused_id(&mut self) -> JobId {
        loop {
            let bits = u128::from(self.random.next()) << 64 | u128::from(self.random.next());
            let id = JobId::from_bits(bits);
            // Ids of an earlier master are in use, too.
            if !self.by_id.contains_key(&id) {
                return id;
            }
        }
    }

    /// Returns the job, if it has not ended.
    fn running(&mut self, id: JobId) -> Option<&mut Job> {
        self.by_id.get_mut(&id).filter(|job| !job.is_over())
    }

    /// Returns whether the job may evict other objects.
    pub(super) fn may_evict(&self, id: JobId) -> bool {
        self.by_id.get(&id).is_some_and(|job| job.may_evict)
    }

    /// Counts what a copy of the job evicted: objects and bytes, by the counters before and after.
    pub(super) fn count_evicted(&mut self, id: JobId, before: (u64, u64), after: (u64, u64)) {
        if let Some(job) = self.by_id.get_mut(&id) {
            job.view.evicted += after.0 - before.0;
            job.view.evicted_bytes += after.1 - before.1;
        }
    }

    /// Counts a move of the job that begins or ends to wait for a sign of life of its target.
    pub(super) fn count_confirming(&mut self, id: JobId, begins: bool) {
        if let Some(job) = self.by_id.get_mut(&id) {
            if begins { job.confirming += 1 } else { job.confirming -= 1 }
        }
    }

    /// Returns all jobs that have not been forgotten.
    pub(in crate::state) fn all(&self) -> impl Iterator<Item = (JobId, &Job)> {
        self.by_id.iter().map(|(id, job)| (*id, job))
    }

    /// Finishes a job. Returns the job that is forgotten in its place.
    fn finish(&mut self, id: JobId) -> Option<JobId> {
        self.running.retain(|other| *other != id);
        self.finished.push_back(id);
        let is_over = self.finished.len() > FINISHED_MAX;
        let oldest = is_over.then(|| self.finished.pop_front()).flatten();
        if let Some(oldest) = oldest {
            self.by_id.remove(&oldest);
        }
        oldest
    }
}

impl Jobs {
    /// Returns the public view of a job.
    pub(in crate::state) fn view(&self, id: JobId) -> Result<JobView> {
        let job = self.by_id.get(&id).ok_or_else(|| unknown(id))?;
        Ok(job.view.clone())
    }

    /// Returns all views: running jobs first, then the latest.
    pub(in crate::state) fn list(&self) -> Vec<JobView> {
        let mut views: Vec<JobView> = self.by_id.values().map(|job| job.view.clone()).collect();
        let is_over = |view: &JobView| !self.running.contains(&view.id);
        views.sort_by_key(|view| (is_over(view), Reverse(view.updated), view.id));
        views
    }

    pub(in crate::state) fn running_count(&self) -> usize {
        self.running.len()
    }
}

impl Job {
    /// Returns the number of concurrent moves.
    fn concurrent_moves(&self) -> u32 {
        self.view.active - self.confirming.min(CONFIRMING_MAX)
    }

    fn is_over(&self) -> bool {
        self.view.status.is_over()
    }
}

impl TaskCalls<'_> {
    /// Returns every job that has not been forgotten: running jobs first, then the latest.
    pub fn list_jobs(&self) -> Vec<JobView> {
        self.jobs.list()
    }

    /// Starts draining segments. They accept no new objects from now on. A job for segments that
    /// were drained before succeeds. Segments that were drained before stay so if the job fails.
    ///
    /// # Errors
    /// `INVALID_PARAMS`: no segments, or one that is also a target. `SEGMENT_NOT_FOUND`: an unknown
    /// segment. `UNAVAILABLE_IN_CURRENT_STATUS`: a segment is being drained or unmounted, or too
    /// many jobs are running.
    pub fn create_job(&mut self, now: Moment, new: NewJob<'_>) -> Result<JobId> {
        self.create_job_once(now, new, None)
    }

    /// Creates a job by an item of a numbered call. Returns the same job for the same item, also
    /// after a restart.
    ///
    /// # Errors
    /// The errors of [`create_job`](Self::create_job).
    pub fn create_job_once(
        &mut self,
        now: Moment,
        new: NewJob<'_>,
        item: Option<CallItem>,
    ) -> Result<JobId> {
        if item.is_some()
            && let Some((id, _)) = self.jobs.all().find(|(_, job)| job.item == item)
        {
            return Ok(id);
        }
        let mut slots = self.named_sources(&new)?;
        if let Some(error) = slots.iter().find_map(|&slot| self.busy_error(slot)) {
            return Err(error);
        }
        if self.jobs.running.len() >= RUNNING_MAX {
            return Err(unavailable("too many drain jobs are running").with("limit", RUNNING_MAX));
        }
        let id = self.jobs.unused_id();
        let job = Job {
            segments: slots.iter().map(|&slot| self.identity(slot)).collect(),
            targets: new.targets.iter().map(|name| Box::from(name.as_str())).collect(),
            concurrency: match new.concurrency {
                0 => CONCURRENCY,
                given => given.min(CONCURRENCY_MAX),
            },
            may_evict: new.may_evict,
            is_scheduled: false,
            cursor: 0,
            found: 0,
            blocked: 0,
            given_up: FxHashMap::default(),
            confirming: 0,
            busy: FxHashSet::default(),
            item,
            logged: now,
            view: JobView {
                id,
                status: JobStatus::Created,
                created: now,
                updated: now,
                segments: new.segments.to_vec(),
                succeeded: 0,
                failed: 0,
                blocked: 0,
                active: 0,
                moved_bytes: 0,
                evicted: 0,
                evicted_bytes: 0,
                message: String::new(),
            },
        };
        self.jobs.by_id.insert(id, job);
        self.jobs.running.push(id);
        // Segments that were drained before stay so, even if the job fails.
        slots.retain(|&slot| self.inventory.segment(slot).status != SegmentStatus::Drained);
        self.set_status(&slots, SegmentStatus::Draining);
        self.log_job(id);
        self.schedule_job(id, now);
        Ok(id)
    }

    /// Returns the segments that a new job drains.
    fn named_sources(&mut self, new: &NewJob<'_>) -> Result<Vec<SegmentSlot>> {
        if new.segments.is_empty() {
            return Err(Error::invalid("the job names no segments"));
        }
        let sources: FxHashSet<&str> = new.segments.iter().map(String::as_str).collect();
        self.searches.steps += (new.segments.len() + new.targets.len()) as u64;
        if let Some(name) = new.targets.iter().find(|name| sources.contains(name.as_str())) {
            let why = "a segment cannot be drained into itself";
            return Err(Error::invalid(why).with("segment", name));
        }
        let mut slots = Vec::new();
        for name in new.segments.iter().chain(new.targets) {
            let named = self.inventory.segments().named(name);
            if named.is_empty() {
                return Err(unknown_segment(name));
            }
            if sources.contains(name.as_str()) {
                slots.extend(named);
            }
        }
        Ok(slots)
    }

    /// Cancels a job. Moves in progress are completed, and its segments accept objects again.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`. `UNAVAILABLE_IN_CURRENT_STATUS`: the job has already ended.
    pub fn cancel_job(&mut self, now: Moment, id: JobId) -> Result<()> {
        let job = self.jobs.by_id.get(&id).ok_or_else(|| unknown(id))?;
        match job.view.status {
            JobStatus::Canceled => return Ok(()),
            JobStatus::Succeeded | JobStatus::Failed => {
                let why = "the drain job has ended, so there is nothing to cancel";
                let status = format!("{:?}", job.view.status).to_lowercase();
                return Err(unavailable(why).with("job", id).with("status", status));
            }
            JobStatus::Created | JobStatus::Planning | JobStatus::Running => {}
        }
        let waiting = self.tasks.waiting_for(id);
        for &task in &waiting {
            self.tasks.discard(task);
        }
        if let Some(job) = self.jobs.by_id.get_mut(&id) {
            job.view.active -= waiting.len() as u32;
        }
        self.end_job(now, id, JobStatus::Canceled, "cancelled");
        Ok(())
    }

    /// Returns why a segment cannot be drained now; `None` if it can.
    fn busy_error(&self, slot: SegmentSlot) -> Option<Error> {
        let segment = self.inventory.segment(slot);
        let why = match segment.status {
            SegmentStatus::Ok | SegmentStatus::Drained => return None,
            SegmentStatus::Draining => "another job drains the segment",
            _ => "the segment is being unmounted",
        };
        let error = unavailable(why).with("segment", &segment.spec.name);
        let identity = self.identity(slot);
        let drains = |id: &&JobId| self.jobs.by_id[*id].segments.contains(&identity);
        Some(match self.jobs.running.iter().find(drains) {
            Some(job) => error.with("job", job),
            None => error,
        })
    }

    /// Handles the timer of a job.
    pub(in crate::state) fn plan_job(&mut self, now: Moment, id: JobId) {
        if let Some(job) = self.jobs.by_id.get_mut(&id) {
            job.is_scheduled = false;
        }
        self.advance_job(now, id);
    }

    /// Goes on with jobs that have capacity for more moves, until their slices count as one.
    /// The others go on with their timers.
    pub(in crate::state) fn advance_jobs(&mut self, now: Moment) {
        let steps = self.searches.steps;
        for id in self.jobs.running.clone() {
            let job = self.jobs.running(id);
            if job.is_some_and(|job| job.concurrent_moves() < job.concurrency && job.cursor > 0) {
                if self.searches.steps - steps < u64::from(SLICE) {
                    self.advance_job(now, id);
                } else {
                    self.schedule_job(id, now);
                }
            }
        }
    }

    /// Examines some more objects and creates tasks for those to be moved.
    fn advance_job(&mut self, now: Moment, id: JobId) {
        let Some(job) = self.jobs.running(id) else { return };
        job.view.status = match job.view.status {
            JobStatus::Created => JobStatus::Planning,
            _ => JobStatus::Running,
        };
        let (mut active, concurrency) = (job.concurrent_moves(), job.concurrency);
        let (start, mut found, mut blocked) = (job.cursor, 0, 0);
        let slots = self.job_segments(id);
        if slots.is_empty() {
            let why = "the segments were unmounted before they were empty";
            return self.end_job(now, id, JobStatus::Failed, why);
        }
        let sources = slots.iter().copied().collect();
        let end = start.saturating_add(SLICE).min(self.inventory.objects().slot_count());
        let is_stuck = self.is_stuck(id, &sources);
        let mut slot = start;
        while slot < end && active < concurrency {
            let object = ObjectSlot::new(slot);
            match self.check_object(id, object, &sources) {
                DrainCheck::Copy(source)
                    if is_stuck && !self.is_kept_elsewhere(id, object, source, &sources) =>
                {
                    return self.end_job(now, id, JobStatus::Failed, NO_DESTINATION);
                }
                DrainCheck::Copy(source) => {
                    (found, active) = (found + 1, active + 1);
                    self.start_move(now, id, object, source);
                }
                DrainCheck::Busy => found += 1,
                DrainCheck::Blocked => (found, blocked) = (found + 1, blocked + 1),
                DrainCheck::Nothing => {}
            }
            slot += 1;
        }
        self.searches.steps += u64::from(slot - start) + (slots.len() / SEGMENTS_PER_STEP) as u64;
        let is_pass_over = slot == self.inventory.objects().slot_count();
        let Some(job) = self.jobs.running(id) else { return };
        (job.cursor, job.found) = (slot, job.found + found);
        job.blocked += blocked;
        if active >= concurrency {
            // The end of a task continues the job.
        } else if is_pass_over {
            self.end_pass(now, id, &slots, &sources);
        } else {
            self.schedule_job(id, now + SLICE_PAUSE);
        }
    }

    /// Returns whether a job that has moved nothing has no segment to move objects to.
    fn is_stuck(&self, id: JobId, sources: &SegmentSet) -> bool {
        let job = &self.jobs.by_id[&id];
        let segments = self.inventory.segments();
        let takes = |slot: SegmentSlot| {
            let segment = segments.at(slot);
            !sources.contains(slot) && (segment.accepts_new() || segment.is_coming_back())
        };
        let has_begun = job.view.active > 0 || job.view.succeeded > 0;
        let mut named = job.targets.iter().flat_map(|name| segments.named(name));
        !has_begun
            && if job.targets.is_empty() {
                !segments.mounted().any(|(slot, _)| takes(slot))
            } else {
                !named.any(|&slot| takes(slot))
            }
    }

    /// Returns whether another segment holds a readable replica of the object, or a disk that may.
    fn is_kept_elsewhere(
        &self,
        id: JobId,
        slot: ObjectSlot,
        source: SegmentId,
        sources: &SegmentSet,
    ) -> bool {
        let object = self.inventory.object(slot);
        let mut copies = self.inventory.pool().readable_copies(&object.replicas);
        copies.any(|copy| !sources.contains(copy.segment))
            || self.jobs.by_id[&id].targets.is_empty()
                && disk_elsewhere(self, slot, source).is_some()
    }

    fn check_object(&self, job: JobId, slot: ObjectSlot, sources: &SegmentSet) -> DrainCheck {
        let object = self.inventory.objects().get(slot).filter(|object| object.is_complete());
        let Some(object) = object else { return DrainCheck::Nothing };
        let mut copies = object.replicas.iter();
        let source = copies.find(|copy| sources.contains(copy.segment));
        let Some(source) = source else { return DrainCheck::Nothing };
        let job = &self.jobs.by_id[&job];
        let segment = self.inventory.segment(source.segment);
        if job.given_up.get(&slot) == Some(&object.version) {
            DrainCheck::Nothing
        } else if job.busy.contains(&(slot, object.version)) {
            DrainCheck::Busy
        } else if object.flags.has(Flags::BEING_COPIED) || !segment.is_readable() {
            DrainCheck::Blocked
        } else {
            DrainCheck::Copy(segment.spec.id)
        }
    }

    /// Creates a task for an object.
    fn start_move(&mut self, now: Moment, id: JobId, slot: ObjectSlot, source: SegmentId) {
        let version = self.inventory.object(slot).version;
        let Some(job) = self.jobs.by_id.get_mut(&id) else { return };
        // Counted first, because the task may end at once.
        job.view.active += 1;
        job.busy.insert((slot, version));
        let goal = drain_goal(source, &job.targets);
        self.add_task(now, slot, TaskKind::Move, goal, TaskSource::Job(id));
    }

    /// Ends a pass: the segments are empty, or another pass follows.
    fn end_pass(&mut self, now: Moment, id: JobId, slots: &[SegmentSlot], sources: &SegmentSet) {
        let is_written =
            slots.iter().any(|&slot| self.inventory.segment(slot).reserved().writing > 0);
        let written = slots.iter().map(|&slot| self.writes.count_in(slot) as u64).sum::<u64>();
        let Some(job) = self.jobs.running(id) else { return };
        job.view.blocked = job.blocked + written;
        let is_empty = job.found == 0 && job.view.active == 0 && !is_written;
        if !is_empty {
            (job.cursor, job.found, job.blocked) = (0, 0, 0);
            return self.schedule_job(id, now + PASS_PAUSE);
        }
        let given_up = std::mem::take(&mut job.given_up);
        let left = given_up.iter().filter(|(slot, version)| {
            self.inventory.objects().get(**slot).is_some_and(|object| {
                let copies = &object.replicas[..];
                object.version == **version
                    && copies.iter().any(|copy| sources.contains(copy.segment))
            })
        });
        match left.count() {
            0 => {
                self.set_status(slots, SegmentStatus::Drained);
                self.end_job(now, id, JobStatus::Succeeded, "the segments are empty");
            }
            left => {
                let plural = if left == 1 { "" } else { "s" };
                let why = format!("{left} object{plural} could not be moved");
                self.end_job(now, id, JobStatus::Failed, &why);
            }
        }
    }

    /// Records the end of an object's task.
    pub(in crate::state) fn end_move(
        &mut self,
        now: Moment,
        id: JobId,
        slot: ObjectSlot,
        version: u64,
        outcome: Result<u64, &str>,
    ) {
        let object = self.inventory.objects().get(slot);
        let is_there = object.is_some_and(|o| o.is_complete() && o.version == version);
        let Some(job) = self.jobs.by_id.get_mut(&id) else { return };
        job.view.updated = now;
        job.view.active -= 1;
        job.busy.remove(&(slot, version));
        match outcome {
            Ok(bytes) => {
                job.view.succeeded += 1;
                job.view.moved_bytes += bytes;
            }
            // An object removed or replaced meanwhile has left the segment, too.
            Err(_) if !is_there => {}
            Err(why) => {
                job.view.failed += 1;
                why.clone_into(&mut job.view.message);
                job.given_up.insert(slot, version);
            }
        }
        // The record names all segments of the job.
        if job.segments.len() <= LOGGED_SEGMENTS_MAX || (job.logged + LOG_PAUSE).has_passed(now) {
            job.logged = now;
            self.log_job(id);
        }
        self.schedule_job(id, now);
    }

    fn end_job(&mut self, now: Moment, id: JobId, status: JobStatus, why: &str) {
        let again = self
            .job_segments(id)
            .into_iter()
            .filter(|&slot| self.inventory.segment(slot).status == SegmentStatus::Draining);
        let again: Vec<SegmentSlot> = again.collect();
        self.set_status(&again, SegmentStatus::Ok);
        let Some(job) = self.jobs.running(id) else { return };
        match status {
            JobStatus::Succeeded => self.inventory.counters_mut().drains_done += 1,
            JobStatus::Canceled => self.inventory.counters_mut().drains_cancelled += 1,
            _ => self.inventory.counters_mut().drains_failed += 1,
        }
        (job.view.status, job.view.updated) = (status, now);
        if status == JobStatus::Failed && !job.view.message.is_empty() {
            job.view.message = format!("{why}; last reason: {}", job.view.message);
        } else {
            why.clone_into(&mut job.view.message);
        }
        self.log_job(id);
        if let Some(oldest) = self.jobs.finish(id) {
            self.inventory.record(|| Effect::Task { id: oldest.bits(), record: None });
        }
    }

    /// Returns the segments of the job that still exist.
    fn job_segments(&self, id: JobId) -> Vec<SegmentSlot> {
        let Some(job) = self.jobs.by_id.get(&id) else { return Vec::new() };
        let slots = job.segments.iter().filter_map(|identity| {
            let slot = self.inventory.segments().by_id(identity.0)?;
            (self.identity(slot) == *identity).then_some(slot)
        });
        slots.collect()
    }

    fn identity(&self, slot: SegmentSlot) -> (SegmentId, Incarnation) {
        let spec = &self.inventory.segment(slot).spec;
        (spec.id, spec.incarnation)
    }

    /// Sets the status of segments, but of those that their owners unmount after a grace: they leave.
    fn set_status(&mut self, slots: &[SegmentSlot], status: SegmentStatus) {
        for &slot in slots {
            segments::set_status(self.inventory, slot, status);
        }
    }

    /// Sets the timer of a job; each job has at most one.
    fn schedule_job(&mut self, id: JobId, at: Moment) {
        let Some(job) = self.jobs.running(id) else { return };
        if !std::mem::replace(&mut job.is_scheduled, true) {
            self.inventory.set_timer(at, Timer::Drain(id));
        }
    }
}

fn unavailable(why: &str) -> Error {
    Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, why)
}

fn unknown(id: JobId) -> Error {
    Error::new(ErrorCode::JOB_NOT_FOUND, "no drain job has that id").with("job", id)
}
