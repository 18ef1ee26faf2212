//! Leaving the interpreter for a blocking call, and coming back safely while it exits.
//!
//! Up to CPython 3.13 a daemon thread that wants the interpreter back after its finalization has
//! begun is ended by unwinding its stack, which aborts the process where the stack holds Rust
//! frames. So a thread that returns after exit began waits here for ever instead; the process ends
//! without it.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use mooncake_base::{Error, Result};
use parking_lot::Mutex;
use pyo3::Python;

/// How long exit waits for threads that are just coming back.
const RETURNING_MAX: Duration = Duration::from_secs(1);

static IS_EXITING: AtomicBool = AtomicBool::new(false);
/// The thread that ends the interpreter, once it does.
static FINALIZING: Mutex<Option<ThreadId>> = Mutex::new(None);
/// Threads between their look at `IS_EXITING` and being attached again.
static RETURNING: AtomicUsize = AtomicUsize::new(0);

/// Runs `call` without holding the interpreter.
///
/// # Errors
/// A closed error, without running it, once the interpreter is exiting.
pub(crate) fn detached<T, F>(py: Python<'_>, call: F) -> Result<T>
where
    F: FnOnce() -> T + Send,
    T: Send,
{
    if IS_EXITING.load(Ordering::SeqCst) && !is_finalizing_thread() {
        return Err(Error::closed("the interpreter is exiting"));
    }
    let value = py.detach(|| {
        let value = call();
        come_back_or_stay();
        value
    });
    RETURNING.fetch_sub(1, Ordering::SeqCst);
    Ok(value)
}

/// Begins the exit: new calls of other threads are refused, and those that are just coming back
/// are let in. To be called once, by the thread that ends the interpreter.
pub(crate) fn begin_exit(py: Python<'_>) {
    *FINALIZING.lock() = Some(thread::current().id());
    IS_EXITING.store(true, Ordering::SeqCst);
    py.detach(|| {
        let deadline = Instant::now() + RETURNING_MAX;
        while RETURNING.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
            thread::yield_now();
        }
    });
}

/// Forgets the threads of the parent. To be called in a forked child.
pub(crate) fn forget_parent() {
    RETURNING.store(0, Ordering::SeqCst);
}

fn come_back_or_stay() {
    // Counted before the look, so that exit cannot pass between the look and the return.
    RETURNING.fetch_add(1, Ordering::SeqCst);
    if IS_EXITING.load(Ordering::SeqCst) && !is_finalizing_thread() {
        RETURNING.fetch_sub(1, Ordering::SeqCst);
        loop {
            thread::park();
        }
    }
}

fn is_finalizing_thread() -> bool {
    *FINALIZING.lock() == Some(thread::current().id())
}
