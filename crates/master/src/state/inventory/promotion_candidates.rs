//! Objects that reads found only on disk, and how often lately.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::Moment;
use rustc_hash::FxHashMap;

use crate::state::ledger::counters::Counters;

/// The window in which reads of an object are counted, from the first on.
const WINDOW: Duration = Duration::from_secs(60);

/// Maximum number of objects that are counted.
const CANDIDATES_MAX: usize = 50_000;

/// Objects that were read from disk within the window, by version.
#[derive(Debug, Default)]
pub(in crate::state) struct PromotionCandidates {
    hits: FxHashMap<u64, (u8, Moment)>,
    /// The versions in the order of their first read. Those that were promoted since are not counted.
    order: VecDeque<(Moment, u64)>,
}

/// What follows from a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum HitVerdict {
    /// The object was not read often enough.
    TooFew,
    /// The object is to be brought into memory.
    Promote,
}

impl PromotionCandidates {
    /// Records a read. Returns `Promote` at the read that makes it `hits_min` reads within the window.
    pub(in crate::state) fn record(
        &mut self,
        now: Moment,
        version: u64,
        hits_min: u8,
        counters: &mut Counters,
    ) -> HitVerdict {
        self.expire(now, counters);
        if hits_min > 1 && !self.hits.contains_key(&version) {
            // A version that was promoted and read anew may still be in the order.
            if self.order.len() >= CANDIDATES_MAX {
                counters.promotion_candidates_dropped += 1;
                return HitVerdict::TooFew;
            }
            counters.promotion_candidates += 1;
            self.hits.insert(version, (0, now));
            self.order.push_back((now, version));
        }
        let hits = self.hits.get(&version).map_or(1, |(hits, _)| hits.saturating_add(1));
        if hits >= hits_min {
            self.hits.remove(&version);
            counters.promotion_candidates_admitted += 1;
            return HitVerdict::Promote;
        }
        if let Some(found) = self.hits.get_mut(&version) {
            found.0 = hits;
        }
        HitVerdict::TooFew
    }

    fn expire(&mut self, now: Moment, counters: &mut Counters) {
        while let Some(&(since, version)) = self.order.front()
            && (since + WINDOW).has_passed(now)
        {
            self.order.pop_front();
            if self.hits.get(&version).is_some_and(|&(_, first)| first == since) {
                self.hits.remove(&version);
                counters.promotion_candidates_expired += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_boot(Duration::from_secs(1000 + seconds))
    }

    #[test]
    fn second_read_within_the_window_promotes() {
        let (mut candidates, mut counters) = (PromotionCandidates::default(), Counters::default());
        let mut record =
            |seconds, version| candidates.record(at(seconds), version, 2, &mut counters);
        assert_eq!(record(0, 1), HitVerdict::TooFew);
        assert_eq!(record(59, 1), HitVerdict::Promote);
        assert_eq!(record(59, 1), HitVerdict::TooFew, "it is counted anew");
        assert_eq!(record(60, 2), HitVerdict::TooFew);
        assert_eq!(record(120, 2), HitVerdict::TooFew, "the first read is too long ago");
        assert_eq!(counters.promotion_candidates_admitted, 1);
        assert_eq!(counters.promotion_candidates_expired, 2);
    }

    #[test]
    fn number_of_candidates_is_limited() {
        let (mut candidates, mut counters) = (PromotionCandidates::default(), Counters::default());
        for version in 0..CANDIDATES_MAX as u64 + 10 {
            assert_eq!(candidates.record(at(0), version, 3, &mut counters), HitVerdict::TooFew);
        }
        assert_eq!(counters.promotion_candidates_dropped, 10);
        assert_eq!(candidates.record(at(0), 5, 1, &mut counters), HitVerdict::Promote);
    }
}
