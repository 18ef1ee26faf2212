//! What wakes the thread that watches guests.

use std::{
    io::{Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

use mooncake_base::{Error, Result};

/// Wakes the watching thread: there is somebody new, or it shall end.
#[derive(Debug)]
pub(crate) struct Waker(UnixStream);

impl Waker {
    pub(crate) fn wake(&self) {
        // A full socket wakes as well as one byte more would.
        let _ = (&self.0).write(&[1]);
    }
}

/// Hears the bell.
#[derive(Debug)]
pub(crate) struct WakeReceiver(UnixStream);

impl WakeReceiver {
    /// Empties it; what it says is that it has been rung.
    pub(crate) fn drain(&self) {
        while matches!((&self.0).read(&mut [0; 64]), Ok(count) if count > 0) {}
    }
}

impl AsFd for WakeReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A bell and what hears it.
///
/// # Errors
/// The system has no more descriptors.
pub(crate) fn waker_pair() -> Result<(Waker, WakeReceiver)> {
    let made = UnixStream::pair().and_then(|(waker, receiver)| {
        waker.set_nonblocking(true)?;
        receiver.set_nonblocking(true)?;
        Ok((Waker(waker), WakeReceiver(receiver)))
    });
    made.map_err(|source| Error::internal("no descriptors to watch with").caused_by(source))
}
