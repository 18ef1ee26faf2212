//! Freed memory that is given to nobody yet: a reader may still read it, or a write may arrive.

use std::{cmp::Reverse, collections::BinaryHeap};

use mooncake_base::Moment;

use super::{allocator::BlockId, lease::Stamp};

/// Blocks that rest, the first to be free on top.
#[derive(Debug, Default)]
pub(super) struct Quarantine(BinaryHeap<Reverse<(Stamp, u32, BlockId)>>);

impl Quarantine {
    /// The block of that segment rests until then.
    pub(super) fn push(&mut self, until: Stamp, segment: u32, block: BlockId) {
        self.0.push(Reverse((until, segment, block)));
    }

    /// Takes out a block whose rest is over.
    pub(super) fn pop_due(&mut self, now: Moment) -> Option<(u32, BlockId)> {
        let &Reverse((until, segment, block)) = self.0.peek()?;
        if until > now.into() {
            return None;
        }
        self.0.pop();
        Some((segment, block))
    }

    /// When the next block is free.
    pub(super) fn next(&self) -> Option<Moment> {
        self.0.peek().map(|Reverse((until, ..))| until.moment())
    }

    /// The memory of that segment is nobody's concern any more.
    pub(super) fn forget(&mut self, segment: u32) {
        self.0.retain(|Reverse((_, other, _))| *other != segment);
    }

    /// All of them, and until when they rest.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (Stamp, u32, BlockId)> {
        self.0.iter().map(|Reverse(block)| *block)
    }
}
