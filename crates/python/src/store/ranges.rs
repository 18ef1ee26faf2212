//! Reads of byte ranges of many objects, given as columns of 64-bit integers: a list of 10^5 ranges
//! crosses into Rust without an object for each number.

use std::ops::Range;

use mooncake_base::{Error, ObjectKey, Result};
use mooncake_store_client::{BufferScope, Client, Parts};
use mooncake_transfer_engine::LocalRange;
use pyo3::{buffer::PyBuffer, prelude::*, types::PyList};

use super::{Store, outcome::outcome_list};
use crate::{
    argument::{call_with_valid, check_same_length, invalid_as_missing, object_keys},
    buffer::caller_range,
    error::or_raise,
};

/// Objects and the ranges to read of each.
pub(crate) struct RangeTable {
    rows: Vec<Result<Row>>,
    offsets: Vec<u64>,
    memory: Vec<LocalRange>,
}

struct Row {
    key: ObjectKey,
    /// The ranges of the object.
    ranges: Range<usize>,
}

/// The columns of a table as Python objects with the buffer protocol.
#[derive(FromPyObject)]
pub(crate) struct Columns<'py>(
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
);

impl RangeTable {
    /// Makes a table. The columns are the first range of each object with the number of all ranges
    /// at the end, and for each range the address of its memory, its offset in the object, and its
    /// length.
    pub(crate) fn new(keys: &[Bound<'_, PyAny>], columns: &Columns<'_>) -> PyResult<Self> {
        let [starts, addresses, offsets, lengths] = [
            integers(&columns.0)?,
            integers(&columns.1)?,
            integers(&columns.2)?,
            integers(&columns.3)?,
        ];
        let checked = check_starts(&starts, keys.len(), addresses.len())
            .and_then(|()| check_same_length("offsets", offsets.len(), addresses.len()))
            .and_then(|()| check_same_length("lengths", lengths.len(), addresses.len()));
        or_raise(columns.0.py(), checked)?;
        let names = invalid_as_missing(object_keys(keys)?).into_iter();
        let rows = names.zip(starts.windows(2)).map(|(key, bounds)| {
            key.map(|key| Row { key, ranges: bounds[0] as usize..bounds[1] as usize })
        });
        let ranges = addresses.into_iter().zip(lengths);
        Ok(Self {
            rows: rows.collect(),
            offsets,
            memory: ranges
                .map(|(address, length)| caller_range(address as usize, length as usize))
                .collect(),
        })
    }

    /// Reads the ranges with one call to the master and one transfer per peer. Returns the bytes
    /// read of each object, or the first failure among its ranges.
    pub(crate) fn read(self, client: &Client, is_registered: bool) -> Vec<Result<u64>> {
        let Self { rows, offsets, memory } = self;
        let scope = if is_registered { BufferScope::Registered } else { BufferScope::Anywhere };
        call_with_valid(rows, |rows| {
            let parts = rows.iter().map(|Row { key, ranges }| Parts {
                key,
                offsets: &offsets[ranges.clone()],
                memory: &memory[ranges.clone()],
            });
            client.read_all_parts(&parts.collect::<Vec<_>>(), scope)
        })
    }
}

/// Reads ranges of objects into memory at addresses; returns the bytes read of each object.
#[pyfunction]
#[pyo3(signature = (store, keys, columns, *, is_registered = false))]
pub(crate) fn read_ranges<'py>(
    store: &Bound<'py, Store>,
    keys: Vec<Bound<'py, PyAny>>,
    columns: Columns<'py>,
    is_registered: bool,
) -> PyResult<Bound<'py, PyList>> {
    let table = RangeTable::new(&keys, &columns)?;
    let read = store.get().call(store.py(), |client| table.read(client, is_registered))?;
    outcome_list(store.py(), &keys, read)
}

/// Copies a column of 64-bit integers. Negative numbers become huge ones, which no object, no
/// memory and no table has.
fn integers(column: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let numbers = PyBuffer::<i64>::get(column)?.to_vec(column.py())?;
    Ok(numbers.into_iter().map(i64::cast_unsigned).collect())
}

fn check_starts(starts: &[u64], keys: usize, ranges: usize) -> Result<()> {
    let is_ascending = starts.is_sorted();
    let (first, last) = (starts.first(), starts.last());
    if starts.len() == keys + 1
        && is_ascending
        && first == Some(&0)
        && last == Some(&(ranges as u64))
    {
        return Ok(());
    }
    Err(Error::invalid(
        "the starts are not one number for each key, from 0 to the number of ranges",
    )
    .with("keys", keys)
    .with("starts", starts.len())
    .with("ranges", ranges))
}
