//! The threads that make blocking calls for event loops: a bounded few for the whole process, which
//! never wait for the interpreter.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Error, ErrorCode, Result};
use mooncake_transfer_engine::process;

/// How many calls run at the same time, at the most.
const THREADS_MAX: usize = 16;

/// How many calls wait for a thread, at the most.
const WAITING_MAX: usize = 1 << 16;

/// How long a thread waits for more before it ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// A call to be made. It must not touch Python.
pub(crate) type Job = Box<dyn FnOnce(&DropQueue) + Send>;

/// What holds objects of Python and is of no use any more: kept until a thread that is attached to
/// the interpreter sweeps it out.
#[derive(Default)]
pub(crate) struct DropQueue(Mutex<Vec<Box<dyn Send>>>);

impl DropQueue {
    /// Keeps it, instead of dropping it here.
    pub(crate) fn push(&self, unused: Box<dyn Send>) {
        self.0.lock().push(unused);
    }
}

#[derive(Default)]
struct Workers {
    state: Mutex<State>,
    arrived: Condvar,
    drop_queue: DropQueue,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    idle: usize,
    threads: usize,
}

struct PerProcess {
    generation: u64,
    workers: &'static Workers,
}

/// Like the runtime: made when first wanted, anew in a forked child, never dropped. The lock is only
/// taken by threads that are attached to the interpreter.
static CURRENT: Mutex<Option<PerProcess>> = Mutex::new(None);

/// Has a call made by one of the threads, soon.
///
/// # Errors
/// Too many wait already, or the system gives no thread at all.
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
        let name = "mooncake-async".to_owned();
        match std::thread::Builder::new().name(name).spawn(|| work(workers)) {
            Ok(_) => state.threads += 1,
            Err(error) if state.threads == 0 => {
                drop(state.waiting.pop_back());
                return Err(Error::internal("no thread for calls of event loops").caused_by(error));
            }
            // Those that there are will come to it.
            Err(_) => {}
        }
    }
    drop(state);
    workers.arrived.notify_one();
    Ok(())
}

/// Drops what is in the drop queue. To be called by a thread that is attached to the interpreter.
pub(crate) fn drain_drop_queue() {
    // Taken out first: what a drop runs may come here again.
    let unused = std::mem::take(&mut *workers().drop_queue.0.lock());
    drop(unused);
}

fn workers() -> &'static Workers {
    let generation = process::generation();
    let mut current = CURRENT.lock();
    if let Some(current) = current.as_ref().filter(|current| current.generation == generation) {
        return current.workers;
    }
    let workers: &'static Workers = Box::leak(Box::default());
    *current = Some(PerProcess { generation, workers });
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
