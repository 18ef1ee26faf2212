//! `mooncake._native.master_address`: the address of a master, as a store reads it.

use mooncake_store_client::MasterAddress;
use pyo3::prelude::*;

use crate::error::or_raise;

/// The kind of an address, the hosts in it with their ports, and the address without a login.
type Parts = (&'static str, Vec<(String, Option<u16>)>, String);

/// Parses the address of a master, or of what names several.
#[pyfunction]
pub(crate) fn master_address(py: Python<'_>, text: &str) -> PyResult<Parts> {
    let address: MasterAddress = or_raise(py, text.parse())?;
    let hosts = address.endpoints().iter().map(|endpoint| (endpoint.host.clone(), endpoint.port));
    let kind = match address {
        MasterAddress::Fixed(_) => "master",
        MasterAddress::List(_) => "list",
        MasterAddress::Etcd(_) => "etcd",
        MasterAddress::Redis(_) => "redis",
        MasterAddress::Kubernetes { .. } => "k8s",
    };
    Ok((kind, hosts.collect(), address.to_string()))
}
