//! The seam behind which the ways to move bytes sit.
//!
//! A [`Transport`] is one way (memory, shm, tcp, later rdma); a [`Path`] is that way to one peer,
//! proven by a real exchange when it was made. The engine asks each transport for a path once per
//! peer, sends every batch over the path that was measured to be the fastest for it, and goes on to
//! the next path, inside the deadline, for the pieces that failed.

pub(crate) mod memory;
pub(crate) mod shm;
pub mod tcp;

use std::{fmt, sync::Arc};

use mooncake_base::{Moment, Result};

use crate::{
    choice::Footing,
    descriptor::SegmentDescriptor,
    metrics::PoolSnapshot,
    piece::{Opcode, Piece, RemoteRange},
};

/// Which way it is. Says in metrics who served a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransportKind {
    /// Within one engine's process.
    Memory,
    /// Between processes of one host.
    Shm,
    /// Over the network.
    Tcp,
    /// One-sided verbs.
    Rdma,
}

impl TransportKind {
    /// The kind of that name, as hints give it.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Memory, Self::Shm, Self::Tcp, Self::Rdma];
        all.into_iter().find(|kind| name.trim().eq_ignore_ascii_case(kind.name()))
    }

    /// Its name in metrics and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a transport can do, so that callers ask instead of trying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    /// It reaches processes of other hosts.
    pub crosses_hosts: bool,
    /// The owner's side checks every address at the time of the transfer; if not, the path checks
    /// against what the owner announced and withdraws.
    pub owner_checks: bool,
    /// Local memory must be registered with this engine.
    pub needs_registered_local: bool,
    /// Lower is tried first, until measurements say otherwise.
    pub cost: u32,
}

/// One way to move bytes.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Which.
    fn kind(&self) -> TransportKind;

    /// What it can do.
    fn capability(&self) -> Capability;

    /// Makes a path to a peer and proves it by a real exchange.
    ///
    /// # Errors
    /// There is no such path; the message says why. That is no fault: the engine takes another.
    fn connect(&self, peer: &SegmentDescriptor, deadline: Moment) -> Result<Arc<dyn Path>>;
}

/// A proven way to one peer.
pub trait Path: fmt::Debug + Send + Sync {
    /// Over which transport.
    fn kind(&self) -> TransportKind;

    /// Whether the path is able to reach this range of the peer, as far as is known here.
    fn reaches(&self, range: RemoteRange) -> bool;

    /// Moves every piece whose outcome is still open, and gives each its outcome. Only pieces of
    /// memory of a kind that the path does not serve keep none: another path is to have them.
    ///
    /// Blocks the calling thread. When it returns no piece's memory is in use by the path any
    /// more, whatever the outcome: a write is counted as done only after its bytes were applied.
    /// A path with completions of its own (verbs) posts and parks the caller until its poller has
    /// reaped them; callers that do not want to wait go through the engine's mover threads.
    fn transfer(&self, opcode: Opcode, pieces: &mut [Piece], deadline: Moment);

    /// False once the peer is known to be gone over this path; the engine drops such a path.
    fn is_alive(&self) -> bool;

    /// What the memory of that range is to this path, if that is known; it decides how fast the
    /// path is.
    fn footing(&self, _range: RemoteRange) -> Option<Footing> {
        None
    }

    /// How fast a probe found the system's copy between the two processes, in bytes a second, if
    /// the path uses it.
    fn probed_bytes_per_second(&self) -> Option<u64> {
        None
    }

    /// How full its pool of connections is, if it has one.
    fn connections(&self) -> Option<PoolSnapshot> {
        None
    }

    /// Ends it: connections that nobody uses are closed at once, the others when their transfer is
    /// over, and no transfer begins any more. Idempotent.
    fn close(&self);
}
