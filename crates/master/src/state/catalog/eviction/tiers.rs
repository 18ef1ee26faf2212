//! Objects in tiers by use count, each tier in the order of last use.

use std::{marker::PhantomData, ops::ControlFlow};

use crate::state::ids::{KeyHash, Slot};

/// No object.
const NONE: u32 = u32::MAX;

/// The mark of an object in no tier.
const OUT: u32 = u32::MAX - 1;

/// The number of tiers: never seen before, seen once, twice, more often.
pub(in crate::state) const TIERS: usize = 4;

/// Bits of the tier in an object's stamp. The other bits are the tick of its last use.
const TIER_BITS: u32 = 2;

/// The clock advances by this many ticks while as many uses pass as there are objects.
pub(in crate::state) const LIFETIME_TICKS: u32 = 1024;

/// Bits of the tick counter, which wraps.
pub(in crate::state) const TICK_MASK: u32 = u32::MAX >> TIER_BITS;

/// The maximum age of an object, well below half of the range of the counter.
const AGE_MAX: u32 = 1 << 28;

/// Objects by tier, each with its last use. Takes 16 bytes per object.
#[derive(Debug)]
pub(in crate::state) struct Tiers<S> {
    entries: Vec<TieredEntry>,
    tiers: [Tier; TIERS],
    /// The tick of the last bounding of ages.
    bounded: u32,
    slot: PhantomData<S>,
}

/// The record of an object. The record outlives the object's stay in a tier.
#[derive(Debug, Clone, Copy)]
struct TieredEntry {
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
    /// The object added last; objects of the same tick follow it.
    newest: u32,
    count: usize,
}

impl<S> Default for Tiers<S> {
    fn default() -> Self {
        let tiers = <[Tier; TIERS]>::default();
        Self { entries: Vec::new(), tiers, bounded: 0, slot: PhantomData }
    }
}

impl Default for Tier {
    fn default() -> Self {
        Self { first: NONE, last: NONE, newest: NONE, count: 0 }
    }
}

impl TieredEntry {
    const UNKNOWN: Self = Self { earlier: OUT, later: OUT, stamp: 0, hash: KeyHash::new(0) };

    fn tier(self) -> usize {
        (self.stamp & !(u32::MAX << TIER_BITS)) as usize
    }

    fn tick(self) -> u32 {
        self.stamp >> TIER_BITS
    }
}

impl<S: Slot> Tiers<S> {
    /// Adds an object that is in no tier, behind all objects except those of a later tick. Of the
    /// objects of one tick the later is evicted first, because a batch names the beginning of a
    /// text before its continuation, which is useless without it.
    pub(in crate::state) fn push(&mut self, object: S, hash: KeyHash, tier: usize, tick: u32) {
        let (object, index) = (object.to_number(), object.index());
        if index >= self.entries.len() {
            self.entries.resize(index + 1, TieredEntry::UNKNOWN);
        }
        self.entries[index].hash = hash;
        self.entries[index].stamp = tick << TIER_BITS | tier as u32;
        let newest = self.tiers[tier].newest;
        let is_same = newest != NONE && self.entries[newest as usize].tick() == tick;
        self.link(object, if is_same { newest } else { NONE });
        self.tiers[tier].newest = object;
    }

    /// Adds an object that was popped, as the first of its tier.
    pub(in crate::state) fn put_back(&mut self, object: S) {
        let tier = self.tiers[self.entries[object.index()].tier()];
        self.link(object.to_number(), tier.first);
    }

    /// Removes an object from its tier.
    pub(in crate::state) fn remove(&mut self, object: S) {
        self.unlink(object.to_number());
    }

    fn unlink(&mut self, object: u32) {
        let entry = self.entries[object as usize];
        let TieredEntry { earlier, later, .. } = entry;
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

    /// Removes and returns the object that has exceeded its tier's lifetime by most; `bonus` is the
    /// extra lifetime of each tier.
    pub(in crate::state) fn pop(&mut self, tick: u32, bonus: &[u32; TIERS]) -> Option<S> {
        let firsts = self.tiers.map(|tier| tier.first);
        let tier = self.most_overdue(firsts, tick, bonus)?;
        self.unlink(firsts[tier]);
        Some(S::from_number(firsts[tier]))
    }

    /// Passes objects to `visit` in the order in which [`pop`](Self::pop) would return them now,
    /// until it breaks.
    pub(in crate::state) fn visit_next(
        &self,
        tick: u32,
        bonus: &[u32; TIERS],
        visit: &mut dyn FnMut(S) -> ControlFlow<()>,
    ) {
        let mut firsts = self.tiers.map(|tier| tier.first);
        while let Some(tier) = self.most_overdue(firsts, tick, bonus) {
            let object = firsts[tier];
            firsts[tier] = self.entries[object as usize].later;
            if visit(S::from_number(object)).is_break() {
                return;
            }
        }
    }

    /// Returns the tier whose first object has exceeded the tier's lifetime by most.
    fn most_overdue(&self, firsts: [u32; TIERS], tick: u32, bonus: &[u32; TIERS]) -> Option<usize> {
        let overdue = |tier: usize| {
            let object = firsts[tier];
            let overdue = || i64::from(self.age(object, tick)) - i64::from(bonus[tier]);
            (object != NONE).then(|| (overdue(), tier))
        };
        let found = (0..TIERS).filter_map(overdue).max_by_key(|(overdue, _)| *overdue);
        found.map(|(_, tier)| tier)
    }

    /// Clears the record of an object that is in no tier.
    pub(in crate::state) fn forget(&mut self, object: S) {
        if let Some(entry) = self.entries.get_mut(object.index()) {
            *entry = TieredEntry::UNKNOWN;
        }
    }

    /// Bounds ages, so that they do not wrap around the counter. Must be called regularly. Visits
    /// all objects, but so seldom that the cost does not matter.
    pub(in crate::state) fn bound_ages(&mut self, tick: u32) {
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

    pub(in crate::state) fn contains(&self, object: S) -> bool {
        self.entries.get(object.index()).is_some_and(|entry| entry.earlier != OUT)
    }

    /// Returns the tier of an object and the tick of its last use, also after its removal, until
    /// its slot is reused.
    pub(in crate::state) fn known(&self, object: S, hash: KeyHash) -> Option<(usize, u32)> {
        let entry = self.entries.get(object.index()).filter(|entry| entry.hash == hash)?;
        (entry.stamp != 0).then(|| (entry.tier(), entry.tick()))
    }

    /// Returns the key hash of an object.
    pub(in crate::state) fn hash(&self, object: S) -> KeyHash {
        self.entries.get(object.index()).map_or(KeyHash::new(0), |entry| entry.hash)
    }

    /// Returns the number of objects in tiers.
    pub(in crate::state) fn count(&self) -> usize {
        self.tiers.iter().map(|tier| tier.count).sum()
    }

    fn age(&self, object: u32, tick: u32) -> u32 {
        age(self.entries[object as usize], tick)
    }

    /// Inserts an object with a complete record before `later` in its tier.
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

fn age(entry: TieredEntry, tick: u32) -> u32 {
    tick.wrapping_sub(entry.tick()) & TICK_MASK
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::ids::ObjectSlot;

    fn drain(tiers: &mut Tiers<ObjectSlot>, tick: u32, bonus: [u32; TIERS]) -> Vec<u32> {
        std::iter::from_fn(|| tiers.pop(tick, &bonus)).map(ObjectSlot::number).collect()
    }

    fn push(tiers: &mut Tiers<ObjectSlot>, object: u32, tier: usize, tick: u32) {
        tiers.push(ObjectSlot::new(object), KeyHash::new(object), tier, tick);
    }

    #[test]
    fn later_object_of_one_tick_is_evicted_first() {
        let mut tiers = Tiers::default();
        for (object, tick) in [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)] {
            push(&mut tiers, object, 0, tick);
        }
        tiers.remove(ObjectSlot::new(2));
        assert_eq!(drain(&mut tiers, 3, [0; TIERS]), [1, 0, 4, 3]);
        assert_eq!(tiers.count(), 0);
    }

    #[test]
    fn tier_bonus_extends_lifetime() {
        let mut tiers = Tiers::default();
        push(&mut tiers, 0, 1, 10);
        push(&mut tiers, 1, 0, 15);
        push(&mut tiers, 2, 0, 25);
        assert_eq!(drain(&mut tiers, 30, [0, 10, 10, 10]), [1, 0, 2]);
    }

    #[test]
    fn put_back_restores_position() {
        let mut tiers = Tiers::default();
        for object in 0..4 {
            push(&mut tiers, object, 0, object);
        }
        let [first, second] = [(); 2].map(|()| tiers.pop(4, &[0; TIERS]).unwrap());
        tiers.put_back(second);
        tiers.put_back(first);
        assert_eq!(drain(&mut tiers, 5, [0; TIERS]), [0, 1, 2, 3]);
    }

    #[test]
    fn ages_stay_ordered_when_ticks_wrap() {
        let mut tiers = Tiers::default();
        push(&mut tiers, 0, 0, 1);
        for step in 1..40_u32 {
            let tick = step.wrapping_mul(1 << 27) & TICK_MASK;
            tiers.bound_ages(tick);
            push(&mut tiers, step, 0, tick);
        }
        let tick = 39_u32.wrapping_mul(1 << 27) & TICK_MASK;
        assert_eq!(drain(&mut tiers, tick, [0; TIERS]), (0..40).collect::<Vec<_>>());
    }
}
