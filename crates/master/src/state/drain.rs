//! Drains: segments that are emptied by moving what lies in them, a few objects at a time.
//!
//! A job goes over all objects in slices and makes a task for each that has a copy in its segments,
//! never more than may run at once, until a whole pass finds none. What three tries could not move
//! is passed over; then the job fails in the end and its segments take objects again.

mod record;

use std::{cmp::Reverse, collections::VecDeque, time::Duration};

use mooncake_base::{Error, ErrorCode, Incarnation, JobId, Moment, Result, SegmentId};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    Effect, State,
    ids::{ObjectSlot, SegmentSlot},
    object::Flags,
    random::Random,
    segment::SegmentStatus,
    task::{TaskKind, drain_goal},
    timer::Timer,
};

/// How many objects are looked at in one call.
const SLICE: u32 = 4096;
/// How many run at once if the job does not say.
const CONCURRENCY: u32 = 4;
/// … and at the most.
const CONCURRENCY_MAX: u32 = 1024;
/// Between two slices of one pass others may have the state.
const SLICE_PAUSE: Duration = Duration::from_millis(1);
/// Between two passes.
const PASS_PAUSE: Duration = Duration::from_millis(500);
/// The most jobs at a time.
const RUNNING_MAX: usize = 64;
/// Jobs that are over and remembered.
const FINISHED_MAX: usize = 256;

/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobStatus {
    /// It was made.
    Created,
    /// It looks for what is to be moved.
    Planning,
    /// Objects are being moved.
    Running,
    /// Its segments are empty.
    Succeeded,
    /// Something could not be moved; the message says more.
    Failed,
    /// It was cancelled.
    Canceled,
}

impl JobStatus {
    /// Whether nothing more becomes of the job.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Canceled)
    }
}

/// A job to be made. Segments go by name.
#[derive(Debug, Clone, Copy)]
pub struct NewJob<'a> {
    /// What is to be emptied.
    pub segments: &'a [String],
    /// Where objects may go; empty: anywhere.
    pub targets: &'a [String],
    /// How many objects are moved at once; 0: 4.
    pub concurrency: u32,
}

/// A job as others may see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobView {
    /// Its id.
    pub id: JobId,
    /// Where it stands.
    pub status: JobStatus,
    /// When it was made.
    pub created: Moment,
    /// When it last changed.
    pub updated: Moment,
    /// The names of its segments.
    pub segments: Vec<String>,
    /// Copies that left.
    pub succeeded: u64,
    /// Copies that could not.
    pub failed: u64,
    /// Copies that something else held up when they were last looked at: another task, or that
    /// they are still being written.
    pub blocked: u64,
    /// Copies that are being moved.
    pub active: u32,
    /// Bytes that were moved.
    pub moved_bytes: u64,
    /// In words.
    pub message: String,
}

/// All jobs that are not forgotten.
#[derive(Debug)]
pub(super) struct Jobs {
    random: Random,
    by_id: FxHashMap<JobId, Job>,
    running: Vec<JobId>,
    finished: VecDeque<JobId>,
}

#[derive(Debug)]
pub(super) struct Job {
    segments: Vec<(SegmentId, Incarnation)>,
    targets: Vec<Box<str>>,
    concurrency: u32,
    is_scheduled: bool,
    /// Where the pass has come to, and what it has found.
    cursor: u32,
    found: u64,
    blocked: u64,
    /// Objects that could not be moved, in that version.
    given_up: FxHashMap<ObjectSlot, u64>,
    /// Objects that are being moved.
    busy: FxHashSet<(ObjectSlot, u64)>,
    view: JobView,
}

/// What a job sees in an object.
enum DrainCheck {
    /// No copy in its segments, or one that it has given up.
    Nothing,
    /// A copy that is being moved.
    Busy,
    /// A copy that something holds up.
    Blocked,
    /// A copy in that segment, to be moved now.
    Copy(SegmentId),
}

impl Jobs {
    pub(super) fn new(seed: u64) -> Self {
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
            // Those of an earlier master are known, too.
            if !self.by_id.contains_key(&id) {
                return id;
            }
        }
    }

    /// The job, if it is not over.
    fn running(&mut self, id: JobId) -> Option<&mut Job> {
        self.by_id.get_mut(&id).filter(|job| !job.is_over())
    }

    /// All jobs that are not forgotten.
    pub(super) fn all(&self) -> impl Iterator<Item = (JobId, &Job)> {
        self.by_id.iter().map(|(id, job)| (*id, job))
    }

    /// The job is over; which is forgotten for it.
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

impl Job {
    fn is_over(&self) -> bool {
        self.view.status.is_over()
    }
}

impl State {
    /// Begins to empty segments: they take nothing new from now on.
    ///
    /// # Errors
    /// `INVALID_PARAMS`: no segments, or one that is also a target. `SEGMENT_NOT_FOUND`: an
    /// unknown one. `UNAVAILABLE_IN_CURRENT_STATUS`: one is being drained or unmounted already, or
    /// too many jobs run.
    pub fn create_job(&mut self, now: Moment, new: NewJob<'_>) -> Result<JobId> {
        if new.segments.is_empty() {
            return Err(Error::invalid("the job names no segments"));
        }
        if let Some(name) = new.targets.iter().find(|name| new.segments.contains(name)) {
            let why = "a segment cannot be drained into itself";
            return Err(Error::invalid(why).with("segment", name));
        }
        let mut slots = Vec::new();
        for name in new.segments.iter().chain(new.targets) {
            let named = self.segments.named(name);
            if named.is_empty() {
                let code = ErrorCode::SEGMENT_NOT_FOUND;
                return Err(Error::new(code, code.name()).with("segment", name));
            }
            if new.segments.contains(name) {
                slots.extend(named);
            }
        }
        let busy = |why: &str| Err(Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, why));
        if slots.iter().any(|&slot| self.segments.at(slot).status != SegmentStatus::Ok) {
            return busy("a segment is being drained or unmounted already");
        }
        if self.jobs.running.len() >= RUNNING_MAX {
            return busy("too many drain jobs run");
        }
        let id = self.jobs.unused_id();
        let job = Job {
            segments: slots.iter().map(|&slot| self.identity(slot)).collect(),
            targets: new.targets.iter().map(|name| Box::from(name.as_str())).collect(),
            concurrency: match new.concurrency {
                0 => CONCURRENCY,
                given => given.min(CONCURRENCY_MAX),
            },
            is_scheduled: false,
            cursor: 0,
            found: 0,
            blocked: 0,
            given_up: FxHashMap::default(),
            busy: FxHashSet::default(),
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
                message: String::new(),
            },
        };
        self.jobs.by_id.insert(id, job);
        self.jobs.running.push(id);
        self.set_status(&slots, SegmentStatus::Draining);
        self.log_job(id);
        self.schedule_job(id, now);
        Ok(id)
    }

    /// A job that was made and not forgotten.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`.
    pub fn job(&self, id: JobId) -> Result<JobView> {
        let job = self.jobs.by_id.get(&id).ok_or_else(|| unknown(id))?;
        Ok(job.view.clone())
    }

    /// Ends a job: what is being moved is moved, nothing more, and its segments take objects again.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`. `UNAVAILABLE_IN_CURRENT_STATUS`: it has ended by itself.
    pub fn cancel_job(&mut self, now: Moment, id: JobId) -> Result<()> {
        let job = self.jobs.by_id.get(&id).ok_or_else(|| unknown(id))?;
        match job.view.status {
            JobStatus::Canceled => return Ok(()),
            JobStatus::Succeeded | JobStatus::Failed => {
                let why = "the job has ended";
                return Err(
                    Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, why).with("job", id)
                );
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

    /// Every job that is not forgotten: those that run first, then the latest.
    pub fn list_jobs(&self) -> Vec<JobView> {
        let mut views: Vec<JobView> =
            self.jobs.by_id.values().map(|job| job.view.clone()).collect();
        let is_over = |view: &JobView| !self.jobs.running.contains(&view.id);
        views.sort_by_key(|view| (is_over(view), Reverse(view.updated), view.id));
        views
    }

    /// The jobs that have not ended.
    pub fn running_jobs(&self) -> usize {
        self.jobs.running.len()
    }

    /// The timer of a job rang.
    pub(super) fn plan_job(&mut self, now: Moment, id: JobId) {
        if let Some(job) = self.jobs.by_id.get_mut(&id) {
            job.is_scheduled = false;
        }
        self.advance_job(now, id);
    }

    /// Jobs that have less to do than they may get more.
    pub(super) fn advance_jobs(&mut self, now: Moment) {
        for id in self.jobs.running.clone() {
            let job = self.jobs.running(id);
            if job.is_some_and(|job| job.view.active < job.concurrency && job.cursor > 0) {
                self.advance_job(now, id);
            }
        }
    }

    /// Looks at some more objects and makes tasks of those that must leave.
    fn advance_job(&mut self, now: Moment, id: JobId) {
        let Some(job) = self.jobs.running(id) else { return };
        job.view.status = match job.view.status {
            JobStatus::Created => JobStatus::Planning,
            _ => JobStatus::Running,
        };
        let (mut active, concurrency) = (job.view.active, job.concurrency);
        let (start, mut found, mut blocked) = (job.cursor, 0, 0);
        let sources = self.job_segments(id);
        if sources.is_empty() {
            let why = "the segments were unmounted before they were empty";
            return self.end_job(now, id, JobStatus::Failed, why);
        }
        let end = start.saturating_add(SLICE).min(self.objects.slot_count());
        let mut slot = start;
        while slot < end && active < concurrency {
            let object = ObjectSlot::new(slot);
            match self.check_object(id, object, &sources) {
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
        let is_pass_over = slot == self.objects.slot_count();
        let Some(job) = self.jobs.running(id) else { return };
        (job.cursor, job.found) = (slot, job.found + found);
        job.blocked += blocked;
        if active >= concurrency {
            // The end of one of them brings it on.
        } else if is_pass_over {
            self.end_pass(now, id, &sources);
        } else {
            self.schedule_job(id, now + SLICE_PAUSE);
        }
    }

    fn check_object(&self, job: JobId, slot: ObjectSlot, sources: &[SegmentSlot]) -> DrainCheck {
        let object = self.objects.get(slot).filter(|object| object.is_complete());
        let Some(object) = object else { return DrainCheck::Nothing };
        let mut copies = object.replicas.iter();
        let source = copies.find(|copy| sources.contains(&copy.segment));
        let Some(source) = source else { return DrainCheck::Nothing };
        let job = &self.jobs.by_id[&job];
        let segment = self.segments.at(source.segment);
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

    /// Makes a task of an object.
    fn start_move(&mut self, now: Moment, id: JobId, slot: ObjectSlot, source: SegmentId) {
        let version = self.objects.at(slot).version;
        let Some(job) = self.jobs.by_id.get_mut(&id) else { return };
        // Counted first: it may end at once.
        job.view.active += 1;
        job.busy.insert((slot, version));
        let goal = drain_goal(source, &job.targets);
        self.add_task(now, slot, TaskKind::Move, goal, Some(id));
    }

    /// All objects were looked at: the segments are empty, or there is another pass.
    fn end_pass(&mut self, now: Moment, id: JobId, sources: &[SegmentSlot]) {
        let is_written = sources.iter().any(|&slot| self.segments.at(slot).writing > 0);
        let written = self.writes.iter().flat_map(|write| write.replicas.iter());
        let written = written.filter(|copy| sources.contains(&copy.segment)).count() as u64;
        let Some(job) = self.jobs.running(id) else { return };
        job.view.blocked = job.blocked + written;
        let is_empty = job.found == 0 && job.view.active == 0 && !is_written;
        if !is_empty {
            (job.cursor, job.found, job.blocked) = (0, 0, 0);
            return self.schedule_job(id, now + PASS_PAUSE);
        }
        let given_up = std::mem::take(&mut job.given_up);
        let left = given_up.iter().filter(|(slot, version)| {
            self.objects.get(**slot).is_some_and(|object| {
                let copies = &object.replicas[..];
                object.version == **version
                    && copies.iter().any(|copy| sources.contains(&copy.segment))
            })
        });
        match left.count() {
            0 => {
                self.set_status(sources, SegmentStatus::Drained);
                self.end_job(now, id, JobStatus::Succeeded, "the segments are empty");
            }
            left => {
                let why = format!("{left} objects could not be moved");
                self.end_job(now, id, JobStatus::Failed, &why);
            }
        }
    }

    /// The task of an object has ended.
    pub(super) fn end_move(
        &mut self,
        now: Moment,
        id: JobId,
        (slot, version): (ObjectSlot, u64),
        outcome: Result<u64, &str>,
    ) {
        let object = self.objects.get(slot);
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
            // What was removed or replaced meanwhile has left, too.
            Err(_) if !is_there => {}
            Err(why) => {
                job.view.failed += 1;
                why.clone_into(&mut job.view.message);
                job.given_up.insert(slot, version);
            }
        }
        self.log_job(id);
        self.schedule_job(id, now);
    }

    fn end_job(&mut self, now: Moment, id: JobId, status: JobStatus, why: &str) {
        let again = self
            .job_segments(id)
            .into_iter()
            .filter(|&slot| self.segments.at(slot).status == SegmentStatus::Draining);
        let again: Vec<SegmentSlot> = again.collect();
        self.set_status(&again, SegmentStatus::Ok);
        let Some(job) = self.jobs.running(id) else { return };
        match status {
            JobStatus::Succeeded => self.counters.drains_done += 1,
            JobStatus::Canceled => self.counters.drains_cancelled += 1,
            _ => self.counters.drains_failed += 1,
        }
        (job.view.status, job.view.updated) = (status, now);
        if status == JobStatus::Failed && !job.view.message.is_empty() {
            job.view.message = format!("{why}; the last one because {}", job.view.message);
        } else {
            why.clone_into(&mut job.view.message);
        }
        self.log_job(id);
        if let Some(oldest) = self.jobs.finish(id) {
            self.effects.record(|| Effect::Task { id: oldest.bits(), record: None });
        }
    }

    /// The segments of the job that are still there.
    fn job_segments(&self, id: JobId) -> Vec<SegmentSlot> {
        let Some(job) = self.jobs.by_id.get(&id) else { return Vec::new() };
        let slots = job.segments.iter().filter_map(|identity| {
            let slot = self.segments.by_id(identity.0)?;
            (self.identity(slot) == *identity).then_some(slot)
        });
        slots.collect()
    }

    fn identity(&self, slot: SegmentSlot) -> (SegmentId, Incarnation) {
        let spec = &self.segments.at(slot).spec;
        (spec.id, spec.incarnation)
    }

    fn set_status(&mut self, slots: &[SegmentSlot], status: SegmentStatus) {
        for &slot in slots {
            let segment = self.segments.at_mut(slot);
            segment.status = status;
            let (number, status, grace) = (segment.number, status.code(), Duration::ZERO);
            self.effects.record(|| Effect::SegmentStatus { number, status, grace });
        }
        self.segments.refresh_open();
    }

    /// A job has one timer at a time.
    fn schedule_job(&mut self, id: JobId, at: Moment) {
        let Some(job) = self.jobs.running(id) else { return };
        if !std::mem::replace(&mut job.is_scheduled, true) {
            self.timers.push(at, Timer::Drain(id));
        }
    }
}

fn unknown(id: JobId) -> Error {
    Error::new(ErrorCode::JOB_NOT_FOUND, "no drain job has that id").with("job", id)
}
