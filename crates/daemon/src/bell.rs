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
pub(crate) struct Bell(UnixStream);

impl Bell {
    pub(crate) fn ring(&self) {
        // A full socket wakes as well as one byte more would.
        let _ = (&self.0).write(&[1]);
    }
}

/// Hears the bell.
#[derive(Debug)]
pub(crate) struct Ear(UnixStream);

impl Ear {
    /// Empties it; what it says is that it has been rung.
    pub(crate) fn empty(&self) {
        while matches!((&self.0).read(&mut [0; 64]), Ok(count) if count > 0) {}
    }
}

impl AsFd for Ear {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A bell and what hears it.
///
/// # Errors
/// The system has no more descriptors.
pub(crate) fn bell() -> Result<(Bell, Ear)> {
    let made = UnixStream::pair().and_then(|(bell, ear)| {
        bell.set_nonblocking(true)?;
        ear.set_nonblocking(true)?;
        Ok((Bell(bell), Ear(ear)))
    });
    made.map_err(|source| Error::internal("no descriptors to watch with").caused_by(source))
}
