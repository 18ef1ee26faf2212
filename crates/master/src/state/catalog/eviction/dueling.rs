//! Set dueling: sampled shadow caches of keys compare settings of the real cache by their hits.

use rustc_hash::FxHashMap;

use crate::state::{
    catalog::eviction::tiers::{LIFETIME_TICKS, TIERS, Tiers},
    ids::{KeyHash, Slot},
};

/// The maximum number of objects in a shadow cache. Keys are sampled so that the share fits.
pub(in crate::state) const OBJECTS_MAX: usize = 8192;

/// The setting used until another one has won.
const DEFAULT_CHOICE: usize = 0;

/// Ticks between two evaluations.
const CHOICE_TICKS: u32 = LIFETIME_TICKS / 8;

/// The half-life of long-term counts in evaluations: eight lifetimes…
const LONG_HALF_LIFE: f32 = 64.0;

/// … and of short-term counts, by which a setting is dropped: two lifetimes.
const SHORT_HALF_LIFE: f32 = 16.0;

/// To be adopted, a setting must lead by this share of the hits or of the misses, whichever are
/// fewer…
const LEAD_MIN: f32 = 0.01;

/// … and beat the default setting by this many standard deviations of chance.
const ADOPT_SIGMAS: f32 = 2.5;

/// A setting that loses to the default by this many standard deviations in the short term is
/// dropped; one that loses by half as many is not adopted.
const DROP_SIGMAS: f32 = 4.0;

/// Shadow caches that see the same uses under different settings. The default setting is used
/// unless another one is significantly better.
#[derive(Debug)]
pub(in crate::state) struct ShadowCaches<const N: usize> {
    shadows: [ShadowCache; N],
    keys: SharedKeys,
    chosen: usize,
    last_choice: u32,
    /// Uses seen, decaying like hits.
    uses: f32,
}

/// One shadow cache.
#[derive(Debug, Default)]
struct ShadowCache {
    bonus: [u32; TIERS],
    tiers: Tiers<ShadowKey>,
    hits: f32,
    /// Duels against the default setting, long-term and short-term.
    long: DuelCounter,
    short: DuelCounter,
}

/// Number of a key that shadow caches hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ShadowKey(u32);

impl Slot for ShadowKey {
    fn from_number(number: u32) -> Self {
        Self(number)
    }

    fn to_number(self) -> u32 {
        self.0
    }
}

/// Keys held by any shadow cache, with one number shared by all of them: they hold mostly the same
/// keys.
#[derive(Debug, Default)]
struct SharedKeys {
    /// Numbers by key hash.
    numbers: FxHashMap<KeyHash, ShadowKey>,
    /// By number: one bit for each shadow cache that holds the key.
    holders: Vec<u8>,
    vacant: Vec<ShadowKey>,
}

impl SharedKeys {
    /// Returns the number of a key, and assigns one if no shadow cache holds the key.
    fn number(&mut self, hash: KeyHash) -> ShadowKey {
        *self.numbers.entry(hash).or_insert_with(|| {
            self.vacant.pop().unwrap_or_else(|| {
                self.holders.push(0);
                ShadowKey::from_index(self.holders.len() - 1)
            })
        })
    }

    /// Records that a shadow cache no longer holds the key.
    fn release(&mut self, number: ShadowKey, hash: KeyHash, shadow: usize) {
        let holders = &mut self.holders[number.index()];
        *holders &= !(1 << shadow);
        if *holders == 0 {
            self.numbers.remove(&hash);
            self.vacant.push(number);
        }
    }
}

/// Uses that hit under one of two settings and missed under the other. Other uses do not show which
/// setting is better.
#[derive(Debug, Clone, Copy, Default)]
struct DuelCounter {
    won: f32,
    lost: f32,
}

impl DuelCounter {
    fn count(&mut self, is_won: bool) {
        *(if is_won { &mut self.won } else { &mut self.lost }) += 1.0;
    }

    fn fade(&mut self, looks: f32) {
        let fading = 0.5_f32.powf(1.0 / looks);
        (self.won, self.lost) = (self.won * fading, self.lost * fading);
    }

    /// Returns the lead over the default setting in standard deviations of chance.
    fn score(self) -> f32 {
        (self.won - self.lost) / (self.won + self.lost).max(1.0).sqrt()
    }
}

impl<const N: usize> ShadowCaches<N> {
    /// Creates one shadow cache per setting of the tiers' extra lifetimes.
    pub(in crate::state) fn new(choices: [[u32; TIERS]; N]) -> Self {
        const { assert!(N <= u8::BITS as usize, "each shadow has a bit") };
        let shadow = |bonus| ShadowCache { bonus, ..ShadowCache::default() };
        let keys = SharedKeys::default();
        Self {
            shadows: choices.map(shadow),
            keys,
            chosen: DEFAULT_CHOICE,
            last_choice: 0,
            uses: 0.0,
        }
    }

    /// Records a use in a cache of `objects` objects, sampled so that a shadow holds at most
    /// `objects_max`.
    pub(in crate::state) fn record_use(
        &mut self,
        hash: KeyHash,
        tier: usize,
        tick: u32,
        objects: usize,
        objects_max: usize,
    ) {
        let thinned = objects.div_ceil(objects_max).next_power_of_two().trailing_zeros();
        // The sampling uses other hash bits than the ghosts do.
        if thinned > 0 && hash.number().wrapping_mul(0x9e37_79b1) >> (u32::BITS - thinned) != 0 {
            return;
        }
        self.uses += 1.0;
        let number = self.keys.number(hash);
        let holders = self.keys.holders[number.index()];
        let mut is_first_hit = None;
        for (index, shadow) in self.shadows.iter_mut().enumerate() {
            let is_hit = holders & (1 << index) != 0;
            if is_hit {
                shadow.hits += 1.0;
                shadow.tiers.remove(number);
            } else {
                shadow.make_room((objects >> thinned).max(1), tick, |victim, hash| {
                    self.keys.release(victim, hash, index);
                });
            }
            shadow.tiers.push(number, hash, tier, tick);
            if is_hit != *is_first_hit.get_or_insert(is_hit) {
                shadow.long.count(is_hit);
                shadow.short.count(is_hit);
            }
        }
        self.keys.holders[number.index()] = u8::MAX >> (u8::BITS as usize - N);
        if tick.wrapping_sub(self.last_choice) >= CHOICE_TICKS {
            self.last_choice = tick;
            self.choose();
        }
    }

    /// Returns the extra lifetimes of the tiers under the setting in use.
    pub(in crate::state) fn bonus(&self) -> &[u32; TIERS] {
        &self.shadows[self.chosen].bonus
    }

    fn choose(&mut self) {
        let first = self.shadows[DEFAULT_CHOICE].hits;
        let hits = self.shadows[self.chosen].hits;
        let lead = |hits: f32| LEAD_MIN * hits.min(self.uses - hits);
        let is_certain = |shadow: &ShadowCache| {
            shadow.long.score() > ADOPT_SIGMAS
                && shadow.short.score() > -DROP_SIGMAS / 2.0
                && shadow.hits > first + lead(first)
        };
        let challengers =
            (DEFAULT_CHOICE + 1..N).filter(|&choice| is_certain(&self.shadows[choice]));
        let best = challengers
            .max_by(|&a, &b| self.shadows[a].hits.total_cmp(&self.shadows[b].hits))
            .filter(|&best| {
                self.chosen == DEFAULT_CHOICE || self.shadows[best].hits > hits + lead(hits) + 1.0
            });
        let chosen = &self.shadows[self.chosen];
        let is_worse = chosen.short.score() < -DROP_SIGMAS || chosen.long.score() < 0.0;
        if let Some(best) = best {
            self.chosen = best;
        } else if is_worse {
            self.chosen = DEFAULT_CHOICE;
        }
        let fading = 0.5_f32.powf(1.0 / LONG_HALF_LIFE);
        self.uses *= fading;
        for shadow in &mut self.shadows {
            shadow.hits *= fading;
            shadow.long.fade(LONG_HALF_LIFE);
            shadow.short.fade(SHORT_HALF_LIFE);
        }
    }
}

impl ShadowCache {
    /// Evicts keys until there is space for one more among `objects_max`.
    fn make_room(
        &mut self,
        objects_max: usize,
        tick: u32,
        mut release: impl FnMut(ShadowKey, KeyHash),
    ) {
        while self.tiers.count() >= objects_max {
            let Some(victim) = self.tiers.pop(tick, &self.bonus) else {
                break;
            };
            release(victim, self.tiers.hash(victim));
        }
        self.tiers.bound_ages(tick);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::random::Random;

    const OBJECTS: usize = 1000;

    /// Returns the setting chosen after uses of these keys. A key's tier rises with each use.
    fn choose(keys: impl Iterator<Item = u32>, shadows: &mut ShadowCaches<2>) -> [u32; TIERS] {
        let mut seen: FxHashMap<u32, usize> = FxHashMap::default();
        for (index, key) in keys.enumerate() {
            let times = seen.entry(key).or_default();
            let tick = 1 + index * LIFETIME_TICKS as usize / OBJECTS;
            let (hash, tier) = (KeyHash::new(key), (*times).min(TIERS - 1));
            shadows.record_use(hash, tier, tick as u32, OBJECTS, OBJECTS_MAX);
            *times += 1;
        }
        *shadows.bonus()
    }

    #[test]
    fn default_stays_unless_another_is_significantly_better() {
        let mut random = Random::new(5);
        let mut below = |limit: usize| random.below(limit) as u32;
        let (first, other) = ([0; TIERS], [0, 500, 500, 500]);
        let mut shadows = ShadowCaches::new([first, other]);
        // Each key is used once: no setting is better.
        let alike: Vec<u32> = (0..50_000).map(|_| below(3000)).collect();
        assert_eq!(choose(alike.into_iter(), &mut shadows), first);
        // Every other use is of a key that is never seen again.
        let scanned = (0..50_000_u32).map(|index| match index % 2 {
            0 => 1_000_000 + index,
            _ => 10_000 + below(900),
        });
        let scanned: Vec<u32> = scanned.collect();
        let mut shadows = ShadowCaches::new([first, other]);
        assert_eq!(choose(scanned.iter().copied(), &mut shadows), other);
        // Sets of keys that are used for a while and never again.
        let in_turn = (0..50_000_u32).map(|index| 3_000_000 + index / 4000 * 10_000 + below(900));
        let mut shadows = ShadowCaches::new([first, other]);
        assert_eq!(choose(scanned.into_iter().chain(in_turn), &mut shadows), first);
    }

    #[test]
    fn each_shadow_behaves_as_if_alone() {
        let choices = [[0; TIERS], [0, 50, 70, 80], [0, 500, 500, 500]];
        let mut together = ShadowCaches::new(choices);
        let mut alone = choices.map(|choice| ShadowCaches::new([choice]));
        let mut random = Random::new(7);
        let (mut hits, mut seen) = (0.0, FxHashMap::default());
        for index in 0..40_000_u32 {
            // Some keys are used often, some twice, some once; the cache grows and shrinks.
            let hash = match random.below(3) {
                0 => random.below(400) as u32,
                1 => 10_000 + index / 2 - random.below(300).min(index as usize / 2) as u32,
                _ => 1_000_000 + index,
            };
            let objects = if index % 8000 < 6000 { 900 } else { 300 };
            let times: &mut usize = seen.entry(hash).or_default();
            let (tier, tick) = ((*times).min(TIERS - 1), 1 + index / 3);
            *times += 1;
            together.record_use(KeyHash::new(hash), tier, tick, objects, OBJECTS_MAX);
            for (alone, beside) in alone.iter_mut().zip(&together.shadows) {
                alone.record_use(KeyHash::new(hash), tier, tick, objects, OBJECTS_MAX);
                assert_eq!(alone.shadows[0].hits, beside.hits, "use {index}");
            }
            hits = together.shadows[0].hits;
        }
        assert!(hits > 100.0, "hits={hits}");
        let SharedKeys { numbers, holders, vacant } = &together.keys;
        assert_eq!(numbers.len() + vacant.len(), holders.len());
        assert!(holders.len() <= choices.len() * 900, "numbers are used again");
    }
}
