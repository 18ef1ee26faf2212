//! The worker threads that run submitted batches, their queue, and the status of each batch.

mod completion_table;

use std::{
    collections::VecDeque,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::{call_limit::CallLimit, threads::Threads};

use self::completion_table::CompletionTable;
use super::batch::{BatchId, BatchStatus};
use crate::metrics::QueueSnapshot;

/// Maximum number of worker threads.
const THREADS_MAX: usize = 4;

/// Maximum number of queued batches.
const QUEUE_MAX: usize = 1024;

/// Maximum number of batches that run or whose result was not taken.
const BATCHES_MAX: usize = 65_536;

/// How long a worker waits for work before it ends.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// The interval at which a close that waits for transfers in flight says so.
const CLOSE_WARNING_INTERVAL: Duration = Duration::from_secs(5);

/// A queued batch: moves its entries and returns its status.
struct Job(Box<dyn FnOnce() -> BatchStatus + Send>);

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").finish_non_exhaustive()
    }
}

/// The worker threads of one engine.
#[derive(Debug)]
pub(super) struct WorkerPool {
    shared: Arc<PoolShared>,
    /// At most [`THREADS_MAX`] have not announced their end.
    threads: Threads,
}

#[derive(Debug)]
struct PoolShared {
    state: Mutex<JobQueue>,
    /// Notified when a batch is queued, or when the pool closes.
    work: Condvar,
    /// Notified when the queue has space, and when a batch or a thread has ended.
    change: Condvar,
    /// The limit of each batch, which a close interrupts.
    limit: CallLimit,
}

#[derive(Debug)]
struct JobQueue {
    queue: VecDeque<(BatchId, Job)>,
    completions: CompletionTable,
    idle: usize,
    alive: usize,
    /// Number of batches that found the queue full until their deadline, or too many results waiting.
    refused: u64,
    is_closed: bool,
}

impl Default for WorkerPool {
    fn default() -> Self {
        let state = JobQueue {
            queue: VecDeque::new(),
            completions: CompletionTable::new(BATCHES_MAX),
            idle: 0,
            alive: 0,
            refused: 0,
            is_closed: false,
        };
        let shared = PoolShared {
            state: Mutex::new(state),
            work: Condvar::new(),
            change: Condvar::new(),
            limit: CallLimit::new(None, true),
        };
        Self { shared: Arc::new(shared), threads: Threads::unbounded() }
    }
}

impl JobQueue {
    fn insert(&mut self, deadline: Moment) -> Result<BatchId> {
        self.completions.insert(deadline).inspect_err(|_| self.refused += 1)
    }
}

impl WorkerPool {
    /// Queues a batch, after waiting for space until its deadline. `run` moves the entries of the
    /// batch and returns by the deadline.
    ///
    /// # Errors
    /// Those of [`Engine::submit`](super::Engine::submit).
    pub(super) fn submit(
        &self,
        deadline: Moment,
        run: impl FnOnce() -> BatchStatus + Send + 'static,
    ) -> Result<BatchId> {
        let job = Job(Box::new(run));
        let mut state = self.shared.state.lock();
        while state.queue.len() >= QUEUE_MAX && !state.is_closed {
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                state.refused += 1;
                return Err(Error::new(
                    ErrorCode::RPC_TIMEOUT,
                    "the queue of batches was full until the deadline",
                )
                .with("batches", state.queue.len()));
            }
            self.shared.change.wait_for(&mut state, left);
        }
        if state.is_closed {
            return Err(closed());
        }
        let batch = state.insert(deadline)?;
        if state.idle <= state.queue.len() && state.alive < THREADS_MAX {
            let started = self.start_thread(&mut state);
            if let Err(error) = started
                && state.alive == 0
            {
                state.completions.remove(batch);
                return Err(error);
            }
        }
        state.queue.push_back((batch, job));
        drop(state);
        self.shared.work.notify_one();
        Ok(batch)
    }

    /// Returns the usage of the queue and the number of threads.
    pub(super) fn load(&self) -> (QueueSnapshot, usize) {
        let state = self.shared.state.lock();
        let (waiting, refused) = (state.queue.len(), state.refused);
        (QueueSnapshot { waiting, limit: QUEUE_MAX, refused }, state.alive)
    }

    /// Adds a batch that its caller moves itself, and then [completes](Self::complete).
    pub(super) fn insert(&self, deadline: Moment) -> Result<BatchId> {
        self.shared.state.lock().insert(deadline)
    }

    pub(super) fn complete(&self, batch: BatchId, status: BatchStatus) {
        self.shared.state.lock().completions.complete(batch, status);
    }

    pub(super) fn take_status(&self, batch: BatchId) -> Result<BatchStatus> {
        self.shared.state.lock().completions.take_status(batch)
    }

    /// Waits for the end of a batch, until `grace` after its deadline.
    pub(super) fn wait(&self, batch: BatchId, grace: Duration) -> Result<BatchStatus> {
        let mut state = self.shared.state.lock();
        while let Some(deadline) = state.completions.deadline(batch) {
            let left = (deadline + grace).left(SystemClock.now());
            if left.is_zero() {
                state.completions.remove(batch);
                let text = "the batch did not end although its deadline has passed";
                let error = Error::new(ErrorCode::RPC_TIMEOUT, text).with("batch", batch);
                return Ok(BatchStatus::TimedOut(error));
            }
            self.shared.change.wait_for(&mut state, left);
        }
        state.completions.take_status(batch).map_err(|_| batch.unknown())
    }

    /// Fails every queued batch, interrupts those in flight, and joins the threads: no memory of a
    /// batch is used after the return. Paths must have been told to close, so that no transfer goes on.
    pub(super) fn close(&self) {
        if self.threads.is_forked() {
            return;
        }
        self.shared.limit.interrupt();
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.queue);
        for (batch, _) in &waiting {
            state.completions.complete(*batch, BatchStatus::Failed(closed()));
        }
        self.shared.work.notify_all();
        self.shared.change.notify_all();
        // A worker itself may drop the last handle of an engine.
        let own = usize::from(self.threads.has_current());
        while state.alive > own {
            if self.shared.change.wait_for(&mut state, CLOSE_WARNING_INTERVAL).timed_out() {
                let workers = state.alive - own;
                tracing::warn!(workers, "the close of an engine waits for transfers in flight");
            }
        }
        // Batches of threads that panicked.
        state.completions.complete_all(&BatchStatus::Failed(closed()));
        drop(state);
        self.shared.change.notify_all();
        drop(waiting);
        self.threads.join();
    }

    fn start_thread(&self, state: &mut JobQueue) -> Result<()> {
        let worker = Worker(Arc::clone(&self.shared));
        let number = state.alive;
        let started = self.threads.spawn(&format!("mooncake-move{number}"), move || worker.run());
        started.map_err(|error| {
            Error::new(ErrorCode::INTERNAL_ERROR, "a worker thread cannot be started")
                .caused_by(error)
        })?;
        state.alive += 1;
        Ok(())
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.close();
    }
}

/// One worker thread.
struct Worker(Arc<PoolShared>);

impl Worker {
    fn run(self) {
        let alive = AliveGuard(&self.0);
        while let Some((batch, Job(run))) = self.next() {
            let mut status = self.0.limit.run(None, run);
            if self.0.limit.is_interrupted() && !matches!(status, BatchStatus::Done) {
                status = BatchStatus::Failed(closed());
            }
            self.0.state.lock().completions.complete(batch, status);
            self.0.change.notify_all();
        }
        drop(alive);
    }

    fn next(&self) -> Option<(BatchId, Job)> {
        let mut state = self.0.state.lock();
        let until = Instant::now() + IDLE_MAX;
        loop {
            if let Some(work) = state.queue.pop_front() {
                drop(state);
                self.0.change.notify_all();
                return Some(work);
            }
            if state.is_closed || Instant::now() >= until {
                return None;
            }
            state.idle += 1;
            self.0.work.wait_until(&mut state, until);
            state.idle -= 1;
        }
    }
}

/// Decrements the number of threads on drop, also after a panic.
struct AliveGuard<'a>(&'a PoolShared);

impl Drop for AliveGuard<'_> {
    fn drop(&mut self) {
        self.0.state.lock().alive -= 1;
        self.0.change.notify_all();
    }
}

fn closed() -> Error {
    Error::closed("the engine is closed")
}
