//! Calls that exist twice in Python: blocking, as a method of `Store`, and for event loops, as a
//! method of `Pending`. Each is written once, in a file by its subject; the two drivers differ in
//! who makes the call and when its outcome is converted.
//!
//! A method reads its arguments and hands its driver three things: Python memory that the call needs,
//! the work, which is done without the interpreter, and the conversion of the outcome.

mod details;
mod get;
mod list;
mod memory;
mod pool;
mod probe;
mod put;
mod read;
mod remove;
mod sessions;
mod tasks;

use std::convert::Infallible;

use mooncake_base::{ObjectKey, Result};
use mooncake_store_client::Client;
use pyo3::{IntoPyObjectExt, prelude::*, types::PyBytes};

use crate::{
    argument::{invalid_as_missing, object_keys},
    buffer::Buffer,
    store::{Keys, outcome::outcome_list},
};

/// What a method of a driver returns: the outcome, or the number of the call that will have it.
type Begun<D> = <D as Driver>::Begun;

/// Makes calls of a client: at once (`Store`), or on a worker thread (`Pending`).
pub(crate) trait Driver {
    /// What a method returns.
    type Begun;

    /// Makes a call: `work` runs without the interpreter, and `finish` converts its value. `held` is
    /// what the work reads or writes in Python; it is dropped with the interpreter. The work itself
    /// must hold nothing of Python.
    fn drive<H, T>(
        &self,
        py: Python<'_>,
        held: H,
        work: impl FnOnce(&Client, &H) -> Result<T> + Send + 'static,
        finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<Self::Begun>
    where
        H: Send + Sync + 'static,
        T: Send + 'static;

    /// Makes a call whose value is converted as it is.
    fn drive_value<H, T>(
        &self,
        py: Python<'_>,
        held: H,
        work: impl FnOnce(&Client, &H) -> Result<T> + Send + 'static,
    ) -> PyResult<Self::Begun>
    where
        H: Send + Sync + 'static,
        T: for<'py> IntoPyObject<'py> + Send + 'static,
    {
        self.drive(py, held, work, |py, value| value.into_py_any(py))
    }

    /// Makes a call that has an outcome for each key.
    fn drive_each<H, T>(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        held: H,
        work: impl FnOnce(&Client, &H) -> Vec<Result<T>> + Send + 'static,
    ) -> PyResult<Self::Begun>
    where
        H: Send + Sync + 'static,
        T: for<'py> IntoPyObject<'py> + Send + 'static,
    {
        let keys: Vec<Py<PyAny>> = keys.into_iter().map(Bound::unbind).collect();
        let finish = move |py: Python<'_>, results| {
            let keys = keys.iter().map(|key| key.bind(py));
            Ok(outcome_list(py, keys, results)?.into_any().unbind())
        };
        self.drive(py, held, |client, held| Ok(work(client, held)), finish)
    }

    /// Makes a call about the objects of keys; an invalid key is that of a missing object.
    fn drive_for_keys<T>(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        work: impl FnOnce(&Client, Vec<Result<ObjectKey>>) -> Vec<Result<T>> + Send + 'static,
    ) -> PyResult<Self::Begun>
    where
        T: for<'py> IntoPyObject<'py> + Send + 'static,
    {
        let names = invalid_as_missing(object_keys(&keys)?);
        self.drive_each(py, keys, (), move |client, ()| work(client, names))
    }
}

/// An object that was read into memory of ours; in Python `bytes`, which are copied from it.
struct Copied(Buffer);

impl<'py> IntoPyObject<'py> for Copied {
    type Target = PyBytes;
    type Output = Bound<'py, PyBytes>;
    type Error = Infallible;

    fn into_pyobject(self, py: Python<'py>) -> std::result::Result<Self::Output, Infallible> {
        Ok(self.0.to_bytes(py).into_bound(py))
    }
}

/// Makes methods of both drivers.
macro_rules! methods {
    ($($methods:tt)*) => {
        #[pyo3::pymethods]
        impl crate::store::Store {
            $($methods)*
        }

        #[pyo3::pymethods]
        impl crate::pending::Pending {
            $($methods)*
        }
    };
}
use methods;
