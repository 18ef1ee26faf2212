//! How often keys were seen that were evicted: a bounded memory of a few bytes a key.

use crate::state::ids::KeyHash;

/// So many evicted keys are remembered for each object that is held.
const KEYS_PER_OBJECT: usize = 5;
/// The memory is made anew when there are so many times fewer objects than it is for.
const SHRUNK: usize = 4;
/// Places of a set. A key may lie in the places of one set only.
const WAYS: usize = 32;
/// Places that are taken on average: seldom is a set too small for all that is to be remembered.
const WAYS_TAKEN: usize = 22;
/// Keys are forgotten by age, the parts of a text together and not here and there one. An age is
/// counted in epochs, of which the memory covers so many…
const EPOCHS: u8 = 48;
/// … and this is one less than there are numbers for them.
const EPOCH_MASK: u8 = 0x3f;
/// Bits of the tier beside the epoch.
const TIER_BITS: u32 = 2;

/// Evicted keys by their hashes, forgotten in the order in which they were evicted. Two keys that
/// look alike, about one in a thousand, are taken for one; that does no harm but that one of them is
/// thought to have been seen before.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    sets: Vec<Set>,
    /// For how many objects there is room.
    objects_max: usize,
    epoch: u8,
    /// Keys remembered in this epoch.
    count: usize,
}

/// Keys, the latest first.
#[derive(Debug, Clone)]
struct Set {
    fingerprints: [u16; WAYS],
    /// Epoch and tier.
    entries: [u8; WAYS],
    count: u8,
}

impl Ghosts {
    /// Remembers a key, beside so many objects that are held. When their number outgrows the
    /// memory, or has become much smaller, what was remembered before is forgotten: sets that are
    /// seldom looked into do not notice how old their keys are.
    pub(super) fn remember(&mut self, hash: KeyHash, tier: usize, objects: usize) {
        if objects > self.objects_max || objects < self.objects_max / SHRUNK {
            self.objects_max = objects + objects / 4;
            let sets = (self.objects_max * KEYS_PER_OBJECT).div_ceil(WAYS_TAKEN);
            let empty = Set { fingerprints: [0; WAYS], entries: [0; WAYS], count: 0 };
            self.sets = vec![empty; sets];
        }
        self.count += 1;
        if self.count * usize::from(EPOCHS) > objects * KEYS_PER_OBJECT {
            (self.epoch, self.count) = ((self.epoch + 1) & EPOCH_MASK, 0);
        }
        self.take(hash);
        let entry = self.epoch << TIER_BITS | tier as u8;
        let set = self.set(hash);
        let count = usize::from(set.count).min(WAYS - 1);
        set.fingerprints.copy_within(..count, 1);
        set.entries.copy_within(..count, 1);
        (set.fingerprints[0], set.entries[0]) = (hash.number() as u16, entry);
        set.count = count as u8 + 1;
    }

    /// The tier of a key that is remembered; it no longer is afterwards.
    pub(super) fn recall(&mut self, hash: KeyHash) -> Option<usize> {
        if self.sets.is_empty() { None } else { self.take(hash) }
    }

    /// Takes a key out of its set, and what is to be forgotten there.
    fn take(&mut self, hash: KeyHash) -> Option<usize> {
        let epoch = self.epoch;
        let set = self.set(hash);
        let age = |entry: u8| epoch.wrapping_sub(entry >> TIER_BITS) & EPOCH_MASK;
        while set.count > 0 && age(set.entries[usize::from(set.count) - 1]) > EPOCHS {
            set.count -= 1;
        }
        let count = usize::from(set.count);
        let place = set.fingerprints[..count]
            .iter()
            .position(|&fingerprint| fingerprint == hash.number() as u16)?;
        let tier = set.entries[place] & !(u8::MAX << TIER_BITS);
        set.fingerprints.copy_within(place + 1..count, place);
        set.entries.copy_within(place + 1..count, place);
        set.count -= 1;
        Some(usize::from(tier))
    }

    /// By the upper bits of the hash; the lower ones tell the keys of a set apart.
    fn set(&mut self, hash: KeyHash) -> &mut Set {
        let index = (u64::from(hash.number()) * self.sets.len() as u64) >> u32::BITS;
        &mut self.sets[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u32) -> KeyHash {
        let mut random = super::super::super::random::Random::new(u64::from(number));
        KeyHash::new(random.next() as u32)
    }

    #[test]
    fn keys_are_remembered_with_their_tiers_and_recalled_once() {
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
    fn what_was_evicted_from_a_far_larger_pool_is_forgotten() {
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
    fn the_memory_is_bounded_and_forgets_the_earliest_first() {
        let mut ghosts = Ghosts::default();
        for number in 0..1_000_000 {
            ghosts.remember(hash(number), 0, 1000);
        }
        assert!(ghosts.sets.len() * size_of::<Set>() <= 30 * 1000, "bytes an object");
        let mut known = |range: std::ops::Range<u32>| {
            range.filter(|number| ghosts.recall(hash(*number)).is_some()).count()
        };
        let (late, early) = (known(996_000..1_000_000), known(0..994_000));
        assert!(late > 3900 && early < 1000, "late={late} early={early}");
    }
}
