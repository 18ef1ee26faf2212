//! Batches as the established calls write them: columns in; plain numbers or bytes out, with one
//! failure beside them that speaks for the others. Of very many small objects each should cost
//! little. Calls of one object have a shorter way: values in, a plain number out, a failure raised.

use mooncake_base::{Error, Result};
use mooncake_store_client::{Located, Presence};
use mooncake_transfer_engine::LocalRange;
use pyo3::{
    prelude::*,
    types::{PyBytes, PyList},
};

use super::{Store, batch_options, moves, moves::Blank};
use crate::{
    argument::{Names, Unsigned, as_absent, column, listed_keys, object_key, one_key, same_length},
    buffer::{Values, foreign_range},
    error::{exception, or_raise, raised_of},
    options::PutOptions,
};

/// One entry for each key, and the last failure.
type Answer<'py> = (Bound<'py, PyList>, Option<Bound<'py, PyAny>>);

/// Puts values that lie at addresses: 0 or the number of a failure for each.
#[pyfunction]
pub(crate) fn put_columns<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = column)] addresses: Vec<Unsigned>,
    #[pyo3(from_py_with = column)] lengths: Vec<Unsigned>,
    options: Option<&Bound<'py, PutOptions>>,
    is_upsert: bool,
) -> PyResult<Answer<'py>> {
    let memory = or_raise(store.py(), joined(&addresses, &lengths))?;
    put(store, keys, &memory, (options, is_upsert))
}

/// Puts values, each of one buffer: 0 or the number of a failure for each. If one of them is empty
/// nothing is put.
#[pyfunction]
pub(crate) fn put_values<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
    values: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PutOptions>>,
    is_upsert: bool,
) -> PyResult<Answer<'py>> {
    let values = Values::of(values)?;
    if values.ranges().iter().any(|range| range.length() == 0) {
        let error = Error::invalid("a value is empty; nothing was stored");
        return or_raise(store.py(), Err(error));
    }
    put(store, keys, values.ranges(), (options, is_upsert))
}

/// Gets objects into memory at addresses: how many bytes each has, or the number of a failure.
#[pyfunction]
pub(crate) fn get_columns<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = column)] addresses: Vec<Unsigned>,
    #[pyo3(from_py_with = column)] lengths: Vec<Unsigned>,
) -> PyResult<Answer<'py>> {
    let py = store.py();
    let memory = or_raise(py, joined(&addresses, &lengths))?;
    let names = as_absent(listed_keys(keys)?);
    or_raise(py, same_length("addresses", memory.len(), names.len()))?;
    let memory: Vec<&[LocalRange]> = memory.iter().map(std::slice::from_ref).collect();
    let store = store.get();
    let read = store.call(py, |client| moves::get_into(client, names, &memory, false))?;
    numbers(keys, read, |length| i64::try_from(length).unwrap_or(i64::MAX))
}

/// Gets objects as `bytes`; none of them for a failure.
#[pyfunction]
pub(crate) fn get_values<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
) -> PyResult<Answer<'py>> {
    let py = store.py();
    let names = as_absent(listed_keys(keys)?);
    let store = store.get();
    let located = store.call(py, |client| moves::locate(client, names))?;
    let mut filled = Vec::with_capacity(located.len());
    let mut ranges = Vec::with_capacity(located.len());
    for located in located.iter().flatten() {
        let (blank, range) = <Py<PyBytes>>::blank(py, located.length())?;
        filled.push(blank);
        ranges.push(range);
    }
    let wanted: Vec<Result<&Located>> =
        located.iter().map(|located| located.as_ref().map_err(Clone::clone)).collect();
    let read = store.call(py, |client| moves::read(client, wanted, &ranges))?;
    let nothing = PyBytes::new(py, b"");
    let mut filled = filled.into_iter();
    let mut failure = None;
    let values = located.iter().zip(read).enumerate().map(|(at, (located, read))| {
        // One for each object that was found, also if it was not read in the end.
        let value = located.is_ok().then(|| filled.next()).flatten();
        match (read, value) {
            (Ok(_), Some(value)) => value.into_bound(py),
            (read, _) => {
                let missing = || Error::internal("an object was read that was not located");
                failure = Some((at, read.err().unwrap_or_else(missing)));
                nothing.clone()
            }
        }
    });
    let values = PyList::new(py, values.collect::<Vec<_>>())?;
    Ok((values, told(keys, failure)?))
}

/// Says whether an object is there, and leases it.
#[pyfunction]
pub(crate) fn is_present(store: &Bound<'_, Store>, key: &Bound<'_, PyAny>) -> PyResult<u8> {
    let (py, keys) = (store.py(), one_key(key)?);
    let Presence { found, failure } = store.get().call(py, |client| client.presence(keys, true))?;
    match (failure, found.first()) {
        (None, Some(Some(is_there))) => Ok(u8::from(*is_there)),
        (failure, _) => or_raise(py, Err(failure.unwrap_or_else(unanswered))),
    }
}

/// Puts a value that lies at an address.
#[pyfunction]
pub(crate) fn put_one(
    store: &Bound<'_, Store>,
    key: &Bound<'_, PyAny>,
    buffer_ptr: Unsigned,
    size: Unsigned,
    options: Option<&Bound<'_, PutOptions>>,
    is_upsert: bool,
) -> PyResult<u8> {
    let py = store.py();
    let names = Names::each(std::slice::from_ref(key))?;
    let options = batch_options(py, options, is_upsert, 1)?;
    let memory = [foreign_range(buffer_ptr.0, size.0)];
    let put = |client: &_| moves::put(client, &names, &[&memory[..]], options);
    alone(key, store.get().call(py, put)?).map(|_: bool| 0)
}

/// Gets an object into memory at an address: how many bytes it has.
#[pyfunction]
pub(crate) fn get_one(
    store: &Bound<'_, Store>,
    key: &Bound<'_, PyAny>,
    buffer_ptr: Unsigned,
    size: Unsigned,
) -> PyResult<u64> {
    let names = as_absent(vec![object_key(key)?]);
    let memory = [foreign_range(buffer_ptr.0, size.0)];
    let get = |client: &_| moves::get_into(client, names, &[&memory[..]], false);
    alone(key, store.get().call(store.py(), get)?)
}

/// The outcome of a batch of one, its failure raised.
fn alone<T>(key: &Bound<'_, PyAny>, outcomes: Vec<Result<T>>) -> PyResult<T> {
    let outcome = outcomes.into_iter().next().unwrap_or_else(|| Err(unanswered()));
    outcome.map_err(|error| raised_of(key.py(), &error, Some(key)))
}

fn unanswered() -> Error {
    Error::internal("a batch of one gave no outcome")
}

fn put<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
    values: &[LocalRange],
    (options, is_upsert): (Option<&Bound<'py, PutOptions>>, bool),
) -> PyResult<Answer<'py>> {
    let py = store.py();
    let names = Names::of(keys)?;
    or_raise(py, same_length("values", values.len(), names.len()))?;
    let options = batch_options(py, options, is_upsert, names.len())?;
    let values: Vec<&[LocalRange]> = values.iter().map(std::slice::from_ref).collect();
    let store = store.get();
    let stored = store.call(py, |client| moves::put(client, &names, &values, options))?;
    numbers(keys, stored, |_| 0)
}

fn joined(addresses: &[Unsigned], lengths: &[Unsigned]) -> Result<Vec<LocalRange>> {
    same_length("lengths", lengths.len(), addresses.len())?;
    let pairs = addresses.iter().zip(lengths);
    Ok(pairs.map(|(address, length)| foreign_range(address.0, length.0)).collect())
}

fn numbers<'py, T>(
    keys: &Bound<'py, PyAny>,
    results: Vec<Result<T>>,
    number: impl Fn(T) -> i64,
) -> PyResult<Answer<'py>> {
    let mut failure = None;
    let numbers = results.into_iter().enumerate().map(|(at, result)| match result {
        Ok(value) => number(value),
        Err(error) => {
            let number = i64::from(error.code().number());
            failure = Some((at, error));
            number
        }
    });
    let numbers = PyList::new(keys.py(), numbers)?;
    Ok((numbers, told(keys, failure)?))
}

/// The failure of the key at that place.
fn told<'py>(
    keys: &Bound<'py, PyAny>,
    failure: Option<(usize, Error)>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some((at, error)) = failure else { return Ok(None) };
    let key = keys.get_item(at).ok();
    exception(keys.py(), &error, key.as_ref()).map(Some)
}
