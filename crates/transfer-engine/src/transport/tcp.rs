//! TCP: works between any two hosts, at the cost of the network stack.
//!
//! One listener serves two protocols, distinguished by the first 8 bytes of a connection: native
//! frames ([`frame`]), which carry up to thousands of ranges each, and upstream's frames
//! ([`compat_frame`]), which carry one range each. Payload moves between socket and registered
//! memory without an intermediate copy ([`vectored_io`]). [`server`] runs on tokio and gives the
//! busiest connections dedicated threads. On the client's side the calling thread drives its
//! transfer, over one connection of a small pool ([`connection_pool`]), or over several at once if
//! the transfer is large ([`request_window`]).

mod compat_frame;
mod connection_pool;
mod frame;
mod framing;
#[cfg(test)]
mod fuzz;
mod path;
mod request_window;
mod server;
mod socket_options;
mod vectored_io;

use std::{sync::Arc, time::Duration};

use mooncake_base::{Moment, Result};

#[cfg(test)]
pub(crate) use fuzz::fuzz_targets;
pub use server::{TcpServer, TcpServerSettings};

use super::{Capability, Path, Transport, TransportKind};
use crate::{discovery::descriptor::SegmentDescriptor, metrics::Refusals, token::Token};

/// The settings of the client's side.
#[derive(Debug, Clone)]
pub struct TcpSettings {
    /// The maximum number of connections to one peer, at least 1. Further callers wait for one.
    pub connections_per_peer: usize,
    /// The maximum number of connections that one large transfer uses. `None`: all of them to
    /// another host; to this host one per two CPUs, since more of them would only compete for CPUs.
    pub connections_per_transfer: Option<usize>,
    /// The timeout for connecting, even if the deadline of the transfer is later.
    pub connect_timeout: Duration,
    /// The token that both sides must prove to know, if one is set.
    pub token: Option<Token>,
    /// Counts refused tokens.
    pub refusals: Arc<Refusals>,
}

impl Default for TcpSettings {
    fn default() -> Self {
        Self {
            connections_per_peer: 4,
            connections_per_transfer: None,
            connect_timeout: Duration::from_secs(5),
            token: None,
            refusals: Arc::default(),
        }
    }
}

/// The transport over TCP.
#[derive(Debug)]
pub struct TcpTransport {
    settings: TcpSettings,
}

impl TcpTransport {
    /// Creates a transport; connections are made later.
    pub fn new(settings: TcpSettings) -> Self {
        let connections_per_peer = settings.connections_per_peer.max(1);
        Self { settings: TcpSettings { connections_per_peer, ..settings } }
    }
}

impl Transport for TcpTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn capability(&self) -> Capability {
        Capability {
            crosses_hosts: true,
            owner_checks: true,
            needs_registered_local: false,
            cost: 100,
        }
    }

    fn connect(&self, peer: &SegmentDescriptor, deadline: Moment) -> Result<Arc<dyn Path>> {
        let path = path::TcpPath::connect(peer, &self.settings, deadline)?;
        Ok(Arc::new(path))
    }
}

#[cfg(test)]
mod tests;
