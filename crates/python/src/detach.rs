//! Releasing the interpreter for a blocking call, and reacquiring it safely during exit.
//!
//! Up to CPython 3.13 a daemon thread that tries to reacquire the interpreter after finalization
//! has begun is ended by unwinding its stack, which ends the process where it meets a Rust frame: the
//! wheel has an unwinder of its own, which does not understand that of the system.
//!
//! - A thread that was about to reacquire the interpreter when exit began still gets it: the exit hook
//!   waits for such threads before anything is finalized.
//! - A thread that returns later does not reacquire the interpreter at once, but waits. In most cases the
//!   process ends first. The wait is bounded: an exit hook of the program that runs after ours may wait
//!   for that thread, and then the interpreter is still intact.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_os::{call_limit::CallLimit, thread::is_main};
use pyo3::{PyResult, Python};

use crate::error::or_raise;

/// Longest time that a returning thread waits for the process to end, longer than most exit hooks; and
/// that the exit waits for threads which enter the interpreter.
const EXIT_WAIT: Duration = Duration::from_secs(2);

static IS_EXITING: AtomicBool = AtomicBool::new(false);
/// The thread that finalizes the interpreter, once finalization has begun.
static FINALIZING: Mutex<Option<Thread>> = Mutex::new(None);
/// Number of [`InterpreterEntry`]s.
static ENTRIES: AtomicUsize = AtomicUsize::new(0);

/// A thread that is about to acquire the interpreter below Rust frames, or runs there. The exit waits
/// for it.
#[derive(Debug)]
struct InterpreterEntry(());

impl InterpreterEntry {
    /// Returns `None` once the interpreter is exiting.
    fn begin() -> Option<Self> {
        // Before the look at the exit, which begins before it looks at the entries.
        ENTRIES.fetch_add(1, Ordering::SeqCst);
        let entry = Self(());
        if is_refused() { None } else { Some(entry) }
    }
}

impl Drop for InterpreterEntry {
    fn drop(&mut self) {
        let is_last = ENTRIES.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last && IS_EXITING.load(Ordering::SeqCst) {
            FINALIZING.lock().as_ref().inspect(|thread| thread.unpark());
        }
    }
}

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
    let (value, _entry) = py.detach(|| {
        let value = call();
        let entry = InterpreterEntry::begin();
        if entry.is_none() {
            wait_for_process_exit();
        }
        (value, entry)
    });
    Ok(value)
}

/// Runs `call` with the interpreter, on a native thread. Does nothing once the interpreter is exiting.
pub(crate) fn attached(call: impl FnOnce(Python<'_>)) {
    if let Some(_entry) = InterpreterEntry::begin() {
        Python::attach(call);
    }
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
/// never. Waits for threads that are about to acquire the interpreter. Must be called by the thread that
/// finalizes the interpreter.
pub(crate) fn begin_exit(py: Python<'_>) {
    *FINALIZING.lock() = Some(thread::current());
    IS_EXITING.store(true, Ordering::SeqCst);
    py.detach(|| park_while(|| ENTRIES.load(Ordering::SeqCst) > 0));
}

fn is_refused() -> bool {
    let is_other = |thread: &Thread| -> bool { thread.id() != thread::current().id() };
    IS_EXITING.load(Ordering::SeqCst) && FINALIZING.lock().as_ref().is_some_and(is_other)
}

/// Waits for the end of the process; returns if that takes longer than [`EXIT_WAIT`].
fn wait_for_process_exit() {
    park_while(|| true);
}

/// Waits while the condition holds, at most for [`EXIT_WAIT`].
fn park_while(condition: impl Fn() -> bool) {
    let end = Instant::now() + EXIT_WAIT;
    while condition() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        thread::park_timeout(left);
    }
}
