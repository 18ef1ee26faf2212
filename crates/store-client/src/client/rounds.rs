//! Large transfers in rounds: each round moves a bounded part of every object, with a time limit of its
//! own, so that a transfer that makes progress does not time out.

use mooncake_transfer_engine::LocalRange;

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
    pub(in crate::client) fn take(&mut self, bytes: usize) -> Vec<(u64, LocalRange)> {
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
}
