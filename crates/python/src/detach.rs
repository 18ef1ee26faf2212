//! Leaving the interpreter for a blocking call, and coming back safely while it exits.
//!
//! Up to CPython 3.13 a daemon thread that wants the interpreter back after its finalization has
//! begun is ended by unwinding its stack. PyO3 stops that at the first Rust frame by a means that is
//! unspecified; here a thread that returns after exit began does not ask at once, but waits, and
//! most often the process ends without it.
//!
//! It does not wait for ever: a hook of the program that runs after ours may wait for that thread,
//! and then the interpreter is still whole.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, Result};
use pyo3::Python;

/// How long a thread waits for the end of the process: longer than most hooks take to run.
const EXIT_WAIT: Duration = Duration::from_secs(2);

static IS_EXITING: AtomicBool = AtomicBool::new(false);
/// The thread that ends the interpreter, once it does.
static FINALIZING: Mutex<Option<ThreadId>> = Mutex::new(None);

/// Runs `call` without holding the interpreter.
///
/// # Errors
/// A closed error, without running it, once the interpreter is exiting.
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

/// Begins the exit: new calls of other threads are refused, and those under way return late or
/// never. To be called by the thread that ends the interpreter.
pub(crate) fn begin_exit() {
    *FINALIZING.lock() = Some(thread::current().id());
    IS_EXITING.store(true, Ordering::SeqCst);
}

fn is_refused() -> bool {
    IS_EXITING.load(Ordering::SeqCst) && *FINALIZING.lock() != Some(thread::current().id())
}

/// Returns only if the process goes on for long.
fn wait_for_process_exit() {
    let end = Instant::now() + EXIT_WAIT;
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|it| !it.is_zero()) {
        thread::park_timeout(left);
    }
}
