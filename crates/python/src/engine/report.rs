//! Metrics of an engine as Python dictionaries.

use mooncake_transfer_engine::{
    EngineSnapshot, PeerSnapshot, PoolSnapshot, QueueSnapshot, TransportSnapshot,
};
use pyo3::{prelude::*, types::PyDict};

/// Converts a snapshot to nested dictionaries.
pub(super) fn dictionary<'py>(
    py: Python<'py>,
    snapshot: &EngineSnapshot,
) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("transports", transports(py, &snapshot.transports)?)?;
    let peers = PyDict::new(py);
    for one in &snapshot.peers {
        peers.set_item(&one.name, peer(py, one)?)?;
    }
    all.set_item("peers", peers)?;
    all.set_item("peers_max", snapshot.peers_max)?;
    all.set_item("peers_evicted", snapshot.peers_evicted)?;
    all.set_item("regions", snapshot.regions)?;
    all.set_item("region_bytes", snapshot.region_bytes)?;
    all.set_item("incoming", pool(py, snapshot.incoming)?)?;
    all.set_item("pinned", pool(py, snapshot.pinned)?)?;
    let refused = PyDict::new(py);
    refused.set_item("token_here", snapshot.refused.token_here)?;
    refused.set_item("token_there", snapshot.refused.token_there)?;
    refused.set_item("established", snapshot.refused.compat)?;
    refused.set_item("ranges", snapshot.refused.ranges)?;
    all.set_item("refused", refused)?;
    all.set_item("batches", queue(py, snapshot.batches)?)?;
    all.set_item("notifications", queue(py, snapshot.notifications)?)?;
    all.set_item("movers", snapshot.workers)?;
    Ok(all)
}

fn peer<'py>(py: Python<'py>, peer: &PeerSnapshot) -> PyResult<Bound<'py, PyDict>> {
    let one = PyDict::new(py);
    one.set_item("transport", peer.transport.map(|kind| kind.name()))?;
    one.set_item("errors", peer.errors)?;
    one.set_item("transports", transports(py, &peer.transports)?)?;
    one.set_item("connections", pool(py, peer.connections)?)?;
    let refusals = PyDict::new(py);
    for (kind, why) in &peer.refusals {
        refusals.set_item(kind.name(), why)?;
    }
    one.set_item("refusals", refusals)?;
    let measured: Vec<_> = peer
        .measured
        .iter()
        .map(|(kind, one)| (kind.name(), one.memory(), one.size, one.bytes_per_second))
        .collect();
    one.set_item("measured", measured)?;
    Ok(one)
}

fn transports<'py>(
    py: Python<'py>,
    transports: &[TransportSnapshot],
) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    for transport in transports {
        let one = PyDict::new(py);
        one.set_item("batches", transport.batches)?;
        one.set_item("pieces", transport.entries)?;
        one.set_item("bytes_read", transport.bytes_read)?;
        one.set_item("bytes_written", transport.bytes_written)?;
        one.set_item("errors", transport.errors)?;
        one.set_item("unserved", transport.unserved)?;
        one.set_item("refusals", transport.refusals)?;
        let seconds = |part| transport.latency.quantile(part).map(|latency| latency.as_secs_f64());
        one.set_item("latency_p50_s", seconds(0.5))?;
        one.set_item("latency_p99_s", seconds(0.99))?;
        let counts = transport.latency.octaves().into_iter().map(|(_, count)| count);
        one.set_item("latency_counts", counts.collect::<Vec<_>>())?;
        all.set_item(transport.kind.name(), one)?;
    }
    Ok(all)
}

fn queue(py: Python<'_>, queue: QueueSnapshot) -> PyResult<Bound<'_, PyDict>> {
    let one = PyDict::new(py);
    one.set_item("waiting", queue.waiting)?;
    one.set_item("limit", queue.limit)?;
    one.set_item("refused", queue.refused)?;
    Ok(one)
}

fn pool(py: Python<'_>, pool: PoolSnapshot) -> PyResult<Bound<'_, PyDict>> {
    let one = PyDict::new(py);
    one.set_item("open", pool.open)?;
    one.set_item("idle", pool.idle)?;
    one.set_item("limit", pool.limit)?;
    one.set_item("refused", pool.refused)?;
    Ok(one)
}
