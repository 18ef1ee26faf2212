//! Freed memory whose release is not on disk yet.
//!
//! A master whose machine loses power starts again with an older state, in which the freed memory
//! belongs to an object that may be read. Freed memory is therefore given to another object only
//! when the log has the record of its release on disk. See `docs/decisions/0018-unsynced-memory.md`.

use std::collections::VecDeque;

use crate::state::{
    ids::{BlockId, SegmentSlot},
    pool::{
        Pool,
        segment::{SegmentNumber, Segments},
    },
};

/// Blocks that one call of [`State::release_synced`] frees at most.
const RELEASE_SLICE: usize = 1024;

/// The log is synced early when this share of the pool (1/8) waits for it, before puts have to.
const EARLY_SYNC_SHARE: u64 = 8;

/// Freed blocks in the order of the log. They are not freed in this order: a fence may end after later
/// removals.
#[derive(Debug, Default)]
pub(in crate::state) struct Unsynced {
    /// Effects up to this position are on disk. Without a log nothing waits.
    synced: Option<u64>,
    blocks: VecDeque<UnsyncedBlock>,
    /// Bytes of these blocks.
    pub(in crate::state) bytes: u64,
    /// Bytes that were freed since the log was last asked to sync.
    pub(in crate::state) unrequested: u64,
    /// Segments whose memory was in the pool before: they accept objects once the record of their
    /// removal is on disk.
    mounts: Vec<(u64, SegmentSlot, SegmentNumber)>,
    /// The log should be synced soon.
    pub(in crate::state) is_sync_wanted: bool,
}

#[derive(Debug, Clone, Copy)]
struct UnsyncedBlock {
    /// Position behind the record of the release.
    position: u64,
    segment: SegmentSlot,
    block: BlockId,
    bytes: u64,
}

impl Unsynced {
    /// Returns whether effects up to the position are on disk, or need not be.
    pub(in crate::state) fn is_synced(&self, position: u64) -> bool {
        self.synced.is_none_or(|synced| position <= synced)
    }

    /// Adds a block behind those whose release was recorded earlier.
    fn push(&mut self, block: UnsyncedBlock) {
        let is_last = self.blocks.back().is_none_or(|last| last.position <= block.position);
        if is_last {
            self.blocks.push_back(block);
        } else {
            let at = self.blocks.partition_point(|other| other.position <= block.position);
            self.blocks.insert(at, block);
        }
    }

    /// Forgets the blocks of segments that left the pool.
    pub(in crate::state) fn forget(&mut self, segments: &Segments) {
        let bytes = &mut self.bytes;
        self.blocks.retain(|entry| {
            let is_kept = segments.at(entry.segment).is_mounted();
            *bytes -= if is_kept { 0 } else { entry.bytes };
            is_kept
        });
    }

    /// Returns all blocks.
    pub(in crate::state) fn blocks(&self) -> impl Iterator<Item = (SegmentSlot, BlockId)> {
        self.blocks.iter().map(|entry| (entry.segment, entry.block))
    }
}

impl Pool {
    /// Tells the state that effects up to this position are on disk: `u64::MAX` while nothing has
    /// to be. Freed memory waits from the first call on. Frees a bounded number of blocks; the rest
    /// is freed by [`advance`](Self::advance) or by the next put that needs memory.
    pub(in crate::state) fn confirm_synced(&mut self, position: u64) {
        if self.unsynced.synced != Some(position) {
            self.unsynced.synced = Some(position);
            self.release_synced();
        }
    }

    /// Returns whether the log should be synced soon, since puts will need memory that waits for
    /// it. Returns it once.
    pub(in crate::state) fn take_sync_request(&mut self) -> bool {
        let is_wanted = std::mem::take(&mut self.unsynced.is_sync_wanted);
        if is_wanted {
            self.unsynced.unrequested = 0;
        }
        is_wanted
    }

    /// Frees a block whose release is recorded below the position, or lets it wait for the log.
    pub(in crate::state) fn free_block(
        &mut self,
        segment: SegmentSlot,
        block: BlockId,
        position: u64,
    ) {
        if self.unsynced.is_synced(position) {
            self.segments.free(segment, block);
            return;
        }
        let found = self.segments.at_mut(segment);
        debug_assert!(!found.allocator.is_block_free(block), "memory that waits is allocated");
        let bytes = found.allocator.size(block);
        found.reserved.withheld += bytes;
        self.unsynced.bytes += bytes;
        self.unsynced.unrequested += bytes;
        let limit = self.segments.mounted_bytes / EARLY_SYNC_SHARE;
        self.unsynced.is_sync_wanted |= self.unsynced.unrequested >= limit;
        self.unsynced.push(UnsyncedBlock { position, segment, block, bytes });
    }

    /// Frees blocks whose release is on disk. Returns whether there were any.
    pub(in crate::state) fn release_synced(&mut self) -> bool {
        let mut has_any = false;
        for _ in 0..RELEASE_SLICE {
            let Some(&entry) = self.unsynced.blocks.front() else { break };
            let UnsyncedBlock { position, segment, block, bytes } = entry;
            if !self.unsynced.is_synced(position) {
                break;
            }
            self.unsynced.blocks.pop_front();
            self.segments.at_mut(segment).reserved.withheld -= bytes;
            self.unsynced.bytes -= bytes;
            self.segments.free(segment, block);
            has_any = true;
        }
        has_any | self.open_synced_mounts()
    }

    /// Returns whether a call of [`release_synced`](Self::release_synced) has work.
    pub(in crate::state) fn has_synced(&self) -> bool {
        let next = self.unsynced.blocks.front();
        next.is_some_and(|entry| self.unsynced.is_synced(entry.position))
    }

    /// Returns whether effects up to the position are on disk, or need not be.
    pub(in crate::state) fn is_synced(&self, position: u64) -> bool {
        self.unsynced.is_synced(position)
    }

    /// Returns the position at which all freed memory can be reused; `None` if none waits.
    pub(in crate::state) fn unsynced_until(&self) -> Option<u64> {
        let blocks = self.unsynced.blocks.back().map(|entry| entry.position);
        let mounts = self.unsynced.mounts.iter().map(|(position, ..)| *position).max();
        blocks.max(mounts).filter(|&position| !self.unsynced.is_synced(position))
    }

    /// Lets a segment accept objects only when the log is on disk up to the position.
    pub(in crate::state) fn await_sync_of_mount(&mut self, slot: SegmentSlot, position: u64) {
        let number = self.segments.at(slot).number;
        self.unsynced.mounts.push((position, slot, number));
    }

    /// Returns whether segments wait for the log before they accept objects.
    pub(in crate::state) fn has_unsynced_mounts(&self) -> bool {
        !self.unsynced.mounts.is_empty()
    }

    fn open_synced_mounts(&mut self) -> bool {
        if self.unsynced.mounts.is_empty() {
            return false;
        }
        let mounts = std::mem::take(&mut self.unsynced.mounts);
        let (due, rest): (Vec<_>, Vec<_>) =
            mounts.into_iter().partition(|&(position, ..)| self.unsynced.is_synced(position));
        self.unsynced.mounts = rest;
        for &(_, slot, number) in &due {
            // The slot may have another segment by now.
            if let Some(segment) =
                self.segments.get_mut(slot).filter(|found| found.number == number)
            {
                segment.awaits_sync = false;
                self.segments.refresh(slot);
            }
        }
        !due.is_empty()
    }
}
