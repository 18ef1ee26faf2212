//! Allocation in free memory only, for copies that must not displace other objects.

use mooncake_base::{Error, ErrorCode, Moment, Result};

use crate::state::{
    calls::reclaim::{Allocation, Pending, Reclaimer},
    inventory::{Inventory, memory, memory_use::admitted},
    pool::{allocator::footprint, request::AllocRequest, segment::Segment},
    replica::Replicas,
};

impl Reclaimer<'_> {
    /// Allocates one replica in free memory. Evicts nothing, and leaves the segments that accept
    /// objects below the watermark, above which eviction ahead of need would begin.
    ///
    /// # Errors
    /// `NO_AVAILABLE_HANDLE`; the context has the bytes that are needed and that are free.
    pub(in crate::state) fn allocate_free(
        &mut self,
        now: Moment,
        request: &AllocRequest<'_>,
    ) -> Result<Allocation> {
        let Some(need) = footprint(request.length) else {
            return Err(self.too_large_error(now, request));
        };
        let is_possible = |segment: &Segment| segment.allocator.length() >= need;
        if !admitted_segments(self.inventory, request).any(is_possible) {
            return self.await_segment(now, request);
        }
        memory::release_due(self.inventory, now);
        let room = room_below_watermark(self.inventory);
        if room >= need {
            let mut replicas = Replicas::default();
            memory::allocate(self.inventory, request, 1, &mut replicas);
            if !replicas.is_empty() {
                return Ok(Allocation::Ready(replicas));
            }
            let fits_later = |segment: &Segment| {
                let withheld = segment.reserved().withheld;
                withheld > 0 && segment.free() + withheld >= need
            };
            let may_fit = admitted_segments(self.inventory, request).any(fits_later);
            if may_fit && let Some(position) = self.inventory.pool().unsynced_until() {
                return Ok(Allocation::Pending(Pending::Sync(position)));
            }
        }
        let runs = admitted_segments(self.inventory, request)
            .map(|segment| segment.allocator.largest_free());
        let free = runs.max().unwrap_or_default().min(room);
        let why = "the copy does not fit into free memory, and the drain evicts no other object: \
                   lend more memory, or allow the drain to evict";
        Err(Error::new(ErrorCode::NO_AVAILABLE_HANDLE, why)
            .with("needed_bytes", need)
            .with("free_bytes", free))
    }
}

/// Returns the segments that accept objects and pass the filter of the request.
fn admitted_segments<'a>(
    inventory: &'a Inventory,
    request: &AllocRequest<'a>,
) -> impl Iterator<Item = &'a Segment> {
    admitted(inventory, request.filter).map(|slot| inventory.segment(slot))
}

/// Returns the bytes that the segments that accept objects can take before eviction ahead of need
/// begins. Others are not counted: they are to leave the pool.
fn room_below_watermark(inventory: &Inventory) -> u64 {
    let Some(watermark) = inventory.rules().watermark else { return u64::MAX };
    let segments = inventory.segments();
    let (mut used, mut capacity) = (0, 0);
    for segment in segments.open().iter().map(|&slot| segments.at(slot)) {
        let (allocated, withheld) = (segment.view().used, segment.reserved().withheld);
        debug_assert!(withheld <= allocated, "withheld memory is allocated, and not prepared");
        used += allocated.saturating_sub(withheld);
        capacity += segment.spec.length;
    }
    ((watermark.high * capacity as f64) as u64).saturating_sub(used)
}
