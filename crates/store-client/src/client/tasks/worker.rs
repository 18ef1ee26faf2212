//! Worker for copy and move tasks that the master assigns to this client: fetches, executes and
//! reports them.
//!
//! A thread runs them, started when the master announces tasks and ended when none are left. Data
//! in this client's own segments is pushed straight to the target, in one transfer per peer for all
//! tasks fetched together. Other data is read straight into the target if the target belongs to
//! this client, and is copied through a buffer otherwise.

use std::{sync::Arc, time::Duration};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::threads::Threads;
use mooncake_proto::v1;
use mooncake_transfer_engine::{Opcode, TransferEntry};
use smallvec::SmallVec;

use super::super::ClientInner;
use crate::{object::Place, rpc::response, session::segments::HeldPart, transfer::jobs::Jobs};

/// Maximum number of tasks fetched together.
const TASKS_MAX: u32 = 64;
/// Maximum bytes of the tasks fetched together, unless a single one is larger: all must be moved
/// within one window.
const BYTES_MAX: u64 = 256 << 20;
/// Subtracted from the window, since the local clock and the master's may run at different speeds.
const WINDOW_MARGIN: Duration = Duration::from_millis(50);
/// Size of the buffer for copies between two other peers.
const COPY_BUFFER_BYTES: u64 = 8 << 20;

/// The thread that runs tasks.
#[derive(Debug)]
pub(in super::super) struct TaskWorker {
    state: Mutex<TaskWorkerState>,
    changed: Condvar,
    /// Joined when the next thread is started or the client is closed.
    threads: Threads,
}

impl Default for TaskWorker {
    fn default() -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { state, changed, threads: Threads::new(1) }
    }
}

#[derive(Debug, Default)]
struct TaskWorkerState {
    is_running: bool,
    /// Whether tasks were announced since the worker last fetched some.
    has_tasks: bool,
}

/// A fetched task.
struct AssignedTask {
    task: v1::TaskWork,
    source: Place,
    targets: SmallVec<[Place; 1]>,
    /// Result for each target.
    outcomes: Vec<Option<Result<()>>>,
}

/// Copies with one side in an own segment, in one direction.
#[derive(Debug, Default)]
struct LocalCopies {
    jobs: Jobs,
    /// For each job, the index of its task and that of the target.
    owners: Vec<(usize, usize)>,
    /// The own sides of all jobs, which stay mapped until the jobs have run.
    held: Vec<HeldPart>,
}

impl LocalCopies {
    fn push(&mut self, near: HeldPart, far: &Place, owner: (usize, usize)) {
        self.jobs.push(&far.segment, [TransferEntry::new(near.range(), far.address())], false);
        self.owners.push(owner);
        self.held.push(near);
    }
}

impl ClientInner {
    /// Starts the worker, or notifies it that tasks are waiting.
    pub(in super::super) fn wake_worker(self: &Arc<Self>) {
        let mut state = self.task_worker.state.lock();
        state.has_tasks = true;
        if state.is_running || self.lifetime.is_closed() {
            return;
        }
        // The thread before it has announced its end and holds no locks.
        self.task_worker.threads.join();
        let inner = Arc::clone(self);
        match self.task_worker.threads.spawn("mc-tasks", move || inner.run_worker()) {
            Ok(()) => state.is_running = true,
            // The next heartbeat announces the tasks again.
            Err(error) => tracing::warn!(%error, "cannot start the thread for copy and move tasks"),
        }
    }

    /// Waits for the thread until the deadline. A thread that hangs in a transfer ends by itself
    /// afterwards.
    pub(in super::super) fn join_worker(&self, until: Moment) {
        let mut state = self.task_worker.state.lock();
        while state.is_running {
            let left = until.left(SystemClock.now());
            if left.is_zero() {
                return;
            }
            self.task_worker.changed.wait_for(&mut state, left);
        }
        drop(state);
        self.task_worker.threads.join();
    }

    fn run_worker(&self) {
        loop {
            {
                let mut state = self.task_worker.state.lock();
                if self.lifetime.is_closed() || !std::mem::take(&mut state.has_tasks) {
                    state.is_running = false;
                    self.task_worker.changed.notify_all();
                    return;
                }
            }
            match self.run_tasks_once() {
                Ok(true) => self.task_worker.state.lock().has_tasks = true,
                Ok(false) => {}
                Err(error) if self.lifetime.is_closed() => {
                    tracing::debug!(%error, "copy and move tasks were abandoned while closing");
                }
                Err(error) => {
                    tracing::warn!(client = self.lifetime.name(), %error, "cannot fetch tasks")
                }
            }
        }
    }

    /// Fetches and runs some tasks. Returns whether more may be waiting.
    fn run_tasks_once(&self) -> Result<bool> {
        let sent = SystemClock.now();
        let request =
            v1::FetchTasksRequest { caller: self.rpc.caller(), limit: TASKS_MAX, bytes: BYTES_MAX };
        let response = self.rpc.call(request)?;
        if response.tasks.is_empty() {
            return Ok(false);
        }
        let segments = response::read_segments(response.segments)?;
        let window = Duration::from_millis(response.window_ms);
        let until = sent + window.saturating_sub(WINDOW_MARGIN);
        let read = |task: v1::TaskWork| {
            let source =
                response::read_places(task.source.iter().copied(), &segments, task.length)?;
            let source = source.first().cloned();
            let targets = task.targets.iter().copied();
            let targets = response::read_places(targets, &segments, task.length)?;
            Ok(AssignedTask {
                source: source.ok_or_else(|| response::protocol_error("a task has no source"))?,
                outcomes: targets.iter().map(|_| None).collect(),
                targets,
                task,
            })
        };
        let mut tasks: Vec<_> = response.tasks.into_iter().map(read).collect::<Result<_>>()?;
        self.run_tasks(&mut tasks, until);
        self.report_tasks(tasks)
    }

    fn run_tasks(&self, tasks: &mut [AssignedTask], until: Moment) {
        let (mut pushed, mut pulled) = (LocalCopies::default(), LocalCopies::default());
        for (at, assigned) in tasks.iter_mut().enumerate() {
            let AssignedTask { source, targets, outcomes, .. } = assigned;
            for (nth, target) in targets.iter().enumerate() {
                let (copies, near, far) = match self.hold(source) {
                    Some(near) => (&mut pushed, near, target),
                    None => match self.hold(target) {
                        Some(near) => (&mut pulled, near, &*source),
                        None => continue,
                    },
                };
                match near {
                    Ok(near) => copies.push(near, far, (at, nth)),
                    Err(error) => outcomes[nth] = Some(Err(error)),
                }
            }
        }
        for (opcode, copies) in [(Opcode::Write, pushed), (Opcode::Read, pulled)] {
            let LocalCopies { mut jobs, owners, held } = copies;
            self.transfers.run(opcode, &mut jobs, until);
            // Segments that were unmounted meanwhile are unmapped here.
            drop(held);
            for ((at, nth), (outcome, may_arrive_late)) in
                owners.into_iter().zip(jobs.finish_writes())
            {
                tasks[at].outcomes[nth] = Some(outcome.and_then(|()| on_time(may_arrive_late)));
            }
        }
        for assigned in tasks {
            self.copy_remaining(assigned, until);
        }
    }

    /// Holds a place that is in a segment of this client.
    fn hold(&self, place: &Place) -> Option<Result<HeldPart>> {
        self.session.segments().hold(place.segment.id, place.offset, place.length)
    }

    /// Copies a task's bytes to the targets that have no result yet.
    fn copy_remaining(&self, assigned: &mut AssignedTask, until: Moment) {
        let open: Vec<usize> =
            (0..assigned.targets.len()).filter(|&nth| assigned.outcomes[nth].is_none()).collect();
        if open.is_empty() {
            return;
        }
        let targets: Vec<&Place> = open.iter().map(|&nth| &assigned.targets[nth]).collect();
        let outcomes = match self.copy_through_buffer(&assigned.source, &targets, until) {
            Ok(outcomes) => outcomes,
            Err(error) => open.iter().map(|_| Err(error.clone())).collect(),
        };
        for (nth, outcome) in open.into_iter().zip(outcomes) {
            assigned.outcomes[nth] = Some(outcome);
        }
    }

    /// Copies block by block through a buffer to every target that has not failed yet.
    fn copy_through_buffer(
        &self,
        source: &Place,
        targets: &[&Place],
        until: Moment,
    ) -> Result<Vec<Result<()>>> {
        let buffer = self.engine.allocate(COPY_BUFFER_BYTES.min(source.length))?;
        let held = buffer.hold();
        let mut outcomes: Vec<Result<()>> = targets.iter().map(|_| Ok(())).collect();
        let mut done = 0;
        while done < source.length && outcomes.iter().any(Result::is_ok) {
            self.lifetime.check_open()?;
            let length = buffer.length().min(source.length - done);
            let local = held.range(0, length)?;
            let entry = TransferEntry::new(local, source.address() + done);
            let mut jobs = Jobs::default();
            jobs.push(&source.segment, [entry], false);
            self.transfers.run(Opcode::Read, &mut jobs, until);
            jobs.finish().collect::<Result<()>>()?;
            let open: Vec<usize> =
                (0..targets.len()).filter(|&nth| outcomes[nth].is_ok()).collect();
            let mut jobs = Jobs::default();
            for &nth in &open {
                let entry = TransferEntry::new(local, targets[nth].address() + done);
                jobs.push(&targets[nth].segment, [entry], false);
            }
            self.transfers.run(Opcode::Write, &mut jobs, until);
            for (nth, (outcome, may_arrive_late)) in open.into_iter().zip(jobs.finish_writes()) {
                outcomes[nth] = outcome.and_then(|()| on_time(may_arrive_late));
            }
            done += length;
        }
        Ok(outcomes)
    }

    /// Reports the results. Returns whether more tasks are waiting.
    fn report_tasks(&self, tasks: Vec<AssignedTask>) -> Result<bool> {
        let end = |assigned: AssignedTask| {
            let AssignedTask { task, targets, outcomes, .. } = assigned;
            let mut end = v1::TaskEnd {
                task: task.task,
                attempt: task.attempt,
                failed_replicas: Vec::new(),
                reason: String::new(),
            };
            for (target, outcome) in targets.iter().zip(outcomes) {
                let outcome = outcome.unwrap_or_else(|| Err(not_copied()));
                if let Err(error) = outcome {
                    end.failed_replicas.push(target.replica.0);
                    end.reason = error.to_string();
                }
            }
            end
        };
        let request = v1::EndTasksRequest {
            caller: self.rpc.caller(),
            ends: tasks.into_iter().map(end).collect(),
        };
        self.rpc.call(request).map(|response| response.has_tasks)
    }
}

/// Checks that no byte of a copy can arrive after its task.
fn on_time(may_arrive_late: bool) -> Result<()> {
    let text = "bytes of an interrupted attempt may still arrive";
    if may_arrive_late { Err(Error::new(ErrorCode::TRANSFER_FAIL, text)) } else { Ok(()) }
}

fn not_copied() -> Error {
    Error::new(ErrorCode::TRANSFER_FAIL, "a copy was left out of its batch")
}
