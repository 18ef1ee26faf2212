//! Error of a put without free memory: the bytes in use, by reason.

use std::time::Duration;

use mooncake_base::{Error, ErrorCode, Moment};

use crate::state::{
    calls::reclaim::{Pending, Reclaimer},
    catalog::object::{Flags, Object},
    inventory::{
        Inventory,
        memory_use::{self, Blocker, MemoryUse, admitted, bytes_in},
    },
    lease::Timestamp,
    pool::{
        request::{AllocRequest, SegmentFilter},
        segment::SegmentStatus,
    },
};

/// How long refusals show the same use of the memory.
const REFUSED_USE_KEPT: Duration = Duration::from_millis(100);

/// A put is to be tried again if an object may be evicted within this time.
const END_AWAITED: Duration = Duration::from_secs(3);

/// Use of the memory that puts were refused with, shown for [`REFUSED_USE_KEPT`]: clients repeat
/// refused puts, and all of them together must not stop the others.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) struct RefusedUse {
    taken: Moment,
    total: MemoryUse,
    /// The most that a segment could offer once its quarantined memory is free.
    fenced_fit: u64,
}

impl Reclaimer<'_> {
    pub(super) fn too_large_error(&self, now: Moment, request: &AllocRequest<'_>) -> Error {
        if let Some(end) = self.inventory.segments().quarantine_end(request.length) {
            let why =
                "mounted memory is quarantined until readers and late writers are done; retry";
            return Error::new(ErrorCode::NO_AVAILABLE_HANDLE, why)
                .with("bytes", request.length)
                .with("retry_after_ms", end.left(now).as_millis().max(1));
        }
        let lengths =
            self.inventory.segments().open().iter().map(|&slot| self.inventory.segment(slot));
        let largest = lengths.map(|segment| segment.allocator.length()).max();
        let why = match largest {
            Some(_) => "the object is larger than any segment",
            None => self.closed_pool_reason(),
        };
        Error::new(ErrorCode::NO_AVAILABLE_HANDLE, why)
            .with("bytes", request.length)
            .with("largest_segment", largest.unwrap_or(0))
    }

    /// Builds the error of a put that would have to wait longer.
    pub(in crate::state) fn pending_error(&self, pending: Pending) -> Error {
        let why = match pending {
            Pending::Sync(_) => "freed memory waits until the log is on disk; retry",
            Pending::Yield | Pending::Busy => "memory is still being freed; retry",
            Pending::Disks(_) => {
                "the memory of objects that wait in the queue of a disk is not free yet: add disks or \
                 memory, or let eviction drop objects with --offload_force_evict"
            }
        };
        let error = Error::new(ErrorCode::NO_AVAILABLE_HANDLE, why);
        match pending {
            Pending::Disks(_) => error
                .with("waiting_objects", self.inventory.offloads().waiting())
                .with("moving_objects", self.inventory.offloads().moving()),
            _ => error,
        }
    }

    /// Returns why no segment accepts objects.
    fn closed_pool_reason(&self) -> &'static str {
        let (mut is_drained, mut is_lost) = (false, false);
        for (_, segment) in self.inventory.segments().mounted() {
            match segment.status {
                SegmentStatus::Ok => is_lost = true,
                _ => is_drained = true,
            }
        }
        match (is_drained, is_lost) {
            (false, false) => "no segment accepts objects: no process lends memory to the pool",
            (true, false) => "no segment accepts objects: all are being drained or were drained",
            (false, true) => "no segment accepts objects: their clients lost contact",
            (true, true) => {
                "no segment accepts objects: they are drained, or their clients lost contact"
            }
        }
    }

    /// Builds the error; its parts add up to all memory that the request may use.
    pub(super) fn out_of_space_error(
        &mut self,
        now: Moment,
        need: u64,
        request: &AllocRequest<'_>,
    ) -> Error {
        let RefusedUse { total: found, fenced_fit, .. } = self.refused_use(now, request);
        let inventory = &*self.inventory;
        let waits_for_fence = fenced_fit >= need;
        let why = if waits_for_fence {
            "freed memory is quarantined until readers and late writers are done; retry"
        } else if found.evictable > 0 {
            "no segment has enough free memory, and eviction would not free enough in one run"
        } else {
            "no segment has enough free memory, and nothing more may be evicted"
        };
        let mut error = Error::new(ErrorCode::NO_AVAILABLE_HANDLE, why)
            .with("bytes", request.length)
            .with("free", found.free)
            .with("leased", found.leased)
            .with("hard_pinned", found.hard_pinned)
            .with("writing", found.writing)
            .with("fenced", found.fenced);
        let others = [
            ("soft_pinned", found.soft_pinned),
            ("replaced", found.replaced),
            ("evictable", found.evictable),
            ("awaiting_sync", found.awaiting_sync),
        ];
        for (name, bytes) in others.into_iter().filter(|(_, bytes)| *bytes > 0) {
            error = error.with(name, bytes);
        }
        let end = if waits_for_fence {
            inventory.pool().next_quarantine_end()
        } else {
            self.next_parked_end(now)
        };
        if !waits_for_fence && end.is_some() && !inventory.disks().is_empty() {
            error = error.with("moving_objects", inventory.offloads().moving());
        }
        match end {
            Some(end) => error.with("retry_after_ms", end.left(now).as_millis().max(1)),
            None => error,
        }
    }
}

impl Reclaimer<'_> {
    /// Returns when the next object may be evicted that is still protected, if that is to be awaited: in
    /// a pool with disks, whose owners read each object for some time after it was put, and while leases
    /// of an earlier master protect objects that may have none.
    fn next_parked_end(&self, now: Moment) -> Option<Moment> {
        let inventory = &self.inventory;
        let end = inventory.catalog().next_parked_end().map(Timestamp::moment)?;
        let is_soon = end.left(now) <= END_AWAITED;
        let is_awaited =
            !inventory.disks().is_empty() || inventory.recovery().has_earlier_leases(now);
        (is_soon && is_awaited).then_some(end)
    }

    /// Returns the use of the memory for the text of a refusal; for a request that may use all
    /// segments, as it was a moment ago.
    fn refused_use(&mut self, now: Moment, request: &AllocRequest<'_>) -> RefusedUse {
        let is_all = matches!(request.filter, SegmentFilter::All);
        let is_recent = |known: &RefusedUse| !(known.taken + REFUSED_USE_KEPT).has_passed(now);
        let known = if is_all { self.searches.refused.filter(is_recent) } else { None };
        let mut found = known.unwrap_or_else(|| self.take_refused_use(now, request.filter));
        if is_all {
            self.searches.refused = Some(found);
        }
        let replaced = replaceable_bytes(self.inventory, now, request).min(found.total.evictable);
        found.total.evictable -= replaced;
        found.total.replaced += replaced;
        found
    }

    fn take_refused_use(&mut self, now: Moment, filter: SegmentFilter<'_>) -> RefusedUse {
        let inventory = &*self.inventory;
        let (total, steps) = memory_use::memory_use(inventory, now, filter);
        self.searches.steps += steps;
        let fenced_fit = admitted(inventory, filter).map(|slot| {
            let segment = inventory.segment(slot);
            let fenced = segment.reserved().fenced;
            if fenced > 0 { segment.free() + fenced } else { 0 }
        });
        RefusedUse { taken: now, total, fenced_fit: fenced_fit.max().unwrap_or(0) }
    }
}

/// Returns the bytes of the object that a request replaces, if it could be evicted otherwise.
fn replaceable_bytes(inventory: &Inventory, now: Moment, request: &AllocRequest<'_>) -> u64 {
    let Some(slot) = request.spared else { return 0 };
    let is_held = |object: &Object| {
        !object.is_complete()
            || object.flags.has(Flags::HARD_PINNED)
            || memory_use::blocker(inventory, now, &[slot]) != Blocker::None
    };
    match inventory.objects().get(slot) {
        Some(object) if !is_held(object) => bytes_in(inventory, slot, request.filter),
        _ => 0,
    }
}
