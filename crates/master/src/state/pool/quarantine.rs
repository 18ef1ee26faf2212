//! Quarantine of freed memory that a reader may still read or a late write may reach.

use std::collections::BTreeSet;

use mooncake_base::Moment;

use crate::state::{
    ids::{BlockId, SegmentSlot},
    lease::Timestamp,
};

/// Quarantined blocks in the order in which they become free: end, version of the object that
/// readers may still read there (0: no readers), segment and block, and the log position behind the
/// record of the release.
#[derive(Debug, Default)]
pub(in crate::state) struct Quarantine(BTreeSet<(Timestamp, u64, SegmentSlot, BlockId, u64)>);

/// A block that was quarantined.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct QuarantinedBlock {
    pub(in crate::state) segment: SegmentSlot,
    pub(in crate::state) block: BlockId,
    /// Log position behind the record of its release.
    pub(in crate::state) position: u64,
}

impl Quarantine {
    /// Quarantines a block until the given time.
    pub(in crate::state) fn push(
        &mut self,
        until: Timestamp,
        version: u64,
        segment: SegmentSlot,
        block: BlockId,
        position: u64,
    ) {
        self.0.insert((until, version, segment, block, position));
    }

    /// Takes out a block whose quarantine is over.
    pub(in crate::state) fn pop_due(&mut self, now: Moment) -> Option<QuarantinedBlock> {
        self.0.first().filter(|(until, ..)| *until <= now.into())?;
        let (_, _, segment, block, position) = self.0.pop_first()?;
        Some(QuarantinedBlock { segment, block, position })
    }

    /// Takes out a block that is quarantined only for readers of that version, with exactly this
    /// end.
    pub(in crate::state) fn pop_read(
        &mut self,
        until: Timestamp,
        version: u64,
    ) -> Option<QuarantinedBlock> {
        let first = (until, version, SegmentSlot::new(0), BlockId::FIRST, 0);
        let found = *self.0.range(first..).next()?;
        let (found_until, found_version, segment, block, position) = found;
        if (found_until, found_version) != (until, version) {
            return None;
        }
        self.0.remove(&found);
        Some(QuarantinedBlock { segment, block, position })
    }

    /// Returns when the next block is free.
    pub(in crate::state) fn next(&self) -> Option<Moment> {
        self.0.first().map(|(until, ..)| until.moment())
    }

    /// Forgets the blocks of segments that left the pool.
    pub(in crate::state) fn forget(&mut self, is_gone: impl Fn(SegmentSlot) -> bool) {
        self.0.retain(|(_, _, segment, ..)| !is_gone(*segment));
    }

    /// Returns all blocks and the ends of their quarantine.
    pub(in crate::state) fn blocks(
        &self,
    ) -> impl Iterator<Item = (Timestamp, SegmentSlot, BlockId)> {
        self.0.iter().map(|(until, _, segment, block, _)| (*until, *segment, *block))
    }
}
