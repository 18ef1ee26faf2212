//! Copies and moves of objects: created by callers and drain jobs, carried out by clients.
//!
//! A task waits in the queue of a client that holds a replica. When that client fetches the task,
//! space is allocated in the target, and the object is neither evicted nor removed (unless forced)
//! until the client has reported the outcome or the task has timed out. Failed tasks are retried by
//! a client that holds a replica then. The object must have the same version at the end; if it was
//! replaced or removed, the task fails.

mod attempt;
mod confirmation;
pub(in crate::state) mod drain;
pub(in crate::state) mod promotion;
mod record;
pub(in crate::state) mod records;
mod table;

use mooncake_base::{
    ClientId, Error, ErrorCode, JobId, Moment, ObjectKey, ReplicaId, Result, SegmentId, TaskId,
    TenantId, Version,
};

pub(in crate::state) use self::table::Tasks;
use crate::state::{
    calls::{
        answers::CallItem,
        put::{PutCalls, write::Writes},
        reclaim::{Reclaimer, Searches},
        task::{
            drain::Jobs,
            promotion::assign_to_disk,
            table::{Goal, Subject, Task},
        },
    },
    catalog::object::Object,
    ids::{ObjectSlot, SegmentSlot},
    inventory::{
        Inventory,
        errors::{not_found, not_ready},
    },
    pool::allocation::Place,
    replica::Replica,
};

/// The maximum number of targets of one copy.
const TARGETS_MAX: usize = 128;

/// Steps after which no more tasks are handed to a client in one call; about a millisecond.
const FETCH_STEPS: u64 = 4096;

/// Steps that one task counts, apart from a search for memory.
const TASK_STEPS: u64 = 16;

/// The maximum length of a failure reason; longer reasons are truncated.
const WHY_BYTES_MAX: usize = 1024;

/// The kind of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskKind {
    /// Adds replicas.
    Copy,
    /// Replaces one replica by another.
    Move,
}

/// The status of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskStatus {
    /// The task waits for its client, or to be retried.
    Pending,
    /// The client is carrying out the task.
    Processing,
    /// The task failed; the message has the reason.
    Failed,
    /// The task is done.
    Success,
}

/// A task to be created. Segments are given by name.
#[derive(Debug, Clone, Copy)]
pub enum NewTask<'a> {
    /// Copies an object to other segments.
    Copy {
        /// The key of the object.
        key: &'a [u8],
        /// The target segments.
        targets: &'a [String],
    },
    /// Moves a replica to another segment.
    Move {
        /// The key of the object.
        key: &'a [u8],
        /// The segment of the replica to move.
        source: &'a str,
        /// The target segment.
        target: &'a str,
    },
}

/// The public view of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskView {
    /// The task id.
    pub id: TaskId,
    /// The kind of the task.
    pub kind: TaskKind,
    /// The key of the object.
    pub key: ObjectKey,
    /// The status of the task.
    pub status: TaskStatus,
    /// The creation time.
    pub created: Moment,
    /// The time of the last change.
    pub updated: Moment,
    /// The client that carries out the task, or did.
    pub client: ClientId,
    /// A message about the outcome.
    pub message: String,
}

/// A task for a client to carry out now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    /// The task id.
    pub id: TaskId,
    /// The number of the attempt, to be repeated in the report.
    pub attempt: u64,
    /// The key of the object.
    pub key: ObjectKey,
    /// The version of the object.
    pub version: Version,
    /// The length in bytes.
    pub length: u64,
    /// The checksum given by the writer.
    pub checksum: Option<u64>,
    /// The place to read from.
    pub source: Place,
    /// The places to write to, at least one.
    pub targets: Vec<Place>,
}

/// A client's report on a task.
#[derive(Debug, Clone, Copy)]
pub struct TaskEnd<'a> {
    /// The task id.
    pub id: TaskId,
    /// The number of the attempt.
    pub attempt: u64,
    /// Replicas that were not written, or on which a write may still be in flight.
    pub failed_replicas: &'a [ReplicaId],
    /// The reason of the failure.
    pub why: &'a str,
}

/// The creator of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum TaskSource {
    /// A drain job.
    Job(JobId),
    /// A caller, by an item of a numbered call if there is one.
    Caller(Option<CallItem>),
}

/// The calls about tasks and drain jobs, with the parts that they change.
#[derive(Debug)]
pub struct TaskCalls<'a> {
    pub(in crate::state) inventory: &'a mut Inventory,
    pub(in crate::state) searches: &'a mut Searches,
    pub(in crate::state) writes: &'a mut Writes,
    pub(in crate::state) tasks: &'a mut Tasks,
    pub(in crate::state) jobs: &'a mut Jobs,
}

impl TaskCalls<'_> {
    /// Returns at most `limit` unfinished tasks, running ones first.
    pub fn list_tasks(&self, limit: usize) -> Vec<TaskView> {
        self.tasks.list(limit)
    }

    /// Returns the number of pending and of running tasks.
    pub fn tasks_underway(&self) -> (usize, usize) {
        (self.tasks.pending(), self.tasks.processing())
    }

    /// Returns the drain jobs that have not ended.
    pub fn running_jobs(&self) -> usize {
        self.jobs.running_count()
    }

    /// Returns whether the client should fetch tasks.
    pub fn has_tasks(&self, now: Moment, client: ClientId) -> bool {
        self.tasks.has_due(now, client)
    }

    fn puts(&mut self) -> PutCalls<'_> {
        PutCalls { inventory: self.inventory, searches: self.searches, writes: self.writes }
    }

    fn reclaimer(&mut self) -> Reclaimer<'_> {
        Reclaimer { inventory: self.inventory, searches: self.searches }
    }

    /// Creates a task by an item of a numbered call. Returns the same task for the same item, also
    /// after a restart.
    ///
    /// # Errors
    /// The errors of [`create_task`](Self::create_task).
    pub fn create_task_once(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        new: NewTask<'_>,
        item: Option<CallItem>,
    ) -> Result<TaskId> {
        if let Some(id) = item.and_then(|item| self.tasks.created_by(item)) {
            return Ok(id);
        }
        let (NewTask::Copy { key, .. } | NewTask::Move { key, .. }) = new;
        let number = self.inventory.objects().tenant_index(tenant);
        let slot = number.and_then(|tenant| self.inventory.find(now, tenant, key));
        let slot = slot.ok_or_else(|| not_found(key))?;
        if !self.inventory.object(slot).is_complete() {
            return Err(not_ready(key));
        }
        let (kind, goal) = self.goal(slot, new)?;
        if self.tasks.pending() >= self.inventory.rules().tasks.pending_max {
            let why = "too many pending tasks";
            return Err(Error::new(ErrorCode::TASK_PENDING_LIMIT_EXCEEDED, why)
                .with("limit", self.inventory.rules().tasks.pending_max));
        }
        Ok(self.add_task(now, slot, kind, goal, TaskSource::Caller(item)))
    }

    /// Creates a task.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: the object is being written for the first time.
    /// `SEGMENT_NOT_FOUND`: an unknown segment. `INVALID_PARAMS`: no targets or too many, a source
    /// without a replica, or a source that is also the target. `TASK_PENDING_LIMIT_EXCEEDED`: too
    /// many tasks are pending.
    pub fn create_task(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        new: NewTask<'_>,
    ) -> Result<TaskId> {
        self.create_task_once(now, tenant, new, None)
    }

    /// Hands tasks to the client that is to carry them out: at most `limit` tasks, and no more once
    /// their objects exceed `bytes` bytes. Space is allocated in the targets, by eviction if
    /// needed. The client may write for the rules' `write_window`. A call takes a bounded number of
    /// [steps](crate::state::State::steps), after which other tasks may be left to hand over.
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
        self.inventory.clients().check(client)?;
        self.puts().release_due(now);
        let (mut work, mut fetched): (Vec<Work>, u64) = (Vec::new(), 0);
        let steps = self.searches.steps;
        for id in self.tasks.due(now, client) {
            let left = self.tasks.processing_left(self.inventory.rules().tasks.processing_max);
            if work.len() >= limit.min(work.len() + left) || (fetched >= bytes && !work.is_empty())
            {
                break;
            }
            let begun = self.begin_task(now, client, id);
            fetched += begun.as_ref().map_or(0, |begun| begun.length);
            work.extend(begun);
            self.searches.steps += TASK_STEPS;
            if self.searches.steps - steps > FETCH_STEPS {
                break;
            }
        }
        // Some tasks may have ended because nothing was left to do.
        self.advance_jobs(now);
        Ok(work)
    }

    /// Records a client's report on an attempt.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`: the attempt does not exist or has timed out. `ILLEGAL_CLIENT`: the task
    /// belongs to another client.
    pub fn end_task(&mut self, now: Moment, client: ClientId, end: TaskEnd<'_>) -> Result<()> {
        let task = self.tasks.get(end.id).ok_or_else(|| unknown(end.id))?;
        if task.attempt.is_none() || task.phase != end.attempt {
            return Err(unknown(end.id));
        }
        if task.client != client {
            let why = "the task belongs to another client";
            return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, why).with("task", end.id));
        }
        let failed = |replica: ReplicaId| end.failed_replicas.contains(&replica);
        let bytes = (0..=WHY_BYTES_MAX).rev().find(|&at| end.why.is_char_boundary(at));
        let why = &end.why[..bytes.unwrap_or_default()];
        self.end_attempt(now, end.id, why, &failed, Some(client));
        self.advance_jobs(now);
        Ok(())
    }

    /// Inserts a task into the table and into the queue of a client.
    pub(in crate::state) fn add_task(
        &mut self,
        now: Moment,
        slot: ObjectSlot,
        kind: TaskKind,
        goal: Goal,
        source: TaskSource,
    ) -> TaskId {
        let object = self.inventory.object(slot);
        let (version, tenant) = (object.version, object.tenant);
        let key = self.inventory.objects().object_key(object);
        let subject = Subject { slot, version, tenant, key };
        let id = self.tasks.insert(Task::new(now, kind, goal, subject, source));
        self.log_task(id);
        self.queue_task(now, id);
        id
    }

    /// Handles a task that is in no queue: waits for a client to fetch it.
    fn queue_task(&mut self, now: Moment, id: TaskId) {
        self.assign_task(now, id, now, None);
        let is_of_job = self.tasks.get(id).is_some_and(|task| task.job.is_some());
        if !is_of_job && !self.inventory.rules().tasks.pending_timeout.is_zero() {
            self.set_task_timer(id, now + self.inventory.rules().tasks.pending_timeout);
        }
    }

    /// Returns the object of the task, if its version is still the same.
    fn subject(&self, task: &Task) -> Option<&Object> {
        let object = self.inventory.objects().get(task.subject.slot)?;
        (object.is_complete() && object.version == task.subject.version).then_some(object)
    }

    fn goal(&self, slot: ObjectSlot, new: NewTask<'_>) -> Result<(TaskKind, Goal)> {
        let known = |name: &str| match self.inventory.segments().named(name) {
            [] => Err(unknown_segment(name)),
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
                let copies = &self.inventory.object(slot).replicas[..];
                // An object that only a disk has is brought into the memory of the target.
                if !copies.is_empty() && !copies.iter().any(|copy| from.contains(&copy.segment)) {
                    let why = "the object has no replica in the source";
                    return Err(Error::invalid(why).with("segment", source));
                }
                let goal = Goal::Move { source: source.into(), target: target.into() };
                Ok((TaskKind::Move, goal))
            }
        }
    }

    /// Returns the segments whose replica a move removes.
    fn sources(&self, goal: &Goal) -> Vec<SegmentSlot> {
        match goal {
            Goal::Copy { .. } => Vec::new(),
            Goal::Move { source, .. } => self.inventory.segments().named(source).to_vec(),
            Goal::Evacuate { source, .. } => {
                self.inventory.segments().by_id(*source).into_iter().collect()
            }
        }
    }

    /// Puts a pending task into the queue of a client that holds a readable replica, preferably not
    /// of the client that failed.
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
            let segment = self.inventory.segment(copy.segment);
            segment.is_mounted().then_some((copy, segment))
        });
        // The owner of the replica to be removed is preferred: it writes out of its own memory. A
        // suspect client comes last, since it may come back.
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
            return assign_to_disk(self, now, id, not_before);
        };
        self.tasks.queue(id, client, not_before);
    }

    /// Reassigns the tasks of a client.
    pub(in crate::state) fn reassign_tasks(&mut self, now: Moment, client: ClientId) {
        for id in self.tasks.of_client(client) {
            let Some(task) = self.tasks.get(id) else { continue };
            match &task.attempt {
                Some(_) => {
                    let why = "the client expired or unregistered";
                    self.end_attempt(now, id, why, &|_| true, None);
                }
                None => {
                    self.tasks.unqueue(id);
                    self.assign_task(now, id, now, Some(client));
                }
            }
        }
    }
}

/// The failure reason of a task whose object was replaced or removed.
const CHANGED: &str = "the object was removed, evicted, replaced or lost before it was copied";

fn unknown_segment(name: &str) -> Error {
    let why = "no segment of that name is mounted";
    Error::new(ErrorCode::SEGMENT_NOT_FOUND, why).with("segment", name)
}

fn unknown(id: TaskId) -> Error {
    let why = "no such task, or the attempt has ended";
    Error::new(ErrorCode::TASK_NOT_FOUND, why).with("task", id)
}

/// Returns the replica to read: the client's own if it has one, else any.
fn pick_source(copies: &[(Replica, ClientId)], client: ClientId) -> Option<Replica> {
    let own = copies.iter().find(|(_, owner)| *owner == client);
    own.or_else(|| copies.first()).map(|(copy, _)| *copy)
}

/// Returns the goal of a drain for an object: to leave a segment, to one of the named targets or
/// any.
pub(in crate::state) fn drain_goal(source: SegmentId, targets: &[Box<str>]) -> Goal {
    Goal::Evacuate { source, targets: targets.into() }
}
