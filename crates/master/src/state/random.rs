//! The random choices of the rules, which repeat with the seed.

use mooncake_base::random::SplitMix64;

/// A stream of numbers that its seed determines.
#[derive(Debug, Clone)]
pub(in crate::state) struct Random(SplitMix64);

impl Random {
    pub(in crate::state) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    pub(in crate::state) fn next(&mut self) -> u64 {
        self.0.number()
    }

    /// Returns a number below `limit`, which is at least 1.
    pub(in crate::state) fn below(&mut self, limit: usize) -> usize {
        self.0.below(limit)
    }
}
