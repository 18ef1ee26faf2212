//! The keys whose objects a client has asked for in memory, so that it does not ask again soon.

use std::{hash::BuildHasher, time::Duration};

use mooncake_base::{Moment, ObjectKey, sync::Mutex};
use mooncake_proto::v1;
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::config::PrefetchConfig;

/// Maximum number of keys; more are asked for again.
const KEYS_MAX: usize = 1 << 18;

/// An object that is not in memory after this time is not awaited any more: its promotion failed.
const LATE: Duration = Duration::from_secs(1);

/// The keys, by hash: two keys of one hash only delay a prefetch.
#[derive(Debug)]
pub(in crate::client) struct AskedKeys {
    config: PrefetchConfig,
    by_hash: Mutex<FxHashMap<u64, PastRequest>>,
}

/// A key that was asked for.
#[derive(Debug, Clone, Copy)]
struct PastRequest {
    since: Moment,
    /// When it may be asked for again.
    until: Moment,
    has_failed: bool,
}

impl AskedKeys {
    pub(in crate::client) fn new(config: PrefetchConfig) -> Self {
        Self { config, by_hash: Mutex::default() }
    }

    /// Returns the numbers of the keys that may be asked for.
    pub(in crate::client) fn select(&self, keys: &[impl AsRef<[u8]>], now: Moment) -> Vec<u32> {
        if !self.config.is_enabled {
            return Vec::new();
        }
        let by_hash = self.by_hash.lock();
        let may_be_asked =
            |key: &[u8]| by_hash.get(&hash(key)).is_none_or(|asked| asked.until.has_passed(now));
        let numbered = (0..).zip(keys);
        numbered.filter(|(_, key)| may_be_asked(key.as_ref())).map(|(number, _)| number).collect()
    }

    /// Records the answer to a probe of keys that asked for objects in memory.
    pub(in crate::client) fn record_answer(
        &self,
        keys: &[impl AsRef<[u8]>],
        found: &v1::ProbeResponse,
        now: Moment,
    ) {
        let named = |number: &u32| keys.get(*number as usize);
        self.record(found.prefetching.iter().filter_map(named), now);
        self.record_failed(found.prefetch_refused.iter().filter_map(named), now);
    }

    /// Records keys whose objects wait to be brought into memory.
    fn record<K: AsRef<[u8]>>(&self, keys: impl Iterator<Item = K>, now: Moment) {
        let asked =
            PastRequest { since: now, until: now + self.config.dedup_ttl, has_failed: false };
        self.insert(keys, asked);
    }

    /// Records keys whose objects the pool does not bring into memory now.
    fn record_failed<K: AsRef<[u8]>>(&self, keys: impl Iterator<Item = K>, now: Moment) {
        let asked = PastRequest { since: now, until: now + self.config.cooldown, has_failed: true };
        self.insert(keys, asked);
    }

    /// Records keys whose objects a read still found only on disk.
    pub(super) fn record_late<'a>(&self, keys: impl Iterator<Item = &'a ObjectKey>, now: Moment) {
        let mut by_hash = self.by_hash.lock();
        for key in keys {
            if let Some(asked) = by_hash.get_mut(&hash(key.as_bytes()))
                && (asked.since + LATE).has_passed(now)
            {
                *asked =
                    PastRequest { since: now, until: now + self.config.cooldown, has_failed: true };
            }
        }
    }

    /// Returns whether a read may wait for the object.
    pub(super) fn awaits(&self, key: &ObjectKey, now: Moment) -> bool {
        let asked = self.by_hash.lock().get(&hash(key.as_bytes())).copied();
        // One that was asked for long ago has been in memory since.
        let awaited = self.config.dedup_ttl.max(LATE);
        asked.is_some_and(|asked| !asked.has_failed && !(asked.since + awaited).has_passed(now))
    }

    /// Returns whether no key was asked for.
    pub(super) fn is_empty(&self) -> bool {
        self.by_hash.lock().is_empty()
    }

    fn insert<K: AsRef<[u8]>>(&self, keys: impl Iterator<Item = K>, asked: PastRequest) {
        let mut keys = keys.peekable();
        if keys.peek().is_none() {
            return;
        }
        let mut by_hash = self.by_hash.lock();
        for key in keys {
            if by_hash.len() >= KEYS_MAX {
                by_hash.retain(|_, known| !known.until.has_passed(asked.since));
                if by_hash.len() >= KEYS_MAX / 2 {
                    by_hash.clear();
                }
            }
            by_hash.insert(hash(key.as_ref()), asked);
        }
    }
}

fn hash(key: &[u8]) -> u64 {
    FxBuildHasher.hash_one(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&[u8]; 2] = [b"a", b"b"];

    fn at(milliseconds: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(1_000_000 + milliseconds))
    }

    fn key(name: &[u8]) -> ObjectKey {
        ObjectKey::new(name.to_vec()).unwrap()
    }

    #[test]
    fn key_is_asked_for_once_within_dedup_ttl() {
        let asked = AskedKeys::new(PrefetchConfig::default());
        assert_eq!(asked.select(&KEYS, at(0)), [0, 1]);
        asked.record([KEYS[1]].into_iter(), at(0));
        assert_eq!(asked.select(&KEYS, at(29_999)), [0]);
        assert_eq!(asked.select(&KEYS, at(30_000)), [0, 1]);
        assert!(asked.awaits(&key(b"b"), at(10)) && !asked.awaits(&key(b"a"), at(10)));
    }

    #[test]
    fn failed_key_is_asked_for_after_cooldown() {
        let asked = AskedKeys::new(PrefetchConfig::default());
        asked.record_failed([KEYS[0]].into_iter(), at(0));
        assert_eq!(asked.select(&KEYS, at(4_999)), [1]);
        assert_eq!(asked.select(&KEYS, at(5_000)), [0, 1]);
        assert!(!asked.awaits(&key(b"a"), at(1)));
        asked.record([KEYS[1]].into_iter(), at(0));
        asked.record_late([key(b"b")].iter(), at(999));
        assert!(asked.awaits(&key(b"b"), at(999)), "it may be on its way");
        asked.record_late([key(b"b")].iter(), at(1_000));
        assert!(!asked.awaits(&key(b"b"), at(1_000)));
        assert_eq!(asked.select(&KEYS, at(6_000)), [0, 1]);
    }

    #[test]
    fn nothing_is_asked_for_where_it_is_switched_off() {
        let config = PrefetchConfig { is_enabled: false, ..PrefetchConfig::default() };
        assert_eq!(AskedKeys::new(config).select(&KEYS, at(0)), [0; 0]);
    }

    #[test]
    fn number_of_keys_is_limited() {
        let asked = AskedKeys::new(PrefetchConfig::default());
        for number in 0..KEYS_MAX + 10 {
            asked.record([number.to_le_bytes()].into_iter(), at(0));
        }
        assert!(asked.by_hash.lock().len() <= KEYS_MAX);
    }
}
