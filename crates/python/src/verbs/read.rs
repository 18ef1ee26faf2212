//! Reads into memory of the caller, and of ranges of located objects.

use std::slice;

use mooncake_transfer_engine::LocalRange;
use pyo3::{prelude::*, types::PyBytes};

use super::{Begun, Copied, Driver, methods};
use crate::{
    argument::{Unsigned, invalid_as_missing, object_keys},
    buffer::{Buffer, uninit_bytes},
    caller_memory::Views,
    error::or_raise,
    pending::Pending,
    store::{
        Keys, Store,
        grids::{GridArgument, GridTable},
        located::{Located, RangeRead},
        outcome::writable_views,
        transfer::{self, GetTerms},
    },
};

methods! {
    /// Gets objects into writable buffers; returns their lengths. Leases the objects unless `lease`
    /// is false.
    #[pyo3(signature = (keys, buffers, *, lease = true))]
    fn read_into<'py>(
        &self,
        py: Python<'py>,
        keys: Keys<'py>,
        buffers: Vec<Bound<'py, PyAny>>,
        lease: bool,
    ) -> PyResult<Begun<Self>> {
        let views = writable_views(&keys, &buffers)?;
        let names = invalid_as_missing(object_keys(&keys)?);
        let terms = GetTerms { is_exact: false, takes_lease: lease };
        self.drive_each(py, keys, views, move |client, views| {
            let ranges: Vec<&[LocalRange]> = views.iter().map(Views::ranges).collect();
            transfer::get_into(client, names, &ranges, terms)
        })
    }

    /// Locates objects, to read ranges of them. Leases them unless `lease` is false.
    #[pyo3(signature = (keys, *, lease = true))]
    fn locate(&self, py: Python<'_>, keys: Keys<'_>, lease: bool) -> PyResult<Begun<Self>> {
        self.drive_for_keys(py, keys, move |client, names| Located::find(client, names, lease))
    }

    /// Reads a range of a located object into a writable buffer, which is filled.
    fn read_located_into(
        &self,
        py: Python<'_>,
        located: &Bound<'_, Located>,
        offset: Unsigned,
        buffer: &Bound<'_, PyAny>,
    ) -> PyResult<Begun<Self>> {
        let range = RangeRead::new(located, offset, buffer)?;
        self.drive_value(py, range, |client, range| range.read(client))
    }
}

#[pymethods]
impl Store {
    /// Reads a range of a located object as `bytes`.
    fn read_located<'py>(
        &self,
        py: Python<'py>,
        located: &Bound<'py, Located>,
        offset: Unsigned,
        length: Unsigned,
    ) -> PyResult<Py<PyBytes>> {
        let (bytes, range) = uninit_bytes(py, length.0 as u64)?;
        let located = located.get();
        let read =
            self.call(py, |client| located.read(client, offset.0 as u64, slice::from_ref(&range)))?;
        or_raise(py, read).map(|_| bytes)
    }
}

#[pymethods]
impl Pending {
    /// Begins to read a range of a located object as `bytes`.
    fn read_located(
        &self,
        py: Python<'_>,
        located: &Bound<'_, Located>,
        offset: Unsigned,
        length: Unsigned,
    ) -> PyResult<u64> {
        let (buffer, range) = Buffer::uninit(length.0 as u64, false)?;
        let located = located.get().clone();
        self.drive_value(py, (), move |client, ()| {
            located.read(client, offset.0 as u64, &[range]).map(|_| Copied(buffer))
        })
    }

    /// Begins to read ranges of objects into memory at addresses, which belongs to `owner`. The
    /// outcome of each item is the number of bytes, the version, and the value of the tag.
    #[pyo3(signature = (keys, grids, owner, *, lease = true, tag = ""))]
    fn read_grids(
        &self,
        py: Python<'_>,
        keys: Keys<'_>,
        grids: Vec<Vec<GridArgument>>,
        owner: Py<PyAny>,
        lease: bool,
        tag: &str,
    ) -> PyResult<u64> {
        let table = GridTable::new(&keys, grids, py)?;
        let tag = tag.to_owned();
        self.drive_each(py, keys, owner, move |client, _| table.read(client, false, lease, &tag))
    }
}
