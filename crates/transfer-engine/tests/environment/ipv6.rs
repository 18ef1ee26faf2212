//! An engine on the IPv6 loopback address.

use std::net::{Ipv6Addr, TcpListener, TcpStream};

use mooncake_transfer_engine::{Engine, EngineConfig};

use crate::pair::runtime;

/// Returns why there is no IPv6.
pub(crate) fn missing() -> Option<String> {
    let refused = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err();
    refused.then(|| "needs IPv6 on the loopback device".to_owned())
}

pub(crate) fn listens_with_any_backlog() {
    let runtime = runtime();
    for handshake_backlog in [0, 1, u16::MAX] {
        let name = "::1".to_owned();
        let config = EngineConfig { name, handshake_backlog, ..EngineConfig::default() };
        let engine = Engine::start(config, runtime.handle().clone()).unwrap();
        TcpStream::connect((Ipv6Addr::LOCALHOST, engine.rpc_port())).unwrap();
    }
}
