//! Objects in tiers by how often they were seen, each tier in the order of the last use.

use crate::state::ids::KeyHash;

/// No object.
const NONE: u32 = u32::MAX;
/// In no tier.
const OUT: u32 = u32::MAX - 1;
/// How many tiers there are: never seen before, once, twice, more often.
pub(super) const TIERS: usize = 4;
/// The tier of an object takes so many bits of its stamp; the rest is the tick of its last use.
const TIER_BITS: u32 = 2;
/// Time goes by uses: so many ticks while as many uses pass as there are objects.
pub(super) const LIFETIME_TICKS: u32 = 1024;
/// Ticks are counted in so many bits, and go round.
pub(super) const TICK_MASK: u32 = u32::MAX >> TIER_BITS;
/// No object counts as older than this; kept well below half of the round.
const AGE_MAX: u32 = 1 << 28;

/// Objects by tier, each with what is known of its use. 16 bytes an object.
#[derive(Debug, Default)]
pub(super) struct Tiers {
    entries: Vec<Entry>,
    tiers: [Tier; TIERS],
    /// When ages were last kept from growing without bound.
    bounded: u32,
}

/// What is known of an object; it outlives the object's stay in a tier.
#[derive(Debug, Clone, Copy)]
struct Entry {
    earlier: u32,
    later: u32,
    /// The tick of the last use, and the tier.
    stamp: u32,
    hash: KeyHash,
}

#[derive(Debug, Clone, Copy)]
struct Tier {
    first: u32,
    last: u32,
    /// The object that came last; those that came in the same tick follow it.
    newest: u32,
    count: usize,
}

impl Default for Tier {
    fn default() -> Self {
        Self { first: NONE, last: NONE, newest: NONE, count: 0 }
    }
}

impl Entry {
    const UNKNOWN: Self = Self { earlier: OUT, later: OUT, stamp: 0, hash: KeyHash::new(0) };

    fn tier(self) -> usize {
        (self.stamp & !(u32::MAX << TIER_BITS)) as usize
    }

    fn tick(self) -> u32 {
        self.stamp >> TIER_BITS
    }
}

impl Tiers {
    /// Adds an object that is in no tier, as the last to go but for those used in a later tick: of
    /// the objects of one tick the later goes first, since a batch names the beginning of a text
    /// before its continuation, which is of no use alone.
    pub(super) fn push(&mut self, object: u32, hash: KeyHash, tier: usize, tick: u32) {
        let index = object as usize;
        if index >= self.entries.len() {
            self.entries.resize(index + 1, Entry::UNKNOWN);
        }
        self.entries[index].hash = hash;
        self.entries[index].stamp = tick << TIER_BITS | tier as u32;
        let newest = self.tiers[tier].newest;
        let is_same = newest != NONE && self.entries[newest as usize].tick() == tick;
        self.link(object, if is_same { newest } else { NONE });
        self.tiers[tier].newest = object;
    }

    /// Adds an object that was popped as the first of its tier.
    pub(super) fn put_back(&mut self, object: u32) {
        let tier = self.tiers[self.entries[object as usize].tier()];
        self.link(object, tier.first);
    }

    /// Takes an object out that is in a tier.
    pub(super) fn remove(&mut self, object: u32) {
        let entry = self.entries[object as usize];
        let Entry { earlier, later, .. } = entry;
        let tier = &mut self.tiers[entry.tier()];
        tier.count -= 1;
        if tier.newest == object {
            tier.newest = later;
        }
        match earlier {
            NONE => tier.first = later,
            earlier => self.entries[earlier as usize].later = later,
        }
        match later {
            NONE => tier.last = earlier,
            later => self.entries[later as usize].earlier = earlier,
        }
        (self.entries[object as usize].earlier, self.entries[object as usize].later) = (OUT, OUT);
    }

    /// Takes the object out that has outstayed its tier for longest, by what each tier may stay
    /// longer than the first.
    pub(super) fn pop(&mut self, tick: u32, bonus: &[u32; TIERS]) -> Option<u32> {
        let first = |tier: usize| {
            let object = self.tiers[tier].first;
            let overdue = || i64::from(self.age(object, tick)) - i64::from(bonus[tier]);
            (object != NONE).then(|| (overdue(), object))
        };
        let (_, object) = (0..TIERS).filter_map(first).max_by_key(|(overdue, _)| *overdue)?;
        self.remove(object);
        Some(object)
    }

    /// Forgets what is known of an object that is in no tier.
    pub(super) fn forget(&mut self, object: u32) {
        if let Some(entry) = self.entries.get_mut(object as usize) {
            *entry = Entry::UNKNOWN;
        }
    }

    /// Keeps ages from going round the counter. To be called now and then; goes through all
    /// objects once in so many ticks that it does not count.
    pub(super) fn bound_ages(&mut self, tick: u32) {
        if tick.wrapping_sub(self.bounded) & TICK_MASK < AGE_MAX / 2 {
            return;
        }
        self.bounded = tick;
        for entry in &mut self.entries {
            if age(*entry, tick) > AGE_MAX {
                let oldest = tick.wrapping_sub(AGE_MAX) & TICK_MASK;
                entry.stamp = oldest << TIER_BITS | entry.tier() as u32;
            }
        }
    }

    pub(super) fn contains(&self, object: u32) -> bool {
        self.entries.get(object as usize).is_some_and(|entry| entry.earlier != OUT)
    }

    /// The tier of an object and the tick of its last use, also after it was taken out, as long as
    /// its number was given to no other.
    pub(super) fn known(&self, object: u32, hash: KeyHash) -> Option<(usize, u32)> {
        let entry = self.entries.get(object as usize).filter(|entry| entry.hash == hash)?;
        (entry.stamp != 0).then(|| (entry.tier(), entry.tick()))
    }

    /// The hash it was added with.
    pub(super) fn hash(&self, object: u32) -> KeyHash {
        self.entries.get(object as usize).map_or(KeyHash::new(0), |entry| entry.hash)
    }

    /// How many are in a tier.
    pub(super) fn count(&self) -> usize {
        self.tiers.iter().map(|tier| tier.count).sum()
    }

    fn age(&self, object: u32, tick: u32) -> u32 {
        age(self.entries[object as usize], tick)
    }

    /// Puts an object of which all else is known before `later` in its tier.
    fn link(&mut self, object: u32, later: u32) {
        let tier = &mut self.tiers[self.entries[object as usize].tier()];
        tier.count += 1;
        let earlier = match later {
            NONE => std::mem::replace(&mut tier.last, object),
            later => std::mem::replace(&mut self.entries[later as usize].earlier, object),
        };
        match earlier {
            NONE => tier.first = object,
            earlier => self.entries[earlier as usize].later = object,
        }
        let entry = &mut self.entries[object as usize];
        (entry.earlier, entry.later) = (earlier, later);
    }
}

fn age(entry: Entry, tick: u32) -> u32 {
    tick.wrapping_sub(entry.tick()) & TICK_MASK
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(tiers: &mut Tiers, tick: u32, bonus: [u32; TIERS]) -> Vec<u32> {
        std::iter::from_fn(|| tiers.pop(tick, &bonus)).collect()
    }

    #[test]
    fn of_one_tick_the_later_goes_first() {
        let mut tiers = Tiers::default();
        for (object, tick) in [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)] {
            tiers.push(object, KeyHash::new(object), 0, tick);
        }
        tiers.remove(2);
        assert_eq!(drain(&mut tiers, 3, [0; TIERS]), [1, 0, 4, 3]);
        assert_eq!(tiers.count(), 0);
    }

    #[test]
    fn a_tier_may_stay_longer_than_another() {
        let mut tiers = Tiers::default();
        tiers.push(0, KeyHash::new(0), 1, 10);
        tiers.push(1, KeyHash::new(1), 0, 15);
        tiers.push(2, KeyHash::new(2), 0, 25);
        assert_eq!(drain(&mut tiers, 30, [0, 10, 10, 10]), [1, 0, 2]);
    }

    #[test]
    fn what_is_put_back_is_where_it_was() {
        let mut tiers = Tiers::default();
        for object in 0..4 {
            tiers.push(object, KeyHash::new(object), 0, object);
        }
        let [first, second] = [(); 2].map(|()| tiers.pop(4, &[0; TIERS]).unwrap());
        tiers.put_back(second);
        tiers.put_back(first);
        assert_eq!(drain(&mut tiers, 5, [0; TIERS]), [0, 1, 2, 3]);
    }

    #[test]
    fn ages_stay_in_order_although_ticks_go_round() {
        let mut tiers = Tiers::default();
        tiers.push(0, KeyHash::new(0), 0, 1);
        for step in 1..40_u32 {
            let tick = step.wrapping_mul(1 << 27) & TICK_MASK;
            tiers.bound_ages(tick);
            tiers.push(step, KeyHash::new(step), 0, tick);
        }
        let tick = 39_u32.wrapping_mul(1 << 27) & TICK_MASK;
        assert_eq!(drain(&mut tiers, tick, [0; TIERS]), (0..40).collect::<Vec<_>>());
    }
}
