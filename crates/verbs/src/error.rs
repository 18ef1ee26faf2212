//! What can go wrong with ibverbs.

use std::io;

/// What a call gives back.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why ibverbs could not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The feature `rdma` was off when this program was built: use another build.
    #[error("this build has no RDMA; build with the feature rdma")]
    NotBuilt,
    /// The library is not on this machine: install it, or do without RDMA.
    #[error(
        "libibverbs.so.1 cannot be loaded; install rdma-core (Debian: libibverbs1 ibverbs-providers): {reason}"
    )]
    NoLibrary {
        /// What the loader said.
        reason: String,
    },
    /// The library lacks a function that every version since 2006 has: it is not libibverbs.
    #[error("libibverbs.so.1 lacks a function name={name}: {reason}")]
    NoFunction {
        /// The function.
        name: &'static str,
        /// What the loader said.
        reason: String,
    },
    /// An argument is outside of what ibverbs can express: fix the call.
    #[error("{what} is out of range value={value}")]
    OutOfRange {
        /// Which argument.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A call failed.
    #[error("{call} failed device={device}: {source}")]
    Call {
        /// The function of ibverbs.
        call: &'static str,
        /// The device it was about, or `-`.
        device: String,
        /// What the kernel or the driver said.
        source: io::Error,
    },
}

#[cfg(feature = "rdma")]
impl Error {
    /// A call that says why in `errno`; to be made right after it.
    pub(crate) fn last(call: &'static str, device: &str) -> Self {
        Self::Call { call, device: device.to_owned(), source: io::Error::last_os_error() }
    }

    /// A call that gave back `code`: an error number, or a bare -1 with the number in `errno`.
    pub(crate) fn status(call: &'static str, device: &str, code: libc::c_int) -> Self {
        if code > 0 {
            let source = io::Error::from_raw_os_error(code);
            return Self::Call { call, device: device.to_owned(), source };
        }
        Self::last(call, device)
    }
}
