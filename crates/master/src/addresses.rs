//! Where a master listens.

use std::net::SocketAddr;

/// Where a master listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The clients' port.
    pub rpc: SocketAddr,
    /// The admin server, if there is one.
    pub admin: Option<SocketAddr>,
    /// The metadata server, if there is one.
    pub metadata: Option<SocketAddr>,
    /// The publisher of events, if there is one.
    pub events: Option<SocketAddr>,
}
