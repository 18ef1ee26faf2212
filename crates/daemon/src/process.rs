//! The process at the other end of a Unix socket: its identity, and whether it is alive.

use std::{
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::Arc,
};

use rustix::{
    net::sockopt::socket_peercred,
    process::{Pid, PidfdFlags, geteuid, pidfd_open},
};
use socket2::Socket;

/// Returns whether the process at the other end of a Unix socket runs as this user, or as root.
pub(crate) fn is_of_this_user(socket: &Socket) -> bool {
    let user = socket_peercred(socket).map(|peer| peer.uid);
    user.is_ok_and(|user| user.is_root() || user == geteuid())
}

/// A process, identified by a pidfd, so that a later process with the same id is not mistaken for
/// it.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    id: Pid,
    handle: Arc<OwnedFd>,
}

impl Process {
    /// Returns the process at the other end of a Unix socket. `None` if the process is unknown,
    /// for example for a process outside this PID namespace.
    pub(crate) fn of_peer(socket: &Socket) -> Option<Self> {
        let peer = socket_peercred(socket).ok()?;
        let handle = pidfd_open(peer.pid, PidfdFlags::empty()).ok()?;
        Some(Self { id: peer.pid, handle: Arc::new(handle) })
    }

    /// Becomes readable when the process exits.
    pub(crate) fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }

    /// Returns whether both are the same process.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.id == other.id
    }
}
