//! Arguments and outcomes that blocking calls and calls of event loops share.

use mooncake_base::{Error, ErrorCode, ObjectKey, Result};
use mooncake_store_client::{
    Client, FoundKeys, ObjectPage, ObjectStatus, ObjectSummary, ProbeTerms, RemovalCounts,
    RemovalTerms, Suffixes,
};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyList},
};

use crate::{
    argument::{call_with_valid, check_same_length, invalid_as_missing, object_keys},
    caller_memory::Views,
    error::{exception, forget_last, or_raise},
    options::PutOptions,
    store::Keys,
};

/// Ends of keys with which no object may exist beside one that is put.
#[pyclass(frozen, module = "mooncake._native", name = "AbsentSuffixes")]
#[derive(Debug)]
pub(crate) struct AbsentSuffixes(Suffixes);

#[pymethods]
impl AbsentSuffixes {
    #[new]
    fn new(suffixes: Vec<Vec<u8>>) -> Self {
        Self(Suffixes::new(suffixes))
    }
}

/// Objects that must not exist for a put: those with these keys, or those beside each item.
#[derive(FromPyObject)]
pub(crate) enum Absent<'py> {
    Beside(Bound<'py, AbsentSuffixes>),
    Keys(Keys<'py>),
}

/// Returns the options of a batch of puts.
pub(crate) fn batch_options(
    py: Python<'_>,
    options: Option<&Bound<'_, PutOptions>>,
    is_upsert: bool,
    items: usize,
    absent: Option<&Absent<'_>>,
) -> PyResult<mooncake_store_client::PutOptions> {
    let mut made = match options {
        Some(options) => or_raise(py, options.get().for_batch(is_upsert, items))?,
        None => mooncake_store_client::PutOptions { is_upsert, ..Default::default() },
    };
    match absent {
        Some(Absent::Beside(suffixes)) => made.absent_suffixes = suffixes.get().0.clone(),
        // No object has an invalid key.
        Some(Absent::Keys(keys)) => {
            made.if_absent = object_keys(keys)?.into_iter().filter_map(Result::ok).collect();
        }
        None => {}
    }
    Ok(made)
}

/// An object in a listing: key, length, whether it is complete, number of copies.
pub(crate) type ListedObject<'py> = (Bound<'py, PyBytes>, u64, bool, u32, u32);

pub(crate) fn probe(
    client: &Client,
    keys: Vec<Result<ObjectKey>>,
    terms: ProbeTerms,
) -> Vec<Result<ObjectStatus>> {
    call_with_valid(keys, |keys| {
        let found = client.exists(&keys, terms);
        let absent = |key: &ObjectKey| {
            Error::new(ErrorCode::OBJECT_NOT_FOUND, "no object has that key").with("key", key)
        };
        found.into_iter().zip(&keys).map(|(found, key)| found?.ok_or_else(|| absent(key))).collect()
    })
}

/// Looks for objects with the keys, or else with keys that are these with a suffix. The bit 1 of a
/// result stands for the key itself, the bits from 2 on for the suffixes.
pub(crate) fn probe_suffixes(
    client: &Client,
    keys: Vec<Result<ObjectKey>>,
    suffixes: &[Vec<u8>],
) -> Vec<Result<u32>> {
    let bits = |found: FoundKeys| u32::from(found.is_there) | (found.suffixes << 1);
    let absent_as_none = |found: Result<u32>| match found {
        Err(error) if error.code() == ErrorCode::OBJECT_NOT_FOUND => Ok(0),
        found => found,
    };
    call_with_valid(keys, |keys| {
        let found = client.exists_or_suffixed(&keys, suffixes);
        found.into_iter().map(|found| found.map(bits)).collect()
    })
    .into_iter()
    .map(absent_as_none)
    .collect()
}

/// Returns whether a probed object exists and is complete.
pub(crate) fn is_there(found: Result<ObjectStatus>) -> Result<bool> {
    match found {
        Ok(status) => Ok(matches!(status, ObjectStatus::Complete { .. })),
        Err(error) if error.code() == ErrorCode::OBJECT_NOT_FOUND => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the length of a probed object.
pub(crate) fn length_of(found: Result<ObjectStatus>) -> Result<u64> {
    match found? {
        ObjectStatus::Complete { length } => Ok(length),
        ObjectStatus::Writing => {
            Err(Error::new(ErrorCode::REPLICA_IS_NOT_READY, "the object is still being written"))
        }
    }
}

/// Converts a page of a listing; the boolean is true for the last page.
pub(crate) fn listing(py: Python<'_>, page: ObjectPage) -> (Vec<ListedObject<'_>>, bool) {
    let entry = |object: ObjectSummary| {
        let key = PyBytes::new(py, object.key.as_bytes());
        (key, object.length, object.is_complete, object.replicas, object.disk_replicas)
    };
    (page.objects.into_iter().map(entry).collect(), page.is_last)
}

/// Exports one writable buffer for each key.
pub(crate) fn writable_views(
    keys: &[Bound<'_, PyAny>],
    buffers: &[Bound<'_, PyAny>],
) -> PyResult<Vec<Views>> {
    if let Some(first) = keys.first() {
        or_raise(first.py(), check_same_length("buffers", buffers.len(), keys.len()))?;
    }
    buffers.iter().map(Views::writable).collect()
}

/// Parses the key of a call that needs an existing object.
pub(crate) fn single_key(key: Bound<'_, PyAny>) -> PyResult<Result<ObjectKey>> {
    let keys = invalid_as_missing(object_keys(&[key])?);
    let missing = || Err(Error::internal("a batch of one key gave no key"));
    Ok(keys.into_iter().next().unwrap_or_else(missing))
}

/// Returns true for each success, as calls without a value have it in Python.
pub(crate) fn done(results: Vec<Result<()>>) -> Vec<Result<bool>> {
    results.into_iter().map(|result| result.map(|()| true)).collect()
}

/// Numbers of objects: removed, and left because they are leased, hard-pinned or being copied.
pub(crate) type RemovalNumbers = (u64, u64, u64, u64);

/// Returns the numbers of a removal as Python has them.
pub(crate) fn removal_numbers(counts: RemovalCounts) -> RemovalNumbers {
    (counts.removed, counts.leased, counts.hard_pinned, counts.being_copied)
}

/// Returns the terms of the removal of any versions.
pub(crate) fn terms_of_sweep(is_forced: bool, spares_hard_pinned: bool) -> RemovalTerms {
    RemovalTerms { is_forced, spares_hard_pinned, if_version: None }
}

/// Returns a list with each value, or the exception in its place.
pub(crate) fn outcome_list<'a, 'py: 'a, T: IntoPyObject<'py>>(
    py: Python<'py>,
    keys: impl IntoIterator<Item = &'a Bound<'py, PyAny>>,
    results: Vec<Result<T>>,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    if results.iter().all(Result::is_ok) {
        forget_last();
    }
    for (key, result) in keys.into_iter().zip(results) {
        match result {
            Ok(value) => list.append(value)?,
            Err(error) => list.append(exception(py, &error, Some(key))?)?,
        }
    }
    Ok(list)
}
