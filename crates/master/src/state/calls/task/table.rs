//! The task table: pending tasks per client, running and finished tasks.

use std::collections::{BTreeSet, VecDeque};

use mooncake_base::{ClientId, JobId, Moment, ObjectKey, Result, SegmentId, TaskId};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{
    calls::{
        answers::CallItem,
        task::{TaskKind, TaskSource, TaskStatus, TaskView, confirmation::Confirmation, unknown},
    },
    catalog::object::REPLICAS_MAX,
    ids::{ObjectSlot, SegmentSlot, TenantIndex},
    inventory::new_copies::NewCopies,
    random::Random,
    replica::{DISK_ORDINAL, Replica},
};

/// The maximum number of tasks of a client examined per call.
const DUE_SCAN_MAX: usize = 1024;

/// A task.
#[derive(Debug)]
pub(in crate::state) struct Task {
    pub(super) kind: TaskKind,
    pub(super) goal: Goal,
    pub(super) subject: Subject,
    pub(super) status: TaskStatus,
    pub(super) created: Moment,
    pub(super) updated: Moment,
    /// The time of the first attempt.
    pub(super) begun: Option<Moment>,
    pub(super) client: ClientId,
    pub(super) message: String,
    /// The number of retries.
    pub(super) retries: u32,
    /// The phase: counts changes between pending and running.
    pub(super) phase: u64,
    /// The earliest time of the next attempt.
    not_before: Moment,
    /// The drain job of the task.
    pub(super) job: Option<JobId>,
    /// The item of a numbered call that created the task.
    pub(super) item: Option<CallItem>,
    /// The present attempt, while the task runs.
    pub(super) attempt: Option<Attempt>,
    /// What the task waits for after its last attempt.
    pub(super) confirmation: Option<Confirmation>,
}

/// The object of a task.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    /// The slot of the object, valid while the version matches.
    pub(super) slot: ObjectSlot,
    pub(super) version: u64,
    pub(super) tenant: TenantIndex,
    pub(super) key: ObjectKey,
}

/// The goal of a task.
#[derive(Debug, Clone)]
pub(in crate::state) enum Goal {
    /// A replica in each of these segments.
    Copy { targets: Vec<Box<str>> },
    /// A replica in the target instead of the source.
    Move { source: Box<str>, target: Box<str> },
    /// No replica in the source, but one in one of the targets; anywhere if none are named.
    Evacuate { source: SegmentId, targets: Box<[Box<str>]> },
}

/// An attempt in progress.
#[derive(Debug)]
pub(super) struct Attempt {
    /// The new replicas.
    pub(super) copies: NewCopies,
    /// All replicas of the goal were allocated and none was lost since.
    pub(super) is_whole: bool,
}

impl Task {
    pub(super) fn new(
        now: Moment,
        kind: TaskKind,
        goal: Goal,
        subject: Subject,
        source: TaskSource,
    ) -> Self {
        let (job, item) = match source {
            TaskSource::Job(job) => (Some(job), None),
            TaskSource::Caller(item) => (None, item),
        };
        Self {
            kind,
            goal,
            subject,
            status: TaskStatus::Pending,
            created: now,
            updated: now,
            begun: None,
            client: ClientId::from_bits(0),
            message: String::new(),
            retries: 0,
            phase: 0,
            not_before: now,
            job,
            item,
            attempt: None,
            confirmation: None,
        }
    }
}

/// All tasks that have not been forgotten.
#[derive(Debug)]
pub(in crate::state) struct Tasks {
    random: Random,
    by_id: FxHashMap<TaskId, Task>,
    /// The tasks that numbered calls created.
    by_item: FxHashMap<CallItem, TaskId>,
    /// Pending tasks per client, ordered by earliest start and sequence number.
    queues: FxHashMap<ClientId, BTreeSet<(Moment, u64, TaskId)>>,
    /// The next sequence number, which keeps tasks with equal times in order.
    next_sequence: u64,
    queued_as: FxHashMap<TaskId, u64>,
    /// Tasks that clients are carrying out.
    running: FxHashSet<TaskId>,
    /// Tasks whose replicas are written, and whose source is still there.
    confirming: FxHashSet<TaskId>,
    finished: VecDeque<TaskId>,
    next_ordinal: u32,
}

impl Tasks {
    pub(in crate::state) fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            by_id: FxHashMap::default(),
            by_item: FxHashMap::default(),
            queues: FxHashMap::default(),
            next_sequence: 0,
            queued_as: FxHashMap::default(),
            running: FxHashSet::default(),
            confirming: FxHashSet::default(),
            finished: VecDeque::new(),
            next_ordinal: REPLICAS_MAX,
        }
    }

    pub(super) fn insert(&mut self, task: Task) -> TaskId {
        let id = loop {
            let bits = u128::from(self.random.next()) << 64 | u128::from(self.random.next());
            let id = TaskId::from_bits(bits);
            // Ids of an earlier master are in use, too.
            if !self.by_id.contains_key(&id) {
                break id;
            }
        };
        self.insert_with_id(id, task);
        id
    }

    /// Inserts a task that has its id already.
    pub(super) fn insert_with_id(&mut self, id: TaskId, task: Task) {
        if let Some(item) = task.item {
            self.by_item.insert(item, id);
        }
        self.by_id.insert(id, task);
    }

    /// Forgets a pending task.
    pub(in crate::state) fn discard(&mut self, id: TaskId) {
        self.unqueue(id);
        self.remove(id);
    }

    /// Forgets a task that is neither queued nor running.
    pub(super) fn remove(&mut self, id: TaskId) {
        if let Some(item) = self.by_id.remove(&id).and_then(|task| task.item) {
            self.by_item.remove(&item);
        }
    }

    /// Queues a task for a client.
    pub(super) fn queue(&mut self, id: TaskId, client: ClientId, not_before: Moment) {
        let Some(task) = self.by_id.get_mut(&id) else { return };
        (task.client, task.not_before) = (client, not_before);
        self.next_sequence += 1;
        self.queued_as.insert(id, self.next_sequence);
        self.queues.entry(client).or_default().insert((not_before, self.next_sequence, id));
    }

    /// Removes a task from its queue.
    pub(super) fn unqueue(&mut self, id: TaskId) {
        let (Some(sequence), Some(task)) = (self.queued_as.remove(&id), self.by_id.get(&id)) else {
            return;
        };
        if let Some(queue) = self.queues.get_mut(&task.client) {
            queue.remove(&(task.not_before, sequence, id));
            if queue.is_empty() {
                self.queues.remove(&task.client);
            }
        }
    }

    /// Starts an attempt of a task that is in no queue.
    pub(super) fn run(&mut self, id: TaskId, attempt: Attempt) {
        let Some(task) = self.by_id.get_mut(&id) else { return };
        task.phase += 1;
        task.status = TaskStatus::Processing;
        task.attempt = Some(attempt);
        self.running.insert(id);
    }

    /// Ends the attempt of a task and returns it.
    pub(super) fn stop(&mut self, id: TaskId) -> Option<Attempt> {
        let task = self.by_id.get_mut(&id)?;
        let attempt = task.attempt.take()?;
        task.phase += 1;
        task.status = TaskStatus::Pending;
        self.running.remove(&id);
        Some(attempt)
    }

    /// Begins to wait for a sign of life, after the last attempt.
    pub(super) fn begin_confirmation(&mut self, id: TaskId, confirmation: Confirmation) {
        if let Some(task) = self.get_mut(id) {
            task.phase += 1;
            task.status = TaskStatus::Processing;
            task.confirmation = Some(confirmation);
            self.confirming.insert(id);
        }
    }

    /// Ends the wait for a sign of life; `None` if the task does not wait.
    pub(super) fn end_confirmation(&mut self, id: TaskId) -> Option<Confirmation> {
        let task = self.get_mut(id)?;
        let confirmation = task.confirmation.take()?;
        task.phase += 1;
        task.status = TaskStatus::Pending;
        self.confirming.remove(&id);
        Some(confirmation)
    }

    /// Finishes a task. Returns the task that is forgotten in its place, if more than
    /// `finished_max` are kept.
    pub(super) fn finish(&mut self, id: TaskId, finished_max: usize) -> Option<TaskId> {
        self.finished.push_back(id);
        let is_over = self.finished.len() > finished_max;
        let oldest = is_over.then(|| self.finished.pop_front()).flatten();
        if let Some(oldest) = oldest {
            self.remove(oldest);
        }
        oldest
    }

    /// Drops the replicas in segments that left the pool from all attempts. Returns how many bytes to
    /// uncharge from which tenant.
    pub(in crate::state) fn forget_segments(
        &mut self,
        is_gone: impl Fn(SegmentSlot) -> bool,
    ) -> Vec<(TenantIndex, u64)> {
        let mut freed = Vec::new();
        for id in &self.running {
            let Some(task) = self.by_id.get_mut(id) else { continue };
            let Some(attempt) = &mut task.attempt else { continue };
            let lost = attempt.copies.forget_segments(&is_gone);
            if lost > 0 {
                attempt.is_whole = false;
                freed.push((attempt.copies.tenant(), lost));
            }
        }
        freed
    }

    /// Returns the tasks created by callers, not by drains.
    pub(in crate::state) fn requested(&self) -> impl Iterator<Item = (TaskId, &Task)> {
        self.by_id.iter().filter(|(_, task)| task.job.is_none()).map(|(id, task)| (*id, task))
    }

    /// Returns the ordinal of the next replica.
    pub(in crate::state) fn next_ordinal(&self) -> u32 {
        self.next_ordinal
    }

    /// Sets the ordinal of the next replica.
    pub(in crate::state) fn resume_ordinals(&mut self, ordinal: u32) {
        self.next_ordinal = ordinal.max(REPLICAS_MAX);
    }

    /// Returns an ordinal for a new replica of an object that has these, none of which has it. No
    /// other replica of the object has had it for a long time.
    pub(super) fn take_ordinal(&mut self, present: &[Replica]) -> u32 {
        loop {
            let ordinal = self.next_ordinal;
            self.next_ordinal = ordinal.checked_add(1).unwrap_or(REPLICAS_MAX);
            let is_taken = present.iter().any(|replica| replica.ordinal == ordinal);
            if ordinal != DISK_ORDINAL && !is_taken {
                return ordinal;
            }
        }
    }

    /// Returns the task that an item of a numbered call created.
    pub(super) fn created_by(&self, item: CallItem) -> Option<TaskId> {
        self.by_item.get(&item).copied()
    }

    pub(super) fn get(&self, id: TaskId) -> Option<&Task> {
        self.by_id.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: TaskId) -> Option<&mut Task> {
        self.by_id.get_mut(&id)
    }

    /// Returns the public view of a task.
    pub(in crate::state) fn view(&self, id: TaskId) -> Result<TaskView> {
        let task = self.get(id).ok_or_else(|| unknown(id))?;
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

    /// Returns the views of at most `limit` unfinished tasks, running ones first.
    pub(in crate::state) fn list(&self, limit: usize) -> Vec<TaskView> {
        let listed = self.underway().take(limit);
        listed.filter_map(|id| self.view(id).ok()).collect()
    }

    /// Returns running tasks, then pending tasks.
    pub(super) fn underway(&self) -> impl Iterator<Item = TaskId> {
        self.running.iter().chain(&self.confirming).chain(self.queued_as.keys()).copied()
    }

    /// Returns the number of pending tasks.
    pub(in crate::state) fn pending(&self) -> usize {
        self.queued_as.len()
    }

    /// Returns the number of running tasks, those included that wait for a sign of life.
    pub(in crate::state) fn processing(&self) -> usize {
        self.running.len() + self.confirming.len()
    }

    /// Returns how many more tasks may run.
    pub(super) fn processing_left(&self, processing_max: usize) -> usize {
        processing_max.saturating_sub(self.running.len())
    }

    /// Returns the number of tasks pending for the client.
    pub(super) fn queued(&self, client: ClientId) -> usize {
        self.queues.get(&client).map_or(0, BTreeSet::len)
    }

    pub(in crate::state) fn has_due(&self, now: Moment, client: ClientId) -> bool {
        let first = self.queues.get(&client).and_then(BTreeSet::first);
        first.is_some_and(|(not_before, ..)| not_before.has_passed(now))
    }

    /// Returns the tasks that the client may start now, the longest waiting first.
    pub(super) fn due(&self, now: Moment, client: ClientId) -> Vec<TaskId> {
        let queue = self.queues.get(&client).into_iter().flatten();
        let due = queue.take_while(|(not_before, ..)| not_before.has_passed(now));
        due.take(DUE_SCAN_MAX).map(|(.., id)| *id).collect()
    }

    /// Returns the tasks pending for the client or run by it.
    pub(super) fn of_client(&self, client: ClientId) -> Vec<TaskId> {
        let waiting = self.queues.get(&client).into_iter().flatten().map(|(.., id)| *id);
        let is_run_by = |id: &TaskId| self.by_id.get(id).is_some_and(|task| task.client == client);
        let running = self.running.iter().copied().filter(is_run_by);
        waiting.chain(running).collect()
    }

    /// Returns the pending tasks of a drain job.
    pub(in crate::state) fn waiting_for(&self, job: JobId) -> Vec<TaskId> {
        let of_job = |id: &&TaskId| self.by_id.get(id).is_some_and(|task| task.job == Some(job));
        self.queued_as.keys().filter(of_job).copied().collect()
    }

    /// Returns the replicas being written.
    pub(in crate::state) fn placed(&self) -> impl Iterator<Item = &Replica> {
        let running = self.running.iter().filter_map(|id| self.by_id.get(id));
        let attempts = running.filter_map(|task| task.attempt.as_ref());
        attempts.flat_map(|attempt| attempt.copies.replicas())
    }

    /// Returns the charged tenants and bytes.
    #[cfg(test)]
    pub(in crate::state) fn charges(&self) -> impl Iterator<Item = (TenantIndex, u64)> {
        let attempts = self.by_id.values().filter_map(|task| task.attempt.as_ref());
        attempts.map(|attempt| (attempt.copies.tenant(), attempt.copies.bytes()))
    }
}
