//! What the client knows of the peers that hold replicas, and the order in which replicas are read
//! that follows from it: by locality, measured latency and recent failures.

pub(crate) mod peer_latency;
pub(crate) mod suspected_peers;

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use mooncake_base::Moment;
use mooncake_transfer_engine::Opcode;
use smallvec::SmallVec;

use self::{
    peer_latency::{LatencyTable, Locality},
    suspected_peers::SuspectedPeers,
};
use crate::{
    object::Place,
    protocol::{ReplicaRank, replica_order},
};

/// Chooses among replicas.
#[derive(Debug)]
pub(crate) struct ReplicaSelector {
    /// The endpoint of the client's engine.
    own_endpoint: String,
    /// The name of the client. A dummy client carries the name of its daemon.
    own_name: String,
    suspected: SuspectedPeers,
    latency: LatencyTable,
    /// Rotates reads among equally good replicas.
    rotation: AtomicUsize,
}

impl ReplicaSelector {
    /// A selector that begins to rotate at `rotation`.
    pub(crate) fn new(own_endpoint: &str, own_name: &str, rotation: usize) -> Self {
        Self {
            own_endpoint: own_endpoint.to_owned(),
            own_name: own_name.to_owned(),
            suspected: SuspectedPeers::default(),
            latency: LatencyTable::default(),
            rotation: AtomicUsize::new(rotation),
        }
    }

    /// Returns the peers with recent failures.
    pub(crate) fn suspected(&self) -> &SuspectedPeers {
        &self.suspected
    }

    /// Returns the measured latencies.
    pub(crate) fn latency(&self) -> &LatencyTable {
        &self.latency
    }

    /// Returns the order in which the replicas of an object are tried: this process first, then by
    /// expected latency; copies on disk come after those in memory, and suspected peers last.
    /// Equally good replicas rotate, so that reads spread over them.
    pub(crate) fn order(&self, places: &[Place], bytes: u64, now: Moment) -> SmallVec<[usize; 1]> {
        let ranks = places.iter().map(|place| {
            let endpoint = place.segment.endpoint.as_str();
            let is_on_disk = place.segment.is_disk;
            let is_elsewhere = if is_on_disk {
                place.segment.name != self.own_name
            } else {
                endpoint != self.own_endpoint
            };
            let expected = if is_elsewhere {
                self.expected_latency(endpoint, Opcode::Read, bytes, now)
            } else {
                Duration::ZERO
            };
            let is_suspected = self.suspected.is_suspected(endpoint, now);
            ReplicaRank { is_suspected, is_on_disk, is_elsewhere, expected }
        });
        let turn = match places.len() {
            0 | 1 => 0,
            _ => self.rotation.fetch_add(1, Ordering::Relaxed),
        };
        replica_order(ranks, turn)
    }

    /// Estimates the duration of a transfer with a peer.
    pub(crate) fn expected_latency(
        &self,
        endpoint: &str,
        opcode: Opcode,
        bytes: u64,
        now: Moment,
    ) -> Duration {
        let there = host_of(endpoint);
        let is_here = there == host_of(&self.own_endpoint) || there == host_of(&self.own_name);
        let locality = if is_here { Locality::SameHost } else { Locality::OtherHost };
        self.latency.expected(endpoint, locality, opcode, bytes, now)
    }
}

/// Returns the endpoint without its port.
fn host_of(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mooncake_base::{ReplicaId, SegmentId};

    use super::*;
    use crate::object::SegmentInfo;

    fn place(endpoint: &str) -> Place {
        let segment = Arc::new(SegmentInfo {
            id: SegmentId::random(),
            name: endpoint.to_owned(),
            endpoint: endpoint.to_owned(),
            base: 0,
            length: 1 << 20,
            protocol: "tcp".to_owned(),
            is_disk: false,
        });
        Place { segment, offset: 0, length: 1, replica: ReplicaId(1) }
    }

    #[test]
    fn near_replicas_come_first_and_suspected_ones_last() {
        let selector = ReplicaSelector::new("own:1", "daemon:1", 0);
        let now = Moment::from_boot(Duration::from_secs(100));
        let places = ["far:1", "daemon:2", "own:1"].map(place);
        assert_eq!(selector.order(&places, 1, now).into_vec(), [2, 1, 0]);
        selector.suspected().add("own:1", now);
        assert_eq!(selector.order(&places, 1, now).into_vec(), [1, 0, 2]);
    }

    #[test]
    fn equally_good_replicas_take_turns() {
        let selector = ReplicaSelector::new("own:1", "own:1", 0);
        let places = ["a:1", "b:1"].map(place);
        let first = || selector.order(&places, 1, Moment::default())[0];
        assert_eq!([first(), first(), first()], [0, 1, 0]);
    }
}
