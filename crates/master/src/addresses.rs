//! The addresses of a master.

use std::{net::SocketAddr, process::id};

use serde_json::{Value, json};

/// The addresses that a master listens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The RPC port of the clients.
    pub rpc: SocketAddr,
    /// The admin server, if there is one.
    pub admin: Option<SocketAddr>,
    /// The metadata server, if there is one.
    pub metadata: Option<SocketAddr>,
    /// The event publisher, if there is one.
    pub events: Option<SocketAddr>,
}

impl Addresses {
    /// Returns the content of the ports file, for programs that start a master with free ports.
    pub(crate) fn to_json(self) -> Value {
        let text = |address: Option<SocketAddr>| address.map(|address| address.to_string());
        let port = |address: Option<SocketAddr>| address.map(|address| address.port());
        json!({
            "pid": id(),
            "rpc": self.rpc.to_string(),
            "rpc_port": self.rpc.port(),
            "admin": text(self.admin),
            "metrics_port": port(self.admin),
            "metadata": text(self.metadata),
            "http_metadata_server_port": port(self.metadata),
            "events": text(self.events),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_names_bound_addresses() {
        let rpc = "127.0.0.1:50052".parse().unwrap();
        let admin = Some("127.0.0.1:9004".parse().unwrap());
        let shown = Addresses { rpc, admin, metadata: None, events: None }.to_json();
        assert_eq!(
            (&shown["rpc"], &shown["metrics_port"]),
            (&json!("127.0.0.1:50052"), &json!(9004))
        );
        assert_eq!((&shown["metadata"], &shown["pid"]), (&json!(null), &json!(id())));
    }
}
