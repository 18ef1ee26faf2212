//! Choice of the local address under which a store is reachable.

use std::net::ToSocketAddrs;

use mooncake_transfer_engine::{EngineConfig, address_facing};

use crate::master_address::MasterAddress;

/// Port for route lookups if the master's port is unknown; the value does not matter.
const ANY_PORT: u16 = 9;

/// Names a nameless peer-to-peer engine (no metadata server) by this host's address on the master's
/// network: loopback for a master on this host. Leaves the choice to the engine if `master` is not
/// an address.
pub fn set_engine_host(engine: &mut EngineConfig, master: &str) {
    if engine.name.is_empty() && engine.is_p2p() {
        engine.name = host_facing(master).unwrap_or_default();
    }
}

/// Returns this host's address on the network of the master, or of the service that names it.
pub fn host_facing(master: &str) -> Option<String> {
    let master = master.parse::<MasterAddress>().ok()?;
    master.endpoints().iter().find_map(|endpoint| {
        let port = endpoint.port.filter(|port| *port > 0).unwrap_or(ANY_PORT);
        let mut addresses = (endpoint.host.as_str(), port).to_socket_addrs().ok()?;
        addresses.find_map(|address| address_facing(address).ok()).map(|own| own.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(before: &str, metadata: &str, master: &str) -> String {
        let mut engine = EngineConfig {
            name: before.to_owned(),
            metadata: metadata.to_owned(),
            ..EngineConfig::default()
        };
        set_engine_host(&mut engine, master);
        engine.name
    }

    #[test]
    fn engine_gets_address_on_masters_network() {
        let p2p = EngineConfig::default().metadata;
        assert_eq!(name("", &p2p, "127.0.0.1:50051"), "127.0.0.1");
        assert_eq!(name("", &p2p, "127.0.0.1:0"), "127.0.0.1", "port not known yet");
        assert_eq!(name("", &p2p, "127.0.0.1:1,127.0.0.1:2"), "127.0.0.1");
        assert_eq!(name("", &p2p, "etcd://127.0.0.1;127.0.0.2"), "127.0.0.1");
        assert_eq!(name("mine", &p2p, "127.0.0.1:50051"), "mine");
        assert_eq!(name("", &p2p, "no address: at all"), "");
        assert_eq!(name("", "http://127.0.0.1:1/metadata", "127.0.0.1:50051"), "");
    }
}
