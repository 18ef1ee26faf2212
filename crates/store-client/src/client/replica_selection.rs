//! Which copy to read first: by where it is, how fast it was, and who failed a moment ago.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use mooncake_base::Moment;
use mooncake_base::sync::Mutex;
use mooncake_transfer_engine::Opcode;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    ClientInner,
    peer_latency::{Locality, rotate_equals},
};
use crate::object::Place;

/// How long a peer that failed is asked last.
const SUSPICION_TIME: Duration = Duration::from_secs(5);

/// The most peers that are suspected at once.
const SUSPECTED_PEERS_MAX: usize = 1024;

/// Peers that failed a moment ago, each until when.
#[derive(Debug, Default)]
pub(super) struct SuspectedPeers {
    until: Mutex<FxHashMap<String, Moment>>,
    /// How many there are, so that nobody takes the lock while there are none.
    count: AtomicUsize,
}

impl SuspectedPeers {
    /// A transfer with the peer failed. Says whether that is news.
    pub(super) fn add(&self, endpoint: &str, now: Moment) -> bool {
        let mut suspects = self.until.lock();
        if suspects.len() >= SUSPECTED_PEERS_MAX {
            suspects.retain(|_, until| !until.has_passed(now));
        }
        if suspects.len() >= SUSPECTED_PEERS_MAX {
            return false;
        }
        let before = suspects.insert(endpoint.to_owned(), now + SUSPICION_TIME);
        self.count.store(suspects.len(), Ordering::Relaxed);
        before.is_none_or(|until| until.has_passed(now))
    }

    /// A transfer with the peer succeeded.
    pub(super) fn clear(&self, endpoint: &str) {
        if self.count.load(Ordering::Relaxed) > 0 {
            let mut suspects = self.until.lock();
            suspects.remove(endpoint);
            self.count.store(suspects.len(), Ordering::Relaxed);
        }
    }

    fn is_suspected(&self, endpoint: &str, now: Moment) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let suspects = self.until.lock();
        suspects.get(endpoint).is_some_and(|until| !until.has_passed(now))
    }
}

impl ClientInner {
    /// The order in which the copies of an object are tried: our own process, then by the time that
    /// reading so many bytes is expected to take; whoever failed a moment ago comes last. Equals
    /// take turns, so that reads spread over them.
    pub(super) fn replica_order(
        &self,
        places: &[Place],
        bytes: u64,
        now: Moment,
    ) -> SmallVec<[usize; 1]> {
        if places.len() < 2 {
            return (0..places.len()).collect();
        }
        let own = self.engine.segment_name();
        let candidates = places.iter().map(|place| {
            let endpoint = place.segment.endpoint.as_str();
            let is_elsewhere = endpoint != own;
            let expected = match is_elsewhere {
                true => self.expected_latency(endpoint, (Opcode::Read, bytes), now),
                false => Duration::ZERO,
            };
            ((self.suspected_peers.is_suspected(endpoint, now), is_elsewhere), expected)
        });
        SmallVec::from_vec(rotate_equals(
            candidates,
            self.replica_rotation.fetch_add(1, Ordering::Relaxed),
        ))
    }

    /// How long a transfer with the peer is going to take.
    pub(super) fn expected_latency(
        &self,
        endpoint: &str,
        what: (Opcode, u64),
        now: Moment,
    ) -> Duration {
        let there = host_of(endpoint);
        // A guest of a daemon goes by the name of the daemon, which is on the same host.
        let is_here = there == host_of(self.engine.segment_name()) || there == host_of(&self.name);
        let locality = match is_here {
            true => Locality::SameHost,
            false => Locality::OtherHost,
        };
        self.peer_latency.expected(endpoint, locality, what, now)
    }
}

/// The endpoint without its port.
fn host_of(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}
