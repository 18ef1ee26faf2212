//! Synthetic traces: access patterns that favor one eviction policy or another.

use mooncake_base::random::SplitMix64;

use super::{Request, Trace};

/// Accesses in a trace of single blocks.
const ACCESSES: u32 = 300_000;
/// Requests in a trace of prompts.
const REQUESTS: usize = 12_000;

/// Generates all traces.
pub(super) fn all() -> Vec<Trace> {
    let mut random = Random(SplitMix64::new(1));
    let mut traces = Vec::new();
    for skew in [0.6, 0.8, 1.1] {
        let requests = (0..ACCESSES).map(|_| vec![random.zipf(100_000, skew)]).collect();
        traces.push((format!("zipf {skew}"), requests));
    }
    let scan = |index: u32| (index / 20_000 % 4 == 3).then_some((1 << 24) + index);
    let mut pick = |index| scan(index).unwrap_or_else(|| random.zipf(50_000, 0.9));
    traces.push(("zipf and scans".to_owned(), (0..ACCESSES).map(|i| vec![pick(i)]).collect()));
    for length in [4_000, 11_000] {
        let requests = (0..ACCESSES).map(|index| vec![index % length]).collect();
        traces.push((format!("loop of {length}"), requests));
    }
    let shifting = (0..ACCESSES).map(|i| vec![i / 40_000 * 100_000 + random.below(9_000)]);
    traces.push(("alternating working sets".to_owned(), shifting.collect()));
    let drifting = (0..ACCESSES).map(|i| vec![i / 8 + random.below(9_000)]);
    traces.push(("drifting set".to_owned(), drifting.collect()));
    traces.push(("uniform reuse distance".to_owned(), uniform_reuse(&mut random)));
    for (open, shared) in [(200, 0), (400, 20)] {
        traces.push((format!("{open} chats, {shared} shared"), chats(&mut random, open, shared)));
    }
    traces
}

/// Accesses blocks with uniformly distributed reuse distances, which favors LRU.
fn uniform_reuse(random: &mut Random) -> Vec<Request> {
    let mut stack: Vec<u32> = Vec::new();
    let mut accesses = Vec::new();
    for _ in 0..ACCESSES / 3 {
        let depth = random.below(14_000) as usize;
        let block = match stack.len().checked_sub(depth + 1) {
            Some(place) => stack.remove(place),
            None => accesses.len() as u32,
        };
        stack.push(block);
        accesses.push(vec![block]);
    }
    accesses
}

/// Simulates `open_max` concurrent conversations, which grow by some blocks each turn and end at a
/// random time. Each begins with one of 50 shared texts of `shared` blocks.
fn chats(random: &mut Random, open_max: usize, shared: u32) -> Vec<Request> {
    let mut open: Vec<Request> = Vec::new();
    let mut next = 1 << 20;
    let mut requests = Vec::new();
    while requests.len() < REQUESTS {
        let is_new = open.len() < open_max || random.below(6) == 0;
        if is_new {
            if open.len() >= open_max {
                let ended = random.below(open.len() as u32);
                open.swap_remove(ended as usize);
            }
            let text = random.zipf(50, 1.1);
            open.push((0..shared).map(|block| text * 100 + block).collect());
        }
        let at = if is_new { open.len() - 1 } else { random.below(open.len() as u32) as usize };
        for _ in 0..1 + random.below(8) {
            next += 1;
            open[at].push(next);
        }
        requests.push(open[at].clone());
    }
    requests
}

/// A generator of the choices of a workload.
struct Random(SplitMix64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.number()
    }

    fn below(&mut self, limit: u32) -> u32 {
        (((self.next() >> 32) * u64::from(limit)) >> 32) as u32
    }

    /// Returns a rank below `limit` by Zipf's law with exponent `skew`, which must not be 1.
    fn zipf(&mut self, limit: u32, skew: f64) -> u32 {
        let share = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let last = f64::from(limit).powf(1.0 - skew) - 1.0;
        (last * share + 1.0).powf(1.0 / (1.0 - skew)) as u32
    }
}
