//! Reads and writes of parts of many objects, given as columns of numbers beside the keys.

use mooncake_base::{Error, ObjectKey, Result};
use mooncake_store_client::{BufferScope, Client, PartOutcomes, Parts, PutOptions};
use mooncake_transfer_engine::LocalRange;
use pyo3::{prelude::*, types::PyList};

use super::pool::Pool;
use crate::{
    argument::{Unsigned, call_with_valid, check_same_length},
    caller_memory::caller_ranges,
    error::exception,
};

/// For each key a list with one number for each of its parts.
pub(crate) type Columns = Vec<Vec<Unsigned>>;

/// Keys and their parts. A key whose columns differ in length is an error of its row only.
pub(crate) struct PartTable {
    rows: Vec<Result<PartRow>>,
}

struct PartRow {
    key: ObjectKey,
    base: u64,
    offsets: Vec<u64>,
    memory: Vec<LocalRange>,
}

impl PartTable {
    /// Makes a table. The memory of a part begins at its address, plus the base of its key if bases
    /// are given.
    ///
    /// # Errors
    /// A column has another length than the list of keys.
    pub(crate) fn new(
        keys: Vec<Result<ObjectKey>>,
        bases: Option<Vec<Unsigned>>,
        addresses: Columns,
        offsets: Columns,
        lengths: Columns,
    ) -> Result<Self> {
        check_same_length("addresses", addresses.len(), keys.len())?;
        check_same_length("offsets", offsets.len(), keys.len())?;
        check_same_length("lengths", lengths.len(), keys.len())?;
        let bases = match bases {
            Some(bases) => bases,
            None => vec![Unsigned(0); keys.len()],
        };
        check_same_length("bases", bases.len(), keys.len())?;
        let columns = bases.into_iter().zip(addresses).zip(offsets).zip(lengths);
        let rows = keys.into_iter().zip(columns);
        let row = |(key, (((base, addresses), offsets), lengths))| {
            row(key, base, addresses, offsets, lengths)
        };
        Ok(Self { rows: rows.map(row).collect() })
    }

    /// Reads the parts into any memory.
    pub(crate) fn get(self, client: &Client) -> Vec<PartOutcomes> {
        call_with_valid(self.rows, |rows| client.read_parts(&parts(&rows), BufferScope::Anywhere))
    }

    /// Reads the parts into registered memory. In a memory pool, of which all is known to the
    /// engine, a part stays within the buffer that its base was registered with.
    pub(crate) fn get_registered(self, client: &Client, pool: Option<&Pool>) -> Vec<PartOutcomes> {
        call_with_valid(self.rows, |rows| {
            let buffer_of = |row: &PartRow| pool.and_then(|pool| pool.buffer_at(row.base));
            let buffers: Vec<_> = rows.iter().map(buffer_of).collect();
            client.read_parts(&parts(&rows), BufferScope::RegisteredBuffers(&buffers))
        })
    }

    /// Reads the parts of objects that `begin_reads` located.
    pub(crate) fn read_begun(self, client: &Client) -> Vec<Result<u64>> {
        call_with_valid(self.rows, |rows| client.sessions().read(&parts(&rows)))
    }

    /// Writes the parts of objects that `begin_writes` reserved.
    pub(crate) fn write_begun(self, client: &Client) -> Vec<Result<u64>> {
        call_with_valid(self.rows, |rows| client.sessions().write(&parts(&rows)))
    }
}

/// Reserves space for the valid items.
pub(crate) fn begin_writes(
    client: &Client,
    keys: Vec<Result<ObjectKey>>,
    lengths: &[Unsigned],
    mut options: PutOptions,
) -> Vec<Result<bool>> {
    let item = |(at, (key, length)): (usize, (Result<ObjectKey>, &Unsigned))| {
        Ok((at, (key?, length.0 as u64)))
    };
    let items = keys.into_iter().zip(lengths).enumerate().map(item).collect();
    call_with_valid(items, |items: Vec<(usize, (ObjectKey, u64))>| {
        // There is one group per item, so the groups of invalid items are dropped, too.
        if !options.groups.is_empty() {
            options.groups = items.iter().map(|(at, _)| options.groups[*at].clone()).collect();
        }
        let items: Vec<_> = items.into_iter().map(|(_, item)| item).collect();
        let begun = client.sessions().begin_writes(&items, &options);
        begun.into_iter().map(|begun| begun.map(|()| true)).collect()
    })
}

/// Returns for each key a list of lengths and exceptions, or the exception that counts for all its
/// parts.
pub(crate) fn lists<'py>(
    py: Python<'py>,
    keys: &[Bound<'py, PyAny>],
    results: Vec<PartOutcomes>,
) -> PyResult<Bound<'py, PyList>> {
    let lists = PyList::empty(py);
    for (key, result) in keys.iter().zip(results) {
        match result {
            Ok(parts) => {
                lists.append(super::outcome::outcome_list(py, std::iter::repeat(key), parts)?)?
            }
            Err(error) => lists.append(exception(py, &error, Some(key))?)?,
        }
    }
    Ok(lists)
}

fn row(
    key: Result<ObjectKey>,
    base: Unsigned,
    addresses: Vec<Unsigned>,
    offsets: Vec<Unsigned>,
    lengths: Vec<Unsigned>,
) -> Result<PartRow> {
    let key = key?;
    if offsets.len() != addresses.len() || lengths.len() != addresses.len() {
        return Err(Error::invalid("the lists of the key's parts differ in length")
            .with("addresses", addresses.len())
            .with("offsets", offsets.len())
            .with("lengths", lengths.len()));
    }
    let ranges = addresses.iter().zip(&lengths);
    // A wrapped sum is an address outside of any memory of the caller; the transfer reports it.
    let ranges = ranges.map(|(at, length)| (base.0.wrapping_add(at.0), length.0)).collect();
    let offsets = offsets.into_iter().map(|offset| offset.0 as u64).collect();
    Ok(PartRow { key, base: base.0 as u64, offsets, memory: caller_ranges(ranges) })
}

fn parts(rows: &[PartRow]) -> Vec<Parts<'_>> {
    rows.iter()
        .map(|row| Parts { key: &row.key, offsets: &row.offsets, memory: &row.memory })
        .collect()
}
