//! The limit of open files (file descriptors) of the process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Returns the current limit.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Raises the soft limit to the hard limit; returns the previous limit.
pub fn raise() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!(%error, ?current, "the limit of open files cannot be raised");
    }
    current.unwrap_or(u64::MAX)
}
