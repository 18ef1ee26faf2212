//! Memory that a store registers, or lends to the pool.

use std::{path::PathBuf, time::Duration};

use mooncake_base::{Error, ErrorCode, SegmentId};
use pyo3::prelude::*;

use crate::{argument::Unsigned, detach::detached, error::or_raise, store::Store};

#[pymethods]
impl Store {
    /// Allocates from the memory pool of a dummy client; returns the address.
    fn allocate_from_pool(&self, py: Python<'_>, length: Unsigned) -> PyResult<u64> {
        let none = || Error::invalid("only a dummy client has a memory pool; use setup_dummy");
        let pool = or_raise(py, self.open().pool())?;
        or_raise(py, pool.ok_or_else(none).and_then(|pool| pool.allocate(length.0 as u64)))
    }

    /// Registers memory of this process for peers. Touches no page.
    fn register_buffer(&self, py: Python<'_>, address: Unsigned, length: Unsigned) -> PyResult<()> {
        let open = self.open();
        let registered = detached(py, || open.register(address.0 as u64, length.0 as u64));
        or_raise(py, registered.and_then(|registered| registered))
    }

    /// Unregisters memory by its first address.
    fn unregister_buffer(&self, py: Python<'_>, address: Unsigned) -> PyResult<()> {
        let open = self.open();
        let withdrawn = detached(py, || open.unregister(address.0 as u64));
        or_raise(py, withdrawn.and_then(|withdrawn| withdrawn))
    }

    /// Lends more memory to the pool; returns the ids of the segments.
    fn mount(&self, py: Python<'_>, length: Unsigned) -> PyResult<Vec<String>> {
        let mounted = self.call(py, |client| client.mount(length.0 as u64))?;
        Ok(or_raise(py, mounted)?.iter().map(ToString::to_string).collect())
    }

    /// Lends a part of a file to the pool; returns the id of the segment.
    #[pyo3(signature = (path, length, *, offset = 0, location = "*"))]
    fn mount_file(
        &self,
        py: Python<'_>,
        path: PathBuf,
        length: Unsigned,
        offset: u64,
        location: &str,
    ) -> PyResult<String> {
        let length = length.0 as u64;
        let mounted = self.call(py, |client| client.mount_file(&path, offset, length, location))?;
        or_raise(py, mounted).map(|id| id.to_string())
    }

    /// Unmounts a segment of this client, at once or after a grace period.
    #[pyo3(signature = (segment, *, grace_s = 0.0))]
    fn unmount(&self, py: Python<'_>, segment: &str, grace_s: f64) -> PyResult<()> {
        let unknown =
            || Error::new(ErrorCode::SEGMENT_NOT_FOUND, "no such segment").with("segment", segment);
        let id = or_raise(py, SegmentId::parse(segment).ok_or_else(unknown))?;
        let grace = Duration::try_from_secs_f64(grace_s).map_err(|_| {
            Error::invalid("a grace period must be a number of seconds").with("grace_s", grace_s)
        });
        let grace = or_raise(py, grace)?;
        let unmounted = self.call(py, |client| client.unmount(id, grace))?;
        or_raise(py, unmounted)
    }
}
