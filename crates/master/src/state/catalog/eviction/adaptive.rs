//! The adaptive policy: recency and frequency, combined with weights chosen by set dueling.

use std::ops::ControlFlow;

use crate::state::{
    catalog::eviction::{
        EvictionPolicy,
        dueling::{OBJECTS_MAX, ShadowCaches},
        ghosts::Ghosts,
        tiers::{LIFETIME_TICKS, TICK_MASK, TIERS, Tiers},
    },
    ids::{KeyHash, ObjectSlot},
};

/// The candidate settings: how much longer each tier stays than objects seen once, in hundredths of
/// a lifetime. The first, default setting is plain LRU.
const CHOICES: [[u32; TIERS]; 5] =
    [[0; TIERS], [0, 50, 70, 80], [0, 100, 180, 240], [0, 200, 200, 200], [0, 500, 500, 500]];

/// The maximum number of objects in a shadow cache before anything was evicted…
const EARLY_OBJECTS_MAX: usize = OBJECTS_MAX / 32;

/// … and the minimum sampling of keys then: one in this many.
const EARLY_SHARE: usize = 8;

/// The resolution of the clock: use counts advance it by parts of a tick.
const TICK_PARTS: u64 = 1 << 32;

/// A read batch ends after uses of this share of the objects, one in this many…
const READ_SHARE: usize = 8;

/// … and a batch with inserts after this share.
const INSERT_SHARE: usize = 4;

/// Evicts the least recently used object, but keeps objects longer that were seen more often,
/// including before their last eviction. How much longer is learned by set dueling: shadow caches
/// of keys run with one candidate setting each, and the setting with the most hits is used. Plain
/// LRU is used unless another setting is significantly better.
///
/// Within a batch, later objects are evicted first. Takes 16 bytes per object, plus about 30 per
/// object for the ghosts (evicted keys).
#[derive(Debug)]
pub struct Adaptive {
    tiers: Tiers<ObjectSlot>,
    ghosts: Ghosts,
    shadows: ShadowCaches<{ CHOICES.len() }>,
    /// Elapsed time in parts of ticks.
    elapsed: u64,
    /// The tick of the present batch.
    tick: u32,
    /// Uses in the present batch, including inserts.
    uses: usize,
    has_inserted: bool,
    /// Whether an object was evicted, that is, whether the pool has been full.
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
    /// Starts the next batch.
    fn next_batch(&mut self) {
        (self.uses, self.has_inserted) = (0, false);
        self.tick = (self.elapsed / TICK_PARTS) as u32 & TICK_MASK;
        self.tiers.bound_ages(self.tick);
    }

    /// Advances the clock by one use.
    fn count_use(&mut self) {
        self.uses += 1;
        let objects = self.tiers.count().max(1) as u64;
        let step = TICK_PARTS * u64::from(LIFETIME_TICKS) / objects;
        self.elapsed = self.elapsed.wrapping_add(step);
    }

    fn train_shadows(&mut self, hash: KeyHash, tier: usize) {
        let count = self.tiers.count();
        // Until the pool has been full, the shadow caches simulate a pool of half the size, with a
        // coarser sample.
        let (objects, objects_max) = if self.has_evicted {
            (count, OBJECTS_MAX)
        } else {
            (count / 2, (count / 2 / EARLY_SHARE).clamp(1, EARLY_OBJECTS_MAX))
        };
        self.shadows.record_use(hash, tier, self.tick, objects, objects_max);
    }
}

impl EvictionPolicy for Adaptive {
    fn begin_batch(&mut self) {
        if self.has_inserted || self.uses * READ_SHARE > self.tiers.count() {
            self.next_batch();
        }
    }

    fn insert(&mut self, object: ObjectSlot, hash: KeyHash) {
        if self.tiers.contains(object) {
            return;
        }
        if self.uses * INSERT_SHARE > self.tiers.count() {
            self.next_batch();
        }
        // A key known under the same slot was replaced or removed; otherwise it was evicted.
        let known = self.tiers.known(object, hash).map(|(tier, _)| tier);
        let known = self.ghosts.recall(hash).or(known);
        let tier = known.map_or(0, |tier| (tier + 1).min(TIERS - 1));
        self.count_use();
        self.has_inserted = true;
        self.tiers.push(object, hash, tier, self.tick);
        self.train_shadows(hash, tier);
    }

    fn touch(&mut self, object: ObjectSlot) {
        if !self.tiers.contains(object) {
            return;
        }
        self.count_use();
        let hash = self.tiers.hash(object);
        let Some((tier, tick)) = self.tiers.known(object, hash) else { return };
        // A probe and the read that follows it count as one use.
        if tick != self.tick {
            let tier = (tier + 1).min(TIERS - 1);
            self.tiers.remove(object);
            self.tiers.push(object, hash, tier, self.tick);
            self.train_shadows(hash, tier);
        }
    }

    fn remove(&mut self, object: ObjectSlot) {
        if self.tiers.contains(object) {
            self.tiers.remove(object);
        }
    }

    fn pop(&mut self) -> Option<ObjectSlot> {
        self.tiers.pop(self.tick, self.shadows.bonus())
    }

    fn visit_next(&self, visit: &mut dyn FnMut(ObjectSlot) -> ControlFlow<()>) {
        self.tiers.visit_next(self.tick, self.shadows.bonus(), visit);
    }

    fn put_back(&mut self, object: ObjectSlot) {
        self.tiers.put_back(object);
    }

    fn on_evicted(&mut self, object: ObjectSlot, hash: KeyHash) {
        if let Some((tier, _)) = self.tiers.known(object, hash) {
            self.has_evicted = true;
            self.ghosts.remember(hash, tier, self.tiers.count() + 1);
            self.tiers.forget(object);
        }
    }
}
