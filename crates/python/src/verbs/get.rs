//! Gets of whole objects. The blocking call allocates `bytes` between two native calls; that of an
//! event loop reads into memory of its own.

use mooncake_base::{Clock, Error, ObjectKey, Result, SystemClock};
use mooncake_store_client::{Client, Located as Places};
use mooncake_transfer_engine::LocalRange;
use pyo3::{
    prelude::*,
    types::{PyBytes, PyList},
};

use super::{Begun, Copied, Driver};
use crate::{
    argument::{check_same_length, invalid_as_missing, object_keys},
    buffer::Buffer,
    caller_memory::Ranges,
    error::{exception, or_raise},
    pending::Pending,
    store::{
        Keys, Store,
        transfer::{self, GetTarget, GetTerms, SignedBuffer, UnsignedBuffer},
    },
};

#[pymethods]
impl Store {
    /// Gets objects as `bytes`. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        lease: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let finish = |py, bytes: Py<PyBytes>| Ok(bytes.into_bound(py).into_any());
        self.fetch::<Py<PyBytes>>(py, &keys, lease, finish)
    }

    /// Gets objects as buffers that own their memory. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, is_signed = false, lease = true))]
    fn get_buffers<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        is_signed: bool,
        lease: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        if is_signed {
            let bind = |py, target: SignedBuffer| Ok(Bound::new(py, target.0)?.into_any());
            self.fetch::<SignedBuffer>(py, &keys, lease, bind)
        } else {
            let bind = |py, target: UnsignedBuffer| Ok(Bound::new(py, target.0)?.into_any());
            self.fetch::<UnsignedBuffer>(py, &keys, lease, bind)
        }
    }

    /// Gets objects into memory at addresses; returns their lengths. Leases the objects unless
    /// `lease` is false.
    #[pyo3(signature = (keys, ranges, *, is_exact = false, lease = true))]
    fn get_into(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        ranges: Ranges,
        is_exact: bool,
        lease: bool,
    ) -> PyResult<Begun<Self>> {
        or_raise(py, check_same_length("ranges", ranges.len(), keys.len()))?;
        let names = invalid_as_missing(object_keys(&keys)?);
        let terms = GetTerms { is_exact, takes_lease: lease };
        self.drive_each(py, keys, ranges, move |client, ranges| {
            transfer::get_into(client, names, &ranges.items(), terms)
        })
    }
}

#[pymethods]
impl Pending {
    /// Begins to get objects as `bytes`, which are copied when the outcome is taken.
    #[pyo3(signature = (keys, *, lease = true))]
    fn get(&self, py: Python<'_>, keys: Keys<'_>, lease: bool) -> PyResult<u64> {
        self.drive_for_keys(py, keys, move |client, names| {
            let objects = fetch(client, names, false, lease);
            objects.into_iter().map(|object| object.map(Copied)).collect()
        })
    }

    /// Begins to get objects as buffers that own their memory.
    #[pyo3(signature = (keys, *, is_signed = false, lease = true))]
    fn get_buffers(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        is_signed: bool,
        lease: bool,
    ) -> PyResult<u64> {
        self.drive_for_keys(py, keys, move |client, names| fetch(client, names, is_signed, lease))
    }
}

impl Store {
    /// Locates objects, allocates a target for each, and reads into the targets. Leases the objects
    /// if `takes_lease` is set.
    fn fetch<'py, B: GetTarget>(
        &self,
        py: Python<'py>,
        keys: &[Bound<'py, PyAny>],
        takes_lease: bool,
        finish: impl Fn(Python<'py>, B) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let deadline = self.deadline();
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
        let read = self.call_within(py, left, |client| transfer::read(client, wanted, &ranges))?;
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

/// Gets objects into buffers that own their memory.
fn fetch(
    client: &Client,
    names: Vec<Result<ObjectKey>>,
    is_signed: bool,
    takes_lease: bool,
) -> Vec<Result<Buffer>> {
    let target = |length| {
        Buffer::uninit(length, is_signed)
            .map_err(|_| Error::internal("no memory for the object").with("length", length))
    };
    let located = transfer::locate(client, names, takes_lease);
    let targets: Vec<Result<(Buffer, LocalRange)>> = located
        .iter()
        .map(|located| located.as_ref().map_err(Clone::clone).and_then(|l| target(l.length())))
        .collect();
    let wanted = located
        .iter()
        .zip(&targets)
        .map(|(located, target)| match target {
            Ok(_) => located.as_ref().map_err(Clone::clone),
            Err(error) => Err(error.clone()),
        })
        .collect();
    let ranges: Vec<_> = targets.iter().flatten().map(|(_, range)| *range).collect();
    let read = transfer::read(client, wanted, &ranges);
    let filled = |(target, read): (Result<(Buffer, LocalRange)>, Result<u64>)| {
        let (buffer, _) = target?;
        read.map(|_| buffer)
    };
    targets.into_iter().zip(read).map(filled).collect()
}
