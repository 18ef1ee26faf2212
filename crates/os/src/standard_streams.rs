//! The standard streams of the process.

use std::{
    fs::OpenOptions,
    os::fd::{AsRawFd as _, IntoRawFd as _, OwnedFd},
};

use rustix::io::{FdFlags, fcntl_setfd};

/// The highest descriptor of a standard stream.
const STDERR: i32 = 2;

/// Opens `/dev/null` for each standard stream that is closed. Otherwise files and sockets of the
/// program would get their descriptors, and what is written to a stream would reach those.
///
/// Rust's own start-up does so only before a `main` in Rust, and not for the Python package. To be
/// called before the program opens anything.
pub fn open_closed() {
    loop {
        let null = OpenOptions::new().read(true).write(true).open("/dev/null");
        // A new descriptor is the lowest free one.
        let Ok(descriptor) = null.map(OwnedFd::from) else { return };
        if descriptor.as_raw_fd() > STDERR {
            return;
        }
        // Processes that this one starts inherit it. Best effort, as in the whole function.
        let _ = fcntl_setfd(&descriptor, FdFlags::empty());
        // It stays open until the process ends.
        let _ = descriptor.into_raw_fd();
    }
}
