//! Transfer batches from Python: lists of integers, each read in one pass.

use mooncake_base::{Error, Result};
use mooncake_transfer_engine::TransferEntry;
use pyo3::{
    Borrowed,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyByteArray, PyBytes, PyDict, PyFrozenSet, PyList, PySet, PyString, PyTuple},
};

use crate::{argument::Unsigned, caller_memory::caller_ranges};

/// Maximum capacity that is reserved before the first number is read.
const ROOM_MAX: usize = 64 << 10;

/// A sequence of non-negative integers: addresses, lengths or ids.
#[derive(Debug, Clone)]
pub(crate) struct Numbers(Vec<usize>);

impl<'py> FromPyObject<'_, 'py> for Numbers {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = object.cast::<PyList>() {
            return list.iter().map(|number| one(&number)).collect::<PyResult<_>>().map(Self);
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return tuple.iter().map(|number| one(&number)).collect::<PyResult<_>>().map(Self);
        }
        // Types that have a length but are not sequences of integers.
        let is_other = object.is_instance_of::<PyString>()
            || object.is_instance_of::<PyBytes>()
            || object.is_instance_of::<PyByteArray>()
            || object.is_instance_of::<PyDict>()
            || object.is_instance_of::<PySet>()
            || object.is_instance_of::<PyFrozenSet>();
        let length = if is_other { None } else { object.len().ok() };
        let Some(length) = length else {
            let kind = object.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "expected a sequence of integers, not {kind}"
            )));
        };
        // An object may report a larger length than it has, so the reservation is bounded.
        let mut numbers = Vec::with_capacity(length.min(ROOM_MAX));
        for number in object.try_iter()? {
            numbers.push(one(&number?)?);
        }
        Ok(Self(numbers))
    }
}

fn one(number: &Bound<'_, PyAny>) -> PyResult<usize> {
    number.extract::<Unsigned>().map(|number| number.0)
}

impl Numbers {
    /// The numbers as ids or addresses.
    pub(super) fn as_u64(&self) -> Vec<u64> {
        self.0.iter().map(|number| *number as u64).collect()
    }

    /// Pairs the addresses with their lengths.
    pub(super) fn ranges(&self, lengths: &Self) -> Result<Vec<(u64, u64)>> {
        check_same_length(self, lengths, "lengths")?;
        Ok(self.0.iter().zip(&lengths.0).map(|(at, length)| (*at as u64, *length as u64)).collect())
    }
}

/// The columns of a batch, which have one length.
#[derive(Debug)]
pub(super) struct Batch {
    addresses: Numbers,
    peer_addresses: Numbers,
    lengths: Numbers,
}

impl Batch {
    /// Makes a batch.
    ///
    /// # Errors
    /// The lists differ in length.
    pub(super) fn new(
        addresses: Numbers,
        peer_addresses: Numbers,
        lengths: Numbers,
    ) -> Result<Self> {
        check_same_length(&addresses, &peer_addresses, "peer_addresses")?;
        check_same_length(&addresses, &lengths, "lengths")?;
        Ok(Self { addresses, peer_addresses, lengths })
    }

    /// Total number of bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.lengths.0.iter().fold(0, |sum: u64, length| sum.saturating_add(*length as u64))
    }

    /// Converts the batch to the entries that the engine takes.
    pub(super) fn into_entries(self) -> Vec<TransferEntry> {
        let local = caller_ranges(self.addresses.0.into_iter().zip(self.lengths.0).collect());
        let remote = self.peer_addresses.0;
        local
            .into_iter()
            .zip(remote)
            .map(|(local, at)| TransferEntry::new(local, at as u64))
            .collect()
    }
}

fn check_same_length(addresses: &Numbers, other: &Numbers, name: &'static str) -> Result<()> {
    if addresses.0.len() == other.0.len() {
        return Ok(());
    }
    Err(Error::invalid("the lists differ in length")
        .with("addresses", addresses.0.len())
        .with(name, other.0.len()))
}
