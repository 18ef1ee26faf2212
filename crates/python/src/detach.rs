//! Releasing the interpreter for a blocking call, and reacquiring it safely during exit.
//!
//! Up to CPython 3.13 a daemon thread that tries to reacquire the interpreter after finalization
//! has begun is ended by unwinding its stack. PyO3 stops the unwinding at the first Rust frame in
//! an unspecified way. A thread that returns here after exit has begun therefore does not reacquire
//! the interpreter at once, but waits. In most cases the process ends first.
//!
//! The wait is bounded: an exit hook of the program that runs after ours may wait for that thread,
//! and then the interpreter is still intact.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_os::{call_limit::CallLimit, thread::is_main};
use pyo3::{PyResult, Python};

use crate::error::or_raise;

/// Longest time that a returning thread waits for the process to end: longer than most exit hooks.
const EXIT_WAIT: Duration = Duration::from_secs(2);

static IS_EXITING: AtomicBool = AtomicBool::new(false);
/// The thread that finalizes the interpreter, once finalization has begun.
static FINALIZING: Mutex<Option<ThreadId>> = Mutex::new(None);

/// Runs `call` without holding the interpreter.
///
/// # Errors
/// Returns a closed error, without running `call`, once the interpreter is exiting.
pub(crate) fn detached<T, F>(py: Python<'_>, call: F) -> Result<T>
where
    F: FnOnce() -> T + Send,
    T: Send,
{
    if is_refused() {
        return Err(Error::closed("the interpreter is exiting"));
    }
    Ok(py.detach(|| {
        let value = call();
        if is_refused() {
            wait_for_process_exit();
        }
        value
    }))
}

/// Runs `call` without holding the interpreter, for at most `timeout`. On the main thread of the
/// process, a signal whose handler raises (Ctrl-C) ends the waits of the call at once.
///
/// # Errors
/// What the signal handler raised; a closed error as [`detached`].
pub(crate) fn limited<T, F>(py: Python<'_>, timeout: Option<Duration>, call: F) -> PyResult<T>
where
    F: FnOnce() -> Result<T> + Send,
    T: Send,
{
    let deadline = timeout.map(|timeout| SystemClock.now() + timeout);
    let is_main = is_main();
    let run = || match (is_main, deadline) {
        (false, None) => (call(), None),
        (false, Some(_)) => (CallLimit::new(deadline, false).run(None, call), None),
        (true, _) => {
            let raised = Rc::new(RefCell::new(None));
            let found = Rc::clone(&raised);
            let interruption = move || {
                let is_first = found.borrow().is_none();
                if is_first && let Err(error) = Python::attach(|py| py.check_signals()) {
                    found.replace(Some(error));
                }
                found.borrow().is_some()
            };
            let limit = CallLimit::new(deadline, true);
            let value = limit.run(Some(Rc::new(interruption)), call);
            (value, raised.take())
        }
    };
    let (value, raised) = or_raise(py, detached(py, run))?;
    match raised {
        Some(error) => Err(error),
        None => or_raise(py, value),
    }
}

/// Begins the exit: new calls of other threads are refused, and those in flight return late or
/// never. Must be called by the thread that finalizes the interpreter.
pub(crate) fn begin_exit() {
    *FINALIZING.lock() = Some(thread::current().id());
    IS_EXITING.store(true, Ordering::SeqCst);
}

fn is_refused() -> bool {
    IS_EXITING.load(Ordering::SeqCst) && *FINALIZING.lock() != Some(thread::current().id())
}

/// Waits for the end of the process; returns if that takes longer than [`EXIT_WAIT`].
fn wait_for_process_exit() {
    let end = Instant::now() + EXIT_WAIT;
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|it| !it.is_zero()) {
        thread::park_timeout(left);
    }
}
