//! How many descriptors the process may have.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// How many it may have now.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Raises the limit as far as it may be raised; returns what it was.
pub fn raise() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!(%error, ?current, "the limit of descriptors cannot be raised");
    }
    current.unwrap_or(u64::MAX)
}
