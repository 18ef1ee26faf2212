//! The interface of the transports, which move bytes between processes.
//!
//! A [`Transport`] is one mechanism (memory, shm, rdma, tcp). A [`Path`] connects this engine
//! to one peer over one transport and is verified by a real exchange when it is created. The engine
//! asks each transport for a path once per peer and sends every batch over the path that was
//! measured to be the fastest for it. Entries that fail are retried over the next path, within the
//! deadline.

pub(crate) mod memory;
#[cfg(feature = "rdma")]
pub(crate) mod rdma;
pub(crate) mod shm;
pub mod tcp;

use std::{fmt, sync::Arc, time::Duration};

use mooncake_base::{Clock, Moment, Result, SystemClock};

pub use crate::transport_kind::TransportKind;
use crate::{
    discovery::descriptor::SegmentDescriptor,
    metrics::PoolSnapshot,
    transfer_entry::{Opcode, RemoteRange, TransferEntry},
};

/// The kind of memory at the remote end, as far as it affects the speed of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteMemory {
    /// Mapped into this process: a plain copy.
    Mapped,
    /// Copied by the kernel between two processes.
    Process,
}

/// The time limits of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeLimits {
    /// The transfer ends at this moment, whatever was moved.
    pub deadline: Moment,
    /// The transfer ends when the peer has taken and sent no byte for this long. `None`: only the
    /// deadline counts, because the caller has no other peer to turn to.
    pub stall: Option<Duration>,
}

impl TimeLimits {
    /// Returns the latest moment at which a peer that is silent from now on is given up.
    pub fn give_up_at(&self) -> Moment {
        self.stall.map_or(self.deadline, |stall| self.deadline.min(SystemClock.now() + stall))
    }
}

impl From<Moment> for TimeLimits {
    fn from(deadline: Moment) -> Self {
        Self { deadline, stall: None }
    }
}

/// The properties of a transport, so that callers can ask instead of trying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    /// True if the transport reaches processes of other hosts.
    pub crosses_hosts: bool,
    /// True if the owner checks every address at the time of the transfer. Otherwise the path
    /// checks against the regions that the owner announced and has not withdrawn.
    pub owner_checks: bool,
    /// True if local memory must be registered with this engine.
    pub needs_registered_local: bool,
    /// The order of trial: lower costs are tried first until measurements say otherwise.
    pub cost: u32,
}

/// One mechanism that moves bytes.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Returns the kind of this transport.
    fn kind(&self) -> TransportKind;

    /// Returns the properties of this transport.
    fn capability(&self) -> Capability;

    /// Creates a path to a peer and verifies it by a real exchange.
    ///
    /// # Errors
    /// The peer cannot be reached over this transport; the message says why. The engine then uses
    /// another transport.
    fn connect(&self, peer: &SegmentDescriptor, deadline: Moment) -> Result<Arc<dyn Path>>;

    /// Closes connections that were not used for a while. Cheap when called often.
    fn close_idle(&self, _now: Moment) {}

    /// Closes every path, also those that their peers have dropped, and ends their transfers in flight.
    /// A transport whose paths end otherwise does nothing.
    fn close(&self) {}
}

/// A verified connection to one peer over one transport.
pub trait Path: fmt::Debug + Send + Sync {
    /// Returns the kind of the transport.
    fn kind(&self) -> TransportKind;

    /// Returns whether the path can reach this range of the peer, as far as this side knows.
    fn reaches(&self, range: RemoteRange) -> bool;

    /// Moves every entry that has no outcome yet and sets its outcome. An entry keeps no outcome
    /// only if its memory is of a kind that the path does not serve; another path then moves it.
    ///
    /// Blocks the calling thread. After the return the path uses no entry's memory any more,
    /// whatever the outcome. A write counts as done only after its bytes were applied. A path with
    /// its own completions (verbs) posts the work and parks the caller until its poller has reaped
    /// the completions; callers that must not block use the engine's worker threads.
    fn transfer(&self, opcode: Opcode, entries: &mut [TransferEntry], limits: TimeLimits);

    /// Returns false once the peer is known to be unreachable over this path. The engine drops such
    /// a path.
    fn is_alive(&self) -> bool;

    /// Returns how this path reaches the memory of the range, if known. The kind of access decides
    /// how fast the path is.
    fn remote_memory(&self, _range: RemoteRange) -> Option<RemoteMemory> {
        None
    }

    /// Returns the speed of the kernel's copy between the two processes in bytes per second, as a
    /// probe measured it, if the path uses that copy.
    fn probed_bytes_per_second(&self) -> Option<u64> {
        None
    }

    /// Returns the state of the connection pool, if the path has one.
    fn connections(&self) -> Option<PoolSnapshot> {
        None
    }

    /// Closes the path: transfers in flight fail soon, and new ones are refused. Does not wait for
    /// them. Idempotent.
    fn close(&self);
}
