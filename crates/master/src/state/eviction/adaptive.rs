//! By the last use and how often a key was seen, weighed by what would have served best.

use super::{
    EvictionPolicy,
    dueling::{OBJECTS_MAX, ShadowCaches},
    ghosts::Ghosts,
    tiers::{LIFETIME_TICKS, TICK_MASK, TIERS, Tiers},
};
use crate::state::ids::{KeyHash, ObjectSlot};

/// How much longer the tiers stay than objects that were seen once, in hundredths of a lifetime.
/// The first choice is plain recency.
const CHOICES: [[u32; TIERS]; 5] =
    [[0; TIERS], [0, 50, 70, 80], [0, 100, 180, 240], [0, 200, 200, 200], [0, 500, 500, 500]];
/// Before anything was evicted a shadow has so many objects at most…
const EARLY_OBJECTS_MAX: usize = OBJECTS_MAX / 32;
/// … and sees no more than one key in so many.
const EARLY_SHARE: usize = 8;
/// Parts of a tick in which uses are counted.
const TICK_PARTS: u64 = 1 << 32;
/// Reads after a share of the objects, one in so many, are no longer of the same batch…
const READ_SHARE: usize = 8;
/// … and new objects no longer after this share.
const INSERT_SHARE: usize = 4;

/// Evicts what was not used for the longest time, but keeps for longer what was seen more often,
/// also before it was last evicted. How much longer is learned: small caches of names run beside
/// with one choice each, and the one with the most hits decides; plain recency while none is certain to
/// be better than it.
///
/// Of a batch the later goes first. 16 bytes an object, and about 30 for names of evicted ones.
#[derive(Debug)]
pub struct Adaptive {
    tiers: Tiers,
    ghosts: Ghosts,
    shadows: ShadowCaches<{ CHOICES.len() }>,
    /// Parts of ticks that have passed.
    elapsed: u64,
    /// The tick of the present batch.
    tick: u32,
    /// Uses and new objects of the present batch.
    uses: usize,
    has_inserted: bool,
    /// Something was evicted, so that the pool is known to be full.
    has_evicted: bool,
}

impl Default for Adaptive {
    fn default() -> Self {
        let ticks = |bonus: [u32; TIERS]| bonus.map(|hundredths| hundredths * LIFETIME_TICKS / 100);
        Self {
            tiers: Tiers::default(),
            ghosts: Ghosts::default(),
            shadows: ShadowCaches::new(CHOICES.map(ticks)),
            elapsed: TICK_PARTS,
            tick: 1,
            uses: 0,
            has_inserted: false,
            has_evicted: false,
        }
    }
}

impl Adaptive {
    /// What comes from now on is of another batch.
    fn next_batch(&mut self) {
        (self.uses, self.has_inserted) = (0, false);
        self.tick = (self.elapsed / TICK_PARTS) as u32 & TICK_MASK;
        self.tiers.bound_ages(self.tick);
    }

    /// Time goes on by one use.
    fn count_use(&mut self) {
        self.uses += 1;
        let objects = self.tiers.count().max(1) as u64;
        let step = TICK_PARTS * u64::from(LIFETIME_TICKS) / objects;
        self.elapsed = self.elapsed.wrapping_add(step);
    }

    fn train_shadows(&mut self, hash: KeyHash, tier: usize) {
        let count = self.tiers.count();
        // While there is room for all, what is learned is how half of it would do, and roughly.
        let objects = match self.has_evicted {
            true => (count, OBJECTS_MAX),
            false => (count / 2, (count / 2 / EARLY_SHARE).clamp(1, EARLY_OBJECTS_MAX)),
        };
        self.shadows.record_use(hash, tier, self.tick, objects);
    }
}

impl EvictionPolicy for Adaptive {
    fn begin_batch(&mut self) {
        if self.has_inserted || self.uses * READ_SHARE > self.tiers.count() {
            self.next_batch();
        }
    }

    fn insert(&mut self, object: ObjectSlot, hash: KeyHash) {
        if self.tiers.contains(object.number()) {
            return;
        }
        if self.uses * INSERT_SHARE > self.tiers.count() {
            self.next_batch();
        }
        // Under the same number it was replaced or removed, else evicted.
        let known = self.tiers.known(object.number(), hash).map(|(tier, _)| tier);
        let known = self.ghosts.recall(hash).or(known);
        let tier = known.map_or(0, |tier| (tier + 1).min(TIERS - 1));
        self.count_use();
        self.has_inserted = true;
        self.tiers.push(object.number(), hash, tier, self.tick);
        self.train_shadows(hash, tier);
    }

    fn touch(&mut self, object: ObjectSlot) {
        if !self.tiers.contains(object.number()) {
            return;
        }
        self.count_use();
        let hash = self.tiers.hash(object.number());
        let Some((tier, tick)) = self.tiers.known(object.number(), hash) else { return };
        // A probe and the read that follows it are one use.
        if tick != self.tick {
            let tier = (tier + 1).min(TIERS - 1);
            self.tiers.remove(object.number());
            self.tiers.push(object.number(), hash, tier, self.tick);
            self.train_shadows(hash, tier);
        }
    }

    fn remove(&mut self, object: ObjectSlot) {
        if self.tiers.contains(object.number()) {
            self.tiers.remove(object.number());
        }
    }

    fn pop(&mut self) -> Option<ObjectSlot> {
        self.tiers.pop(self.tick, self.shadows.bonus()).map(ObjectSlot::new)
    }

    fn put_back(&mut self, object: ObjectSlot) {
        self.tiers.put_back(object.number());
    }

    fn on_evicted(&mut self, object: ObjectSlot, hash: KeyHash) {
        if let Some((tier, _)) = self.tiers.known(object.number(), hash) {
            self.has_evicted = true;
            self.ghosts.remember(hash, tier, self.tiers.count() + 1);
            self.tiers.forget(object.number());
        }
    }
}
