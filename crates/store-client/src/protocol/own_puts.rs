//! The puts that a client has started and not closed: those that a thread or an open reservation is
//! still writing, and those of which it is unknown whether the master has closed them.

use mooncake_base::{ObjectKey, ReplicaId, Version};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Unconfirmed puts from which on new puts wait until some are settled.
pub const UNCONFIRMED_MAX: usize = 1 << 16;

/// A put that its caller gave up, and that the master may still hold: its end or its revocation was
/// not answered, the answer to its start was lost, or its reservation was dropped.
///
/// It is revoked before the client starts another put of that key. Otherwise the other put would
/// meet it and be taken for a second one of an existing object, or a delayed message could end it
/// later and replace the value of the other. It is never ended: the caller knows it as failed, and
/// may have put another value since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnconfirmedPut {
    /// The key.
    pub key: ObjectKey,
    /// The version.
    pub version: Version,
    /// Replicas on which a write may still be in flight: their memory is not reused at once.
    pub failed_replicas: SmallVec<[ReplicaId; 1]>,
}

/// The open puts of a client.
#[derive(Debug, Default)]
pub struct OwnPuts {
    /// Puts that are being written, by the number of their start.
    live: FxHashMap<u64, Live>,
    unconfirmed: FxHashMap<ObjectKey, SmallVec<[UnconfirmedPut; 1]>>,
    unconfirmed_count: usize,
}

/// The puts of one start that are being written.
#[derive(Debug)]
enum Live {
    /// The start was sent and is not answered.
    Starting,
    Started(SmallVec<[u64; 1]>),
}

impl OwnPuts {
    /// Records that a start is about to be sent.
    pub fn begin_start(&mut self, request: u64) {
        self.live.insert(request, Live::Starting);
    }

    /// Records the answer of a start: the versions that are being written from now on.
    pub fn end_start(&mut self, request: u64, versions: SmallVec<[u64; 1]>) {
        if versions.is_empty() {
            self.live.remove(&request)
        } else {
            self.live.insert(request, Live::Started(versions))
        };
    }

    /// Records that none of the puts of this start is being written any more.
    pub fn release_all(&mut self, request: u64) {
        self.live.remove(&request);
    }

    /// Records that one put is not being written any more.
    pub fn release(&mut self, request: u64, version: Version) {
        let Some(Live::Started(versions)) = self.live.get_mut(&request) else { return };
        versions.retain(|other| *other != version.0);
        if versions.is_empty() {
            self.live.remove(&request);
        }
    }

    /// Returns whether an unfinished put of this client is being written.
    pub fn is_live(&self, key: &[u8], request: u64, version: Version) -> bool {
        let is_open = match self.live.get(&request) {
            None => false,
            Some(Live::Starting) => true,
            Some(Live::Started(versions)) => versions.contains(&version.0),
        };
        is_open && !self.unconfirmed_of(key).iter().any(|put| put.version == version)
    }

    /// Adds a put that must be revoked.
    pub fn add_unconfirmed(&mut self, put: UnconfirmedPut) {
        let puts = self.unconfirmed.entry(put.key.clone()).or_default();
        if !puts.iter().any(|other| other.version == put.version) {
            puts.push(put);
            self.unconfirmed_count += 1;
        }
    }

    /// Removes a put that the master does not hold any more.
    pub fn confirm(&mut self, put: &UnconfirmedPut) {
        let Some(puts) = self.unconfirmed.get_mut(&put.key) else { return };
        let before = puts.len();
        puts.retain(|other| other.version != put.version);
        self.unconfirmed_count -= before - puts.len();
        if puts.is_empty() {
            self.unconfirmed.remove(&put.key);
        }
    }

    /// Returns the number of unconfirmed puts.
    pub fn unconfirmed_count(&self) -> usize {
        self.unconfirmed_count
    }

    /// Returns the unconfirmed puts of a key.
    pub fn unconfirmed_of(&self, key: &[u8]) -> &[UnconfirmedPut] {
        self.unconfirmed.get(key).map_or(&[], |puts| puts)
    }

    /// Returns at most `limit` unconfirmed puts.
    pub fn some_unconfirmed(&self, limit: usize) -> Vec<UnconfirmedPut> {
        self.unconfirmed.values().flatten().take(limit).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    fn put(key: &str, version: u64) -> UnconfirmedPut {
        UnconfirmedPut {
            key: ObjectKey::new(key.as_bytes()).unwrap(),
            version: Version(version),
            failed_replicas: SmallVec::new(),
        }
    }

    #[test]
    fn put_is_live_from_its_start_until_it_is_released() {
        let mut puts = OwnPuts::default();
        assert!(!puts.is_live(b"k", 1, Version(10)), "an unknown start");
        puts.begin_start(1);
        assert!(puts.is_live(b"k", 1, Version(10)), "the version is not known yet");
        puts.end_start(1, smallvec![11, 12]);
        assert!(!puts.is_live(b"k", 1, Version(10)), "a late duplicate of the start");
        assert!(puts.is_live(b"k", 1, Version(11)) && puts.is_live(b"k", 1, Version(12)));
        puts.release(1, Version(11));
        assert!(!puts.is_live(b"k", 1, Version(11)) && puts.is_live(b"k", 1, Version(12)));
        puts.add_unconfirmed(put("k", 12));
        assert!(!puts.is_live(b"k", 1, Version(12)), "it was given up");
        puts.release(1, Version(12));
        puts.begin_start(2);
        puts.release_all(2);
        assert!(puts.live.is_empty());
        puts.begin_start(3);
        puts.end_start(3, SmallVec::new());
        assert!(puts.live.is_empty(), "nothing was started");
    }

    #[test]
    fn unconfirmed_puts_are_kept_until_confirmed() {
        let mut puts = OwnPuts::default();
        for _ in 0..2 {
            puts.add_unconfirmed(put("a", 1));
        }
        puts.add_unconfirmed(put("a", 2));
        puts.add_unconfirmed(put("b", 3));
        assert_eq!(puts.unconfirmed_count(), 3);
        assert_eq!(puts.unconfirmed_of(b"a"), [put("a", 1), put("a", 2)]);
        assert_eq!(puts.some_unconfirmed(2).len(), 2);
        puts.confirm(&put("a", 1));
        puts.confirm(&put("a", 1));
        assert_eq!(puts.unconfirmed_of(b"a"), [put("a", 2)]);
        puts.confirm(&put("a", 2));
        assert!(puts.unconfirmed_of(b"a").is_empty());
        assert_eq!((puts.unconfirmed_count(), puts.some_unconfirmed(9)), (1, vec![put("b", 3)]));
    }
}
