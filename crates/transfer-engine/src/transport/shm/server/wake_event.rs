//! An eventfd, which std does not have.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// An eventfd that wakes the thread from its poll.
#[derive(Debug)]
pub(super) struct WakeEvent(OwnedFd);

impl WakeEvent {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: the call only creates a new file descriptor.
        let file = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above has just created the descriptor; no other code owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(file) }))
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(super) fn notify(&self) {
        let one = 1_u64;
        let file = self.0.as_fd().as_raw_fd();
        // SAFETY: the call reads eight bytes of a local. It fails only if the counter is full, in
        // which case the thread is woken anyway.
        let _ = unsafe { libc::write(file, (&raw const one).cast(), 8) };
    }

    pub(super) fn clear(&self) {
        let mut count = 0_u64;
        let file = self.0.as_fd().as_raw_fd();
        // SAFETY: the call writes eight bytes of a local.
        let _ = unsafe { libc::read(file, (&raw mut count).cast(), 8) };
    }
}
