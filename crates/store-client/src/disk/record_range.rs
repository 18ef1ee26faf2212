//! Cuts reads of records into ranges of a record that are loaded at once, each with the parts of the
//! destination that it fills.

use mooncake_transfer_engine::LocalRange;
use smallvec::SmallVec;

/// The longest range.
pub(crate) const RANGE_BYTES_MAX: u64 = 16 << 20;

/// Ranges of a record that lie closer together are loaded as one: a device reads so many bytes in the
/// time that a further request takes.
const GAP_BYTES_MAX: u64 = 64 << 10;

/// A range of a record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RecordRange {
    /// Where it begins within the record.
    pub(crate) offset: u64,
    /// The length.
    pub(crate) length: u64,
    /// Which of its bytes go where: offsets within the range.
    pub(crate) parts: SmallVec<[(u64, LocalRange); 1]>,
}

impl RecordRange {
    /// Returns the memory that all bytes of the range go to, if that is one part.
    pub(crate) fn whole(&self) -> Option<LocalRange> {
        match self.parts[..] {
            [(0, whole)] if whole.length() as u64 == self.length => Some(whole),
            _ => None,
        }
    }

    fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// Cuts the ranges of one object, which are offsets within the object and memory.
pub(crate) fn record_ranges(ranges: impl Iterator<Item = (u64, LocalRange)>) -> Vec<RecordRange> {
    let mut ranges: Vec<_> = ranges.filter(|(_, range)| range.length() > 0).collect();
    if !ranges.is_sorted_by_key(|&(offset, _)| offset) {
        ranges.sort_by_key(|&(offset, _)| offset);
    }
    let mut cut: Vec<RecordRange> = Vec::new();
    for (mut offset, mut range) in ranges {
        loop {
            let near = cut.last_mut().filter(|last| {
                offset <= last.end().saturating_add(GAP_BYTES_MAX)
                    && offset - last.offset < RANGE_BYTES_MAX
            });
            let last = match near {
                Some(last) => last,
                None => {
                    cut.push(RecordRange { offset, length: 0, parts: SmallVec::new() });
                    cut.last_mut().expect("it was just added")
                }
            };
            let at = offset - last.offset;
            let length = ((RANGE_BYTES_MAX - at) as usize).min(range.length());
            last.parts.push((at, range.part(0, length)));
            last.length = last.length.max(at + length as u64);
            if length == range.length() {
                break;
            }
            offset += length as u64;
            range = range.part(length, range.length() - length);
        }
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::dangling_range;

    fn check(ranges: &[(u64, usize)], expected: &[(u64, u64, usize)]) {
        let ranges = ranges.iter().map(|&(offset, length)| (offset, dangling_range(length)));
        let found = record_ranges(ranges);
        let found: Vec<_> =
            found.iter().map(|cut| (cut.offset, cut.length, cut.parts.len())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn near_ranges_are_loaded_as_one() {
        check(&[(0, 10)], &[(0, 10, 1)]);
        check(&[(5, 0)], &[]);
        check(&[(100, 10), (0, 10)], &[(0, 110, 2)]);
        check(&[(0, 10), (10 + GAP_BYTES_MAX, 1)], &[(0, 11 + GAP_BYTES_MAX, 2)]);
        check(&[(0, 10), (11 + GAP_BYTES_MAX, 1)], &[(0, 10, 1), (11 + GAP_BYTES_MAX, 1, 1)]);
        check(&[(0, 10), (4, 2), (4, 8)], &[(0, 12, 3)]);
    }

    #[test]
    fn long_range_is_cut() {
        let max = RANGE_BYTES_MAX;
        let long = 2 * max as usize + 1;
        check(&[(7, long)], &[(7, max, 1), (7 + max, max, 1), (7 + 2 * max, 1, 1)]);
        check(&[(0, max as usize - 1), (max - 1, 2)], &[(0, max, 2), (max, 1, 1)]);
    }
}
