//! The IPv4 address of a network interface.

use std::net::{IpAddr, Ipv4Addr};

use mooncake_base::{Error, Result};

/// Returns the first address of the interface that `--rpc_interface` names.
///
/// # Errors
/// There is no such interface, or it has no IPv4 address.
pub(super) fn address_of(interface: &str) -> Result<Ipv4Addr> {
    let known = if_addrs::get_if_addrs().map_err(|source| {
        Error::internal("cannot list the network interfaces").caused_by(source)
    })?;
    let address =
        known.iter().filter(|found| found.name == interface).find_map(|found| match found.ip() {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
    address.ok_or_else(|| {
        let mut names: Vec<&str> = known.iter().map(|found| found.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        Error::invalid("the interface does not exist or has no IPv4 address")
            .with("option", "rpc_interface")
            .with("interface", interface)
            .with("known", names.join(","))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_interface_has_its_address() {
        assert_eq!(address_of("lo").unwrap(), Ipv4Addr::LOCALHOST);
    }

    #[test]
    fn error_names_missing_interface_and_known_ones() {
        let error = address_of("nowhere0").unwrap_err().to_string();
        for part in ["interface=nowhere0", "option=rpc_interface", "lo"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
