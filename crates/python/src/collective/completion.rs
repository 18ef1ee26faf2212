//! `CollectiveCompletion`: the end of an operation, awaited, asked for or called back.

use std::time::{Duration, Instant};

use mooncake_collective::Completion;
use pyo3::prelude::*;

use super::SIGNAL_INTERVAL;
use crate::{
    detach::{attached, detached},
    error::{or_raise, py_error},
};

/// The end of an operation.
#[pyclass(frozen, module = "mooncake._native", name = "CollectiveCompletion")]
#[derive(Debug)]
pub(crate) struct CollectiveCompletion(pub(super) Completion);

#[pymethods]
impl CollectiveCompletion {
    /// Lets the group carry out the operation without a thread that waits for it.
    fn start(&self) {
        self.0.start();
    }

    /// Waits at most `timeout_s` and returns whether the operation is done.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        if self.0.wait(Duration::ZERO) {
            return Ok(true);
        }
        let limit = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::MAX);
        let begun = Instant::now();
        loop {
            let left = limit.saturating_sub(begun.elapsed()).min(SIGNAL_INTERVAL);
            if or_raise(py, detached(py, || self.0.wait(left)))? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// Returns whether the operation is done. Looks for frames of the peers.
    fn done(&self) -> bool {
        self.0.wait(Duration::ZERO)
    }

    /// Whether the end of the operation was seen already, without a look at the peers.
    #[getter]
    fn has_ended(&self) -> bool {
        self.0.is_done()
    }

    /// Returns why the operation failed as a whole.
    fn error<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let error = self.0.outcome()?.error?;
        Some(py_error(py, &error).into_value(py).into_bound(py).into_any())
    }

    /// Returns the slots that were lost while the operation ran.
    fn failed_ranks(&self) -> Vec<usize> {
        self.0.outcome().map(|outcome| outcome.failed_slots).unwrap_or_default()
    }

    /// Returns the slot that a receive got its message from.
    fn source(&self) -> Option<usize> {
        self.0.outcome()?.source
    }

    /// Calls `callback` once the operation is done, from a native thread; at once if it is.
    fn add_done_callback(&self, py: Python<'_>, callback: Py<PyAny>) -> PyResult<()> {
        let completion = self.0.clone();
        let call = Box::new(move || {
            attached(|py| {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, None);
                }
            });
        });
        or_raise(py, detached(py, || completion.on_done(call)))
    }
}
