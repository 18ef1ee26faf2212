//! Large transfers in rounds: each round moves a bounded part of an object or a batch, with a time limit
//! of its own, so that a transfer that makes progress does not time out.

use mooncake_transfer_engine::LocalRange;

/// How many bytes a round moves.
#[derive(Debug, Clone, Copy)]
pub(in crate::client) struct RoundSize {
    /// Maximum number of bytes of one object.
    of_object: usize,
    /// Maximum number of bytes of all objects.
    of_batch: usize,
}

impl RoundSize {
    /// Rounds of so many bytes of an object. Several objects are moved side by side, so that peers
    /// work at the same time.
    pub(in crate::client) fn new(object_bytes: usize) -> Self {
        const OBJECTS: usize = 4;
        Self { of_object: object_bytes, of_batch: object_bytes.saturating_mul(OBJECTS) }
    }

    /// Returns whether objects of these lengths need more than one round.
    pub(in crate::client) fn is_exceeded_by(self, lengths: impl Iterator<Item = u64>) -> bool {
        let mut sum = 0_u64;
        for length in lengths {
            sum = sum.saturating_add(length);
            if length > self.of_object as u64 || sum > self.of_batch as u64 {
                return true;
            }
        }
        false
    }

    /// Starts a round.
    pub(in crate::client) fn begin(self) -> RoundBudget {
        RoundBudget { of_object: self.of_object, left: self.of_batch }
    }
}

/// The bytes that a round may still move.
#[derive(Debug)]
pub(in crate::client) struct RoundBudget {
    of_object: usize,
    left: usize,
}

impl RoundBudget {
    /// Returns whether the round is full.
    pub(in crate::client) fn is_spent(&self) -> bool {
        self.left == 0
    }

    /// Takes the next ranges of an object, without empty ones.
    pub(in crate::client) fn take<I: Iterator<Item = (u64, LocalRange)>>(
        &mut self,
        cursor: &mut RoundCursor<I>,
    ) -> Vec<(u64, LocalRange)> {
        let ranges = cursor.take(self.of_object.min(self.left));
        self.left -= ranges.iter().map(|(_, range)| range.length()).sum::<usize>();
        ranges
    }
}

/// Cuts the ranges of one object into rounds.
pub(in crate::client) struct RoundCursor<I> {
    ranges: I,
    /// What is left of the range that the last round has reached.
    rest: Option<(u64, LocalRange)>,
}

impl<I: Iterator<Item = (u64, LocalRange)>> RoundCursor<I> {
    /// Starts before the first of the ranges, which are offsets within the object and local memory.
    pub(in crate::client) fn new(mut ranges: I) -> Self {
        let rest = ranges.next();
        Self { ranges, rest }
    }

    /// Returns whether no range is left.
    pub(in crate::client) fn is_at_end(&self) -> bool {
        self.rest.is_none()
    }

    /// Takes the next ranges, of so many bytes, without empty ones.
    fn take(&mut self, bytes: usize) -> Vec<(u64, LocalRange)> {
        let mut left = bytes;
        let mut taken = Vec::new();
        while left > 0
            && let Some((offset, range)) = self.rest
        {
            let length = range.length().min(left);
            if length > 0 {
                taken.push((offset, range.part(0, length)));
            }
            left -= length;
            self.rest = match range.length() - length {
                0 => self.ranges.next(),
                more => Some((offset.saturating_add(length as u64), range.part(length, more))),
            };
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::bytes::dangling_range;

    const ROUND: usize = 1000;

    fn rounds(ranges: &[(u64, LocalRange)]) -> Vec<Vec<(u64, usize)>> {
        let mut cursor = RoundCursor::new(ranges.iter().copied());
        let mut rounds = Vec::new();
        while !cursor.is_at_end() {
            let round = cursor.take(ROUND);
            rounds.push(round.iter().map(|(offset, range)| (*offset, range.length())).collect());
        }
        rounds
    }

    #[test]
    fn round_ends_within_a_range_and_goes_on_there() {
        let ranges = [(5, dangling_range(ROUND - 1)), (900, dangling_range(0))];
        assert_eq!(rounds(&ranges), [[(5, ROUND - 1)]], "empty ranges move nothing");
        let ranges = [(0, dangling_range(ROUND)), (1000, dangling_range(2))];
        assert_eq!(rounds(&ranges), [[(0, ROUND)], [(1000, 2)]]);
        let ranges = [(7, dangling_range(10)), (100, dangling_range(2 * ROUND))];
        let expected = [vec![(7, 10), (100, 990)], vec![(1090, ROUND)], vec![(2090, 10)]];
        assert_eq!(rounds(&ranges), expected);
        assert!(rounds(&[]).is_empty());
    }

    #[test]
    fn round_is_bounded_by_object_and_by_batch() {
        let size = RoundSize::new(ROUND);
        let full = 4 * ROUND as u64;
        assert!(!size.is_exceeded_by([ROUND as u64; 4].into_iter()));
        assert!(size.is_exceeded_by([ROUND as u64 + 1].into_iter()), "a large object");
        assert!(size.is_exceeded_by([1, full].into_iter()), "a large batch");
        assert!(size.is_exceeded_by([u64::MAX, u64::MAX].into_iter()));

        let objects = [ROUND - 1, 3 * ROUND, ROUND, ROUND, 7];
        let mut cursors =
            objects.map(|length| RoundCursor::new(std::iter::once((0, dangling_range(length)))));
        let mut rounds = Vec::new();
        while cursors.iter().any(|cursor| !cursor.is_at_end()) {
            let mut budget = size.begin();
            let taken = cursors.iter_mut().map(|cursor| {
                budget.take(cursor).iter().map(|(_, range)| range.length()).sum::<usize>()
            });
            rounds.push(taken.collect::<Vec<_>>());
        }
        let expected = [
            vec![ROUND - 1, ROUND, ROUND, ROUND, 1],
            vec![0, ROUND, 0, 0, 6],
            vec![0, ROUND, 0, 0, 0],
        ];
        assert_eq!(rounds, expected);
    }
}
