//! The RDMA devices of this machine, and which of them an engine would use.

use std::collections::BTreeMap;

use pyo3::prelude::*;

use crate::{detach::detached, error::or_raise};

/// An RDMA device of this machine.
#[pyclass(frozen, module = "mooncake._native", name = "RdmaDevice", get_all)]
#[derive(Debug)]
pub(crate) struct RdmaDevice {
    name: String,
    /// State of the port; None if the device cannot be opened.
    state: Option<&'static str>,
    link_layer: Option<&'static str>,
    megabits_per_second: Option<u32>,
    mtu: Option<u32>,
    /// Index, address, protocol and network interface.
    addresses: Vec<(u8, String, String, Option<String>)>,
    limits: BTreeMap<&'static str, u64>,
    /// Index of the address that an engine would use.
    chosen: Option<u8>,
    /// Why an engine would not use the device.
    reason: Option<String>,
}

/// Returns the RDMA devices of this machine, or why none can be used.
#[pyfunction]
pub(crate) fn rdma_devices(py: Python<'_>) -> PyResult<(Vec<RdmaDevice>, Option<String>)> {
    let found = or_raise(py, detached(py, devices::find))?;
    Ok(match found {
        Ok(devices) => (devices, None),
        Err(reason) => (Vec::new(), Some(reason)),
    })
}

#[cfg(feature = "rdma")]
mod devices {
    use std::collections::BTreeMap;

    use mooncake_settings::rdma_settings;
    use mooncake_transfer_engine::rdma::{DeviceReport, survey};
    use mooncake_verbs::{DeviceLimits, Library, LinkLayer, PortState};

    use super::RdmaDevice;

    pub(super) fn find() -> Result<Vec<RdmaDevice>, String> {
        let library = Library::load().map_err(|error| error.to_string())?;
        let settings = rdma_settings("").map_err(|error| error.to_string())?;
        let found = survey(&library, &settings).map_err(|error| error.to_string())?;
        Ok(found.into_iter().map(device).collect())
    }

    fn device(report: DeviceReport) -> RdmaDevice {
        let DeviceReport { name, port, addresses, limits, choice } = report;
        let entry = |entry: mooncake_verbs::GidEntry| {
            (entry.index, entry.gid.to_string(), entry.kind.to_string(), entry.interface)
        };
        let (chosen, reason) = match choice {
            Ok(entry) => (Some(entry.index), None),
            Err(error) => (None, Some(error.to_string())),
        };
        RdmaDevice {
            name,
            state: port.map(|port| match port.state {
                PortState::Active => "active",
                PortState::Down => "down",
                PortState::Waiting => "waiting",
            }),
            link_layer: port.map(|port| match port.link_layer {
                LinkLayer::InfiniBand => "InfiniBand",
                LinkLayer::Ethernet => "Ethernet",
                LinkLayer::Unknown => "unknown link layer",
            }),
            megabits_per_second: port.map(|port| port.megabits_per_second),
            mtu: port.map(|port| port.mtu.bytes()),
            addresses: addresses.into_iter().map(entry).collect(),
            limits: limits.as_ref().map(limits_by_name).unwrap_or_default(),
            chosen,
            reason,
        }
    }

    fn limits_by_name(limits: &DeviceLimits) -> BTreeMap<&'static str, u64> {
        BTreeMap::from([
            ("bytes per registration", limits.region_bytes_max),
            ("completions per queue", limits.completions_max.into()),
            ("queue pairs", limits.queue_pairs_max.into()),
            ("reads in flight per queue pair", limits.outgoing_reads_max.into()),
            ("registrations", limits.regions_max.into()),
            ("requests per queue", limits.requests_max.into()),
        ])
    }
}

#[cfg(not(feature = "rdma"))]
mod devices {
    use super::RdmaDevice;

    /// Returns why this build has none.
    pub(super) fn find() -> Result<Vec<RdmaDevice>, String> {
        mooncake_verbs::device_names().map(|_| Vec::new()).map_err(|error| error.to_string())
    }
}
