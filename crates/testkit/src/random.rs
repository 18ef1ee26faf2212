//! Pseudo-random numbers from a seed, which a failing test prints.

use mooncake_base::{ClientId, random::SplitMix64};

/// A generator. If a test panics while it holds a generator, the seed is printed.
#[derive(Debug)]
pub struct Random {
    seed: u64,
    numbers: SplitMix64,
}

impl Random {
    /// Creates a generator with a random seed.
    pub fn new() -> Self {
        Self::from_seed(ClientId::random().halves().0)
    }

    /// Creates a generator with this seed, to reproduce its numbers.
    pub fn from_seed(seed: u64) -> Self {
        Self { seed, numbers: SplitMix64::new(seed) }
    }

    /// Returns any number.
    pub fn number(&mut self) -> u64 {
        self.numbers.number()
    }

    /// Returns a number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit
    }

    /// Returns `count` random bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.number().to_le_bytes()[..chunk.len()]);
        }
        bytes
    }
}

impl Default for Random {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Random {
    #[allow(clippy::print_stderr, reason = "the seed is needed to reproduce the failure")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to reproduce: Random::from_seed({})", self.seed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_the_bytes() {
        assert_eq!(Random::from_seed(7).bytes(100), Random::from_seed(7).bytes(100));
        assert_ne!(Random::from_seed(7).bytes(100), Random::from_seed(8).bytes(100));
        assert!((0..1000).all(|seed| Random::from_seed(seed).below(3) < 3));
    }
}
