//! Copies and moves of objects: made by callers and drain jobs, carried out by clients.
//!
//! A task waits in the queue of a client that holds a copy. When that client fetches it, room is
//! taken in the target, and the object is neither evicted nor plainly removed until the client has
//! said how it went, or its time is over. What failed is tried again, by whoever holds a copy then.
//! The object must be the very same at the end; if it was replaced or removed, the task fails.

mod attempt;
mod record;
mod table;

use mooncake_base::{
    ClientId, Error, ErrorCode, JobId, Moment, ObjectKey, ReplicaId, Result, SegmentId, TaskId,
    TenantId, Version,
};

use super::{
    State,
    ids::{ObjectSlot, SegmentSlot},
    lease::Timestamp,
    object::{Flags, Object, Replica},
    put::Place,
    read::{not_found, not_ready},
};
pub(super) use table::Tasks;
use table::{Goal, Subject, Task};

/// The most targets of one copy.
const TARGETS_MAX: usize = 128;
/// A reason that a client gives is cut to so many bytes.
const WHY_BYTES_MAX: usize = 1024;

/// What a task does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskKind {
    /// Adds copies.
    Copy,
    /// Adds a copy in the place of another.
    Move,
}

/// Where a task stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskStatus {
    /// It waits for its client, or to be tried again.
    Pending,
    /// Its client has it.
    Processing,
    /// It will not be done; the message says why.
    Failed,
    /// It is done.
    Success,
}

/// A task to be made. Segments go by name.
#[derive(Debug, Clone, Copy)]
pub enum NewTask<'a> {
    /// Copies of an object in more segments.
    Copy {
        /// The object.
        key: &'a [u8],
        /// Where copies are wanted.
        targets: &'a [String],
    },
    /// A copy of an object somewhere else.
    Move {
        /// The object.
        key: &'a [u8],
        /// Where the copy lies that goes.
        source: &'a str,
        /// Where it goes.
        target: &'a str,
    },
}

/// A task as others may see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskView {
    /// Its id.
    pub id: TaskId,
    /// What it does.
    pub kind: TaskKind,
    /// With which object.
    pub key: ObjectKey,
    /// Where it stands.
    pub status: TaskStatus,
    /// When it was made.
    pub created: Moment,
    /// When it last changed.
    pub updated: Moment,
    /// Who carries it out, or did.
    pub client: ClientId,
    /// In words.
    pub message: String,
}

/// A task for a client to carry out now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    /// The task.
    pub id: TaskId,
    /// Which try it is; to be named at the end.
    pub attempt: u64,
    /// The object.
    pub key: ObjectKey,
    /// Which life of it.
    pub version: Version,
    /// Its length in bytes.
    pub length: u64,
    /// The checksum its writer gave.
    pub checksum: Option<u64>,
    /// What to read.
    pub source: Place,
    /// What to write, at least one.
    pub targets: Vec<Place>,
}

/// What a client says of a task that it was given.
#[derive(Debug, Clone, Copy)]
pub struct TaskEnd<'a> {
    /// The task.
    pub id: TaskId,
    /// Which try.
    pub attempt: u64,
    /// Copies that could not be written, or on which a write may still be under way.
    pub failed_replicas: &'a [ReplicaId],
    /// Why, in words.
    pub why: &'a str,
}

impl State {
    /// Makes a task.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: it is being written for the first time.
    /// `INVALID_PARAMS`: no targets or too many, an unknown segment, a source without a copy, or
    /// one that is the target. `TASK_PENDING_LIMIT_EXCEEDED`: too many wait.
    pub fn create_task(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        new: NewTask<'_>,
    ) -> Result<TaskId> {
        let (NewTask::Copy { key, .. } | NewTask::Move { key, .. }) = new;
        let number = self.objects.tenant_index(tenant);
        let slot = number.and_then(|tenant| self.find(tenant, key));
        let slot = slot.ok_or_else(|| not_found(key))?;
        if !self.objects.at(slot).is_complete() {
            return Err(not_ready(key));
        }
        let (kind, goal) = self.goal(slot, new)?;
        if self.tasks.pending() >= self.rules.tasks.pending_max {
            let why = "too many tasks wait";
            return Err(Error::new(ErrorCode::TASK_PENDING_LIMIT_EXCEEDED, why)
                .with("limit", self.rules.tasks.pending_max));
        }
        Ok(self.add_task(now, slot, kind, goal, None))
    }

    /// A task that was made and not forgotten.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`.
    pub fn task(&self, id: TaskId) -> Result<TaskView> {
        let task = self.tasks.get(id).ok_or_else(|| unknown(id))?;
        Ok(TaskView {
            id,
            kind: task.kind,
            key: task.subject.key.clone(),
            status: task.status,
            created: task.created,
            updated: task.updated,
            client: task.client,
            message: task.message.clone(),
        })
    }

    /// Some of the tasks that are not over, at most so many: those that run first.
    pub fn list_tasks(&self, limit: usize) -> Vec<TaskView> {
        let listed = self.tasks.underway().take(limit);
        listed.filter_map(|id| self.task(id).ok()).collect()
    }

    /// How many tasks wait, and how many run.
    pub fn tasks_underway(&self) -> (usize, usize) {
        (self.tasks.pending(), self.tasks.processing())
    }

    /// Whether the client should fetch tasks.
    pub fn has_tasks(&self, now: Moment, client: ClientId) -> bool {
        self.tasks.has_due(now, client)
    }

    /// Hands tasks to the client that is to carry them out: at most so many, and no more once their
    /// objects have so many bytes. Room is taken in the
    /// targets by evicting, if it must be; bytes may be written for the rules' `write_window`.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first.
    pub fn fetch_tasks(
        &mut self,
        now: Moment,
        client: ClientId,
        limit: usize,
        bytes: u64,
    ) -> Result<Vec<Work>> {
        self.clients.check(client)?;
        let mut work = Vec::new();
        for id in self.tasks.due(now, client) {
            let limit =
                limit.min(work.len() + self.tasks.processing_left(self.rules.tasks.processing_max));
            let fetched: u64 = work.iter().map(|work: &Work| work.length).sum();
            if work.len() >= limit || (fetched >= bytes && !work.is_empty()) {
                break;
            }
            work.extend(self.begin_task(now, client, id));
        }
        // Some may have ended without anything to do.
        self.advance_jobs(now);
        Ok(work)
    }

    /// Takes the client's word for how a try went.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`: there is no such try (any more): it took too long. `ILLEGAL_CLIENT`:
    /// somebody else's.
    pub fn end_task(&mut self, now: Moment, client: ClientId, end: TaskEnd<'_>) -> Result<()> {
        let task = self.tasks.get(end.id).ok_or_else(|| unknown(end.id))?;
        let attempt = task.attempt.as_ref().filter(|_| task.phase == end.attempt);
        let until = attempt.ok_or_else(|| unknown(end.id))?.until;
        if task.client != client {
            let why = "the task is somebody else's";
            return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, why).with("task", end.id));
        }
        let failed = |replica: ReplicaId| end.failed_replicas.contains(&replica);
        let why = &end.why[..end.why.floor_char_boundary(WHY_BYTES_MAX)];
        self.end_attempt(now, end.id, why, &failed, until.into());
        self.advance_jobs(now);
        Ok(())
    }

    /// Puts a task into the books and into somebody's queue.
    pub(super) fn add_task(
        &mut self,
        now: Moment,
        slot: ObjectSlot,
        kind: TaskKind,
        goal: Goal,
        job: Option<JobId>,
    ) -> TaskId {
        let object = self.objects.at(slot);
        let (version, tenant) = (object.version, object.tenant);
        let key = self.objects.object_key(object);
        let subject = Subject { slot, version, tenant, key };
        let id = self.tasks.insert(Task::new(now, kind, goal, subject, job));
        self.log_task(id);
        self.queue_task(now, id);
        id
    }

    /// A task that is in no queue waits for a client to fetch it.
    fn queue_task(&mut self, now: Moment, id: TaskId) {
        self.assign_task(now, id, now, None);
        let is_of_job = self.tasks.get(id).is_some_and(|task| task.job.is_some());
        if !is_of_job && !self.rules.tasks.pending_timeout.is_zero() {
            self.set_task_timer(id, now + self.rules.tasks.pending_timeout);
        }
    }

    /// The object that the task is about, if it is still the same.
    fn subject(&self, task: &Task) -> Option<&Object> {
        let object = self.objects.get(task.subject.slot)?;
        (object.is_complete() && object.version == task.subject.version).then_some(object)
    }

    /// Until when a client may still read the object for a task.
    pub(super) fn copying_until(&self, slot: ObjectSlot) -> Timestamp {
        match self.objects.at(slot).flags.has(Flags::BEING_COPIED) {
            true => self.tasks.copying_until(slot).map_or_else(Timestamp::default, Timestamp::from),
            false => Timestamp::default(),
        }
    }

    fn goal(&self, slot: ObjectSlot, new: NewTask<'_>) -> Result<(TaskKind, Goal)> {
        let known = |name: &str| match self.segments.named(name) {
            [] => Err(Error::invalid("no segment of that name is mounted").with("segment", name)),
            slots => Ok(slots),
        };
        match new {
            NewTask::Copy { targets, .. } => {
                if targets.is_empty() || targets.len() > TARGETS_MAX {
                    return Err(Error::invalid("a copy has 1 to 128 targets")
                        .with("targets", targets.len()));
                }
                targets.iter().try_for_each(|name| known(name).map(drop))?;
                let targets = targets.iter().map(|name| Box::from(name.as_str())).collect();
                Ok((TaskKind::Copy, Goal::Copy { targets }))
            }
            NewTask::Move { source, target, .. } => {
                if source == target {
                    let why = "the source and the target of a move are the same";
                    return Err(Error::invalid(why).with("segment", source));
                }
                let from = known(source)?;
                known(target)?;
                let copies = &self.objects.at(slot).replicas[..];
                if !copies.iter().any(|copy| from.contains(&copy.segment)) {
                    let why = "the object has no copy in the source";
                    return Err(Error::invalid(why).with("segment", source));
                }
                let goal = Goal::Move { source: source.into(), target: target.into() };
                Ok((TaskKind::Move, goal))
            }
        }
    }

    /// The segments whose copy a move drops.
    fn sources(&self, goal: &Goal) -> Vec<SegmentSlot> {
        match goal {
            Goal::Copy { .. } => Vec::new(),
            Goal::Move { source, .. } => self.segments.named(source).to_vec(),
            Goal::Evacuate { source, .. } => self.segments.by_id(*source).into_iter().collect(),
        }
    }

    /// Puts a task that waits into the queue of a client that holds a copy it may read, rather not
    /// of the one that failed.
    fn assign_task(
        &mut self,
        now: Moment,
        id: TaskId,
        not_before: Moment,
        avoid: Option<ClientId>,
    ) {
        let Some(task) = self.tasks.get(id) else { return };
        let Some(object) = self.subject(task) else {
            return self.fail_task(now, id, CHANGED);
        };
        let sources = self.sources(&task.goal);
        let holders = object.replicas.iter().filter_map(|copy| {
            let segment = self.segments.at(copy.segment);
            segment.is_mounted().then_some((copy, segment))
        });
        // The owner of the copy that goes pushes it out of its own memory; whoever is not heard of
        // comes last, for it may come back.
        let best = holders.min_by_key(|(copy, segment)| {
            (
                segment.is_suspect,
                avoid == Some(segment.client),
                !sources.contains(&copy.segment),
                self.tasks.queued(segment.client),
                copy.ordinal,
            )
        });
        let Some(client) = best.map(|(_, segment)| segment.client) else {
            return self.fail_task(now, id, CHANGED);
        };
        self.tasks.queue(id, client, not_before);
    }

    /// The client's tasks are given to others.
    pub(super) fn reassign_tasks(&mut self, now: Moment, client: ClientId) {
        for id in self.tasks.of_client(client) {
            let Some(task) = self.tasks.get(id) else { continue };
            match &task.attempt {
                Some(attempt) => {
                    let until = attempt.until.into();
                    self.end_attempt(now, id, "the client is gone", &|_| true, until);
                }
                None => {
                    self.tasks.unqueue(id);
                    self.assign_task(now, id, now, Some(client));
                }
            }
        }
    }

    /// The memory of that segment is gone, and with it what tasks took in it.
    pub(super) fn drop_task_replicas(&mut self, segment: SegmentSlot) {
        for (tenant, bytes) in self.tasks.forget_segment(segment) {
            self.tenants.uncharge(tenant, bytes);
        }
    }
}

/// Why a task fails whose object is not what it was.
const CHANGED: &str = "the object was removed, evicted, replaced or lost before it was copied";

fn unknown(id: TaskId) -> Error {
    let why = "there is no such task, or that try of it is over";
    Error::new(ErrorCode::TASK_NOT_FOUND, why).with("task", id)
}

/// Of the copies of an object the one to read: the client's own if it has one, else any.
fn pick_source(copies: &[(Replica, ClientId)], client: ClientId) -> Option<Replica> {
    let own = copies.iter().find(|(_, owner)| *owner == client);
    own.or_else(|| copies.first()).map(|(copy, _)| *copy)
}

/// What a drain wants of an object: that it leaves a segment, for one of those named, or any.
pub(super) fn drain_goal(source: SegmentId, targets: &[Box<str>]) -> Goal {
    Goal::Evacuate { source, targets: targets.into() }
}
