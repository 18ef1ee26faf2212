//! Destinations of reads: which bytes of an object go to which memory.

use mooncake_base::{Error, Result};
use mooncake_transfer_engine::LocalRange;
use smallvec::SmallVec;

use crate::{
    client::put::total,
    grid::Grid,
    object::{Located, Span},
};

/// The ranges of a read: offsets within the object and their destinations.
pub(in crate::client) enum DestinationLayout<'a> {
    Listed(SmallVec<[(u64, LocalRange); 1]>),
    /// As the caller lists them: reads of 10^5 ranges make no copy of the list.
    Scattered(&'a [u64], &'a [LocalRange]),
    Grids(&'a [Grid]),
}

/// The ranges of a layout, two of the three empty: an iterator has one type for all layouts.
type RangesByKind<'a> = (&'a [(u64, LocalRange)], (&'a [u64], &'a [LocalRange]), &'a [Grid]);

impl DestinationLayout<'_> {
    /// The ranges that are not empty.
    pub(in crate::client) fn ranges(&self) -> impl Iterator<Item = (u64, LocalRange)> {
        let (listed, scattered, grids) = self.by_kind();
        let scattered = scattered.0.iter().copied().zip(scattered.1.iter().copied());
        listed
            .iter()
            .copied()
            .chain(scattered.filter(|(_, range)| range.length() > 0))
            .chain(grids.iter().flat_map(Grid::ranges))
    }

    /// Length of all ranges together.
    pub(in crate::client) fn nbytes(&self) -> u64 {
        let (listed, (_, into), grids) = self.by_kind();
        let ranges = listed.iter().map(|(_, range)| range).chain(into);
        total(ranges) + grids.iter().map(Grid::nbytes).sum::<u64>()
    }

    /// Number of ranges, including empty ones.
    pub(in crate::client) fn count_max(&self) -> usize {
        let (listed, (_, into), grids) = self.by_kind();
        listed.len() + into.len() + grids.iter().map(Grid::count).sum::<usize>()
    }

    fn by_kind(&self) -> RangesByKind<'_> {
        match self {
            Self::Listed(ranges) => (ranges, (&[], &[]), &[]),
            Self::Scattered(offsets, into) => (&[], (offsets, into), &[]),
            Self::Grids(grids) => (&[], (&[], &[]), grids),
        }
    }
}

/// Maps the span to offsets within the object and destination ranges.
pub(in crate::client) fn layout<'a>(
    located: &Located,
    span: Span<'a>,
    into: &'a [LocalRange],
) -> Result<DestinationLayout<'a>> {
    let (offset, length) = match span {
        Span::Whole => (0, located.length),
        Span::Range { offset, length } => (offset, length),
        Span::Scattered(offsets) => return scatter(located, offsets, into),
        Span::Grids(grids) => {
            let check = |grid: &Grid| check_part(located, grid.offset(), grid.object_span());
            return grids.iter().try_for_each(check).map(|()| DestinationLayout::Grids(grids));
        }
    };
    check_part(located, offset, length)?;
    fill(offset, length, into).map(DestinationLayout::Listed).ok_or_else(|| {
        let room = total(into);
        Error::invalid("the destination is smaller than the read")
            .with("key", &located.key)
            .with("destination_bytes", room)
            .with("bytes", length)
    })
}

fn scatter<'a>(
    located: &Located,
    offsets: &'a [u64],
    into: &'a [LocalRange],
) -> Result<DestinationLayout<'a>> {
    if offsets.len() != into.len() {
        return Err(Error::invalid("there must be one destination for each part")
            .with("key", &located.key)
            .with("parts", offsets.len())
            .with("destinations", into.len()));
    }
    for (&offset, range) in offsets.iter().zip(into) {
        check_part(located, offset, range.length() as u64)?;
    }
    Ok(DestinationLayout::Scattered(offsets, into))
}

/// Checks that the range is within the object.
pub(in crate::client) fn check_part(located: &Located, offset: u64, length: u64) -> Result<()> {
    if offset.checked_add(length).is_some_and(|end| end <= located.length) {
        return Ok(());
    }
    Err(Error::invalid("the range ends outside the object")
        .with("key", &located.key)
        .with("object_bytes", located.length)
        .with("offset", offset)
        .with("length", length))
}

/// Distributes `length` bytes from `offset` on over the ranges, in order; `None` if they do not
/// fit.
fn fill(offset: u64, length: u64, into: &[LocalRange]) -> Option<SmallVec<[(u64, LocalRange); 1]>> {
    let mut done = 0;
    let take = |range: &LocalRange| {
        let begin = done;
        let taken = (length - begin).min(range.length() as u64);
        done += taken;
        (taken > 0).then(|| (offset + begin, range.part(0, taken as usize)))
    };
    let ranges = into.iter().filter_map(take).collect();
    (done == length).then_some(ranges)
}
