//! Small caches of names, run beside the real one to learn how long which tier should stay.

use rustc_hash::FxHashMap;

use super::tiers::{TIERS, Tiers};

/// The most objects of a shadow. It sees one key in so many that its share fits.
const OBJECTS_MAX: usize = 2048;
/// Ticks between two looks at who is ahead.
const LOOK_TICKS: u32 = super::adaptive::LIFETIME_TICKS / 8;
/// A hit counts half after so many looks: eight lifetimes.
const HALF_LIFE_LOOKS: f32 = 64.0;
/// Another choice must be ahead by this share of the hits or of the misses to be taken, whichever
/// are fewer.
const LEAD: f32 = 0.01;

/// The same uses under several choices.
#[derive(Debug)]
pub(super) struct Shadows<const N: usize> {
    shadows: [Shadow; N],
    chosen: usize,
    looked: u32,
    /// Uses that were seen, fading like hits.
    uses: f32,
}

/// One small cache.
#[derive(Debug, Default)]
struct Shadow {
    stay: [u32; TIERS],
    tiers: Tiers,
    /// The number of each held name, by its hash.
    held: FxHashMap<u32, u32>,
    vacant: Vec<u32>,
    hits: f32,
}

impl<const N: usize> Shadows<N> {
    /// One for each choice of how long the tiers stay.
    pub(super) fn new(choices: [[u32; TIERS]; N], chosen: usize) -> Self {
        let shadow = |stay| Shadow { stay, ..Shadow::default() };
        Self { shadows: choices.map(shadow), chosen, looked: 0, uses: 0.0 }
    }

    /// An object was used, in a cache of so many.
    pub(super) fn used(&mut self, hash: u32, tier: usize, tick: u32, objects: usize) {
        let thinned = objects.div_ceil(OBJECTS_MAX).next_power_of_two().trailing_zeros();
        // Apart from the bits by which ghosts are placed.
        if thinned > 0 && hash.wrapping_mul(0x9e37_79b1) >> (u32::BITS - thinned) != 0 {
            return;
        }
        self.uses += 1.0;
        for shadow in &mut self.shadows {
            shadow.used(hash, tier, tick, (objects >> thinned).max(1));
        }
        if tick.wrapping_sub(self.looked) >= LOOK_TICKS {
            self.looked = tick;
            self.look();
        }
    }

    /// How long the tiers should stay by what was learned.
    pub(super) fn stay(&self) -> &[u32; TIERS] {
        &self.shadows[self.chosen].stay
    }

    fn look(&mut self) {
        let best = (0..N).max_by(|&a, &b| self.shadows[a].hits.total_cmp(&self.shadows[b].hits));
        let hits = self.shadows[self.chosen].hits;
        let lead = LEAD * hits.min(self.uses - hits);
        if let Some(best) = best.filter(|&best| self.shadows[best].hits > hits + lead + 1.0) {
            self.chosen = best;
        }
        let fading = 0.5_f32.powf(1.0 / HALF_LIFE_LOOKS);
        self.uses *= fading;
        self.shadows.iter_mut().for_each(|shadow| shadow.hits *= fading);
    }
}

impl Shadow {
    fn used(&mut self, hash: u32, tier: usize, tick: u32, objects_max: usize) {
        if let Some(&number) = self.held.get(&hash) {
            self.hits += 1.0;
            self.tiers.remove(number);
            self.tiers.push(number, hash, tier, tick);
            return;
        }
        while self.held.len() >= objects_max {
            let Some(victim) = self.tiers.pop(tick, &self.stay) else { break };
            self.held.remove(&self.tiers.hash(victim));
            self.vacant.push(victim);
        }
        self.tiers.bound_ages(tick);
        let number = self.vacant.pop().unwrap_or(self.held.len() as u32);
        self.held.insert(hash, number);
        self.tiers.push(number, hash, tier, tick);
    }
}
