//! Reads of ranges at regular distances of many objects: 10^5 ranges cross into Rust as a few
//! numbers.

use std::ops::Range;

use mooncake_base::{Error, ObjectKey, Result};
use mooncake_store_client::{BufferScope, Client, Grid, GridDimension, GridParts, GridsRead};
use pyo3::{
    prelude::*,
    types::{PyList, PyTuple},
};

use super::{Store, outcome::outcome_list};
use crate::{
    argument::{Unsigned, call_with_valid, check_same_length, invalid_as_missing, object_keys},
    caller_memory::caller_range,
    error::or_raise,
};

/// Objects and the ranges to read of each.
pub(crate) struct GridTable {
    rows: Vec<Result<GridRow>>,
    grids: Vec<Grid>,
}

struct GridRow {
    key: ObjectKey,
    /// The grids of the object.
    grids: Range<usize>,
}

/// A grid in Python: address of the memory, offset in the object and length of the first range; for
/// each dimension, outermost first, the number of ranges, and their distances in object and memory.
#[derive(FromPyObject)]
pub(crate) struct GridArgument(Unsigned, Unsigned, Unsigned, Vec<(Unsigned, Unsigned, Unsigned)>);

impl GridTable {
    /// Makes a table: a list of grids for each key.
    pub(crate) fn new(
        keys: &[Bound<'_, PyAny>],
        lists: Vec<Vec<GridArgument>>,
        py: Python<'_>,
    ) -> PyResult<Self> {
        or_raise(py, check_same_length("grids", lists.len(), keys.len()))?;
        let mut grids = Vec::with_capacity(lists.iter().map(Vec::len).sum());
        let rows =
            invalid_as_missing(object_keys(keys)?).into_iter().zip(lists).map(|(key, list)| {
                let first = grids.len();
                for grid in list {
                    grids.push(Grid::try_from(grid)?);
                }
                Ok(GridRow { key: key?, grids: first..grids.len() })
            });
        Ok(Self { rows: rows.collect(), grids })
    }

    /// Reads the ranges with one call to the master and one transfer per peer. Returns what was
    /// read of each object, or the first failure among its ranges.
    pub(crate) fn read(
        self,
        client: &Client,
        is_registered: bool,
        lease: bool,
        tag: &str,
    ) -> Vec<Result<GridsOutcome>> {
        let Self { rows, grids } = self;
        let scope = if is_registered { BufferScope::Registered } else { BufferScope::Anywhere };
        call_with_valid(rows, |rows| {
            let parts = rows
                .iter()
                .map(|row| GridParts { key: &row.key, grids: &grids[row.grids.clone()] });
            client.read_grids(&parts.collect::<Vec<_>>(), scope, lease, tag)
        })
        .into_iter()
        .map(|read| read.map(GridsOutcome))
        .collect()
    }
}

/// The outcome of one object: in Python the number of bytes, the version of the object, and the
/// value of the wanted tag.
pub(crate) struct GridsOutcome(GridsRead);

impl<'py> IntoPyObject<'py> for GridsOutcome {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        let GridsRead { nbytes, version, tag } = self.0;
        (nbytes, version.0, &*tag).into_pyobject(py)
    }
}

impl TryFrom<GridArgument> for Grid {
    type Error = Error;

    fn try_from(grid: GridArgument) -> Result<Self> {
        let GridArgument(Unsigned(address), Unsigned(offset), Unsigned(length), dimensions) = grid;
        let dimension =
            |(count, object_step, memory_step): (Unsigned, Unsigned, Unsigned)| GridDimension {
                count: count.0 as u64,
                object_step: object_step.0 as u64,
                memory_step: memory_step.0 as u64,
            };
        let dimensions = dimensions.into_iter().map(dimension).collect();
        Self::new(offset as u64, length as u64, dimensions, |span| caller_range(address, span))
    }
}

/// Reads ranges of objects into memory at addresses. Returns for each object the bytes read, its
/// version, and the value of the tag with the name `tag`. Leases the objects unless `lease` is false.
#[pyfunction]
#[pyo3(signature = (store, keys, grids, *, is_registered = false, lease = true, tag = ""))]
pub(crate) fn read_grids<'py>(
    store: &Bound<'py, Store>,
    keys: Vec<Bound<'py, PyAny>>,
    grids: Vec<Vec<GridArgument>>,
    is_registered: bool,
    lease: bool,
    tag: &str,
) -> PyResult<Bound<'py, PyList>> {
    let table = GridTable::new(&keys, grids, store.py())?;
    let read =
        store.get().call(store.py(), |client| table.read(client, is_registered, lease, tag))?;
    outcome_list(store.py(), &keys, read)
}
