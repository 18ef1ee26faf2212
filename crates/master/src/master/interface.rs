//! The IPv4 address of a network interface, read from tables in `/proc`.

use std::{fs, net::Ipv4Addr};

use mooncake_base::{Error, Result};

/// Returns the address of the interface that `--rpc_interface` names.
///
/// # Errors
/// There is no such interface, or it has no IPv4 address.
pub(super) fn address_of(interface: &str) -> Result<Ipv4Addr> {
    if interface == "lo" {
        return Ok(Ipv4Addr::LOCALHOST);
    }
    let read = |path: &str| {
        fs::read_to_string(path).map_err(|source| {
            Error::internal("the tables of the kernel cannot be read")
                .with("path", path)
                .caused_by(source)
        })
    };
    find(interface, &read("/proc/net/route")?, &read("/proc/net/fib_trie")?).ok_or_else(|| {
        Error::invalid("the interface does not exist or has no IPv4 address")
            .with("option", "rpc_interface")
            .with("interface", interface)
    })
}

/// Returns the local address within a network that is reached directly over the interface. The
/// narrowest network is tried first. Reads `/proc` instead of calling `getifaddrs`, because this
/// crate has no unsafe code.
fn find(interface: &str, routes: &str, tries: &str) -> Option<Ipv4Addr> {
    let locals = local_addresses(tries);
    let number = |text: &&str| u32::from_str_radix(text, 16).ok().map(u32::from_be);
    let mut networks: Vec<(u32, u32)> = routes
        .lines()
        .skip(1)
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let gateway = number(words.get(2)?)?;
            let (network, mask) = (number(words.get(1)?)?, number(words.get(7)?)?);
            (words.first() == Some(&interface) && gateway == 0 && mask != 0)
                .then_some((network, mask))
        })
        .collect();
    networks.sort_unstable_by_key(|(_, mask)| std::cmp::Reverse(*mask));
    networks.into_iter().find_map(|(network, mask)| {
        locals.iter().find(|address| address.to_bits() & mask == network).copied()
    })
}

/// Returns every address of this host: those marked `host LOCAL` in the table.
fn local_addresses(tries: &str) -> Vec<Ipv4Addr> {
    let mut last = None;
    let mut found = Vec::new();
    for line in tries.lines() {
        if let Some((_, address)) = line.split_once("|-- ") {
            last = address.trim().parse().ok();
        } else if line.contains("/32 host LOCAL")
            && let Some(address) = last
            && !found.contains(&address)
        {
            found.push(address);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTES: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth1\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0
eth2\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
";

    const TRIES: &str = "\
Main:
  +-- 0.0.0.0/0 3 0 5
Local:
        |-- 10.0.0.9
           /32 host LOCAL
        |-- 10.255.255.255
           /32 link BROADCAST
        |-- 127.0.0.1
           /32 host LOCAL
        |-- 192.168.0.7
           /32 host LOCAL
";

    #[test]
    fn finds_local_address_in_network_of_interface() {
        assert_eq!(find("eth0", ROUTES, TRIES), Some(Ipv4Addr::new(192, 168, 0, 7)));
        assert_eq!(find("eth1", ROUTES, TRIES), Some(Ipv4Addr::new(10, 0, 0, 9)));
        assert_eq!(find("eth2", ROUTES, TRIES), None, "a network without a local address");
        assert_eq!(find("eth9", ROUTES, TRIES), None);
        assert_eq!(find("eth0", "", "garbage"), None);
    }

    #[test]
    fn error_names_missing_interface() {
        assert_eq!(address_of("lo").unwrap(), Ipv4Addr::LOCALHOST);
        let error = address_of("nowhere0").unwrap_err().to_string();
        assert!(error.contains("nowhere0") && error.contains("rpc_interface"), "{error}");
    }
}
