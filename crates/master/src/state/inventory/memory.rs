//! Memory that is taken for new objects and given back: free blocks, what a search holds, and what waits
//! for a fence or for the log.

use mooncake_base::Moment;

use crate::state::{
    ids::{BlockId, ObjectSlot, SegmentSlot},
    inventory::{Inventory, prepared},
    pool::{
        allocator::Marks,
        freed::{FreedTo, KeptBlocks},
        request::AllocRequest,
    },
    replica::Replicas,
};

/// Blocks that are freed at a time because they are due.
const RELEASE_SLICE: usize = 1024;

/// A window of memory that is being evicted, from the block `next` on.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct Window {
    pub(in crate::state) segment: SegmentSlot,
    /// What was evicted or was free so far, joined into one block.
    pub(in crate::state) block: Option<BlockId>,
    /// The first block that is not joined yet.
    pub(in crate::state) next: BlockId,
    /// Bytes that the window needs.
    pub(in crate::state) length: u64,
}

/// Allocates replicas in free memory: at most so many as `copies` says, with those in `replicas`.
/// Returns the number of segments tried.
pub(in crate::state) fn allocate(
    inventory: &mut Inventory,
    request: &AllocRequest<'_>,
    copies: usize,
    replicas: &mut Replicas,
) -> usize {
    let tried = inventory.pool.try_allocate(request, copies, replicas);
    if replicas.len() == copies || !prepared::release_all(inventory) {
        return tried;
    }
    tried + inventory.pool.try_allocate(request, copies, replicas)
}

/// Lists the segments to look at first for a request, in order.
pub(in crate::state) fn preferred_order(
    inventory: &mut Inventory,
    request: &AllocRequest<'_>,
) -> Vec<SegmentSlot> {
    let mut segments = Vec::new();
    inventory.pool.preferred_order(request, &mut segments);
    segments
}

/// Counts memory that a search holds between two calls.
pub(in crate::state) fn withhold(inventory: &mut Inventory, segment: SegmentSlot, bytes: u64) {
    inventory.pool.withhold(segment, bytes);
}

/// Ends [`withhold`].
pub(in crate::state) fn end_withholding(
    inventory: &mut Inventory,
    segment: SegmentSlot,
    bytes: u64,
) {
    inventory.pool.end_withholding(segment, bytes);
}

/// Frees a block whose release is recorded below the position, or lets it wait for the log.
pub(in crate::state) fn free_block(
    inventory: &mut Inventory,
    segment: SegmentSlot,
    block: BlockId,
    position: u64,
) {
    inventory.pool.free_block(segment, block, position);
}

/// Remembers that evictions cannot make space for so many bytes in any segment.
pub(in crate::state) fn record_unreclaimable(inventory: &mut Inventory, bytes: u64) {
    inventory.pool.segments.record_unreclaimable(bytes);
}

/// Returns the marks of a segment, to move them.
pub(in crate::state) fn marks(inventory: &mut Inventory, segment: SegmentSlot) -> Marks<'_> {
    Marks::of(&mut inventory.pool.segments.at_mut(segment).allocator)
}

/// Evicts an object with its group, or else a member of a condemned group. Those of their blocks that
/// belong to the window stay allocated and are added to `kept`. Returns the number of evicted objects.
pub(in crate::state) fn evict_for_window(
    inventory: &mut Inventory,
    now: Moment,
    victim: Option<ObjectSlot>,
    window: Window,
    kept: &mut KeptBlocks,
) -> usize {
    let allocator = &inventory.pool.segments.at(window.segment).allocator;
    let start = allocator.offset(window.next);
    let begin = window.block.map_or(start, |block| allocator.offset(block));
    let end = (start + 1).max(begin.saturating_add(window.length));
    let mut to = FreedTo::Window { segment: window.segment, offsets: start..end, kept };
    match victim {
        Some(victim) => inventory.evict_group(now, victim, &mut to),
        None => usize::from(inventory.evict_condemned(now, &mut to)),
    }
}

/// Joins the next block to a window: it is free, or was kept for the window. Returns the block of the
/// window, and whether the object fits; what it does not need is freed then.
pub(in crate::state) fn join_next(
    inventory: &mut Inventory,
    window: Window,
    position: u64,
) -> (BlockId, bool) {
    let Window { segment, block, next, length } = window;
    let (joined, trimmed) = inventory.pool.segments.with_allocator(segment, |allocator| {
        match block {
            Some(block) => allocator.join_next(block),
            None if allocator.is_block_free(next) => allocator.take_free(next),
            None => {}
        }
        let block = block.unwrap_or(next);
        let fits = allocator.window_fits(block, block, length);
        (block, fits.then(|| allocator.trim(block, length)))
    });
    let Some((block, rests)) = trimmed else { return (joined, false) };
    for rest in rests.into_iter().flatten() {
        inventory.pool.free_block(segment, rest, position);
    }
    (block, true)
}

/// Frees memory that is due, in case the timers are late. Returns whether there was any.
pub(in crate::state) fn release_due(inventory: &mut Inventory, now: Moment) -> bool {
    let mut has_any = inventory.pool.release_synced();
    for _ in 0..RELEASE_SLICE {
        if !inventory.pool.free_due_quarantine(now) {
            break;
        }
        has_any = true;
    }
    has_any
}

/// Frees one block whose quarantine is over. Returns whether there was one.
pub(in crate::state) fn free_due(inventory: &mut Inventory, now: Moment) -> bool {
    inventory.pool.free_due_quarantine(now)
}

/// Asks for a sync of the log, since memory is needed that waits for it.
pub(in crate::state) fn request_sync(inventory: &mut Inventory) {
    inventory.pool.unsynced.is_sync_wanted = true;
}

/// Returns whether the log should be synced soon. Returns it once.
pub(in crate::state) fn take_sync_request(inventory: &mut Inventory) -> bool {
    inventory.pool.take_sync_request()
}

/// Records that effects up to this position are on disk.
pub(in crate::state) fn confirm_synced(inventory: &mut Inventory, position: u64) {
    inventory.pool.confirm_synced(position);
}

/// Records that effects up to this position survive a restart of the master.
pub(in crate::state) fn confirm_durable(inventory: &mut Inventory, position: u64) {
    inventory.max_granted.confirm_durable(position);
}
