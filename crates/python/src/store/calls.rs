//! Calls of the client that the methods of a store have in common.

use mooncake_base::{ObjectKey, Result, Version};
use mooncake_store_client::Client;
use mooncake_transfer_engine::LocalRange;
use pyo3::{prelude::*, types::PyList};

use super::{Store, outcome::outcome_list, transfer};
use crate::{
    argument::{call_with_valid, check_same_length, invalid_as_missing, object_keys},
    buffer::Views,
    detach::limited,
    error::or_raise,
};

impl Store {
    /// Makes a call of the client without holding the interpreter.
    pub(crate) fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Client) -> T + Send,
    ) -> PyResult<T> {
        let open = self.open();
        limited(py, self.timeout, || open.client().map(call))
    }

    /// Makes a call about the objects of keys; an invalid key is that of a missing object.
    pub(super) fn call_for_keys<'py, T: IntoPyObject<'py> + Send>(
        &self,
        py: Python<'py>,
        keys: &[Bound<'py, PyAny>],
        call: impl FnOnce(&Client, &[ObjectKey]) -> Vec<Result<T>> + Send,
    ) -> PyResult<Bound<'py, PyList>> {
        call_for_names(self, py, keys, |client, names| {
            call_with_valid(names, |names| call(client, &names))
        })
    }
}

/// Does what `Store::call_for_keys` does; the call gets the errors of invalid keys, too.
pub(super) fn call_for_names<'py, T: IntoPyObject<'py> + Send>(
    store: &Store,
    py: Python<'py>,
    keys: &[Bound<'py, PyAny>],
    call: impl FnOnce(&Client, Vec<Result<ObjectKey>>) -> Vec<Result<T>> + Send,
) -> PyResult<Bound<'py, PyList>> {
    let names = invalid_as_missing(object_keys(keys)?);
    let results = store.call(py, |client| call(client, names))?;
    outcome_list(py, keys, results)
}

/// Puts values. Returns what `outcome` makes of each new version, or the failure.
pub(super) fn put_values<'py, T: IntoPyObject<'py>>(
    store: &Store,
    py: Python<'py>,
    keys: &[Bound<'py, PyAny>],
    values: &[Bound<'py, PyAny>],
    options: mooncake_store_client::PutOptions,
    outcome: impl Fn(Option<Version>) -> T,
) -> PyResult<Bound<'py, PyList>> {
    or_raise(py, check_same_length("values", values.len(), keys.len()))?;
    let views = values.iter().map(Views::of).collect::<PyResult<Vec<_>>>()?;
    let ranges: Vec<&[LocalRange]> = views.iter().map(Views::ranges).collect();
    transfer::put_ranges(store, py, keys, &ranges, options, outcome)
}
