//! The transport between processes of one host and user: shared memory is mapped, other memory is
//! copied by the kernel.
//!
//! Each engine listens on an abstract Unix socket that its segment descriptor names. An attaching
//! engine probes with real exchanges which of two access modes reach the owner's memory
//! ([`probe`]): mapping memory whose file descriptor the owner sends, and
//! `process_vm_readv`/`writev`. Where neither works (another host, user, or container) there is no
//! path over this transport. The connection stays open: the attached engine uses it to query each
//! region once, and the owner uses it to withdraw regions. When a process ends, the kernel closes
//! its connections.

mod client;
#[cfg(test)]
mod fuzz;
mod link;
mod message;
mod probe;
pub(crate) mod server;

use std::sync::Arc;

use mooncake_base::{Moment, Result};

#[cfg(test)]
pub(crate) use self::fuzz::fuzz_targets;
use self::{client::ShmPath, server::ShmServer};
use crate::{
    discovery::descriptor::SegmentDescriptor,
    transport::{Capability, Path, Transport, TransportKind},
};

/// The transport to processes of the same host.
#[derive(Debug)]
pub(crate) struct ShmTransport {
    server: Arc<ShmServer>,
}

impl ShmTransport {
    pub(crate) const fn new(server: Arc<ShmServer>) -> Self {
        Self { server }
    }
}

impl Transport for ShmTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn capability(&self) -> Capability {
        Capability {
            crosses_hosts: false,
            owner_checks: false,
            needs_registered_local: false,
            cost: 10,
        }
    }

    fn connect(&self, peer: &SegmentDescriptor, deadline: Moment) -> Result<Arc<dyn Path>> {
        Ok(Arc::new(ShmPath::connect(peer, &self.server, deadline)?))
    }
}
