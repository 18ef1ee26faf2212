//! `Pending`: the calls in flight of one event loop. A thread that is attached to the interpreter
//! begins a call, a worker thread that is not attached makes it, and the loop takes the outcome
//! when a descriptor becomes readable.
//!
//! Memory that a call reads or writes is kept alive until its outcome is taken, even if the caller
//! no longer waits for it.

use std::{
    io::{Read as _, Write as _},
    os::{fd::AsRawFd, unix::net::UnixStream},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_os::call_limit::{CallLimit, run_under};
use mooncake_store_client::Client;
use pyo3::prelude::*;

use crate::{
    error::{or_raise, py_error},
    store::{Open, Store, settings::seconds},
    verbs::Driver,
    workers::{self, DropQueue},
};

/// The outcome of a call, converted to Python objects by a thread that is attached to the
/// interpreter.
type Outcome = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// The calls in flight of one event loop.
#[pyclass(frozen, module = "mooncake._native", name = "Pending")]
#[derive(Debug)]
pub(crate) struct Pending {
    calls: Arc<LoopCalls>,
    /// Longest duration of a call; `None`: the limits of the client.
    timeout: Option<Duration>,
}

/// The calls in flight, shared by handles with different limits.
#[derive(Debug)]
struct LoopCalls {
    store: Arc<Open>,
    completions: Option<Arc<CompletionQueue>>,
    waker: UnixStream,
    begun: AtomicU64,
}

/// The outcomes that worker threads have delivered and the loop has not taken.
struct CompletionQueue {
    state: Mutex<Completions>,
    /// Write end of the waker: a byte is written when the queue becomes non-empty, which makes the
    /// other end readable.
    waker: UnixStream,
}

#[derive(Default)]
struct Completions {
    done: Vec<(u64, Outcome)>,
    is_abandoned: bool,
}

#[pymethods]
impl Pending {
    /// Makes an empty set of calls of a store, for one event loop.
    #[new]
    fn new(py: Python<'_>, store: &Bound<'_, Store>) -> PyResult<Self> {
        store.get().call(py, |_client| ())?; // raises if the store is closed
        let (near, far) = or_raise(py, waker_pair())?;
        let completions = CompletionQueue { state: Mutex::default(), waker: far };
        let calls = LoopCalls {
            store: Arc::clone(store.get().open()),
            completions: Some(Arc::new(completions)),
            waker: near,
            begun: AtomicU64::new(0),
        };
        Ok(Self { calls: Arc::new(calls), timeout: None })
    }

    /// Returns the same calls with a limit for the duration of each call.
    fn within(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Self> {
        let timeout = or_raise(py, seconds("timeout_s", Some(timeout_s)))?;
        Ok(Self { calls: Arc::clone(&self.calls), timeout })
    }

    /// Returns the descriptor that becomes readable when outcomes can be taken.
    fn fileno(&self) -> i32 {
        self.calls.waker.as_raw_fd()
    }

    /// Takes the delivered outcomes: the number of each call, and its value or its exception.
    fn take(&self, py: Python<'_>) -> PyResult<Vec<(u64, Py<PyAny>)>> {
        or_raise(py, self.calls.check())?;
        // Drain the waker before the queue: an outcome pushed in between then wakes the loop again.
        let mut drained = [0; 64];
        while (&self.calls.waker).read(&mut drained).is_ok_and(|count| count == drained.len()) {}
        let done = std::mem::take(&mut self.calls.completions().state.lock().done);
        let to_object_pair = |(number, outcome): (u64, Outcome)| match outcome(py) {
            Ok(value) => (number, value),
            Err(error) => (number, error.into_value(py).into_any()),
        };
        Ok(done.into_iter().map(to_object_pair).collect())
    }
}

impl Pending {
    /// Submits a call to the worker threads; returns its number.
    fn begin(
        &self,
        py: Python<'_>,
        call: impl FnOnce(Result<&Client>) -> Outcome + Send + 'static,
    ) -> PyResult<u64> {
        or_raise(py, self.calls.check())?;
        workers::drain_drop_queue();
        let number = self.calls.begun.fetch_add(1, Ordering::Relaxed) + 1;
        let store = Arc::clone(&self.calls.store);
        let completions = Arc::clone(self.calls.completions());
        let deadline = self.timeout.map(|timeout| SystemClock.now() + timeout);
        let job = move |drop_queue: &DropQueue| {
            let limit = deadline.map(|_| CallLimit::new(deadline, false));
            let make = || run_under(limit, || call(store.client()));
            let made = catch_unwind(AssertUnwindSafe(make));
            completions.push(number, made.unwrap_or_else(|_| panicked()), drop_queue);
        };
        or_raise(py, workers::submit(Box::new(job)))?;
        Ok(number)
    }
}

impl Driver for Pending {
    type Begun = u64;

    fn drive<H, T>(
        &self,
        py: Python<'_>,
        held: H,
        work: impl FnOnce(&Client, &H) -> Result<T> + Send + 'static,
        finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<Self::Begun>
    where
        H: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.begin(py, move |client| {
            let value = client.and_then(|client| work(client, &held));
            Box::new(move |py| {
                drop(held);
                finish(py, or_raise(py, value)?)
            })
        })
    }
}

impl LoopCalls {
    /// Returns an error in a forked child. Must be called before any lock is taken: the child may
    /// have inherited a lock in locked state.
    fn check(&self) -> Result<()> {
        if self.store.is_forked() {
            let text = "the store was opened before this process was forked; open one here";
            return Err(Error::closed(text));
        }
        Ok(())
    }

    fn completions(&self) -> &Arc<CompletionQueue> {
        self.completions.as_ref().expect("only drop takes what is inside")
    }
}

impl Drop for LoopCalls {
    fn drop(&mut self) {
        let Some(completions) = self.completions.take() else { return };
        if self.store.is_forked() {
            std::mem::forget(completions);
            return;
        }
        let mut state = completions.state.lock();
        state.is_abandoned = true;
        let done = std::mem::take(&mut state.done);
        drop(state);
        drop(done);
    }
}

impl CompletionQueue {
    fn push(&self, number: u64, outcome: Outcome, drop_queue: &DropQueue) {
        let mut state = self.state.lock();
        if state.is_abandoned {
            drop(state);
            drop_queue.push(Box::new(outcome));
            return;
        }
        let is_first = state.done.is_empty();
        state.done.push((number, outcome));
        drop(state);
        if is_first {
            // If the socket is full, the loop has a wake-up pending already.
            let _ = (&self.waker).write(&[1]);
        }
    }
}

impl std::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionQueue").finish_non_exhaustive()
    }
}

fn waker_pair() -> Result<(UnixStream, UnixStream)> {
    let pair = UnixStream::pair().and_then(|(near, far)| {
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        Ok((near, far))
    });
    pair.map_err(|error| Error::internal("no socket pair to wake the event loop").caused_by(error))
}

/// Returns the outcome of a call that panicked.
fn panicked() -> Outcome {
    Box::new(|py| Err(py_error(py, &Error::internal("a call panicked"))))
}
