//! Equally long ranges at regular distances: a rectangular part of an array that is stored row by
//! row.

use mooncake_base::{Error, Result};
use mooncake_transfer_engine::LocalRange;
use smallvec::SmallVec;

/// One dimension of a [`Grid`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridDimension {
    /// Number of points along it.
    pub count: u64,
    /// Distance of two points in the object.
    pub object_step: u64,
    /// Distance of two points in memory.
    pub memory_step: u64,
}

/// Ranges of one length at the points of a regular grid, both in an object and in memory. 10^5
/// ranges are described by a few numbers.
#[derive(Debug, Clone)]
pub struct Grid {
    /// Offset of the first range in the object.
    offset: u64,
    /// Length of each range.
    length: u64,
    /// Outermost first. No count is 0.
    dimensions: SmallVec<[GridDimension; 2]>,
    /// Number of ranges; 0 if they are empty.
    count: usize,
    /// Offset in the object of the end of the last range.
    end: u64,
    /// From the first range in memory to the end of the last one.
    memory: LocalRange,
}

impl Grid {
    /// Makes a grid. Without dimensions it is a single range. `memory` returns the memory from the
    /// first range to the end of the last one, given its length.
    ///
    /// # Errors
    /// The grid ends beyond the last address (`INVALID_PARAMS`).
    pub fn new(
        offset: u64,
        length: u64,
        dimensions: SmallVec<[GridDimension; 2]>,
        memory: impl FnOnce(usize) -> LocalRange,
    ) -> Result<Self> {
        let is_empty = length == 0 || dimensions.iter().any(|dimension| dimension.count == 0);
        if is_empty {
            let dimensions = SmallVec::new();
            return Ok(Self {
                offset,
                length: 0,
                dimensions,
                count: 0,
                end: offset,
                memory: memory(0),
            });
        }
        let steps = dimensions.iter().map(|dimension| (dimension.count, dimension.object_step));
        let end = span(length, steps).and_then(|span| span.checked_add(offset));
        let steps = dimensions.iter().map(|dimension| (dimension.count, dimension.memory_step));
        let span = span(length, steps).and_then(|span| usize::try_from(span).ok());
        let counts = dimensions.iter().map(|dimension| dimension.count);
        let count = counts.into_iter().try_fold(1_u64, u64::checked_mul);
        let count = count.and_then(|count| usize::try_from(count).ok());
        let (Some(end), Some(span), Some(count)) = (end, span, count) else {
            return Err(Error::invalid("the ranges end beyond the last address")
                .with("offset", offset)
                .with("length", length));
        };
        Ok(Self { offset, length, dimensions, count, end, memory: memory(span) })
    }

    /// Number of ranges that are not empty.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Length of all ranges together.
    pub fn nbytes(&self) -> u64 {
        (self.count as u64).saturating_mul(self.length)
    }

    /// Offset of the first range in the object.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Distance from the first range in the object to the end of the last one.
    pub(crate) fn object_span(&self) -> u64 {
        self.end - self.offset
    }

    /// Memory from the first range to the end of the last one.
    pub(crate) fn memory(&self) -> &LocalRange {
        &self.memory
    }

    /// The ranges: offsets in the object and memory, the innermost dimension first.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u64, LocalRange)> {
        let mut at: SmallVec<[u64; 2]> = SmallVec::from_elem(0, self.dimensions.len());
        let (mut offset, mut into) = (self.offset, 0);
        (0..self.count).map(move |_| {
            let range = (offset, self.memory.part(into as usize, self.length as usize));
            for (at, dimension) in at.iter_mut().zip(&self.dimensions).rev() {
                *at += 1;
                if *at < dimension.count {
                    offset += dimension.object_step;
                    into += dimension.memory_step;
                    break;
                }
                // Back to the first point of this dimension; the next outer one moves on.
                *at = 0;
                offset -= (dimension.count - 1) * dimension.object_step;
                into -= (dimension.count - 1) * dimension.memory_step;
            }
            range
        })
    }
}

/// Distance from the first range to the end of the last one, for counts and steps along each
/// dimension; `None` beyond 64 bits.
fn span(length: u64, steps: impl Iterator<Item = (u64, u64)>) -> Option<u64> {
    steps.into_iter().try_fold(length, |span, (count, step)| {
        (count - 1).checked_mul(step).and_then(|along| span.checked_add(along))
    })
}

#[cfg(test)]
mod tests {
    use mooncake_base::ErrorCode;
    use smallvec::smallvec;

    use super::*;
    use crate::client::dangling_range;

    fn dimension(count: u64, object_step: u64, memory_step: u64) -> GridDimension {
        GridDimension { count, object_step, memory_step }
    }

    fn listed(grid: &Grid) -> Vec<(u64, usize, usize)> {
        let start = grid.memory().address();
        let place =
            |(offset, range): (u64, LocalRange)| (offset, range.address() - start, range.length());
        grid.ranges().map(place).collect()
    }

    #[test]
    fn ranges_follow_the_dimensions_from_the_innermost() {
        let grid =
            Grid::new(304, 4, smallvec![dimension(2, 100, 40), dimension(3, 8, 4)], dangling_range);
        let grid = grid.unwrap();
        assert_eq!(
            listed(&grid),
            [(304, 0, 4), (312, 4, 4), (320, 8, 4), (404, 40, 4), (412, 44, 4), (420, 48, 4)]
        );
        assert_eq!((grid.count(), grid.nbytes()), (6, 24));
        assert_eq!((grid.object_span(), grid.memory().length()), (120, 52));
    }

    #[test]
    fn grid_without_dimensions_is_one_range() {
        let grid = Grid::new(7, 9, smallvec![], dangling_range).unwrap();
        assert_eq!(listed(&grid), [(7, 0, 9)]);
        assert_eq!((grid.object_span(), grid.memory().length()), (9, 9));
    }

    #[test]
    fn empty_grids_have_no_ranges() {
        for (length, count) in [(0, 3), (8, 0), (0, 0)] {
            let grid =
                Grid::new(7, length, smallvec![dimension(count, 8, 8)], dangling_range).unwrap();
            assert_eq!(listed(&grid), []);
            assert_eq!((grid.count(), grid.nbytes(), grid.object_span()), (0, 0, 0));
        }
    }

    #[test]
    fn grid_beyond_the_last_address_is_refused() {
        for (offset, length, dimension) in [
            (u64::MAX, 1, dimension(1, 0, 0)),
            (0, u64::MAX, dimension(2, 1, 0)),
            (0, 1, dimension(u64::MAX, 2, 0)),
            (0, 1, dimension(3, 0, u64::MAX)),
            (1, 1, dimension(u64::MAX, 1, 0)),
        ] {
            let error =
                Grid::new(offset, length, smallvec![dimension], dangling_range).unwrap_err();
            assert_eq!(error.code(), ErrorCode::INVALID_PARAMS);
        }
        let many = smallvec![dimension(u64::MAX, 0, 0), dimension(2, 0, 0)];
        assert!(Grid::new(0, 1, many, dangling_range).is_err());
    }
}
