//! The host of a client, taken from its name.

use std::net::IpAddr;

use mooncake_base::Endpoint;

/// Returns the host part of a client's name; empty if it does not identify a host.
pub(in crate::state) fn host_of(name: &str) -> Box<str> {
    let Ok(endpoint) = name.parse::<Endpoint>() else { return Box::from(name) };
    let is_nowhere = match endpoint.host.parse::<IpAddr>() {
        Ok(address) => address.is_loopback() || address.is_unspecified(),
        Err(_) => endpoint.host == "localhost",
    };
    if is_nowhere { Box::from("") } else { endpoint.host.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_names_have_no_host() {
        for (name, host) in [
            ("10.0.0.1:12300", "10.0.0.1"),
            ("[fe80::1]:1", "fe80::1"),
            ("node-a", "node-a"),
            ("localhost:17000", ""),
            ("127.0.0.1:1", ""),
            ("0.0.0.0", ""),
        ] {
            assert_eq!(&*host_of(name), host, "{name}");
        }
    }
}
