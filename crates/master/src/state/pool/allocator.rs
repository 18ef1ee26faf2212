//! Allocator of the memory of one segment, of the TLSF family: two levels of size classes of free
//! blocks, O(1) to allocate and to free.
//!
//! Sizes are rounded only to the granule: 8 bytes, or 64 from 4 KiB up, where blocks also start at
//! multiples of 64, so that copies and tensor views start on a cache line. The metadata lies here
//! and not in the blocks, since the memory belongs to another process.
//!
//! A search tries the bin of its own size first, so that a hole of exactly the right size is reused
//! before a larger one is split; a pool of one or few sizes then stays as dense as it was when
//! filled. Sizes below the average are cut from the end of a block and others from its start, which
//! keeps small objects from being scattered between large ones.

mod marks;
mod window;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub(in crate::state) use self::marks::Marks;
pub use self::window::Mark;
use crate::state::ids::BlockId;

/// No block.
const NONE: u32 = u32::MAX;

/// Sizes and offsets are multiples of this.
const GRANULE_BYTES: u64 = 8;

/// Blocks of at least this size are whole cache lines.
const LARGE_BYTES: u64 = 4096;

const LARGE_GRANULE_BYTES: u64 = 64;

/// 32 bins per power of two: sizes in one bin differ by at most 3 %.
const FINE_BITS: u32 = 5;

const FINE: usize = 1 << FINE_BITS;

/// Powers of two, enough for [`LENGTH_MAX`].
const COARSE: usize = 44;

/// Maximum length of a segment: 128 TiB, more than the address space of a process.
pub(in crate::state) const LENGTH_MAX: u64 = 1 << 47;

/// Blocks of a bin that are tried before larger bins are.
const FIRST_SCAN_MAX: usize = 16;

/// Blocks of the own bin that are tried before the allocation fails.
const BIN_SCAN_MAX: usize = 1024;

/// Flag of a free block in its offset.
const FREE: u64 = 1 << 63;

/// A range of the segment, up to the start of the next block.
#[derive(Debug, Clone, Copy)]
struct Block {
    /// Start of the block, with [`FREE`].
    offset: u64,
    /// Neighbors in memory.
    before: u32,
    after: u32,
    /// Neighbors in the bin, of a free block; an unused record has only `later`, and an allocated
    /// block has its owner there.
    earlier: u32,
    later: u32,
}

/// The memory of one segment.
#[derive(Debug)]
pub struct Allocator {
    blocks: Vec<Block>,
    /// Unused records of `blocks`, linked by `later`.
    unused: u32,
    heads: Box<[[u32; FINE]; COARSE]>,
    coarse_map: u64,
    fine_maps: [u32; COARSE],
    /// Free blocks by start; kept only during a series of [`allocate_at`](Self::allocate_at) calls.
    by_offset: Option<BTreeMap<u64, u32>>,
    /// Marked blocks; an unused entry is [`NONE`].
    marks: Vec<u32>,
    /// Block where the next scan of the memory begins.
    rover: u32,
    length: u64,
    used: u64,
    count: u64,
}

impl Allocator {
    /// Creates an allocator with all memory free. A remainder of `length` below a granule and
    /// memory beyond 128 TiB are never allocated.
    pub fn new(length: u64) -> Self {
        let length = length.min(LENGTH_MAX) / GRANULE_BYTES * GRANULE_BYTES;
        let mut new = Self {
            blocks: Vec::new(),
            unused: NONE,
            heads: Box::new([[NONE; FINE]; COARSE]),
            coarse_map: 0,
            fine_maps: [0; COARSE],
            by_offset: None,
            marks: Vec::new(),
            rover: 0,
            length,
            used: 0,
            count: 0,
        };
        if length > 0 {
            let whole = new.record(Block {
                offset: 0,
                before: NONE,
                after: NONE,
                earlier: NONE,
                later: NONE,
            });
            new.insert_free(whole);
        }
        new
    }

    /// Allocates a block of at least that length; `None` if no free range is long enough.
    pub fn allocate(&mut self, length: u64) -> Option<BlockId> {
        let (need, align) = rounded(length)?;
        self.by_offset = None;
        let block = self.find(need, align)?;
        self.remove_free(block);
        let (start, end) = (self.offset_of(block), self.end_of(block));
        let is_small = self.used > need * self.count;
        let at =
            if is_small { (end - need) / align * align } else { start.next_multiple_of(align) };
        let block = self.cut(block, at, need);
        debug_assert_eq!(
            (self.size_of(block), self.offset_of(block) % align, self.is_free(block)),
            (need, 0, false),
            "an allocated block has the size and the alignment that were asked for"
        );
        self.blocks[block as usize].later = NONE;
        self.used += need;
        self.count += 1;
        Some(BlockId(block))
    }

    /// Allocates the block that [`allocate`](Self::allocate) returned at that offset for that
    /// length, in this allocator or in an earlier one of the same length. Returns `None` if part of
    /// it is taken, or if `allocate` never returns such a block.
    ///
    /// Takes logarithmic time in the number of free blocks, in any order and between calls of
    /// [`free`](Self::free); the first call after an `allocate` scans all blocks.
    pub fn allocate_at(&mut self, offset: u64, length: u64) -> Option<BlockId> {
        let (need, align) = rounded(length)?;
        let end = offset.checked_add(need)?;
        if !offset.is_multiple_of(align) {
            return None;
        }
        let (_, &block) = self.free_by_offset().range(..=offset).next_back()?;
        if end > self.end_of(block) {
            return None;
        }
        self.remove_free(block);
        let block = self.cut(block, offset, need);
        self.blocks[block as usize].later = NONE;
        self.used += need;
        self.count += 1;
        Some(BlockId(block))
    }

    /// Allocates what is free of a range, in as many blocks as it takes.
    ///
    /// Takes time as [`allocate_at`](Self::allocate_at) does, for each block.
    pub(in crate::state) fn allocate_free_in(&mut self, offset: u64, length: u64) -> Vec<BlockId> {
        let end = offset.saturating_add(length).min(self.length);
        let end = end.next_multiple_of(GRANULE_BYTES).min(self.length);
        let mut at = offset / GRANULE_BYTES * GRANULE_BYTES;
        let mut allocated = Vec::new();
        while at < end {
            let free = self.free_by_offset();
            let (before, after) = (free.range(..=at).next_back(), free.range(at..end).next());
            let (before, after) = (before.map(|it| *it.1), after.map(|it| *it.1));
            let Some(block) = before.filter(|&block| self.end_of(block) > at).or(after) else {
                break;
            };
            let start = self.offset_of(block).max(at);
            at = self.end_of(block).min(end);
            self.remove_free(block);
            let block = self.cut(block, start, at - start);
            self.blocks[block as usize].later = NONE;
            self.used += at - start;
            self.count += 1;
            allocated.push(BlockId(block));
        }
        allocated
    }

    /// Returns the free blocks by their start.
    fn free_by_offset(&mut self) -> &BTreeMap<u64, u32> {
        if self.by_offset.is_none() {
            let blocks = std::iter::successors(self.first(), |&block| {
                let after = self.blocks[block as usize].after;
                (after != NONE).then_some(after)
            });
            let free = blocks.filter(|&block| self.is_free(block));
            self.by_offset = Some(free.map(|block| (self.offset_of(block), block)).collect());
        }
        self.by_offset.get_or_insert_default()
    }

    /// Frees a block and merges it with free neighbors. Returns the length of the free range that
    /// it is part of then.
    ///
    /// # Panics
    /// If the block is not allocated.
    pub fn free(&mut self, block: BlockId) -> u64 {
        let mut block = block.0;
        assert!(!self.is_free(block), "a block is given back once");
        debug_assert!(self.is_linked(block), "a block that is freed was allocated");
        self.used -= self.size_of(block);
        self.count -= 1;
        debug_assert_eq!(self.used == 0, self.count == 0, "bytes are allocated in blocks");
        let before = self.blocks[block as usize].before;
        if before != NONE && self.is_free(before) {
            self.remove_free(before);
            self.merge_next(before);
            block = before;
        }
        let after = self.blocks[block as usize].after;
        if after != NONE && self.is_free(after) {
            self.remove_free(after);
            self.merge_next(block);
        }
        debug_assert!(
            [self.blocks[block as usize].before, self.blocks[block as usize].after]
                .into_iter()
                .all(|next| next == NONE || !self.is_free(next)),
            "free neighbours are merged"
        );
        self.insert_free(block);
        self.size_of(block)
    }

    /// Returns the first block of a run around `around` that would fit `length` if the `taken`
    /// blocks were free. Returns `None` if no run fits. Subtracts the blocks that it looked at from
    /// `steps`.
    pub(in crate::state) fn find_run(
        &self,
        around: BlockId,
        length: u64,
        steps: &mut usize,
        taken: impl Fn(BlockId) -> bool,
    ) -> Option<BlockId> {
        let (need, align) = rounded(length)?;
        let (mut first, mut last) = (around.0, around.0);
        let fits = |first: u32, last: u32| {
            self.offset_of(first).next_multiple_of(align) + need <= self.end_of(last)
        };
        for is_back in [true, false] {
            while !fits(first, last) {
                let end = if is_back { &mut first } else { &mut last };
                let record = self.blocks[*end as usize];
                let next = if is_back { record.before } else { record.after };
                *steps = steps.saturating_sub(1);
                if *steps == 0 || next == NONE || !(self.is_free(next) || taken(BlockId(next))) {
                    break;
                }
                *end = next;
            }
        }
        fits(first, last).then_some(BlockId(first))
    }

    /// Returns the start of the block.
    pub fn offset(&self, block: BlockId) -> u64 {
        self.offset_of(block.0)
    }

    /// Returns the size of the block after rounding.
    pub fn size(&self, block: BlockId) -> u64 {
        self.size_of(block.0)
    }

    /// Returns the allocated bytes after rounding.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Returns the bytes that can be allocated altogether.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Cuts `at..at + need` out of a block that is in no bin.
    /// Returns the number of allocated blocks.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the length of the longest free range.
    pub(in crate::state) fn largest_free(&self) -> u64 {
        let Some(coarse) = self.coarse_map.checked_ilog2() else { return 0 };
        let Some(fine) = self.fine_maps[coarse as usize].checked_ilog2() else { return 0 };
        let longest = self.bin(Bin { coarse: coarse as usize, fine: fine as usize });
        longest.map(|block| self.size_of(block)).max().unwrap_or_default()
    }

    fn cut(&mut self, mut block: u32, at: u64, need: u64) -> u32 {
        if at > self.offset_of(block) {
            let rest = self.split(block, at);
            self.insert_free(block);
            block = rest;
        }
        if at + need < self.end_of(block) {
            let rest = self.split(block, at + need);
            self.insert_free(rest);
        }
        block
    }

    /// Finds a free block that fits `need` bytes at a multiple of `align`.
    fn find(&self, need: u64, align: u64) -> Option<u32> {
        let own = bin_of(need);
        let fits = |block: u32| {
            let start = self.offset_of(block).next_multiple_of(align);
            start + need <= self.end_of(block)
        };
        if let Some(block) = self.bin(own).take(FIRST_SCAN_MAX).find(|&block| fits(block)) {
            return Some(block);
        }
        let mut bin = self.next_bin(own);
        while let Some(found) = bin {
            if let Some(block) = self.bin(found).take(FIRST_SCAN_MAX).find(|&block| fits(block)) {
                return Some(block);
            }
            bin = self.next_bin(found);
        }
        self.bin(own).skip(FIRST_SCAN_MAX).take(BIN_SCAN_MAX).find(|&block| fits(block))
    }

    fn bin(&self, Bin { coarse, fine }: Bin) -> impl Iterator<Item = u32> {
        let head = self.heads[coarse][fine];
        std::iter::successors((head != NONE).then_some(head), |&block| {
            let later = self.blocks[block as usize].later;
            (later != NONE).then_some(later)
        })
    }

    /// Returns the next bin of larger sizes that has blocks.
    fn next_bin(&self, Bin { coarse, fine }: Bin) -> Option<Bin> {
        let fines = self.fine_maps[coarse] & u32::MAX.checked_shl(fine as u32 + 1).unwrap_or(0);
        if fines != 0 {
            return Some(Bin { coarse, fine: fines.trailing_zeros() as usize });
        }
        let coarses = self.coarse_map & (u64::MAX << (coarse + 1));
        (coarses != 0).then(|| {
            let coarse = coarses.trailing_zeros() as usize;
            Bin { coarse, fine: self.fine_maps[coarse].trailing_zeros() as usize }
        })
    }

    fn insert_free(&mut self, block: u32) {
        debug_assert!(!self.is_free(block), "a free block is in one bin");
        let Bin { coarse, fine } = bin_of(self.size_of(block));
        let head = self.heads[coarse][fine];
        if head != NONE {
            self.blocks[head as usize].earlier = block;
        }
        let record = &mut self.blocks[block as usize];
        record.offset |= FREE;
        (record.earlier, record.later) = (NONE, head);
        self.heads[coarse][fine] = block;
        self.fine_maps[coarse] |= 1 << fine;
        self.coarse_map |= 1 << coarse;
        if let Some(by_offset) = &mut self.by_offset {
            by_offset.insert(self.blocks[block as usize].offset & !FREE, block);
        }
    }

    fn remove_free(&mut self, block: u32) {
        debug_assert!(self.is_free(block), "only a free block is in a bin");
        let Bin { coarse, fine } = bin_of(self.size_of(block));
        let record = &mut self.blocks[block as usize];
        record.offset &= !FREE;
        let (earlier, later) = (record.earlier, record.later);
        if let Some(by_offset) = &mut self.by_offset {
            by_offset.remove(&record.offset);
        }
        if later != NONE {
            self.blocks[later as usize].earlier = earlier;
        }
        if earlier != NONE {
            self.blocks[earlier as usize].later = later;
            return;
        }
        self.heads[coarse][fine] = later;
        if later == NONE {
            self.fine_maps[coarse] &= !(1 << fine);
            if self.fine_maps[coarse] == 0 {
                self.coarse_map &= !(1 << coarse);
            }
        }
    }

    /// Splits a block at `at`. The second half is in no bin.
    fn split(&mut self, block: u32, at: u64) -> u32 {
        debug_assert!(
            self.offset_of(block) < at && at < self.end_of(block),
            "a block is split inside"
        );
        let after = self.blocks[block as usize].after;
        let rest =
            self.record(Block { offset: at, before: block, after, earlier: NONE, later: NONE });
        self.blocks[block as usize].after = rest;
        if after != NONE {
            self.blocks[after as usize].before = rest;
        }
        rest
    }

    /// Merges a block with the next one; neither is in a bin.
    fn merge_next(&mut self, block: u32) {
        let next = self.blocks[block as usize].after;
        let after = self.blocks[next as usize].after;
        self.blocks[block as usize].after = after;
        if after != NONE {
            self.blocks[after as usize].before = block;
        }
        self.blocks[next as usize].later = self.unused;
        self.unused = next;
        if self.rover == next {
            self.rover = block;
        }
        for mark in &mut self.marks {
            if *mark == next {
                *mark = block;
            }
        }
    }

    fn record(&mut self, block: Block) -> u32 {
        if self.unused == NONE {
            let index = u32::try_from(self.blocks.len()).expect("blocks are counted in 32 bits");
            assert_ne!(index, NONE, "blocks are counted in 32 bits");
            self.blocks.push(block);
            return index;
        }
        let index = self.unused;
        self.unused = self.blocks[index as usize].later;
        self.blocks[index as usize] = block;
        index
    }

    /// Returns the first block of the segment. Its record never moves: blocks are merged into the
    /// earlier of two, and split off behind it.
    fn first(&self) -> Option<u32> {
        (self.length > 0).then_some(0)
    }

    fn offset_of(&self, block: u32) -> u64 {
        self.blocks[block as usize].offset & !FREE
    }

    fn end_of(&self, block: u32) -> u64 {
        match self.blocks[block as usize].after {
            NONE => self.length,
            after => self.offset_of(after),
        }
    }

    fn size_of(&self, block: u32) -> u64 {
        self.end_of(block) - self.offset_of(block)
    }

    fn is_free(&self, block: u32) -> bool {
        self.blocks[block as usize].offset & FREE != 0
    }

    /// Returns whether the neighbors of a block know it: they do not know the record of one that was
    /// merged into another.
    fn is_linked(&self, block: u32) -> bool {
        let Block { before, after, .. } = self.blocks[block as usize];
        let is_first = before == NONE && self.first() == Some(block);
        let follows = before != NONE && self.blocks[before as usize].after == block;
        (is_first || follows) && (after == NONE || self.blocks[after as usize].before == block)
    }
}

/// Returns the rounded size and the alignment of a block.
fn rounded(length: u64) -> Option<(u64, u64)> {
    let align = if length >= LARGE_BYTES { LARGE_GRANULE_BYTES } else { GRANULE_BYTES };
    (1..=LENGTH_MAX).contains(&length).then(|| (length.next_multiple_of(align), align))
}

/// Returns the bytes that an object takes up in a segment; `None` if it fits in none.
pub(in crate::state) fn footprint(length: u64) -> Option<u64> {
    rounded(length).map(|(need, _)| need)
}

/// A list of free blocks of about the same size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Bin {
    /// Class of the size, a power of two.
    coarse: usize,
    /// Class within that.
    fine: usize,
}

/// Returns the bin of a size. Monotonic: later bins have larger blocks only.
fn bin_of(size: u64) -> Bin {
    let granules = size / GRANULE_BYTES;
    let Some(power) = granules.checked_ilog2().filter(|&power| power >= FINE_BITS) else {
        return Bin { coarse: 0, fine: granules as usize };
    };
    let fine = (granules >> (power - FINE_BITS)) as usize & (FINE - 1);
    Bin { coarse: (power - FINE_BITS + 1) as usize, fine }
}
