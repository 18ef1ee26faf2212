//! The order in which the replicas of an object are read.

use std::time::Duration;

use smallvec::SmallVec;

/// Latency differences below this are noise.
const LATENCY_NOISE: Duration = Duration::from_micros(10);

/// What is known about reading a replica. A smaller value is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaRank {
    /// Its holder has failed a short time ago.
    pub is_suspected: bool,
    /// It is a record on disk.
    pub is_on_disk: bool,
    /// It is in another process.
    pub is_elsewhere: bool,
    /// The expected duration of the read.
    pub expected: Duration,
}

impl ReplicaRank {
    /// Returns whether it makes no clear difference which of the two is read, `best` being the
    /// better one.
    fn is_about_as_good_as(&self, best: &Self) -> bool {
        let class = |rank: &Self| (rank.is_suspected, rank.is_on_disk, rank.is_elsewhere);
        class(self) == class(best) && self.expected <= best.expected * 2 + LATENCY_NOISE
    }
}

/// Sorts replicas, the best one first, and returns their indexes. Those that are about as good as the
/// best are rotated by `turn`, so that reads spread over them.
pub fn replica_order(
    ranks: impl ExactSizeIterator<Item = ReplicaRank>,
    turn: usize,
) -> SmallVec<[usize; 1]> {
    if ranks.len() < 2 {
        return (0..ranks.len()).collect();
    }
    let ranks: Vec<_> = ranks.collect();
    let mut order: SmallVec<[usize; 1]> = (0..ranks.len()).collect();
    order.sort_by_key(|&at| ranks[at]);
    let best = ranks[order[0]];
    let equals = order.iter().take_while(|&&at| ranks[at].is_about_as_good_as(&best)).count();
    order[..equals].sort_unstable();
    order[..equals].rotate_left(turn % equals);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_about_as_good_as_the_best_take_turns() {
        let rank = |is_elsewhere, micros| ReplicaRank {
            is_suspected: false,
            is_on_disk: false,
            is_elsewhere,
            expected: Duration::from_micros(micros),
        };
        let ranks = [rank(true, 20), rank(true, 60), rank(true, 45), rank(true, 500)];
        let order = |turn| replica_order(ranks.into_iter(), turn).into_vec();
        assert_eq!(order(0), [0, 2, 1, 3]);
        assert_eq!(order(1), [2, 0, 1, 3]);
        assert_eq!(order(2), [0, 2, 1, 3]);
        let own = [rank(true, 1), rank(false, 900)];
        assert_eq!(
            replica_order(own.into_iter(), 1).into_vec(),
            [1, 0],
            "the own process is first"
        );
        assert!(replica_order(std::iter::empty(), 3).is_empty());
    }

    #[test]
    fn suspected_holder_is_asked_last() {
        let rank = |is_suspected| ReplicaRank {
            is_suspected,
            is_on_disk: false,
            is_elsewhere: !is_suspected,
            expected: Duration::ZERO,
        };
        for turn in 0..4 {
            let order = replica_order([rank(true), rank(false)].into_iter(), turn);
            assert_eq!(order.into_vec(), [1, 0]);
        }
    }
}
