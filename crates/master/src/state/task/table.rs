//! The books of the tasks: who has which, what waits, what runs, what is over.

use std::collections::{BTreeSet, VecDeque};

use mooncake_base::{ClientId, JobId, Moment, ObjectKey, SegmentId, TaskId};
use rustc_hash::FxHashMap;

use super::{TaskKind, TaskStatus};
use crate::state::{
    ids::{ObjectSlot, SegmentSlot, TenantIndex},
    object::{REPLICAS_MAX, Replica},
    random::Random,
};

/// How many tasks of a client are looked at in one call.
const DUE_SCAN_MAX: usize = 1024;

/// A task.
#[derive(Debug)]
pub(in super::super) struct Task {
    pub(super) kind: TaskKind,
    pub(super) goal: Goal,
    pub(super) subject: Subject,
    pub(super) status: TaskStatus,
    pub(super) created: Moment,
    pub(super) updated: Moment,
    /// When it first ran.
    pub(super) begun: Option<Moment>,
    pub(super) client: ClientId,
    pub(super) message: String,
    /// How often it was tried again.
    pub(super) retries: u32,
    /// Counts how often it went from waiting to running and back.
    pub(super) phase: u64,
    /// Not tried before that.
    not_before: Moment,
    /// The drain that it is for.
    pub(super) job: Option<JobId>,
    /// While it runs.
    pub(super) attempt: Option<Attempt>,
}

/// The object of a task.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    /// Its number, good as long as the version is the same.
    pub(super) slot: ObjectSlot,
    pub(super) version: u64,
    pub(super) tenant: TenantIndex,
    pub(super) key: ObjectKey,
}

/// What is to be reached.
#[derive(Debug, Clone)]
pub(in super::super) enum Goal {
    /// A copy in each of these.
    Copy { targets: Vec<Box<str>> },
    /// A copy in the one instead of the other.
    Move { source: Box<str>, target: Box<str> },
    /// No copy in the one, but in one of the others; if none are named, anywhere.
    Evacuate { source: SegmentId, targets: Box<[Box<str>]> },
}

/// A try under way.
#[derive(Debug)]
pub(super) struct Attempt {
    /// No byte of it is read or written later.
    pub(super) until: Moment,
    /// Whom the copies are charged to, and for how much each.
    pub(super) tenant: TenantIndex,
    pub(super) length: u64,
    /// The new copies.
    pub(super) placed: Vec<Replica>,
    /// All that was wanted was placed, and as many still stand.
    pub(super) is_whole: bool,
}

impl Task {
    pub(super) fn new(
        now: Moment,
        kind: TaskKind,
        goal: Goal,
        subject: Subject,
        job: Option<JobId>,
    ) -> Self {
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
            attempt: None,
        }
    }
}

/// All tasks that are not forgotten.
#[derive(Debug)]
pub(in super::super) struct Tasks {
    random: Random,
    by_id: FxHashMap<TaskId, Task>,
    /// What waits for each client: not before when, in which order, which.
    queues: FxHashMap<ClientId, BTreeSet<(Moment, u64, TaskId)>>,
    /// Counts up, so that equals go in the order in which they came.
    next_sequence: u64,
    queued_as: FxHashMap<TaskId, u64>,
    /// Which task copies an object.
    running: FxHashMap<ObjectSlot, TaskId>,
    processing: usize,
    finished: VecDeque<TaskId>,
    next_ordinal: u16,
}

impl Tasks {
    pub(in super::super) fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            by_id: FxHashMap::default(),
            queues: FxHashMap::default(),
            next_sequence: 0,
            queued_as: FxHashMap::default(),
            running: FxHashMap::default(),
            processing: 0,
            finished: VecDeque::new(),
            next_ordinal: REPLICAS_MAX as u16,
        }
    }

    pub(super) fn insert(&mut self, task: Task) -> TaskId {
        let id = loop {
            let bits = u128::from(self.random.next()) << 64 | u128::from(self.random.next());
            let id = TaskId::from_bits(bits);
            // Those of an earlier master are known, too.
            if !self.by_id.contains_key(&id) {
                break id;
            }
        };
        self.insert_with_id(id, task);
        id
    }

    /// A task that has its id already.
    pub(super) fn insert_with_id(&mut self, id: TaskId, task: Task) {
        self.by_id.insert(id, task);
    }

    /// Forgets a task that waits.
    pub(in super::super) fn discard(&mut self, id: TaskId) {
        self.unqueue(id);
        self.remove(id);
    }

    /// Forgets a task that is in no queue and does not run.
    pub(super) fn remove(&mut self, id: TaskId) {
        self.by_id.remove(&id);
    }

    /// The task waits for that client.
    pub(super) fn queue(&mut self, id: TaskId, client: ClientId, not_before: Moment) {
        let Some(task) = self.by_id.get_mut(&id) else { return };
        (task.client, task.not_before) = (client, not_before);
        self.next_sequence += 1;
        self.queued_as.insert(id, self.next_sequence);
        self.queues.entry(client).or_default().insert((not_before, self.next_sequence, id));
    }

    /// The task waits for nobody.
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

    /// The task, which waits for nobody, runs from now on.
    pub(super) fn run(&mut self, id: TaskId, attempt: Attempt) {
        let Some(task) = self.by_id.get_mut(&id) else { return };
        task.phase += 1;
        task.status = TaskStatus::Processing;
        task.attempt = Some(attempt);
        self.running.insert(task.subject.slot, id);
        self.processing += 1;
    }

    /// The task does not run any more; what it did.
    pub(super) fn stop(&mut self, id: TaskId) -> Option<Attempt> {
        let task = self.by_id.get_mut(&id)?;
        let attempt = task.attempt.take()?;
        task.phase += 1;
        task.status = TaskStatus::Pending;
        if self.running.get(&task.subject.slot) == Some(&id) {
            self.running.remove(&task.subject.slot);
        }
        self.processing -= 1;
        Some(attempt)
    }

    /// The task is over; which is forgotten for it, since that many are remembered.
    pub(super) fn finish(&mut self, id: TaskId, finished_max: usize) -> Option<TaskId> {
        self.finished.push_back(id);
        let is_over = self.finished.len() > finished_max;
        let oldest = is_over.then(|| self.finished.pop_front()).flatten();
        if let Some(oldest) = oldest {
            self.by_id.remove(&oldest);
        }
        oldest
    }

    /// The object is gone or another one; whatever was copied of it is of no use.
    pub(in super::super) fn forget_object(&mut self, slot: ObjectSlot) {
        self.running.remove(&slot);
    }

    /// The memory of that segment is gone; who is charged for so many bytes less.
    pub(super) fn forget_segment(&mut self, segment: SegmentSlot) -> Vec<(TenantIndex, u64)> {
        let mut freed = Vec::new();
        let attempts = self.by_id.values_mut().filter_map(|task| task.attempt.as_mut());
        for attempt in attempts {
            let before = attempt.placed.len();
            attempt.placed.retain(|replica| replica.segment != segment);
            let lost = (before - attempt.placed.len()) as u64;
            if lost > 0 {
                attempt.is_whole = false;
                freed.push((attempt.tenant, attempt.length * lost));
            }
        }
        freed
    }

    /// What was asked for by callers, and not by drains.
    pub(in super::super) fn requested(&self) -> impl Iterator<Item = (TaskId, &Task)> {
        self.by_id.iter().filter(|(_, task)| task.job.is_none()).map(|(id, task)| (*id, task))
    }

    /// The number that the next copy has.
    pub(in super::super) fn next_ordinal(&self) -> u16 {
        self.next_ordinal
    }

    /// Copies are numbered from there on.
    pub(in super::super) fn resume_ordinals(&mut self, ordinal: u16) {
        self.next_ordinal = ordinal.max(REPLICAS_MAX as u16);
    }

    /// A number for a new copy that no other copy of the same object has had for a long time.
    pub(super) fn take_ordinal(&mut self) -> u16 {
        let ordinal = self.next_ordinal;
        self.next_ordinal = ordinal.checked_add(1).unwrap_or(REPLICAS_MAX as u16);
        ordinal
    }

    pub(super) fn get(&self, id: TaskId) -> Option<&Task> {
        self.by_id.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: TaskId) -> Option<&mut Task> {
        self.by_id.get_mut(&id)
    }

    /// Those that run, and then those that wait.
    pub(super) fn underway(&self) -> impl Iterator<Item = TaskId> {
        self.running.values().chain(self.queued_as.keys()).copied()
    }

    /// How many wait.
    pub(super) fn pending(&self) -> usize {
        self.queued_as.len()
    }

    /// How many run.
    pub(super) fn processing(&self) -> usize {
        self.processing
    }

    /// How many more may run.
    pub(super) fn processing_left(&self, processing_max: usize) -> usize {
        processing_max.saturating_sub(self.processing)
    }

    /// How many wait for the client.
    pub(super) fn queued(&self, client: ClientId) -> usize {
        self.queues.get(&client).map_or(0, BTreeSet::len)
    }

    pub(super) fn has_due(&self, now: Moment, client: ClientId) -> bool {
        let first = self.queues.get(&client).and_then(BTreeSet::first);
        first.is_some_and(|(not_before, ..)| not_before.has_passed(now))
    }

    /// What the client may do now, whoever waits for longest first.
    pub(super) fn due(&self, now: Moment, client: ClientId) -> Vec<TaskId> {
        let queue = self.queues.get(&client).into_iter().flatten();
        let due = queue.take_while(|(not_before, ..)| not_before.has_passed(now));
        due.take(DUE_SCAN_MAX).map(|(.., id)| *id).collect()
    }

    /// What waits for the client or is being done by it.
    pub(super) fn of_client(&self, client: ClientId) -> Vec<TaskId> {
        let waiting = self.queues.get(&client).into_iter().flatten().map(|(.., id)| *id);
        let running = self
            .running_tasks()
            .filter(|id| self.by_id.get(id).is_some_and(|task| task.client == client));
        waiting.chain(running).collect()
    }

    /// Those of a drain that have not begun.
    pub(in super::super) fn waiting_for(&self, job: JobId) -> Vec<TaskId> {
        let of_job = |id: &&TaskId| self.by_id.get(id).is_some_and(|task| task.job == Some(job));
        self.queued_as.keys().filter(of_job).copied().collect()
    }

    /// Until when the object may be read for the task that copies it.
    pub(super) fn copying_until(&self, slot: ObjectSlot) -> Option<Moment> {
        let task = self.by_id.get(self.running.get(&slot)?)?;
        task.attempt.as_ref().map(|attempt| attempt.until)
    }

    fn running_tasks(&self) -> impl Iterator<Item = TaskId> {
        // Also those whose object is gone, which `running` does not name.
        let tasks = self.by_id.iter();
        tasks.filter(|(_, task)| task.attempt.is_some()).map(|(id, _)| *id)
    }

    /// The copies that are being written.
    pub(in super::super) fn placed(&self) -> impl Iterator<Item = &Replica> {
        let attempts = self.by_id.values().filter_map(|task| task.attempt.as_ref());
        attempts.flat_map(|attempt| &attempt.placed)
    }

    /// Whom they are charged to, and for how much.
    #[cfg(test)]
    pub(in super::super) fn charges(&self) -> impl Iterator<Item = (TenantIndex, u64)> {
        let attempts = self.by_id.values().filter_map(|task| task.attempt.as_ref());
        attempts.map(|attempt| (attempt.tenant, attempt.length * attempt.placed.len() as u64))
    }
}
