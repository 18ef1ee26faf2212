//! Traces that nobody recorded: patterns that are kind to one order of eviction or another.

use super::{Request, Trace};

/// Uses of each trace of single blocks.
const USES: u32 = 300_000;
/// Requests of each trace of prompts.
const REQUESTS: usize = 12_000;

/// Every pattern.
pub(super) fn all() -> Vec<Trace> {
    let mut random = Random(1);
    let mut traces = Vec::new();
    for skew in [0.6, 0.8, 1.1] {
        let requests = (0..USES).map(|_| vec![random.zipf(100_000, skew)]).collect();
        traces.push((format!("zipf {skew}"), requests));
    }
    let scan = |index: u32| (index / 20_000 % 4 == 3).then_some((1 << 24) + index);
    let mut pick = |index| scan(index).unwrap_or_else(|| random.zipf(50_000, 0.9));
    traces.push(("zipf and scans".to_owned(), (0..USES).map(|i| vec![pick(i)]).collect()));
    for length in [4_000, 11_000] {
        let requests = (0..USES).map(|index| vec![index % length]).collect();
        traces.push((format!("loop of {length}"), requests));
    }
    let shifting = (0..USES).map(|i| vec![i / 40_000 * 100_000 + random.below(9_000)]);
    traces.push(("working sets in turn".to_owned(), shifting.collect()));
    let drifting = (0..USES).map(|i| vec![i / 8 + random.below(9_000)]);
    traces.push(("drifting set".to_owned(), drifting.collect()));
    traces.push(("recency alone".to_owned(), by_recency(&mut random)));
    for (open, shared) in [(200, 0), (400, 20)] {
        traces.push((format!("{open} chats, {shared} shared"), chats(&mut random, open, shared)));
    }
    traces
}

/// Blocks are wanted again after so many others, all distances alike: best served by recency.
fn by_recency(random: &mut Random) -> Vec<Request> {
    let mut stack: Vec<u32> = Vec::new();
    let mut uses = Vec::new();
    for _ in 0..USES / 3 {
        let depth = random.below(14_000) as usize;
        let block = match stack.len().checked_sub(depth + 1) {
            Some(place) => stack.remove(place),
            None => uses.len() as u32,
        };
        stack.push(block);
        uses.push(vec![block]);
    }
    uses
}

/// Conversations, so many at a time, that grow by some blocks each turn and end at some time.
/// Each begins with one of some shared texts of so many blocks.
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

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u32) -> u32 {
        (((self.next() >> 32) * u64::from(limit)) >> 32) as u32
    }

    /// A rank below `limit`, by Zipf's law with that exponent, which is not 1.
    fn zipf(&mut self, limit: u32, skew: f64) -> u32 {
        let share = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let last = f64::from(limit).powf(1.0 - skew) - 1.0;
        (last * share + 1.0).powf(1.0 / (1.0 - skew)) as u32
    }
}
