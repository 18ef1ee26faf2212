//! Ghosts: a bounded memory of how often evicted keys were seen, in a few bytes per key.

use crate::state::ids::KeyHash;

/// The number of evicted keys remembered per cached object.
const KEYS_PER_OBJECT: usize = 5;

/// The memory is replaced by a smaller one when there are this many times fewer objects than it is
/// sized for.
const SHRUNK: usize = 4;

/// Ways of a set. A key can only be in the ways of one set.
const WAYS: usize = 32;

/// The average number of ways in use. A set seldom overflows at this load.
const WAYS_TAKEN: usize = 22;

/// Keys are forgotten by age, so that the blocks of one text are forgotten together. Ages are
/// counted in epochs. The memory covers this many epochs…
const EPOCHS: u8 = 48;

/// … and epoch numbers wrap at this mask.
const EPOCH_MASK: u8 = 0x3f;

/// Bits of the tier beside the epoch.
const TIER_BITS: u32 = 2;

/// Evicted keys by hash, forgotten in the order of their eviction. Two keys with the same
/// fingerprint, about one in a thousand, are confused. The only effect is that a new key is treated
/// as seen before.
#[derive(Debug, Default)]
pub(in crate::state) struct Ghosts {
    /// The sets, one after another. Each column is allocated as zeros, which the system provides
    /// when they are used: a pool of 16 M objects does not stop to write half a gigabyte.
    fingerprints: Vec<u16>,
    entries: Vec<u8>,
    counts: Vec<u8>,
    /// The number of objects that the memory is sized for.
    objects_max: usize,
    epoch: u8,
    /// Keys remembered in the present epoch.
    count: usize,
}

/// A set of keys, the latest first.
#[derive(Debug)]
struct Set<'a> {
    fingerprints: &'a mut [u16],
    /// Epoch and tier of each key.
    entries: &'a mut [u8],
    count: &'a mut u8,
}

impl Ghosts {
    /// Remembers an evicted key; `objects` is the number of cached objects. When that number
    /// exceeds the size of the memory or has shrunk far below it, all earlier keys are forgotten:
    /// sets that are rarely accessed would not notice how old their keys are.
    pub(in crate::state) fn remember(&mut self, hash: KeyHash, tier: usize, objects: usize) {
        if objects > self.objects_max || objects < self.objects_max / SHRUNK {
            self.objects_max = objects + objects / 4;
            let sets = (self.objects_max * KEYS_PER_OBJECT).div_ceil(WAYS_TAKEN);
            self.fingerprints = vec![0; sets * WAYS];
            self.entries = vec![0; sets * WAYS];
            self.counts = vec![0; sets];
        }
        self.count += 1;
        if self.count * usize::from(EPOCHS) > objects * KEYS_PER_OBJECT {
            (self.epoch, self.count) = ((self.epoch + 1) & EPOCH_MASK, 0);
        }
        self.take(hash);
        let entry = self.epoch << TIER_BITS | tier as u8;
        let set = self.set(hash);
        let count = usize::from(*set.count).min(WAYS - 1);
        set.fingerprints.copy_within(..count, 1);
        set.entries.copy_within(..count, 1);
        (set.fingerprints[0], set.entries[0]) = (hash.number() as u16, entry);
        *set.count = count as u8 + 1;
    }

    /// Returns the tier of a key and forgets the key.
    pub(in crate::state) fn recall(&mut self, hash: KeyHash) -> Option<usize> {
        if self.counts.is_empty() { None } else { self.take(hash) }
    }

    /// Removes a key from its set, and all keys of the set that are too old.
    fn take(&mut self, hash: KeyHash) -> Option<usize> {
        let epoch = self.epoch;
        let set = self.set(hash);
        let age = |entry: u8| epoch.wrapping_sub(entry >> TIER_BITS) & EPOCH_MASK;
        while *set.count > 0 && age(set.entries[usize::from(*set.count) - 1]) > EPOCHS {
            *set.count -= 1;
        }
        let count = usize::from(*set.count);
        let place = set.fingerprints[..count]
            .iter()
            .position(|&fingerprint| fingerprint == hash.number() as u16)?;
        let tier = set.entries[place] & !(u8::MAX << TIER_BITS);
        set.fingerprints.copy_within(place + 1..count, place);
        set.entries.copy_within(place + 1..count, place);
        *set.count -= 1;
        Some(usize::from(tier))
    }

    /// Selects the set by the upper bits of the hash. The lower bits are the fingerprint within the
    /// set.
    fn set(&mut self, hash: KeyHash) -> Set<'_> {
        let index = (u64::from(hash.number()) * self.counts.len() as u64) >> u32::BITS;
        let index = index as usize;
        let ways = index * WAYS..(index + 1) * WAYS;
        Set {
            fingerprints: &mut self.fingerprints[ways.clone()],
            entries: &mut self.entries[ways],
            count: &mut self.counts[index],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u32) -> KeyHash {
        let mut random = super::super::super::super::random::Random::new(u64::from(number));
        KeyHash::new(random.next() as u32)
    }

    #[test]
    fn recalls_tier_of_key_once() {
        let mut ghosts = Ghosts::default();
        assert_eq!(ghosts.recall(hash(1)), None);
        for number in 0..3000 {
            ghosts.remember(hash(number), number as usize % 4, 1000);
        }
        ghosts.remember(hash(7), 2, 1000);
        assert_eq!((ghosts.recall(hash(7)), ghosts.recall(hash(7))), (Some(2), None));
        let kept = (1000..3000).filter(|n| ghosts.recall(hash(*n)) == Some(*n as usize % 4));
        assert!(kept.count() > 1990, "nearly all");
    }

    #[test]
    fn forgets_keys_when_pool_shrinks() {
        let mut ghosts = Ghosts::default();
        for number in 0..1000 {
            ghosts.remember(hash(number), 1, 40_000);
        }
        ghosts.remember(hash(2000), 1, 40_000 / SHRUNK);
        assert_eq!(ghosts.recall(hash(7)), None, "the memory is for a quarter more objects");
        for number in 3000..4000 {
            ghosts.remember(hash(number), 2, 10_000);
        }
        ghosts.remember(hash(5000), 1, 12_500 / SHRUNK);
        assert_eq!(ghosts.recall(hash(3007)), Some(2), "it is not so much smaller");
        assert_eq!(ghosts.recall(hash(5000)), Some(1));
    }

    #[test]
    fn bounded_memory_forgets_oldest_first() {
        let mut ghosts = Ghosts::default();
        for number in 0..1_000_000 {
            ghosts.remember(hash(number), 0, 1000);
        }
        let bytes = size_of_val(&ghosts.fingerprints[..]) + ghosts.entries.len();
        assert!(bytes + ghosts.counts.len() <= 30 * 1000, "bytes an object");
        let mut known = |range: std::ops::Range<u32>| {
            range.filter(|number| ghosts.recall(hash(*number)).is_some()).count()
        };
        let (late, early) = (known(996_000..1_000_000), known(0..994_000));
        assert!(late > 3900 && early < 1000, "late={late} early={early}");
    }
}
