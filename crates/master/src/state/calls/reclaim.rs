//! Allocation of memory for replicas, and eviction to make space.
//!
//! A put that finds free memory is done at once. Otherwise a search (`search.rs`) evicts, step by step
//! as the rules in `next_step.rs` say:
//! first the objects that the eviction order names (`victims.rs`), and if those do not make
//! a large enough run within a bounded number of steps, a window of adjacent memory that holds only
//! evictable objects (`window.rs`). A search that takes longer goes on in slices, between
//! which the state is unlocked, and what it evicted is kept for it.

pub(in crate::state) mod free_memory;
pub(in crate::state) mod next_step;
pub(in crate::state) mod out_of_space;
pub(in crate::state) mod search;
pub(in crate::state) mod victims;
pub(in crate::state) mod window;

use mooncake_base::{Moment, Result};

pub(in crate::state) use self::search::{SearchId, Searches};
use crate::state::{
    inventory::{Inventory, memory, moves, releases},
    pool::{allocator::footprint, request::AllocRequest},
    replica::Replicas,
};

/// The reason why an allocation cannot go on at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// Its share of time is used up: unlock the state and call again.
    Yield,
    /// Too many searches for memory are under way: call again a little later.
    Busy,
    /// The memory waits for the log: call again when it is on disk up to this position.
    Sync(u64),
    /// The memory waits until disks have taken objects over: call again when their progress, of which
    /// this was the last, goes on, or after some time.
    Disks(u64),
}

/// The state of an allocation.
#[derive(Debug)]
pub(in crate::state) enum Allocation {
    Ready(Replicas),
    Pending(Pending),
}

/// The search for memory, with the parts that it changes.
#[derive(Debug)]
pub(in crate::state) struct Reclaimer<'a> {
    pub(in crate::state) inventory: &'a mut Inventory,
    pub(in crate::state) searches: &'a mut Searches,
}

impl Reclaimer<'_> {
    /// Allocates replicas on distinct segments: as many as requested if possible, at least one.
    /// Goes on with `search` if there is one. While the allocation is pending, `search` holds what
    /// was found so far; pass it again, or to [`cancel_search`](Self::cancel_search).
    ///
    /// # Errors
    /// `NO_AVAILABLE_HANDLE`; the context lists what holds the memory.
    pub(in crate::state) fn allocate_copies(
        &mut self,
        now: Moment,
        request: &AllocRequest<'_>,
        search: &mut Option<SearchId>,
    ) -> Result<Allocation> {
        let open =
            self.inventory.segments().open().iter().filter(|&&slot| request.filter.admits(slot));
        let Some(need) = footprint(request.length) else {
            return Err(self.too_large_error(now, request));
        };
        let possible =
            open.filter(|&&slot| self.inventory.segment(slot).allocator.length() >= need);
        let copies = possible.take(request.replicas as usize).count();
        let mut replicas = Replicas::default();
        if search.is_none() {
            if copies == 0 {
                return self.await_segment(now, request);
            }
            let tried = memory::allocate(self.inventory, request, copies, &mut replicas);
            self.searches.steps += tried as u64;
        }
        if replicas.len() < copies || search.is_some() {
            let found = self.search_copies(now, need, copies, request, replicas, search);
            moves::keep_moving_ahead(self.inventory, now);
            let Some(more) = found else { return Err(self.out_of_space_error(now, need, request)) };
            match more {
                Allocation::Ready(found) => replicas = found,
                pending @ Allocation::Pending(_) => return Ok(pending),
            }
        }
        if replicas.len() < request.replicas as usize {
            self.inventory.counters_mut().puts_with_fewer_copies += 1;
        }
        releases::prepare_ahead(self.inventory, now, need, request.spared);
        Ok(Allocation::Ready(replicas))
    }

    /// Answers a request that no segment can take now.
    fn await_segment(&mut self, now: Moment, request: &AllocRequest<'_>) -> Result<Allocation> {
        let pool = self.inventory.pool();
        if pool.has_unsynced_mounts()
            && let Some(position) = pool.unsynced_until()
        {
            return Ok(Allocation::Pending(Pending::Sync(position)));
        }
        Err(self.too_large_error(now, request))
    }
}
