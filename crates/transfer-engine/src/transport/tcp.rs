//! TCP: works anywhere, at the price of the network stack.
//!
//! One listener speaks two protocols, told apart by the first 8 bytes of a connection: our own
//! frames ([`frame`]), which carry thousands of ranges at a time, and those of the established
//! engine ([`compat_frame`]), one range at a time. Payload goes between socket and registered
//! memory without a copy in between ([`vectored_io`]). [`server`] answers on tokio, and
//! lends the busiest connections a thread each; a transfer is driven by the thread that asked for
//! it, over one connection ([`connection_pool`]) of a small pool, or over several of them at once if it is
//! large ([`request_window`]).

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
use crate::{descriptor::SegmentDescriptor, metrics::Refusals, token::Token};

/// How the client's side behaves.
#[derive(Debug, Clone)]
pub struct TcpSettings {
    /// The most connections to one peer; at least 1. Callers beyond that wait their turn.
    pub connections_per_peer: usize,
    /// The most connections that one large transfer uses. `None`: all of them to another host, and
    /// one for two processors to this one, where more of them only take turns.
    pub connections_per_transfer: Option<usize>,
    /// How long connecting may take, however far the deadline of the transfer is.
    pub connect_timeout: Duration,
    /// What is proven to peers, and asked of them.
    pub token: Option<Token>,
    /// Where refused tokens are counted.
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

/// Makes paths over TCP.
#[derive(Debug)]
pub struct TcpTransport {
    settings: TcpSettings,
}

impl TcpTransport {
    /// A transport; connects to nothing yet.
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
