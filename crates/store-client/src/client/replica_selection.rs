//! Order in which the replicas of an object are read: by locality, measured latency and recent
//! failures.

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

/// Time for which a failed peer is tried last.
const SUSPICION_TIME: Duration = Duration::from_secs(5);

/// Maximum number of suspected peers.
const SUSPECTED_PEERS_MAX: usize = 1024;

/// Peers with a recent failure, and the end of their suspicion.
#[derive(Debug, Default)]
pub(super) struct SuspectedPeers {
    until: Mutex<FxHashMap<String, Moment>>,
    /// Number of suspected peers, so that the lock is not taken while there are none.
    count: AtomicUsize,
}

impl SuspectedPeers {
    /// Marks a peer as suspected after a failed transfer. Returns whether the peer was not
    /// suspected before.
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

    /// Clears the suspicion after a successful transfer.
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
    /// Returns the order in which the replicas of an object are tried: this process first, then by
    /// expected latency; suspected peers come last. Equally good replicas rotate, so that reads
    /// spread over them.
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

    /// Estimates the duration of a transfer with a peer.
    pub(super) fn expected_latency(
        &self,
        endpoint: &str,
        what: (Opcode, u64),
        now: Moment,
    ) -> Duration {
        let there = host_of(endpoint);
        // A dummy client carries the name of its daemon, which is on the same host.
        let is_here = there == host_of(self.engine.segment_name()) || there == host_of(&self.name);
        let locality = match is_here {
            true => Locality::SameHost,
            false => Locality::OtherHost,
        };
        self.peer_latency.expected(endpoint, locality, what, now)
    }
}

/// Returns the endpoint without its port.
fn host_of(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}
