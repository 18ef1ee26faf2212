//! The state of the pool.

use pyo3::{IntoPyObjectExt, prelude::*};

use super::{Begun, Driver, methods};
use crate::store::describe;

methods! {
    /// Returns the segments of the pool.
    fn segments(&self, py: Python<'_>) -> PyResult<Begun<Self>> {
        self.drive(
            py,
            (),
            |client, ()| client.segments(),
            |py, segments| {
                let described = segments.iter().map(|segment| describe::segment(py, segment));
                described.collect::<PyResult<Vec<_>>>()?.into_py_any(py)
            },
        )
    }

    /// Returns the status of the master.
    fn status(&self, py: Python<'_>) -> PyResult<Begun<Self>> {
        self.drive(
            py,
            (),
            |client, ()| client.status(),
            |py, status| Ok(describe::status(py, &status)?.into_any().unbind()),
        )
    }

    /// Raises unless the master answers and knows this client.
    fn health(&self, py: Python<'_>) -> PyResult<Begun<Self>> {
        self.drive(py, (), |client, ()| client.health(), |py, ()| Ok(py.None()))
    }
}
