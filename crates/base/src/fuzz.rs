//! A small fuzzer for decoders of outside input.
//!
//! A target is a function of bytes that must not panic, and must not accept bytes that it does not
//! encode the same way again. The driver starts from valid messages, mutates them at random, and
//! keeps the inputs that lead to a new outcome. Each run of the tests uses the same seed and a fixed
//! number of rounds. `MOONCAKE_FUZZ_SECONDS=600 cargo test -p CRATE --lib fuzz -- --nocapture` runs
//! for that time, with a random seed, which a failure prints.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use crate::{
    EngineId,
    env::{EnvVar, ValueKind},
    random::SplitMix64,
};

/// Duration of a run in seconds; a fixed number of rounds if the variable is not set.
static SECONDS: EnvVar = EnvVar {
    name: "MOONCAKE_FUZZ_SECONDS",
    aliases: &[],
    default: "",
    kind: ValueKind::Text,
    help: "How long the tests fuzz the decoders.",
};

/// Inputs for each target in a normal run of the tests.
const ROUNDS: u64 = 20_000;

/// The maximum length of an input.
const BYTES_MAX: usize = 4096;

/// A decoder under test.
#[derive(Debug)]
pub struct Target {
    /// The name that a failure reports.
    pub name: &'static str,
    /// Valid inputs.
    pub seeds: Vec<Vec<u8>>,
    /// Decodes and checks the bytes; returns a number that identifies the kind of outcome.
    pub run: fn(&[u8]) -> u64,
}

/// Returns a number that identifies an outcome.
pub fn outcome(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// Mutates an input in one to four places.
fn mutate(random: &mut SplitMix64, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[random.below(corpus.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        match random.below(8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.number() as u8,
            2 => bytes.insert(at, random.number() as u8),
            3 if at < bytes.len() => drop(bytes.remove(at)),
            4 => bytes.truncate(at),
            5 => {
                // Numbers at which sums and sizes overflow.
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

/// Fuzzes one target; returns the number of runs and of distinct outcomes.
fn drive(target: &Target, seed: u64, should_continue: &dyn Fn(u64) -> bool) -> (u64, usize) {
    let mut random = SplitMix64::new(seed);
    let mut corpus = target.seeds.clone();
    let mut seen: HashSet<u64> = corpus.iter().map(|bytes| (target.run)(bytes)).collect();
    let mut count = 0;
    while should_continue(count) {
        let bytes = mutate(&mut random, &corpus);
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

/// Fuzzes each target, for a fixed number of rounds or for `MOONCAKE_FUZZ_SECONDS` in total.
///
/// # Panics
/// If a target panics, or does not distinguish valid from invalid bytes.
#[allow(clippy::print_stderr, reason = "a long run reports its progress")]
pub fn check(targets: &[Target]) {
    let seconds: Option<u64> = SECONDS.read().and_then(|text| text.parse().ok());
    let Some(seconds) = seconds else {
        for target in targets {
            let (_, outcomes) = drive(target, 1, &|count| count < ROUNDS);
            assert!(outcomes >= 2, "{}: every input has the same outcome", target.name);
        }
        return;
    };
    let each = Duration::from_secs(seconds) / targets.len().max(1) as u32;
    for target in targets {
        let seed = EngineId::random().halves().0;
        let end = Instant::now() + each;
        let (count, outcomes) =
            drive(target, seed, &|count| count % 256 != 0 || Instant::now() < end);
        eprintln!("{}: {count} runs, {outcomes} distinct outcomes, seed {seed}", target.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_a_decoder_that_panics() {
        let run = |bytes: &[u8]| {
            let length = bytes.first().map_or(0, |first| usize::from(*first));
            u64::from(bytes[..length][0])
        };
        let target = Target { name: "bad", seeds: vec![vec![3, 1, 2]], run };
        let found = catch_unwind(|| drive(&target, 1, &|count| count < 1000));
        assert!(found.is_err());
    }

    #[test]
    #[should_panic(expected = "the same outcome")]
    fn rejects_a_decoder_that_accepts_everything() {
        check(&[Target { name: "all", seeds: vec![vec![1]], run: |_| 0 }]);
    }
}
