//! Throws broken bytes at what decodes what comes from outside.
//!
//! A target is a function of bytes that must neither panic nor accept what it does not write the
//! same way again. The driver begins with good messages, breaks them at random, and keeps those
//! that lead to an outcome it has not seen yet. Each run of the tests takes the same seed and a
//! moment; `MOONCAKE_FUZZ_SECONDS=600 cargo test -p CRATE --lib fuzz -- --nocapture` takes that
//! long, with a seed of its own that a failure prints.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use crate::{EngineId, env::EnvVar};

/// How long a run takes, in seconds; a moment if it is not set.
static SECONDS: EnvVar = EnvVar {
    name: "MOONCAKE_FUZZ_SECONDS",
    aliases: &[],
    default: "",
    help: "How long the tests throw broken bytes at decoders.",
};

/// Bytes thrown at each target in a run of the tests.
const ROUNDS: u64 = 20_000;

/// No input is longer.
const BYTES_MAX: usize = 4096;

/// Something that decodes.
#[derive(Debug)]
pub struct Target {
    /// What it is called where it fails.
    pub name: &'static str,
    /// Good inputs.
    pub seeds: Vec<Vec<u8>>,
    /// Decodes and checks; the number tells one kind of outcome from another.
    pub run: fn(&[u8]) -> u64,
}

/// A number for an outcome.
pub fn outcome(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// Numbers, one after another, that a seed fixes (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Breaks an input in one to four places.
fn break_bytes(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[random.below(corpus.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        match random.below(8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.next() as u8,
            2 => bytes.insert(at, random.next() as u8),
            3 if at < bytes.len() => drop(bytes.remove(at)),
            4 => bytes.truncate(at),
            5 => {
                // Numbers at which sums and sizes go wrong.
                let edges = [0, 1, 4095, 4096, 4097, u64::MAX, 1 << 63, u64::MAX >> 1, 1 << 32];
                let edge = edges[random.below(edges.len())].to_le_bytes();
                let width = [1, 2, 4, 8][random.below(4)];
                let end = (at + width).min(bytes.len());
                bytes[at..end].copy_from_slice(&edge[..end - at]);
            }
            6 => {
                let other = &corpus[random.below(corpus.len())];
                bytes.truncate(at);
                bytes.extend_from_slice(&other[random.below(other.len() + 1)..]);
            }
            _ => {
                let end = (at + random.below(32)).min(bytes.len());
                bytes.extend_from_within(at..end);
            }
        }
        bytes.truncate(BYTES_MAX);
    }
    bytes
}

/// Throws bytes at one target; how many times, and how many kinds of outcome there were.
fn drive(target: &Target, seed: u64, goes_on: &dyn Fn(u64) -> bool) -> (u64, usize) {
    let mut random = Random(seed | 1);
    let mut corpus = target.seeds.clone();
    let mut seen: HashSet<u64> = corpus.iter().map(|bytes| (target.run)(bytes)).collect();
    let mut count = 0;
    while goes_on(count) {
        let bytes = break_bytes(&mut random, &corpus);
        let run = catch_unwind(AssertUnwindSafe(|| (target.run)(&bytes)));
        let Ok(outcome) = run else {
            panic!("{} with seed {seed}, run {count}: {bytes:?}", target.name);
        };
        if seen.len() < 4096 && seen.insert(outcome) {
            corpus.push(bytes);
        }
        count += 1;
    }
    (count, seen.len())
}

/// Throws bytes at each target: a moment, or as long as `MOONCAKE_FUZZ_SECONDS` says, all together.
///
/// # Panics
/// A target has panicked, or takes good and bad bytes for the same.
#[allow(clippy::print_stderr, reason = "a long run tells how far it came")]
pub fn check(targets: &[Target]) {
    let seconds: Option<u64> = SECONDS.read().and_then(|text| text.parse().ok());
    let Some(seconds) = seconds else {
        for target in targets {
            let (_, outcomes) = drive(target, 1, &|count| count < ROUNDS);
            assert!(outcomes >= 2, "{}: good and bad bytes are told apart", target.name);
        }
        return;
    };
    let each = Duration::from_secs(seconds) / targets.len().max(1) as u32;
    for target in targets {
        let seed = EngineId::random().halves().0;
        let end = Instant::now() + each;
        let (count, outcomes) =
            drive(target, seed, &|count| count % 256 != 0 || Instant::now() < end);
        eprintln!("{}: {count} runs, {outcomes} kinds of outcome, seed {seed}", target.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_finds_a_decoder_that_panics() {
        let run = |bytes: &[u8]| {
            let length = bytes.first().map_or(0, |first| usize::from(*first));
            u64::from(bytes[..length][0])
        };
        let target = Target { name: "bad", seeds: vec![vec![3, 1, 2]], run };
        let found = catch_unwind(|| drive(&target, 1, &|count| count < 1000));
        assert!(found.is_err());
    }

    #[test]
    #[should_panic(expected = "told apart")]
    fn a_decoder_that_takes_everything_is_none() {
        check(&[Target { name: "all", seeds: vec![vec![1]], run: |_| 0 }]);
    }
}
