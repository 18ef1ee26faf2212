//! How a store makes calls of the client: while the caller waits.

use std::time::Duration;

use mooncake_base::{Clock, Moment, Result, SystemClock};
use mooncake_store_client::Client;
use pyo3::prelude::*;

use super::Store;
use crate::{detach::limited, error::or_raise, verbs::Driver};

impl Store {
    /// Makes a call of the client without holding the interpreter.
    pub(crate) fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Client) -> T + Send,
    ) -> PyResult<T> {
        self.call_within(py, self.timeout, call)
    }

    /// Makes a call with another limit than that of this handle.
    pub(crate) fn call_within<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
        call: impl FnOnce(&Client) -> T + Send,
    ) -> PyResult<T> {
        let open = self.open();
        limited(py, timeout, || open.client().map(call))
    }

    /// The moment until which a call that begins now may take.
    pub(crate) fn deadline(&self) -> Option<Moment> {
        self.timeout.map(|timeout| SystemClock.now() + timeout)
    }
}

impl Driver for Store {
    type Begun = Py<PyAny>;

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
        let value = self.call(py, |client| work(client, &held))?;
        drop(held);
        finish(py, or_raise(py, value)?)
    }
}
