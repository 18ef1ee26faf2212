//! A bounded pool of threads, one per process, that make blocking calls for event loops. The
//! threads never wait for the interpreter.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Error, ErrorCode, Result};
use mooncake_os::{fork, threads};

/// Maximum number of calls that run at the same time.
const THREADS_MAX: usize = 16;

/// Maximum number of calls that wait for a thread.
const WAITING_MAX: usize = 1 << 16;

/// Time after which an idle thread ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// A call for a worker thread. It must not touch Python.
pub(crate) type Job = Box<dyn FnOnce(&DropQueue) + Send>;

/// Values that hold Python objects and are no longer needed. Dropping them needs the interpreter,
/// so they are kept until a thread that is attached to the interpreter drains the queue.
#[derive(Default)]
pub(crate) struct DropQueue(Mutex<Vec<Box<dyn Send>>>);

impl DropQueue {
    /// Queues a value instead of dropping it on this thread.
    pub(crate) fn push(&self, unused: Box<dyn Send>) {
        self.0.lock().push(unused);
    }
}

#[derive(Default)]
struct Workers {
    state: Mutex<JobQueue>,
    arrived: Condvar,
    drop_queue: DropQueue,
}

#[derive(Default)]
struct JobQueue {
    waiting: VecDeque<Job>,
    idle: usize,
    threads: usize,
}

struct ProcessWorkers {
    generation: u64,
    workers: &'static Workers,
}

/// The pool of this process, like the runtime: made on first use, made again in a forked child,
/// never dropped. Only threads that are attached to the interpreter take the lock.
static CURRENT: Mutex<Option<ProcessWorkers>> = Mutex::new(None);

/// Submits a call to the worker threads.
///
/// # Errors
/// Too many calls are queued, or the system cannot start the first thread.
pub(crate) fn submit(job: Job) -> Result<()> {
    let workers = workers();
    let mut state = workers.state.lock();
    if state.waiting.len() >= WAITING_MAX {
        let text = "too many calls wait for a thread; await some of them first";
        return Err(Error::new(ErrorCode::TASK_PENDING_LIMIT_EXCEEDED, text)
            .with("waiting", state.waiting.len()));
    }
    state.waiting.push_back(job);
    if state.waiting.len() > state.idle && state.threads < THREADS_MAX {
        match threads::start_detached("mooncake-async", || work(workers)) {
            Ok(()) => state.threads += 1,
            Err(error) if state.threads == 0 => {
                drop(state.waiting.pop_back());
                return Err(Error::internal("no thread for calls of event loops").caused_by(error));
            }
            // The running threads will take the call.
            Err(_) => {}
        }
    }
    drop(state);
    workers.arrived.notify_one();
    Ok(())
}

/// Drops the queued values. Must be called by a thread that is attached to the interpreter.
pub(crate) fn drain_drop_queue() {
    // Taken out of the lock first: a destructor may run Python code that calls this function again.
    let unused = std::mem::take(&mut *workers().drop_queue.0.lock());
    drop(unused);
}

fn workers() -> &'static Workers {
    let generation = fork::generation();
    let mut current = CURRENT.lock();
    if let Some(current) = current.as_ref().filter(|current| current.generation == generation) {
        return current.workers;
    }
    let workers: &'static Workers = Box::leak(Box::default());
    *current = Some(ProcessWorkers { generation, workers });
    workers
}

fn work(workers: &'static Workers) {
    let mut state = workers.state.lock();
    loop {
        if let Some(job) = state.waiting.pop_front() {
            drop(state);
            job(&workers.drop_queue);
            state = workers.state.lock();
            continue;
        }
        state.idle += 1;
        let waited = workers.arrived.wait_for(&mut state, IDLE_MAX);
        state.idle -= 1;
        if waited.timed_out() && state.waiting.is_empty() {
            state.threads -= 1;
            return;
        }
    }
}
