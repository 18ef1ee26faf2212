//! Wakes the thread that watches dummy clients.

use std::{
    io::{Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

use mooncake_base::{Error, Result};

/// Wakes the watching thread after a new client has connected or on shutdown.
#[derive(Debug)]
pub(crate) struct Waker(UnixStream);

impl Waker {
    pub(crate) fn wake(&self) {
        // If the socket is full, the receiver is already readable.
        let _ = (&self.0).write(&[1]);
    }
}

/// The receiving end, polled by the watching thread.
#[derive(Debug)]
pub(crate) struct WakeReceiver(UnixStream);

impl WakeReceiver {
    /// Discards all pending bytes; only their presence matters.
    pub(crate) fn drain(&self) {
        while matches!((&self.0).read(&mut [0; 64]), Ok(count) if count > 0) {}
    }
}

impl AsFd for WakeReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Creates a connected waker and receiver.
///
/// # Errors
/// The process has too many open files.
pub(crate) fn waker_pair() -> Result<(Waker, WakeReceiver)> {
    let made = UnixStream::pair().and_then(|(waker, receiver)| {
        waker.set_nonblocking(true)?;
        receiver.set_nonblocking(true)?;
        Ok((Waker(waker), WakeReceiver(receiver)))
    });
    made.map_err(|source| {
        Error::internal("cannot create the socket pair of the watching thread").caused_by(source)
    })
}
