//! Parsing of Python arguments into checked types.

use mooncake_base::{Error, ErrorCode, KeyBatch, KeyRef, ObjectKey, Result};
use mooncake_store_client::Selector;
use pyo3::{
    Borrowed,
    exceptions::{PyOverflowError, PyTypeError},
    prelude::*,
    types::{PyBytes, PyList, PyString},
};

/// A non-negative integer: an address, a length or a count.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unsigned(pub(crate) usize);

impl<'py> FromPyObject<'_, 'py> for Unsigned {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.extract::<usize>().map(Self).map_err(|error| {
            let what = "addresses, sizes and counts are integers from 0 to 2^64-1";
            let py = object.py();
            if error.is_instance_of::<PyOverflowError>(py) {
                return PyTypeError::new_err(what);
            }
            match object.get_type().name() {
                Ok(kind) if error.is_instance_of::<PyTypeError>(py) => {
                    PyTypeError::new_err(format!("{what}, not {kind}"))
                }
                _ => error,
            }
        })
    }
}

/// Reads a number for `from_py_with`. A negative or too large number is a `TypeError`; PyO3 adds
/// the name of the argument.
pub(crate) fn unsigned<T: TryFrom<u64>>(object: &Bound<'_, PyAny>) -> PyResult<T> {
    let Unsigned(number) = object.extract()?;
    T::try_from(number as u64).map_err(|_| PyTypeError::new_err("the number is out of range"))
}

/// Reads a number or `None` for `from_py_with`.
pub(crate) fn optional_unsigned<T: TryFrom<u64>>(object: &Bound<'_, PyAny>) -> PyResult<Option<T>> {
    if object.is_none() { Ok(None) } else { unsigned(object).map(Some) }
}

/// A number among the options of our own API. One out of range is an invalid argument that names the
/// option, as other wrong values of options are.
#[derive(Debug)]
pub(crate) struct NumberOption<T>(std::result::Result<T, String>);

impl<T> NumberOption<T> {
    /// Returns the number.
    ///
    /// # Errors
    /// `INVALID_PARAMS`: it is out of range.
    pub(crate) fn named(self, name: &'static str) -> Result<T> {
        let out_of_range = |text| Error::invalid("the number is out of range").with(name, text);
        self.0.map_err(out_of_range)
    }
}

impl<'py, T: TryFrom<u64>> FromPyObject<'_, 'py> for NumberOption<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let number = match object.extract::<u64>() {
            Ok(number) => T::try_from(number).ok(),
            Err(error) if error.is_instance_of::<PyOverflowError>(py) => None,
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                let kind = object.get_type().name()?;
                return Err(PyTypeError::new_err(format!("a number is an integer, not {kind}")));
            }
            Err(error) => return Err(error),
        };
        Ok(Self(number.map_or_else(|| Err(object.to_string()), Ok)))
    }
}

/// The keys of a batch, packed end to end in one buffer.
#[derive(Debug)]
pub(crate) struct PackedKeys {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl PackedKeys {
    /// Packs the keys of any sequence.
    pub(crate) fn from_sequence(keys: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut bytes = Vec::new();
        let ends = map_sequence(keys, KEYS, |key| Self::add(&mut bytes, &key))?;
        Ok(Self { bytes, ends })
    }

    /// Packs the keys of a slice.
    pub(crate) fn from_slice(keys: &[Bound<'_, PyAny>]) -> PyResult<Self> {
        let mut bytes = Vec::new();
        let ends = keys.iter().map(|key| Self::add(&mut bytes, key)).collect::<PyResult<_>>()?;
        Ok(Self { bytes, ends })
    }

    /// Appends one key and returns its end in `bytes`.
    fn add(bytes: &mut Vec<u8>, key: &Bound<'_, PyAny>) -> PyResult<usize> {
        with_bytes(key, |key| bytes.extend_from_slice(key))?;
        Ok(bytes.len())
    }

    /// Number of keys.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the keys in order. A key that no object can have is an error of its item only.
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = Result<KeyRef<'_>>> {
        let mut start = 0;
        self.ends
            .iter()
            .map(move |&end| KeyRef::new(&self.bytes[std::mem::replace(&mut start, end)..end]))
    }
}

/// Parses keys. A key that no object can have is an error of its item only.
pub(crate) fn object_keys(keys: &[Bound<'_, PyAny>]) -> PyResult<Vec<Result<ObjectKey>>> {
    keys.iter().map(object_key).collect()
}

/// Parses the keys of any sequence, as [`object_keys`] does.
pub(crate) fn object_keys_of(keys: &Bound<'_, PyAny>) -> PyResult<Vec<Result<ObjectKey>>> {
    map_sequence(keys, KEYS, |key| object_key(&key))
}

/// Reads a list of numbers for `from_py_with`.
pub(crate) fn column(numbers: &Bound<'_, PyAny>) -> PyResult<Vec<Unsigned>> {
    map_sequence(numbers, "addresses and sizes are lists of integers", |number| number.extract())
}

/// The beginning of the error for an argument that is not a list of keys.
const KEYS: &str = "keys are a list of str or bytes";

/// Reads each item of a sequence. Lists, the usual case, are read in place without a copy.
fn map_sequence<'py, T>(
    items: &Bound<'py, PyAny>,
    what: &str,
    mut read: impl FnMut(Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let Ok(list) = items.cast::<PyList>() else {
        return sequence(items, what)?.into_iter().map(read).collect();
    };
    // `collect` into a `Result` cannot preallocate, since it does not know the length.
    let mut values = Vec::with_capacity(list.len());
    for item in list {
        values.push(read(item)?);
    }
    Ok(values)
}

/// Parses one key as a batch of one.
pub(crate) fn one_key(key: &Bound<'_, PyAny>) -> PyResult<KeyBatch> {
    let mut batch = KeyBatch::with_capacity(1);
    with_bytes(key, |bytes| batch.push(bytes))?;
    Ok(batch)
}

/// Parses one key. A key that no object can have is an error of its item only.
pub(crate) fn object_key(key: &Bound<'_, PyAny>) -> PyResult<Result<ObjectKey>> {
    with_bytes(key, |bytes| ObjectKey::new(bytes))
}

/// Calls `take` with the bytes of a key.
pub(crate) fn with_bytes<R>(key: &Bound<'_, PyAny>, take: impl FnOnce(&[u8]) -> R) -> PyResult<R> {
    if let Ok(text) = key.cast::<PyString>() {
        let Ok(utf8) = text.to_cow() else {
            // Keys of listings that are not valid UTF-8 have surrogates, as names of files do.
            let bytes = text.call_method1("encode", ("utf-8", "surrogateescape"))?;
            return Ok(take(bytes.cast::<PyBytes>()?.as_bytes()));
        };
        return Ok(take(utf8.as_bytes()));
    }
    if let Ok(bytes) = key.cast::<PyBytes>() {
        return Ok(take(bytes.as_bytes()));
    }
    let kind = key.get_type().name()?;
    Err(PyTypeError::new_err(format!("a key is str or bytes, not {kind}")))
}

/// Returns the items of a sequence that is not text, else an error that begins with `what`.
fn sequence<'py>(items: &Bound<'py, PyAny>, what: &str) -> PyResult<Vec<Bound<'py, PyAny>>> {
    items.extract().or_else(|_| {
        let kind = items.get_type().name()?;
        Err(PyTypeError::new_err(format!("{what}, not {kind}")))
    })
}

/// Parses keys as a batch.
pub(crate) fn key_batch(keys: &Bound<'_, PyAny>) -> PyResult<KeyBatch> {
    let count = keys.cast::<PyList>().map_or(0, |list| list.len());
    let mut batch = KeyBatch::with_capacity(count);
    map_sequence(keys, KEYS, |key| with_bytes(&key, |bytes| batch.push(bytes)))?;
    Ok(batch)
}

/// Turns the error of an invalid key into "not found", for reads: no object can have such a key.
pub(crate) fn invalid_as_missing(keys: Vec<Result<ObjectKey>>) -> Vec<Result<ObjectKey>> {
    let absent = |error: Error| Error::new(ErrorCode::OBJECT_NOT_FOUND, error.message().to_owned());
    keys.into_iter().map(|key| key.map_err(absent)).collect()
}

/// Calls `call` with the valid items and puts its outcomes and the errors back in their places.
pub(crate) fn call_with_valid<I, O>(
    items: Vec<Result<I>>,
    call: impl FnOnce(Vec<I>) -> Vec<Result<O>>,
) -> Vec<Result<O>> {
    let (valid, invalid) = partition_valid(items.into_iter());
    invalid.merge_into(call(valid))
}

/// Splits items into the valid ones and the errors of the others.
pub(crate) fn partition_valid<I>(
    items: impl ExactSizeIterator<Item = Result<I>>,
) -> (Vec<I>, InvalidItems) {
    let count = items.len();
    let mut valid = Vec::with_capacity(count);
    let mut invalid = Vec::new();
    for (at, item) in items.enumerate() {
        match item {
            Ok(item) => valid.push(item),
            Err(error) => invalid.push((at, error)),
        }
    }
    (valid, InvalidItems { count, invalid })
}

/// The items of a batch that failed validation before the call.
#[derive(Debug)]
pub(crate) struct InvalidItems {
    /// Length of the whole batch.
    count: usize,
    /// Index and error of each invalid item, in order.
    invalid: Vec<(usize, Error)>,
}

impl InvalidItems {
    /// Merges the errors into the outcomes of the valid items, each in its place.
    pub(crate) fn merge_into<O>(self, outcomes: Vec<Result<O>>) -> Vec<Result<O>> {
        if self.invalid.is_empty() && outcomes.len() == self.count {
            return outcomes;
        }
        let mut invalid = self.invalid.into_iter().peekable();
        let mut outcomes = outcomes.into_iter();
        let missing = || Err(Error::internal("a batch was answered with too few outcomes"));
        (0..self.count)
            .map(|at| match invalid.next_if(|(invalid, _)| *invalid == at) {
                Some((_, error)) => Err(error),
                None => outcomes.next().unwrap_or_else(missing),
            })
            .collect()
    }
}

/// Returns an error if a list has another length than the list of keys.
pub(crate) fn check_same_length(name: &'static str, length: usize, keys: usize) -> Result<()> {
    if length == keys {
        return Ok(());
    }
    Err(Error::invalid("the lists differ in length").with("keys", keys).with(name, length))
}

/// Returns the selector for the arguments `regex` and `prefix`; at most one may be given.
pub(crate) fn selector(regex: Option<String>, prefix: Option<Vec<u8>>) -> Result<Selector> {
    match (regex, prefix) {
        (None, None) => Ok(Selector::All),
        (Some(regex), None) => Ok(Selector::Regex(regex)),
        (None, Some(prefix)) => Ok(Selector::Prefix(prefix)),
        (Some(_), Some(_)) => Err(Error::invalid("give a regex or a prefix, not both")),
    }
}
