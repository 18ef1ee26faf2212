//! `Located`: one version of an object, whose ranges are read by several calls.

use std::sync::Arc;

use mooncake_base::{Error, ObjectKey, Result};
use mooncake_store_client::{Client, Located as Places, Read};
use mooncake_transfer_engine::LocalRange;
use pyo3::{prelude::*, types::PyBytes};

use super::transfer;
use crate::{argument::Unsigned, caller_memory::Views};

/// A version of an object and where its copies are. Reads find the copies again if they were moved;
/// they fail once the object was replaced or removed.
#[pyclass(frozen, module = "mooncake._native", name = "Located")]
#[derive(Debug, Clone)]
pub(crate) struct Located(Arc<Places>);

#[pymethods]
impl Located {
    /// Key of the object.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.key().as_bytes())
    }

    /// Length of the object in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.0.length()
    }

    /// Number that changes when the object is replaced.
    #[getter]
    fn version(&self) -> u64 {
        self.0.version().0
    }
}

impl Located {
    fn new(places: Places) -> Self {
        Self(Arc::new(places))
    }

    /// Locates objects. Leases them if `takes_lease` is set.
    pub(crate) fn find(
        client: &Client,
        keys: Vec<Result<ObjectKey>>,
        takes_lease: bool,
    ) -> Vec<Result<Self>> {
        let located = transfer::locate(client, keys, takes_lease);
        located.into_iter().map(|found| found.map(Self::new)).collect()
    }

    /// Reads from an offset on into memory, which is filled.
    ///
    /// # Errors
    /// The range is outside of the object, or as [`Client::read`].
    pub(crate) fn read(&self, client: &Client, offset: u64, into: &[LocalRange]) -> Result<u64> {
        let length = into.iter().map(|range| range.length() as u64).sum();
        let read = client.read(&[Read::range(&self.0, offset, length, into)]);
        let missing = || Err(Error::internal("a read has no outcome"));
        read.into_iter().next().unwrap_or_else(missing)
    }
}

/// A read of a range into the caller's memory.
pub(crate) struct RangeRead {
    located: Located,
    offset: u64,
    memory: Views,
}

impl RangeRead {
    /// Exports the memory.
    pub(crate) fn new(
        located: &Bound<'_, Located>,
        offset: Unsigned,
        buffer: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let memory = Views::writable(buffer)?;
        Ok(Self { located: located.get().clone(), offset: offset.0 as u64, memory })
    }

    /// Fills the memory; returns its length.
    ///
    /// # Errors
    /// As [`Located::read`].
    pub(crate) fn read(&self, client: &Client) -> Result<u64> {
        self.located.read(client, self.offset, self.memory.ranges())
    }
}
