//! Waiting for the file descriptors of ibverbs.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    time::{Duration, Instant},
};

/// Makes reads return at once when there is nothing to read.
pub(crate) fn set_nonblocking(descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let raw = descriptor.as_raw_fd();
    // SAFETY: the descriptor is open while it is borrowed; the call takes no pointer.
    let flags = unsafe { libc::fcntl(raw, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    let code = unsafe { libc::fcntl(raw, libc::F_SETFL, flags | libc::O_NONBLOCK) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sleeps until one of the descriptors has something to read or the time is over. Returns whether one
/// has.
pub(crate) fn wait_readable<const N: usize>(
    descriptors: [BorrowedFd<'_>; N],
    timeout: Duration,
) -> io::Result<bool> {
    let started = Instant::now();
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        // Rounded up, so that the last wait does not spin.
        let milliseconds = left.as_nanos().div_ceil(1_000_000);
        let milliseconds = i32::try_from(milliseconds).unwrap_or(i32::MAX);
        let mut entries = descriptors.map(|descriptor| libc::pollfd {
            fd: descriptor.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: `N` entries, which live past the call.
        let count = unsafe { libc::poll(entries.as_mut_ptr(), N as libc::nfds_t, milliseconds) };
        match count {
            0 => return Ok(false),
            1.. => return Ok(true),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}
