//! The log lines about clients. Those that many clients may cause at once are limited in number.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::{Error, Moment, sync::Mutex};
use mooncake_os::rlimit::limit;

use super::listen::CONNECTIONS_MAX;
use crate::rlimit::connections_max;

/// The shortest time between two lines of one kind.
const PAUSE: Duration = Duration::from_secs(60);

/// Log lines about clients, limited to one of each kind a minute.
#[derive(Debug, Default)]
pub(super) struct ClientLog {
    refusals: Limiter,
    displaced: Limiter,
    excess: Limiter,
    other_logs: Limiter,
}

/// Peers of another version, which are refused.
#[derive(Debug, Default)]
pub(crate) struct RefusedVersions {
    count: AtomicU64,
    lines: Limiter,
}

impl RefusedVersions {
    /// Counts and logs a refusal; the error has both versions.
    pub(super) fn record(&self, now: Moment, peer: Option<SocketAddr>, error: &Error) {
        self.add();
        if let Some(count) = self.lines.record(now) {
            let peer = peer.map_or_else(|| "a process of this host".to_owned(), |p| p.to_string());
            tracing::warn!(peer, %error, count, "refused a peer of another version");
        }
    }

    /// Counts a refusal that is logged elsewhere.
    pub(crate) fn add(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many there were.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl ClientLog {
    /// Logs that a client was refused because of its token.
    pub(super) fn refused(&self, now: Moment, error: &Error) {
        if let Some(count) = self.refusals.record(now) {
            tracing::warn!(%error, count, "refused a client: it does not show the token of this master");
        }
    }

    /// Logs that a connection ended for a newer one before its peer had shown that it may call.
    pub(super) fn displaced(&self, now: Moment) {
        if let Some(count) = self.displaced.record(now) {
            tracing::warn!(
                count,
                "too many connections whose peers have not shown yet that they may call: the oldest \
                 ended for newer ones"
            );
        }
    }

    /// Logs that a client was refused because there are too many connections.
    pub(super) fn too_many(&self, now: Moment) {
        let descriptors = limit();
        if let Some(count) = self.excess.record(now) {
            tracing::warn!(
                count,
                limit = connections_max(CONNECTIONS_MAX, descriptors),
                descriptors,
                "too many connections, some were refused; where descriptors are few, raise the hard \
                 limit (ulimit -Hn)"
            );
        }
    }

    /// Logs that a client comes with memory that another log describes.
    pub(super) fn other_log(&self, now: Moment, client: &str) {
        if let Some(count) = self.other_logs.record(now) {
            tracing::warn!(
                client,
                count,
                "clients come with memory of another log than that of this master: it is mounted \
                 anew, and the objects of that log are gone; after a restart check --state_dir"
            );
        }
    }
}

/// Lets one event through at a time, and counts those in between.
#[derive(Debug, Default)]
struct Limiter {
    state: Mutex<(Option<Moment>, u64)>,
}

impl Limiter {
    /// Records an event. Returns how many there were since the last one that was let through, if
    /// this one is.
    fn record(&self, now: Moment) -> Option<u64> {
        let mut state = self.state.lock();
        let (last, count) = &mut *state;
        *count += 1;
        if last.is_some_and(|last| now.since(last) < PAUSE) {
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_event_passes_and_later_ones_are_counted() {
        let limiter = Limiter::default();
        let at = |seconds| Moment::from_boot(Duration::from_secs(seconds));
        assert_eq!(limiter.record(at(100)), Some(1));
        assert_eq!((limiter.record(at(101)), limiter.record(at(159))), (None, None));
        assert_eq!(limiter.record(at(160)), Some(3));
        assert_eq!(limiter.record(at(161)), None);
    }
}
