//! Which copy to read first: by where it is, and by who failed a moment ago.

use std::time::Duration;

use mooncake_base::sync::Mutex;
use mooncake_base::{Moment, ObjectKey};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};

use super::Shared;
use crate::object::Place;

/// How long a peer that failed is asked last.
const SUSPICION: Duration = Duration::from_secs(5);

/// The most peers that are suspected at once.
const SUSPECTS_MAX: usize = 1024;

/// Peers that failed a moment ago, each until when.
#[derive(Debug, Default)]
pub(super) struct Suspects(Mutex<FxHashMap<String, Moment>>);

impl Suspects {
    /// A transfer with the peer failed. Says whether that is news.
    pub(super) fn add(&self, endpoint: &str, now: Moment) -> bool {
        let mut suspects = self.0.lock();
        if suspects.len() >= SUSPECTS_MAX {
            suspects.retain(|_, until| !until.has_passed(now));
        }
        if suspects.len() >= SUSPECTS_MAX {
            return false;
        }
        let before = suspects.insert(endpoint.to_owned(), now + SUSPICION);
        before.is_none_or(|until| until.has_passed(now))
    }

    /// A transfer with the peer succeeded.
    pub(super) fn clear(&self, endpoint: &str) {
        let mut suspects = self.0.lock();
        if !suspects.is_empty() {
            suspects.remove(endpoint);
        }
    }

    fn has(&self, endpoint: &str, now: Moment) -> bool {
        let suspects = self.0.lock();
        suspects.get(endpoint).is_some_and(|until| !until.has_passed(now))
    }
}

impl Shared {
    /// The order in which the copies are tried: our own process, our own host, others; whoever
    /// failed a moment ago comes last. Equal ones take turns by key, so that readers of many
    /// objects spread over the copies.
    pub(super) fn preference(&self, key: &ObjectKey, places: &[Place], now: Moment) -> Vec<usize> {
        let mut order: Vec<usize> = (0..places.len()).collect();
        if places.len() < 2 {
            return order;
        }
        let own = self.engine.segment_name();
        let turn = turn_of(key, self.id.bits() as usize, places.len());
        order.sort_by_key(|&at| {
            let endpoint = places[at].segment.endpoint.as_str();
            let distance = match endpoint {
                _ if endpoint == own => 0,
                _ if host(endpoint) == host(own) => 1,
                _ => 2,
            };
            (self.suspects.has(endpoint, now), distance, (at + turn) % places.len())
        });
        order
    }
}

fn turn_of(key: &ObjectKey, reader: usize, copies: usize) -> usize {
    let mut hasher = FxHasher::default();
    key.hash(&mut hasher);
    (hasher.finish() as usize).wrapping_add(reader) % copies
}

/// The endpoint without its port.
fn host(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}
