//! Batches of the upstream calls: columns in; plain status codes or bytes out, with the last error
//! beside them. The cost per item is low, for batches of very many small objects. Calls for one
//! object take values, return a plain number and raise on failure.

use mooncake_base::{Error, Result, Version};
use mooncake_store_client::{Located, Presence, ProbeTerms};
use mooncake_transfer_engine::LocalRange;
use pyo3::{
    prelude::*,
    types::{PyBytes, PyList},
};

use super::{
    Store,
    outcome::batch_options,
    transfer,
    transfer::{GetTarget, GetTerms},
};
use crate::{
    argument::{
        PackedKeys, Unsigned, check_same_length, column, invalid_as_missing, object_key,
        object_keys_of, one_key,
    },
    caller_memory::{Values, caller_range},
    error::{exception, forget_last, or_raise, py_error_for_key},
    options::PutOptions,
};

/// Reads of the upstream calls lease the objects.
const LEASED: GetTerms = GetTerms { is_exact: false, takes_lease: true };

/// One entry for each key, and the exception of the last failure.
type ColumnReply<'py> = (Bound<'py, PyList>, Option<Bound<'py, PyAny>>);

/// Puts values from addresses; returns 0 or an error code for each.
#[pyfunction]
pub(crate) fn put_columns<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = column)] addresses: Vec<Unsigned>,
    #[pyo3(from_py_with = column)] lengths: Vec<Unsigned>,
    options: Option<&Bound<'py, PutOptions>>,
    is_upsert: bool,
) -> PyResult<ColumnReply<'py>> {
    let memory = or_raise(store.py(), local_ranges(&addresses, &lengths))?;
    put(store, keys, &memory, options, is_upsert)
}

/// Puts values of one buffer each; returns 0 or an error code for each. Puts nothing if one value
/// is empty.
#[pyfunction]
pub(crate) fn put_values<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
    values: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PutOptions>>,
    is_upsert: bool,
) -> PyResult<ColumnReply<'py>> {
    let values = Values::of(values)?;
    if values.ranges().iter().any(|range| range.length() == 0) {
        let error = Error::invalid("a value is empty; nothing was stored");
        return or_raise(store.py(), Err(error));
    }
    put(store, keys, values.ranges(), options, is_upsert)
}

/// Gets objects into memory at addresses; returns a length or an error code for each.
#[pyfunction]
pub(crate) fn get_columns<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = column)] addresses: Vec<Unsigned>,
    #[pyo3(from_py_with = column)] lengths: Vec<Unsigned>,
) -> PyResult<ColumnReply<'py>> {
    let py = store.py();
    let memory = or_raise(py, local_ranges(&addresses, &lengths))?;
    let names = invalid_as_missing(object_keys_of(keys)?);
    or_raise(py, check_same_length("addresses", memory.len(), names.len()))?;
    let memory: Vec<&[LocalRange]> = memory.iter().map(std::slice::from_ref).collect();
    let store = store.get();
    let read = store.call(py, |client| transfer::get_into(client, names, &memory, LEASED))?;
    codes_and_failure(keys, read, |length| i64::try_from(length).unwrap_or(i64::MAX))
}

/// Gets objects as `bytes`; returns `b""` for a failure.
#[pyfunction]
pub(crate) fn get_values<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
) -> PyResult<ColumnReply<'py>> {
    let py = store.py();
    let names = invalid_as_missing(object_keys_of(keys)?);
    let store = store.get();
    let located = store.call(py, |client| transfer::locate(client, names, true))?;
    let mut filled = Vec::with_capacity(located.len());
    let mut ranges = Vec::with_capacity(located.len());
    for located in located.iter().flatten() {
        let (target, range) = <Py<PyBytes>>::allocate(py, located.length())?;
        filled.push(target);
        ranges.push(range);
    }
    let wanted: Vec<Result<&Located>> =
        located.iter().map(|located| located.as_ref().map_err(Clone::clone)).collect();
    let read = store.call(py, |client| transfer::read(client, wanted, &ranges))?;
    let nothing = PyBytes::new(py, b"");
    let mut filled = filled.into_iter();
    let mut failure = None;
    let values = located.iter().zip(read).enumerate().map(|(at, (located, read))| {
        // Every located object has a target, even if its read failed.
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
    Ok((values, failure_object(keys, failure)?))
}

/// Returns 1 if an object exists, which leases it, else 0. With `prefetch` an object that only a disk
/// has is brought into memory.
#[pyfunction]
#[pyo3(signature = (store, key, *, prefetch = false))]
pub(crate) fn is_present(
    store: &Bound<'_, Store>,
    key: &Bound<'_, PyAny>,
    prefetch: bool,
) -> PyResult<u8> {
    let (py, keys) = (store.py(), one_key(key)?);
    let terms = ProbeTerms { takes_lease: true, prefetches: prefetch };
    let Presence { found, failure } =
        store.get().call(py, |client| client.presence(keys, terms))?;
    match (failure, found.first()) {
        (None, Some(Some(is_there))) => {
            forget_last();
            Ok(u8::from(*is_there))
        }
        (failure, _) => or_raise(py, Err(failure.unwrap_or_else(no_outcome))),
    }
}

/// Puts a value from an address; returns 0.
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
    let names = PackedKeys::from_slice(std::slice::from_ref(key))?;
    let options = batch_options(py, options, is_upsert, 1, None)?;
    let memory = [caller_range(buffer_ptr.0, size.0)];
    let put = |client: &_| transfer::put(client, &names, &[&memory[..]], options);
    single_outcome(key, store.get().call(py, put)?).map(|_: Option<Version>| 0)
}

/// Gets an object into memory at an address; returns its length.
#[pyfunction]
pub(crate) fn get_one(
    store: &Bound<'_, Store>,
    key: &Bound<'_, PyAny>,
    buffer_ptr: Unsigned,
    size: Unsigned,
) -> PyResult<u64> {
    let names = invalid_as_missing(vec![object_key(key)?]);
    let memory = [caller_range(buffer_ptr.0, size.0)];
    let get = |client: &_| transfer::get_into(client, names, &[&memory[..]], LEASED);
    single_outcome(key, store.get().call(store.py(), get)?)
}

/// Returns the outcome of a batch of one, or raises its error.
fn single_outcome<T>(key: &Bound<'_, PyAny>, outcomes: Vec<Result<T>>) -> PyResult<T> {
    let outcome = outcomes.into_iter().next().unwrap_or_else(|| Err(no_outcome()));
    if outcome.is_ok() {
        forget_last();
    }
    outcome.map_err(|error| py_error_for_key(key.py(), &error, Some(key)))
}

fn no_outcome() -> Error {
    Error::internal("a batch of one gave no outcome")
}

fn put<'py>(
    store: &Bound<'py, Store>,
    keys: &Bound<'py, PyAny>,
    values: &[LocalRange],
    options: Option<&Bound<'py, PutOptions>>,
    is_upsert: bool,
) -> PyResult<ColumnReply<'py>> {
    let py = store.py();
    let names = PackedKeys::from_sequence(keys)?;
    or_raise(py, check_same_length("values", values.len(), names.len()))?;
    let options = batch_options(py, options, is_upsert, names.len(), None)?;
    let values: Vec<&[LocalRange]> = values.iter().map(std::slice::from_ref).collect();
    let store = store.get();
    let stored = store.call(py, |client| transfer::put(client, &names, &values, options))?;
    codes_and_failure(keys, stored, |_| 0)
}

fn local_ranges(addresses: &[Unsigned], lengths: &[Unsigned]) -> Result<Vec<LocalRange>> {
    check_same_length("lengths", lengths.len(), addresses.len())?;
    let pairs = addresses.iter().zip(lengths);
    Ok(pairs.map(|(address, length)| caller_range(address.0, length.0)).collect())
}

fn codes_and_failure<'py, T>(
    keys: &Bound<'py, PyAny>,
    results: Vec<Result<T>>,
    number: impl Fn(T) -> i64,
) -> PyResult<ColumnReply<'py>> {
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
    Ok((numbers, failure_object(keys, failure)?))
}

/// Returns the exception for the error of the key at that index.
fn failure_object<'py>(
    keys: &Bound<'py, PyAny>,
    failure: Option<(usize, Error)>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some((at, error)) = failure else {
        forget_last();
        return Ok(None);
    };
    let key = keys.get_item(at).ok();
    exception(keys.py(), &error, key.as_ref()).map(Some)
}
