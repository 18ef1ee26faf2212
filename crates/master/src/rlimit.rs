//! The limit of open file descriptors: raised at the start, and the number of connections it
//! allows.

use mooncake_os::rlimit;

/// Descriptors reserved for listeners, files, HTTP and the runtime.
const RESERVED: u64 = 256;

/// The limit below which a warning is logged, because clients may be refused.
const LOW: u64 = 8192;

/// Raises the limit as far as the hard limit allows. Warns if the result is low.
pub(crate) fn raise() {
    let was = rlimit::raise();
    let limit = rlimit::limit();
    if limit < LOW {
        let connections = connections_max(usize::MAX, limit);
        tracing::warn!(
            descriptors = limit,
            connections,
            "few file descriptors: connections beyond the limit are refused; raise the hard limit (ulimit -Hn)"
        );
    } else {
        tracing::info!(descriptors = limit, was, "the limit of file descriptors");
    }
}

/// Returns the number of connections that may be open at a time: `wanted`, or fewer if the
/// descriptors do not suffice.
pub(crate) fn connections_max(wanted: usize, descriptors: u64) -> usize {
    let possible = descriptors.saturating_sub(RESERVED).max(descriptors / 4).max(1);
    wanted.min(usize::try_from(possible).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_reserved_descriptors() {
        assert_eq!(connections_max(65_536, 1 << 20), 65_536);
        assert_eq!(connections_max(65_536, 1024), 768);
        assert_eq!(connections_max(65_536, 64), 16);
        assert_eq!(connections_max(65_536, 0), 1);
    }
}
