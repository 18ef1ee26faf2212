//! Windows of adjacent blocks: who owns a block, marks that follow a block through merges, and
//! blocks that are joined into one.

use crate::state::{
    ids::BlockId,
    pool::allocator::{Allocator, FREE, NONE, rounded},
};

/// A place in the memory that stays valid while blocks are split and merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark(usize);

impl Allocator {
    /// Records the owner of an allocated block, a number that the caller chooses. Valid until the
    /// block is freed.
    pub fn set_owner(&mut self, block: BlockId, owner: u32) {
        debug_assert!(!self.is_free(block.0), "only an allocated block has an owner");
        self.blocks[block.0 as usize].later = owner;
    }

    /// Returns the owner of an allocated block; `None` if none was recorded since its allocation,
    /// and for a free block.
    pub fn owner(&self, block: BlockId) -> Option<u32> {
        let record = &self.blocks[block.0 as usize];
        (record.offset & FREE == 0 && record.later != NONE).then_some(record.later)
    }

    /// Returns whether the block is free.
    pub fn is_block_free(&self, block: BlockId) -> bool {
        self.is_free(block.0)
    }

    /// Returns the first block of the memory.
    pub fn first_block(&self) -> Option<BlockId> {
        self.first().map(BlockId)
    }

    /// Returns the block behind this one.
    pub fn next_block(&self, block: BlockId) -> Option<BlockId> {
        let after = self.blocks[block.0 as usize].after;
        (after != NONE).then_some(BlockId(after))
    }

    /// Marks a block. If the block is merged into an earlier one, the mark moves there.
    pub fn mark(&mut self, block: BlockId) -> Mark {
        match self.marks.iter().position(|&marked| marked == NONE) {
            Some(at) => {
                self.marks[at] = block.0;
                Mark(at)
            }
            None => {
                self.marks.push(block.0);
                Mark(self.marks.len() - 1)
            }
        }
    }

    /// Returns the marked block.
    pub fn marked(&self, mark: Mark) -> BlockId {
        BlockId(self.marks[mark.0])
    }

    /// Moves a mark to another block.
    pub fn move_mark(&mut self, mark: Mark, block: BlockId) {
        self.marks[mark.0] = block.0;
    }

    /// Returns the block where the next scan of the memory should begin.
    pub fn rover(&self) -> Option<BlockId> {
        (self.length > 0).then_some(BlockId(self.rover))
    }

    /// Sets the block where the next scan of the memory should begin.
    pub fn set_rover(&mut self, block: BlockId) {
        self.rover = block.0;
    }

    /// Removes a mark.
    pub fn unmark(&mut self, mark: Mark) {
        self.marks[mark.0] = NONE;
        while self.marks.last() == Some(&NONE) {
            self.marks.pop();
        }
    }

    /// Returns whether a block of that length fits into the window from the start of `first` to the
    /// end of `last`.
    pub fn window_fits(&self, first: BlockId, last: BlockId, length: u64) -> bool {
        let Some((need, align)) = rounded(length) else { return false };
        self.offset_of(first.0).next_multiple_of(align) + need <= self.end_of(last.0)
    }

    /// Allocates a free block as a whole.
    pub fn take_free(&mut self, block: BlockId) {
        self.remove_free(block.0);
        self.blocks[block.0 as usize].later = NONE;
        self.used += self.size_of(block.0);
        self.count += 1;
    }

    /// Joins an allocated block with the next one, which is allocated or free.
    ///
    /// # Panics
    /// If there is no next block.
    pub fn join_next(&mut self, block: BlockId) {
        let next = self.blocks[block.0 as usize].after;
        assert_ne!(next, NONE, "the caller has looked at the next block");
        if self.is_free(next) {
            self.remove_free(next);
            self.used += self.size_of(next);
        } else {
            self.count -= 1;
        }
        self.merge_next(block.0);
    }

    /// Cuts an allocated block down to what [`allocate`](Self::allocate) returns for that length.
    /// Returns the block, and what is left before and behind it, which stays allocated.
    ///
    /// # Panics
    /// If the block is too short.
    pub fn trim(&mut self, block: BlockId, length: u64) -> (BlockId, [Option<BlockId>; 2]) {
        assert!(self.window_fits(block, block, length), "the caller has joined enough");
        let (need, align) = rounded(length).expect("a length that fits is valid");
        let at = self.offset_of(block.0).next_multiple_of(align);
        let mut kept = block.0;
        let mut rests = [None, None];
        if at > self.offset_of(kept) {
            kept = self.split(kept, at);
            self.count += 1;
            rests[0] = Some(block);
        }
        if at + need < self.end_of(kept) {
            let rest = self.split(kept, at + need);
            self.count += 1;
            rests[1] = Some(BlockId(rest));
        }
        self.blocks[kept as usize].later = NONE;
        (BlockId(kept), rests)
    }
}
