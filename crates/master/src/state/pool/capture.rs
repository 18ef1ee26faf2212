//! Blocks that are kept for a window when they are freed.

use std::ops::Range;

use rustc_hash::FxHashSet;

use crate::state::{
    ids::{BlockId, SegmentSlot},
    pool::Pool,
};

/// A part of a segment whose blocks stay allocated when their objects give them up, and those blocks.
#[derive(Debug)]
pub(in crate::state) struct Capture {
    pub(in crate::state) segment: SegmentSlot,
    pub(in crate::state) offsets: Range<u64>,
    pub(in crate::state) blocks: FxHashSet<BlockId>,
    /// Position of the log from which on the blocks may be used again.
    pub(in crate::state) position: u64,
}

impl Pool {
    /// Keeps a freed block for the window that is being evicted, if it lies there.
    pub(in crate::state) fn capture_block(
        &mut self,
        segment: SegmentSlot,
        block: BlockId,
        position: u64,
    ) -> bool {
        let Some(capture) = &mut self.capture else { return false };
        if capture.segment != segment {
            return false;
        }
        let offset = self.segments.at(segment).allocator.offset(block);
        let is_in = capture.offsets.contains(&offset);
        if is_in {
            capture.blocks.insert(block);
            capture.position = capture.position.max(position);
        }
        is_in
    }
}
