//! Leaving the interpreter for a blocking call, and coming back safely while it exits.
//!
//! Up to CPython 3.13 a daemon thread that wants the interpreter back after its finalization has
//! begun is ended by unwinding its stack. PyO3 stops that at the first Rust frame by a means that is
//! unspecified; here a thread that returns after exit began does not ask any more, but waits for
//! ever, and the process ends without it.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, ThreadId},
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, Result};
use pyo3::Python;

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
    if is_too_late() {
        return Err(Error::closed("the interpreter is exiting"));
    }
    Ok(py.detach(|| {
        let value = call();
        while is_too_late() {
            thread::park();
        }
        value
    }))
}

/// Begins the exit: new calls of other threads are refused, and those under way do not return. To
/// be called by the thread that ends the interpreter.
pub(crate) fn begin_exit() {
    *FINALIZING.lock() = Some(thread::current().id());
    IS_EXITING.store(true, Ordering::SeqCst);
}

fn is_too_late() -> bool {
    IS_EXITING.load(Ordering::SeqCst) && *FINALIZING.lock() != Some(thread::current().id())
}
