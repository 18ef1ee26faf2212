//! Which of its addresses a store takes as its own.

use std::net::ToSocketAddrs;

use mooncake_base::Endpoint;
use mooncake_transfer_engine::{EngineConfig, address_facing};

/// A port for questions about routes where none is known: any would do.
const ANY_PORT: u16 = 9;

/// Gives an engine without a name, that peers are to find without a metadata server, the address of
/// this host on the network on which its master is: loopback for a master here. Leaves the choice to
/// the engine if the master's address is none.
pub fn set_engine_host(engine: &mut EngineConfig, master: &str) {
    if engine.name.is_empty() && engine.is_p2p() {
        engine.name = host_facing(master).unwrap_or_default();
    }
}

/// The address of this host on the network on which that master is, if there is one.
pub fn host_facing(master: &str) -> Option<String> {
    let master: Endpoint = master.parse().ok()?;
    let port = master.port.filter(|port| *port > 0).unwrap_or(ANY_PORT);
    let mut addresses = (master.host.as_str(), port).to_socket_addrs().ok()?;
    addresses.find_map(|address| address_facing(address).ok()).map(|own| own.to_string())
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
    fn a_store_is_where_its_master_sees_it_unless_it_was_told() {
        let p2p = EngineConfig::default().metadata;
        assert_eq!(name("", &p2p, "127.0.0.1:50051"), "127.0.0.1");
        assert_eq!(name("", &p2p, "127.0.0.1:0"), "127.0.0.1", "a port that is not known yet");
        assert_eq!(name("mine", &p2p, "127.0.0.1:50051"), "mine");
        assert_eq!(name("", &p2p, "no address: at all"), "");
        assert_eq!(name("", "http://127.0.0.1:1/metadata", "127.0.0.1:50051"), "");
    }
}
