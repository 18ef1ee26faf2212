//! The marks of an allocator, apart from its memory.

use std::ops::Deref;

use crate::state::{
    ids::BlockId,
    pool::allocator::{Allocator, Mark},
};

/// An allocator whose marks may be set and moved, but whose blocks stay as they are.
#[derive(Debug)]
pub(in crate::state) struct Marks<'a>(&'a mut Allocator);

impl Deref for Marks<'_> {
    type Target = Allocator;

    fn deref(&self) -> &Allocator {
        self.0
    }
}

impl<'a> Marks<'a> {
    pub(in crate::state) fn of(allocator: &'a mut Allocator) -> Self {
        Self(allocator)
    }

    /// Marks a block.
    pub(in crate::state) fn mark(&mut self, block: BlockId) -> Mark {
        self.0.mark(block)
    }

    /// Moves a mark to another block.
    pub(in crate::state) fn move_mark(&mut self, mark: Mark, block: BlockId) {
        self.0.move_mark(mark, block);
    }

    /// Removes a mark.
    pub(in crate::state) fn unmark(&mut self, mark: Mark) {
        self.0.unmark(mark);
    }

    /// Sets the block at which the next scan begins.
    pub(in crate::state) fn set_rover(&mut self, block: BlockId) {
        self.0.set_rover(block);
    }
}
