//! Prepared blocks: free memory of which the log already says that it rests after a restart or a
//! take-over.
//!
//! A put that starts in such memory need not wait for the log: a master that does not know of the put
//! gives the memory to nobody for as long as the put may be written. Blocks are prepared in the sizes
//! that were put last, since a cache mostly has few sizes.

use std::collections::VecDeque;

use crate::state::{
    ids::{BlockId, SegmentSlot},
    pool::{Pool, allocator::footprint},
};

/// Maximum number of prepared blocks of a segment.
const BLOCKS_MAX: usize = 32;

/// Maximum share of a segment that is prepared (1/64).
const BYTES_SHARE: u64 = 64;

/// Share of a segment that stays free beside its prepared blocks (1/8): memory that puts run short of
/// is not kept back for later ones.
const FREE_SHARE: u64 = 8;

/// How puts in prepared memory may be answered, and how much of it there is.
#[derive(Debug, Default)]
pub(in crate::state) struct Preparation {
    /// Answers need not wait for the log up to this position; `None`: nothing is prepared, since a wait
    /// costs little.
    answerable: Option<u64>,
    /// Bytes of all prepared blocks.
    bytes: u64,
    /// Number of prepared blocks that puts have taken.
    taken: u64,
}

/// A block that is kept for a put of its size.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct PreparedBlock {
    block: BlockId,
    size: u64,
    /// Log position behind the record of its preparation.
    position: u64,
}

/// The prepared blocks of a segment, in the order of the log.
pub(in crate::state) type PreparedBlocks = VecDeque<PreparedBlock>;

impl Pool {
    /// Sets the log position up to which answers need not wait. `None` ends the preparation of memory.
    pub(in crate::state) fn set_answerable(&mut self, position: Option<u64>) {
        self.preparation.answerable = position;
    }

    /// Returns whether memory is prepared for puts.
    pub(in crate::state) fn prepares(&self) -> bool {
        self.preparation.answerable.is_some()
    }

    /// Returns whether any memory is prepared.
    pub(in crate::state) fn has_prepared(&self) -> bool {
        self.preparation.bytes > 0
    }

    /// Returns the number of prepared blocks that puts have taken.
    pub(in crate::state) fn prepared_taken(&self) -> u64 {
        self.preparation.taken
    }

    /// Takes a prepared block of exactly the size that an object of that length has.
    pub(in crate::state) fn take_prepared(
        &mut self,
        slot: SegmentSlot,
        length: u64,
    ) -> Option<BlockId> {
        let answerable = self.preparation.answerable?;
        let segment = self.segments.at(slot);
        let size = footprint(length)?;
        let is_ready = |found: &PreparedBlock| found.size == size && found.position <= answerable;
        let at = segment.prepared.iter().position(is_ready)?;
        self.preparation.taken += 1;
        self.remove_prepared(slot, at)
    }

    /// Allocates a block to be prepared, if the segment has enough free memory. Once its preparation is
    /// recorded, it is passed to [`keep_prepared`](Self::keep_prepared).
    pub(in crate::state) fn begin_preparing(
        &mut self,
        slot: SegmentSlot,
        length: u64,
    ) -> Option<BlockId> {
        let segment = self.segments.at(slot);
        let size = footprint(length)?;
        let whole = segment.allocator.length();
        let is_plenty = segment.free() > whole / FREE_SHARE + size;
        let may_prepare = segment.accepts_new()
            && segment.prepared.len() < BLOCKS_MAX
            && segment.reserved.prepared + size <= whole / BYTES_SHARE;
        if !(is_plenty && may_prepare) {
            return None;
        }
        self.segments.with_allocator(slot, |allocator| allocator.allocate(length))
    }

    /// Keeps a block whose preparation is recorded below the log position.
    pub(in crate::state) fn keep_prepared(
        &mut self,
        slot: SegmentSlot,
        block: BlockId,
        position: u64,
    ) {
        let segment = self.segments.at_mut(slot);
        let size = segment.allocator.size(block);
        segment.reserved.prepared += size;
        segment.prepared.push_back(PreparedBlock { block, size, position });
        self.preparation.bytes += size;
    }

    /// Takes the oldest prepared block of a segment that has another size than objects of that length;
    /// `None`: of any size.
    pub(in crate::state) fn take_unused(
        &mut self,
        slot: SegmentSlot,
        length: Option<u64>,
    ) -> Option<BlockId> {
        let segment = self.segments.at(slot);
        let size = length.and_then(footprint);
        let at = segment.prepared.iter().position(|found| Some(found.size) != size)?;
        self.remove_prepared(slot, at)
    }

    /// Takes the prepared block with that index from a segment.
    fn remove_prepared(&mut self, slot: SegmentSlot, at: usize) -> Option<BlockId> {
        let segment = self.segments.at_mut(slot);
        let PreparedBlock { block, size, .. } = segment.prepared.remove(at)?;
        segment.reserved.prepared -= size;
        self.preparation.bytes -= size;
        Some(block)
    }

    /// Returns all prepared blocks.
    pub(in crate::state) fn prepared(&self) -> impl Iterator<Item = (SegmentSlot, BlockId)> {
        let mounted = self.segments.mounted().filter(|(_, segment)| !segment.prepared.is_empty());
        mounted.flat_map(|(slot, segment)| {
            segment.prepared.iter().map(move |found| (slot, found.block))
        })
    }
}
