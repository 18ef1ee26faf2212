//! A process of this host that speaks through a socket: who it is, and whether it lives.

use std::{
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::{
    net::sockopt::socket_peercred,
    process::{Pid, PidfdFlags, pidfd_open},
};
use socket2::Socket;

/// A process, held by a descriptor, so that no later process of the same number is taken for it.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    id: Pid,
    handle: Arc<OwnedFd>,
}

impl Process {
    /// The process at the other end of a Unix socket. `None` if the system does not tell, as of a
    /// process that this one cannot see.
    pub(crate) fn of_peer(socket: &Socket) -> Option<Self> {
        let peer = socket_peercred(socket).ok()?;
        let handle = pidfd_open(peer.pid, PidfdFlags::empty()).ok()?;
        Some(Self { id: peer.pid, handle: Arc::new(handle) })
    }

    /// Readable once the process is dead.
    pub(crate) fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }

    /// Whether both are the same.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.id == other.id
    }
}
