//! A buddy allocator over slabs that hands out addresses and never touches memory.
//!
//! A slab is one block of the largest class. A block is split into halves until it fits; two free
//! halves are joined again. The lowest address is taken first, so that allocations stay together
//! and the slabs above them become free.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_base::{Error, Result};

/// Size of the smallest block.
const BLOCK_BYTES_MIN: u64 = 8 << 10;

/// Number of classes; each is twice as large as the one before.
const CLASSES: usize = 16;

/// Size of the largest block and of a slab.
pub(super) const BLOCK_BYTES_MAX: u64 = BLOCK_BYTES_MIN << (CLASSES - 1);

const CLASS_LAST: usize = CLASSES - 1;

/// The state of the allocator.
#[derive(Debug, Default)]
pub(super) struct Arena {
    slabs: BTreeSet<u64>,
    /// Free blocks of each class.
    free: [BTreeSet<u64>; CLASSES],
    allocated: BTreeMap<u64, ArenaAllocation>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ArenaAllocation {
    /// A block of this class.
    Block(usize),
    /// Memory of its own, with this many bytes.
    Dedicated(u64),
}

/// Result of freeing an allocation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Freed {
    /// The block is kept for a later allocation.
    Retained,
    /// The slab or dedicated memory at this address is not needed any more.
    Released(u64),
}

impl Arena {
    /// Adds a slab of [`BLOCK_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// The slab overlaps another one.
    pub(super) fn add_slab(&mut self, base: u64) -> Result<()> {
        let before = self.slabs.range(..base.saturating_add(BLOCK_BYTES_MAX)).next_back();
        if before.is_some_and(|other| other + BLOCK_BYTES_MAX > base) {
            return Err(Error::internal("two slabs overlap"));
        }
        self.slabs.insert(base);
        self.free[CLASS_LAST].insert(base);
        Ok(())
    }

    /// Records a dedicated allocation.
    ///
    /// # Errors
    /// Another allocation begins at this address.
    pub(super) fn add_dedicated(&mut self, base: u64, length: u64) -> Result<()> {
        if self.allocated.insert(base, ArenaAllocation::Dedicated(length)).is_some() {
            return Err(Error::internal("two buffers begin at one address"));
        }
        Ok(())
    }

    /// Allocates a block for `length` bytes; `None` if a slab has to be added first.
    pub(super) fn allocate(&mut self, length: u64) -> Option<u64> {
        let wanted = class_of(length)?;
        let found = (wanted..CLASSES).find(|class| !self.free[*class].is_empty())?;
        let address = self.free[found].pop_first()?;
        // The upper half of each split stays free.
        for class in wanted..found {
            self.free[class].insert(address + bytes_of(class));
        }
        self.allocated.insert(address, ArenaAllocation::Block(wanted));
        Some(address)
    }

    /// Frees a block and joins it with its free buddies.
    ///
    /// # Errors
    /// No allocation of that length begins there. Nothing changes then.
    pub(super) fn free(&mut self, address: u64, length: u64) -> Result<Freed> {
        let wrong = |text: &str| {
            Error::invalid(text)
                .with("address", format_args!("{address:#x}"))
                .with("length", length)
        };
        let allocation = self
            .allocated
            .get(&address)
            .copied()
            .ok_or_else(|| wrong("no managed buffer begins there, or it was freed before"))?;
        match allocation {
            ArenaAllocation::Dedicated(whole) if length > BLOCK_BYTES_MAX && length <= whole => {
                self.allocated.remove(&address);
                Ok(Freed::Released(address))
            }
            ArenaAllocation::Block(class) if class_of(length) == Some(class) => {
                self.allocated.remove(&address);
                Ok(self.join(address, class))
            }
            _ => Err(wrong("the managed buffer there has another length")),
        }
    }

    fn join(&mut self, mut address: u64, mut class: usize) -> Freed {
        let slab = *self.slabs.range(..=address).next_back().expect("blocks lie in slabs");
        while class < CLASS_LAST {
            let buddy = slab + ((address - slab) ^ bytes_of(class));
            if !self.free[class].remove(&buddy) {
                break;
            }
            address = address.min(buddy);
            class += 1;
        }
        // One free slab is kept, so that repeated allocation does not create a slab each time.
        if class == CLASS_LAST && !self.free[CLASS_LAST].is_empty() {
            self.slabs.remove(&slab);
            return Freed::Released(slab);
        }
        self.free[class].insert(address);
        Freed::Retained
    }
}

const fn bytes_of(class: usize) -> u64 {
    BLOCK_BYTES_MIN << class
}

/// Returns the smallest class for `length` bytes; `None` if the largest is too small.
fn class_of(length: u64) -> Option<usize> {
    (0..CLASSES).find(|class| length <= bytes_of(*class))
}

#[cfg(test)]
mod tests;
