//! Pseudo-random numbers that repeat with their seed, for simulations, tests and choices that a
//! replay must repeat.

/// A SplitMix64 generator: fast, with 64 bits of state, and not for secrets.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator; any seed is as good as another.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub const fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `limit`, which is at least 1.
    pub const fn below(&mut self, limit: usize) -> usize {
        ((self.number() as u128 * limit as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_the_published_sequence() {
        let mut random = SplitMix64::new(1_234_567);
        let numbers = [(); 3].map(|()| random.number());
        let published =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(numbers, published);
    }

    #[test]
    fn numbers_stay_below_the_limit_and_reach_every_value() {
        let mut random = SplitMix64::new(7);
        let mut counts = [0; 3];
        (0..1000).for_each(|_| counts[random.below(3)] += 1);
        assert!(counts.iter().all(|count| *count > 250), "{counts:?}");
        assert_eq!(random.below(1), 0);
    }
}
