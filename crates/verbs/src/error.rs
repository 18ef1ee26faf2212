//! Errors of ibverbs.

use std::io;

/// Result of a call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of ibverbs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The program was built without the feature `rdma`: use another build.
    #[error("this build has no RDMA; build with the feature rdma")]
    NotBuilt,
    /// The library is not on this machine: install it, or do without RDMA.
    #[error(
        "libibverbs.so.1 cannot be loaded; install rdma-core (Debian: libibverbs1 ibverbs-providers): {reason}"
    )]
    NoLibrary {
        /// Message of the dynamic loader.
        reason: String,
    },
    /// The library lacks a function that every version since 2006 has, so it is not libibverbs.
    #[error("libibverbs.so.1 lacks a function name={name}: {reason}")]
    NoFunction {
        /// The function.
        name: &'static str,
        /// Message of the dynamic loader.
        reason: String,
    },
    /// An argument is outside the range that ibverbs can express: fix the call.
    #[error("{what} is out of range value={value}")]
    OutOfRange {
        /// The argument.
        what: &'static str,
        /// The value.
        value: u64,
    },
    /// The library is too old for the call: update it, or do without.
    #[error("libibverbs.so.1 has no {function}, which {since} brought")]
    TooOld {
        /// The function.
        function: &'static str,
        /// The release that brought it.
        since: &'static str,
    },
    /// The completion queue was made without a channel, so that it cannot report: poll it.
    #[error("the completion queue has no channel")]
    NoChannel,
    /// Two objects of different devices cannot work together: fix the call.
    #[error("the objects are of different devices expected={expected} found={found}")]
    OtherDevice {
        /// The device of the first object.
        expected: String,
        /// The device of the other one.
        found: String,
    },
    /// Memory could not be registered.
    #[error("cannot register memory device={device} length={length}: {reason}: {source}")]
    Register {
        /// The device.
        device: String,
        /// Length of the range in bytes.
        length: usize,
        /// The likely cause and the remedy.
        reason: String,
        /// Error of the kernel or the driver.
        source: io::Error,
    },
    /// A call failed.
    #[error("{call} failed device={device}: {source}")]
    Call {
        /// The function of ibverbs.
        call: &'static str,
        /// The device, or `-`.
        device: String,
        /// Error of the kernel or the driver.
        source: io::Error,
    },
}

#[cfg(feature = "rdma")]
impl Error {
    /// Creates the error of a call that sets `errno`; must be called right after it.
    pub(crate) fn last(call: &'static str, device: &str) -> Self {
        Self::Call { call, device: device.to_owned(), source: io::Error::last_os_error() }
    }

    /// Creates the error of a call that returned `code`: an error number, or -1 with the number in
    /// `errno`.
    pub(crate) fn status(call: &'static str, device: &str, code: libc::c_int) -> Self {
        if code > 0 {
            let source = io::Error::from_raw_os_error(code);
            return Self::Call { call, device: device.to_owned(), source };
        }
        Self::last(call, device)
    }
}
