//! Descriptions of the pool and counters of the client, as dictionaries.

use mooncake_store_client::{
    Located, MasterStatus, MetricsSnapshot, SegmentUse,
    metrics::{Count, DiskMetrics, Latency},
};
use std::time::Duration;

use pyo3::{
    intern,
    prelude::*,
    types::{PyDict, PyList},
};

/// Describes a segment and its use.
pub(crate) fn segment<'py>(
    py: Python<'py>,
    described: &SegmentUse,
) -> PyResult<Bound<'py, PyDict>> {
    let SegmentUse { segment, used, takes_objects, is_connected } = described;
    let dict = PyDict::new(py);
    dict.set_item("id", segment.id.to_string())?;
    dict.set_item("name", &segment.name)?;
    dict.set_item("endpoint", &segment.endpoint)?;
    dict.set_item("protocol", &segment.protocol)?;
    dict.set_item("base", segment.base)?;
    dict.set_item("capacity_bytes", segment.length)?;
    dict.set_item("used_bytes", used)?;
    dict.set_item("takes_objects", takes_objects)?;
    dict.set_item("is_connected", is_connected)?;
    Ok(dict)
}

/// The copies of an object, in Python a list of dictionaries.
pub(crate) struct Places(pub(crate) Located);

impl<'py> IntoPyObject<'py> for Places {
    type Target = PyList;
    type Output = Bound<'py, PyList>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        let list = PyList::empty(py);
        for place in self.0.places() {
            let dict = PyDict::new(py);
            dict.set_item(intern!(py, "replica"), place.replica.0)?;
            dict.set_item(intern!(py, "segment_id"), place.segment.id.to_string())?;
            dict.set_item(intern!(py, "segment"), &place.segment.name)?;
            dict.set_item(intern!(py, "endpoint"), &place.segment.endpoint)?;
            dict.set_item(intern!(py, "address"), place.segment.base + place.offset)?;
            dict.set_item(intern!(py, "size"), place.length)?;
            dict.set_item(intern!(py, "is_disk"), place.segment.is_disk)?;
            list.append(dict)?;
        }
        Ok(list)
    }
}

/// Describes the master.
pub(crate) fn status<'py>(py: Python<'py>, status: &MasterStatus) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("version", &status.version)?;
    dict.set_item("uptime_s", status.uptime.as_secs_f64())?;
    dict.set_item("keys", status.keys)?;
    dict.set_item("clients", status.clients)?;
    dict.set_item("capacity_bytes", status.capacity)?;
    dict.set_item("used_bytes", status.used)?;
    dict.set_item("fenced_bytes", status.fenced)?;
    dict.set_item("rpc_address", &status.rpc_address)?;
    dict.set_item("admin_address", &status.admin_address)?;
    dict.set_item("metadata_address", &status.metadata_address)?;
    Ok(dict)
}

/// Converts the client's counters.
pub(crate) fn metrics<'py>(
    py: Python<'py>,
    metrics: &MetricsSnapshot,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("calls", count(py, metrics.calls)?)?;
    dict.set_item("puts", count(py, metrics.puts)?)?;
    dict.set_item("reads", count(py, metrics.reads)?)?;
    dict.update(numbers(py, metrics.copies())?.as_mapping())?;
    let operations = PyDict::new(py);
    for (name, counted) in &metrics.operations {
        let operation = count(py, counted.objects)?;
        operation.set_item("is_read", counted.is_read)?;
        operation.set_item("latency", latency(py, &counted.latency)?)?;
        operations.set_item(name, operation)?;
    }
    dict.set_item("operations", operations)?;
    let rpcs = PyDict::new(py);
    for (name, counted) in &metrics.rpcs {
        let rpc = PyDict::new(py);
        rpc.set_item("failed", counted.failed)?;
        rpc.set_item("latency", latency(py, &counted.latency)?)?;
        rpcs.set_item(name, rpc)?;
    }
    dict.set_item("rpcs", rpcs)?;
    let transfers = PyDict::new(py);
    for (name, counted) in &metrics.transfers {
        transfers.set_item(name, latency(py, counted)?)?;
    }
    dict.set_item("transfers", transfers)?;
    let by_transport = PyDict::new(py);
    for (transport, counted) in &metrics.by_transport {
        let served = count(py, counted.total())?;
        served.set_item("read_bytes", counted.read_bytes)?;
        served.set_item("written_bytes", counted.written_bytes)?;
        by_transport.set_item(transport, served)?;
    }
    dict.set_item("by_transport", by_transport)?;
    let peer_errors = PyDict::new(py);
    for (peer, errors) in &metrics.peer_errors {
        peer_errors.set_item(peer, errors)?;
    }
    dict.set_item("peer_errors", peer_errors)?;
    dict.set_item("disk", disk(py, &metrics.disk)?)?;
    Ok(dict)
}

fn disk<'py>(py: Python<'py>, metrics: &DiskMetrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, count) in [("read", &metrics.read), ("written", &metrics.written)] {
        let way = numbers(py, count.entries())?;
        way.set_item("latency", latency(py, &count.latency)?)?;
        dict.set_item(name, way)?;
    }
    dict.update(numbers(py, metrics.entries())?.as_mapping())?;
    dict.set_item("refused", numbers(py, metrics.refused.iter().copied())?)?;
    let directories = PyDict::new(py);
    for found in &metrics.directories {
        let row = numbers(py, found.entries())?;
        row.set_item("read_method", found.read_method)?;
        row.set_item("why", &found.why)?;
        directories.set_item(&found.path, row)?;
    }
    dict.set_item("directories", directories)?;
    Ok(dict)
}

fn numbers<'py>(
    py: Python<'py>,
    entries: impl Iterator<Item = (&'static str, u64)>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in entries {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// Times are in microseconds; 0 if there was no call.
fn latency<'py>(py: Python<'py>, latency: &Latency) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let micros = |time: Option<Duration>| time.unwrap_or_default().as_secs_f64() * 1e6;
    dict.set_item("calls", latency.count())?;
    dict.set_item("mean_us", micros(latency.mean()))?;
    for (name, part) in [("p50_us", 0.5), ("p90_us", 0.9), ("p99_us", 0.99), ("p999_us", 0.999)] {
        dict.set_item(name, micros(latency.quantile(part)))?;
    }
    Ok(dict)
}

fn count(py: Python<'_>, count: Count) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("done", count.done)?;
    dict.set_item("failed", count.failed)?;
    dict.set_item("bytes", count.bytes)?;
    Ok(dict)
}
