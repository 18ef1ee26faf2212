//! Gets of whole objects into memory that is allocated for them: two native calls with one limit.

use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_store_client::Located as Places;
use pyo3::{prelude::*, types::PyList};

use super::{
    Store,
    transfer::{self, GetTarget},
};
use crate::{
    argument::{invalid_as_missing, object_keys},
    detach::limited,
    error::exception,
};

impl Store {
    /// Locates objects, allocates a target for each, and reads into the targets. Leases the objects
    /// if `takes_lease` is set.
    pub(super) fn fetch<'py, B: GetTarget>(
        &self,
        py: Python<'py>,
        keys: &[Bound<'py, PyAny>],
        takes_lease: bool,
        finish: impl Fn(Python<'py>, B) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let deadline = self.timeout.map(|timeout| SystemClock.now() + timeout);
        let names = invalid_as_missing(object_keys(keys)?);
        let located = self.call(py, |client| transfer::locate(client, names, takes_lease))?;
        let mut targets = Vec::with_capacity(keys.len());
        let mut ranges = Vec::with_capacity(keys.len());
        for located in located.iter().filter_map(|located| located.as_ref().ok()) {
            let (target, range) = B::allocate(py, located.length())?;
            targets.push(target);
            ranges.push(range);
        }
        let wanted: Vec<Result<&Places>> =
            located.iter().map(|located| located.as_ref().map_err(Clone::clone)).collect();
        let left = deadline.map(|deadline| deadline.left(SystemClock.now()));
        let open = self.open();
        let read = limited(py, left, || {
            open.client().map(|client| transfer::read(client, wanted, &ranges))
        })?;
        let mut targets = targets.into_iter();
        let result = PyList::empty(py);
        for ((key, located), read) in keys.iter().zip(&located).zip(read) {
            // Every located object has a target, even if its read failed.
            let target = located.is_ok().then(|| targets.next()).flatten();
            match (read, target) {
                (Ok(_), Some(target)) => result.append(finish(py, target)?)?,
                (Ok(_), None) => {
                    let error = Error::internal("an object was read that was not located");
                    result.append(exception(py, &error, Some(key))?)?;
                }
                (Err(error), _) => result.append(exception(py, &error, Some(key))?)?,
            }
        }
        Ok(result)
    }
}
