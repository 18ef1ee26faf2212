//! TCP: works between any two hosts, at the cost of the network stack.
//!
//! One listener serves two protocols, distinguished by the first 8 bytes of a connection: native
//! frames ([`data_frame`]), which carry up to thousands of ranges each, and upstream's frames
//! ([`compat_frame`]), which carry one range each. Payload moves between socket and registered
//! memory without an intermediate copy ([`vectored_io`]). [`server`] runs on tokio and gives the
//! busiest connections dedicated threads. On the client's side ([`client`]) the calling thread drives
//! its transfer.

mod batch_split;
mod client;
mod compat_frame;
mod data_frame;
#[cfg(test)]
mod fuzz;
mod greeting;
mod server;
mod socket_options;
mod vectored_io;

use std::sync::Arc;

use mooncake_base::{Moment, Result};

pub use client::TcpSettings;
#[cfg(test)]
pub(crate) use fuzz::fuzz_targets;
pub use server::{TcpServer, TcpServerSettings};

use super::{Capability, Path, Transport, TransportKind};
use crate::discovery::descriptor::SegmentDescriptor;

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
        let path = client::TcpPath::connect(peer, &self.settings, deadline)?;
        Ok(Arc::new(path))
    }

    fn close_idle(&self, now: Moment) {
        self.settings.budget.sweep(now);
    }

    fn close(&self) {
        self.settings.budget.close();
    }
}

#[cfg(test)]
mod tests;
