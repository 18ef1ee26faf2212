//! Peers that failed or stayed silent a short time ago.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Backoff, Clock, Error, Moment, Result, SystemClock};
use rustc_hash::FxHashMap;

/// Time for which a failed peer is tried last.
const SUSPICION_TIME: Duration = Duration::from_secs(5);

/// Maximum number of suspected peers.
const SUSPECTED_PEERS_MAX: usize = 1024;

/// Maximum number of suspected peers that are named to the master, which ignores more.
const NAMED_PEERS_MAX: usize = 256;

/// Pauses after a peer stayed silent, before it is tried again.
const SILENCE_PAUSES: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(4));

/// Peers with a recent failure.
#[derive(Debug, Default)]
pub(crate) struct SuspectedPeers {
    peers: Mutex<FxHashMap<String, Suspicion>>,
    /// Number of suspected peers, so that the lock is not taken while there are none.
    count: AtomicUsize,
}

/// A peer with a recent failure.
#[derive(Debug, Default)]
struct Suspicion {
    until: Moment,
    silence: Option<Silence>,
}

/// A peer that did not answer in time.
#[derive(Debug)]
struct Silence {
    error: Error,
    /// The stall limit of the attempt. Only an attempt with a higher limit is worth its time before
    /// the pause is over.
    stall: Option<Duration>,
    /// Earlier silences in a row.
    earlier: u32,
    until: Moment,
}

impl SuspectedPeers {
    /// Marks a peer as suspected after a failed transfer. Returns whether the peer was not
    /// suspected before.
    pub(crate) fn add(&self, endpoint: &str, now: Moment) -> bool {
        let mut peers = self.peers.lock();
        let Some(suspicion) = self.suspicion(&mut peers, endpoint, now) else { return false };
        let was_over = suspicion.until.has_passed(now);
        suspicion.until = now + SUSPICION_TIME;
        was_over
    }

    /// Records that a peer did not answer a transfer with this stall limit.
    pub(crate) fn add_silence(
        &self,
        endpoint: &str,
        error: &Error,
        stall: Option<Duration>,
        now: Moment,
    ) {
        let mut peers = self.peers.lock();
        let Some(suspicion) = self.suspicion(&mut peers, endpoint, now) else { return };
        let earlier = match &suspicion.silence {
            // Transfers that ran at the same time have seen the same silence.
            Some(before) if !before.until.has_passed(now) => before.earlier,
            Some(before) => before.earlier.saturating_add(1),
            None => 0,
        };
        let until = now + SILENCE_PAUSES.pause(earlier);
        suspicion.silence = Some(Silence { error: error.clone(), stall, earlier, until });
    }

    /// Fails if the peer was silent a moment ago for at least this stall limit.
    pub(crate) fn check(&self, endpoint: &str, stall: Option<Duration>) -> Result<()> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        self.check_at(endpoint, stall, SystemClock.now())
    }

    fn check_at(&self, endpoint: &str, stall: Option<Duration>, now: Moment) -> Result<()> {
        let peers = self.peers.lock();
        let silence = peers.get(endpoint).and_then(|suspicion| suspicion.silence.as_ref());
        let Some(silence) = silence.filter(|silence| !silence.until.has_passed(now)) else {
            return Ok(());
        };
        let limit = |stall: Option<Duration>| stall.unwrap_or(Duration::MAX);
        if limit(stall) > limit(silence.stall) {
            return Ok(());
        }
        let text = "the peer did not answer a moment ago and is not tried again yet";
        Err(Error::new(silence.error.code(), text)
            .with("peer", endpoint)
            .with("tried_again_in_ms", silence.until.since(now).as_millis())
            .caused_by(silence.error.clone()))
    }

    /// Clears the suspicion after a successful transfer.
    pub(crate) fn clear(&self, endpoint: &str) {
        if self.count.load(Ordering::Relaxed) > 0 {
            let mut peers = self.peers.lock();
            peers.remove(endpoint);
            self.count.store(peers.len(), Ordering::Relaxed);
        }
    }

    /// Returns the suspected peers, as many as the master takes: those that failed last.
    pub(crate) fn endpoints(&self) -> Vec<String> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        self.endpoints_at(SystemClock.now())
    }

    fn endpoints_at(&self, now: Moment) -> Vec<String> {
        let peers = self.peers.lock();
        let is_suspected = |suspicion: &Suspicion| !suspicion.until.has_passed(now);
        let mut suspected: Vec<_> =
            peers.iter().filter(|(_, suspicion)| is_suspected(suspicion)).collect();
        suspected.sort_unstable_by_key(|(_, suspicion)| std::cmp::Reverse(suspicion.until));
        suspected.truncate(NAMED_PEERS_MAX);
        suspected.into_iter().map(|(endpoint, _)| endpoint.clone()).collect()
    }

    pub(crate) fn is_suspected(&self, endpoint: &str, now: Moment) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let peers = self.peers.lock();
        peers.get(endpoint).is_some_and(|suspicion| !suspicion.until.has_passed(now))
    }

    /// Returns the entry of a peer, a new one if needed; `None` if there are too many.
    fn suspicion<'a>(
        &self,
        peers: &'a mut FxHashMap<String, Suspicion>,
        endpoint: &str,
        now: Moment,
    ) -> Option<&'a mut Suspicion> {
        if peers.len() >= SUSPECTED_PEERS_MAX {
            peers.retain(|_, suspicion| !suspicion.until.has_passed(now));
        }
        if peers.len() >= SUSPECTED_PEERS_MAX {
            return None;
        }
        if !peers.contains_key(endpoint) {
            peers.insert(endpoint.to_owned(), Suspicion::default());
            self.count.store(peers.len(), Ordering::Relaxed);
        }
        peers.get_mut(endpoint)
    }
}

#[cfg(test)]
mod tests {
    use mooncake_base::ErrorCode;

    use super::*;

    const SHORT: Option<Duration> = Some(Duration::from_secs(1));
    const LONG: Option<Duration> = Some(Duration::from_secs(2));

    fn silent() -> Error {
        Error::new(ErrorCode::RPC_TIMEOUT, "silent")
    }

    #[test]
    fn silent_peer_is_tried_again_after_growing_pauses() {
        let peers = SuspectedPeers::default();
        let mut now = Moment::default() + Duration::from_secs(100);
        let mut pauses = Vec::new();
        for _ in 0..5 {
            assert!(peers.check_at("a", SHORT, now).is_ok());
            peers.add_silence("a", &silent(), SHORT, now);
            peers.add_silence("a", &silent(), SHORT, now);
            let begin = now;
            while peers.check_at("a", SHORT, now).is_err() {
                now = now + Duration::from_millis(100);
            }
            pauses.push(now.since(begin).as_millis());
        }
        assert_eq!(pauses, [500, 1000, 2000, 4000, 4000]);
        assert!(peers.check_at("b", SHORT, now).is_ok());
        peers.add_silence("a", &silent(), SHORT, now);
        peers.clear("a");
        assert!(peers.check_at("a", SHORT, now).is_ok());
    }

    #[test]
    fn longer_attempt_is_made_during_the_pause() {
        let peers = SuspectedPeers::default();
        let now = Moment::default() + Duration::from_secs(100);
        peers.add_silence("a", &silent(), SHORT, now);
        assert!(peers.check_at("a", SHORT, now).is_err());
        assert!(peers.check_at("a", LONG, now).is_ok());
        assert!(peers.check_at("a", None, now).is_ok());
        peers.add_silence("a", &silent(), None, now);
        let error = peers.check_at("a", None, now).unwrap_err();
        assert_eq!(error.code(), ErrorCode::RPC_TIMEOUT);
        assert!(error.to_string().contains("peer=a"), "{error}");
    }

    #[test]
    fn names_the_peers_that_failed_last() {
        let peers = SuspectedPeers::default();
        let start = Moment::default() + Duration::from_secs(100);
        let at = |peer: usize| start + Duration::from_millis(peer as u64);
        for peer in 0..NAMED_PEERS_MAX + 10 {
            peers.add(&format!("p{peer}"), at(peer));
        }
        let named = peers.endpoints_at(at(NAMED_PEERS_MAX + 10));
        assert_eq!(named.len(), NAMED_PEERS_MAX);
        assert_eq!(named[0], format!("p{}", NAMED_PEERS_MAX + 9));
        assert!(!named.contains(&"p9".to_owned()) && named.contains(&"p10".to_owned()));
        assert_eq!(peers.endpoints_at(at(9) + SUSPICION_TIME).len(), NAMED_PEERS_MAX);
        assert_eq!(peers.endpoints_at(at(19) + SUSPICION_TIME).len(), NAMED_PEERS_MAX - 10);
    }

    #[test]
    fn failed_peer_is_suspected_for_a_while() {
        let peers = SuspectedPeers::default();
        let now = Moment::default() + Duration::from_secs(100);
        assert!(!peers.is_suspected("a", now));
        assert!(peers.add("a", now));
        assert!(!peers.add("a", now));
        assert!(peers.is_suspected("a", now));
        assert!(!peers.is_suspected("a", now + SUSPICION_TIME));
        assert!(peers.check_at("a", SHORT, now).is_ok(), "a peer that refused is cheap to try");
    }
}
