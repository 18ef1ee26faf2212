//! Where the blocks of evicted objects go: back to the pool, or to the window that is being evicted.

use std::ops::Range;

use rustc_hash::FxHashSet;

use crate::state::{
    ids::{BlockId, SegmentSlot},
    pool::Pool,
};

/// Where freed blocks go.
#[derive(Debug)]
pub(in crate::state) enum FreedTo<'a> {
    /// To the pool, once the log has the record of their release on disk.
    Pool,
    /// Blocks of this part of a segment stay allocated and are kept for a window; all others go to the
    /// pool.
    Window { segment: SegmentSlot, offsets: Range<u64>, kept: &'a mut KeptBlocks },
}

/// Allocated blocks of a window that no object has any more.
#[derive(Debug, Default)]
pub(in crate::state) struct KeptBlocks {
    pub(in crate::state) blocks: FxHashSet<BlockId>,
    /// Position of the log from which on the blocks may be used again.
    pub(in crate::state) position: u64,
}

impl Pool {
    /// Frees a block whose release is recorded below the position, or keeps it for a window.
    pub(in crate::state) fn free_block_to(
        &mut self,
        to: &mut FreedTo<'_>,
        segment: SegmentSlot,
        block: BlockId,
        position: u64,
    ) {
        if let FreedTo::Window { segment: within, offsets, kept } = to
            && *within == segment
            && offsets.contains(&self.segments.at(segment).allocator.offset(block))
        {
            let is_new = kept.blocks.insert(block);
            debug_assert!(is_new, "a block is kept for a window once");
            kept.position = kept.position.max(position);
            return;
        }
        self.free_block(segment, block, position);
    }
}
