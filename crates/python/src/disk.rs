//! What `mooncake disk` asks of a directory of records that no process uses, and the directories of a
//! store.

use std::{path::PathBuf, time::Duration};

use mooncake_disk::{Error, ReadMethod, inspect, measure};
use mooncake_settings::uses_ring;
use pyo3::{
    exceptions::{PyOSError, PyValueError},
    prelude::*,
    types::PyBytes,
};

use crate::{detach::detached, error::or_raise, store::Store};

/// Tenant, key, version, length, extent, offset in it, and whether the extent is sealed.
type DiskRecord = (String, Py<PyBytes>, u64, u64, u32, u64, bool);

/// Numbers of extents, of good records and of their bytes; tenant, key and version of damaged ones; the
/// extents that cannot be read.
type Report = (u64, u64, u64, Vec<(String, Py<PyBytes>, u64)>, Vec<UnreadableExtent>);

/// The path of an extent, and why it cannot be read.
type UnreadableExtent = (PathBuf, String);

/// Takes the directories of a store out of the pool, after a time in which their records can be read.
#[pyfunction]
pub(crate) fn unmount_disks(store: &Bound<'_, Store>, grace_s: u32) -> PyResult<()> {
    let (py, grace) = (store.py(), Duration::from_secs(grace_s.into()));
    let unmounted = store.get().call(py, |client| client.unmount_disks(grace))?;
    or_raise(py, unmounted)
}

/// Returns the records of a directory, and the extents of which some may be missing.
#[pyfunction]
pub(crate) fn disk_records(
    py: Python<'_>,
    path: PathBuf,
) -> PyResult<(Vec<DiskRecord>, Vec<UnreadableExtent>)> {
    let listed = or_raise(
        py,
        detached(py, || {
            let mut found = Vec::new();
            let visit = |it: inspect::Found<'_>| {
                found.push((it.name.to_owned(), it.length, it.extent, it.offset, it.is_sealed));
            };
            let listed = inspect::list(&path, visit);
            listed.map(|unreadable| (found, unreadable))
        }),
    )?;
    let (records, unreadable) = listed.map_err(|error| raised(&error))?;
    let row =
        |(name, length, extent, offset, is_sealed): (mooncake_disk::OwnedName, _, _, _, _)| {
            let key = PyBytes::new(py, &name.key).unbind();
            (name.tenant.into_string(), key, name.version, length, extent, offset, is_sealed)
        };
    Ok((records.into_iter().map(row).collect(), causes(unreadable)))
}

/// Reads every record of a directory, and returns which hold.
#[pyfunction]
pub(crate) fn disk_verify(py: Python<'_>, path: PathBuf) -> PyResult<Report> {
    let verified = or_raise(py, detached(py, || inspect::verify(&path)))?;
    let report = verified.map_err(|error| raised(&error))?;
    let bad = report.bad.into_iter().map(|name| {
        (name.tenant.into_string(), PyBytes::new(py, &name.key).unbind(), name.version)
    });
    let unreadable = causes(report.unreadable);
    Ok((report.extents, report.records, report.bytes, bad.collect(), unreadable))
}

fn causes(unreadable: Vec<inspect::Unreadable>) -> Vec<UnreadableExtent> {
    unreadable.into_iter().map(|extent| (extent.path, extent.why)).collect()
}

/// Removes all records of a directory, and its identity; returns how many extents it had.
#[pyfunction]
pub(crate) fn disk_wipe(py: Python<'_>, path: PathBuf) -> PyResult<usize> {
    let wiped = or_raise(py, detached(py, || inspect::wipe(&path)))?;
    wiped.map_err(|error| raised(&error))
}

/// Writes bytes to a directory that is empty or absent, and reads them. Returns the bytes written and
/// read in a second, what reads, why that does, and the reads past the page cache that were refused.
#[pyfunction]
pub(crate) fn disk_measure(
    py: Python<'_>,
    path: PathBuf,
    length: u64,
) -> PyResult<(f64, f64, &'static str, String, u64)> {
    let method = ReadMethod::from_switch(or_raise(py, uses_ring())?);
    let measured = py.detach(|| measure::measure(&path, method, length));
    let found = measured.map_err(|error| raised(&error))?;
    let reader = found.read_method.method.name();
    let why = found.read_method.to_string();
    Ok((found.write_rate, found.read_rate, reader, why, found.direct_refused))
}

fn raised(error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Io { .. } | Error::InUse { .. } => PyOSError::new_err(text),
        Error::Newer { .. } | Error::Foreign { .. } | Error::Invalid(_) => {
            PyValueError::new_err(text)
        }
    }
}
