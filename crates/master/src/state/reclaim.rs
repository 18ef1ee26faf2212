//! Allocation of memory for replicas, and eviction to make space.
//!
//! A put that finds free memory is done at once. Otherwise a search (`reclaim/search.rs`) evicts:
//! first the objects that the eviction order names (`reclaim/victims.rs`), and if those do not make
//! a large enough run within a bounded number of steps, a window of adjacent memory that holds only
//! evictable objects (`reclaim/window.rs`). A search that takes longer goes on in slices, between
//! which the state is unlocked, and what it evicted is kept for it.

mod ahead;
pub mod eviction;
pub(super) mod eviction_queue;
mod free_memory;
pub(super) mod out_of_space;
pub(super) mod pins;
mod released;
mod search;
pub(super) mod sweep;
mod victims;
mod window;

use std::time::Duration;

use mooncake_base::{Moment, Result};

use smallvec::{SmallVec, smallvec};

pub(super) use self::{
    ahead::Ahead,
    released::{ReleasedObjects, logged_object},
    search::{SearchId, Searches},
    window::Capture,
};
use crate::state::{
    Rules,
    catalog::{
        Catalog,
        object::{Flags, Replicas},
    },
    ids::{KeyHash, ObjectSlot, SegmentSlot},
    inventory::Inventory,
    pool::{allocator::footprint, segment::SegmentSet},
    put::options::PutOptions,
    read::lease::Timestamp,
    reclaim::eviction::EvictionPolicy,
};

/// Wait before a group with a hard-pinned member is examined again.
const GROUP_RETRY: Duration = Duration::from_secs(1);
/// Blocks that are freed at a time because they are due.
const RELEASE_SLICE: usize = 1024;
/// Members of a group that are evicted at once; the group is condemned if it has more.
const GROUP_SLICE: usize = 64;

/// The reason why an allocation cannot go on at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// Its share of time is used up: unlock the state and call again.
    Yield,
    /// Too many searches for memory are under way: call again a little later.
    Busy,
    /// The memory waits for the log: call again when it is on disk up to this position.
    Sync(u64),
}

/// The state of an allocation.
#[derive(Debug)]
pub(super) enum Allocation {
    Ready(Replicas),
    Pending(Pending),
}

/// An allocation of replicas.
#[derive(Debug)]
pub(super) struct AllocRequest<'a> {
    pub(super) length: u64,
    pub(super) replicas: u32,
    /// Segments to use.
    pub(super) filter: SegmentFilter<'a>,
    /// The writer's host; empty if unknown.
    pub(super) host: &'a str,
    pub(super) options: &'a PutOptions,
    /// The object that is replaced; never evicted for this request.
    pub(super) spared: Option<ObjectSlot>,
}

/// Filter over the segments that accept objects.
#[derive(Debug, Clone, Copy)]
pub(super) enum SegmentFilter<'a> {
    /// All segments.
    All,
    /// These segments.
    Only(&'a [SegmentSlot]),
    /// All segments but these.
    Except(&'a [SegmentSlot]),
    /// All segments but those of peers that the writer could not reach.
    Avoiding(&'a SegmentSet),
}

impl SegmentFilter<'_> {
    pub(in crate::state) fn admits(&self, segment: SegmentSlot) -> bool {
        match self {
            Self::All => true,
            Self::Only(these) => these.contains(&segment),
            Self::Except(these) => !these.contains(&segment),
            Self::Avoiding(these) => !these.contains(segment),
        }
    }
}

/// The two eviction orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EvictionPass {
    Plain,
    Soft,
}

impl EvictionPass {
    /// Returns the eviction orders that the rules allow.
    fn allowed(rules: &Rules) -> &'static [Self] {
        if rules.is_soft_pin_evictable { &[Self::Plain, Self::Soft] } else { &[Self::Plain] }
    }
}

/// The decision about the next object of the order.
#[derive(Debug, Clone, Copy)]
pub(super) enum Verdict {
    Evict,
    /// Protected until then.
    Wait(Timestamp),
    /// Soft-pinned: evicted after all others.
    Demote,
    /// Not useful, or spared by this request.
    Skip,
    /// Its group takes more steps to examine. The next call goes on with it.
    Unfinished,
}

/// The search for memory, with the parts that it changes.
#[derive(Debug)]
pub(super) struct Reclaimer<'a> {
    pub(super) inventory: &'a mut Inventory,
    pub(super) searches: &'a mut Searches,
}

impl Reclaimer<'_> {
    /// Allocates replicas on distinct segments: as many as requested if possible, at least one.
    /// Goes on with `search` if there is one. While the allocation is pending, `search` holds what
    /// was found so far; pass it again, or to [`cancel_search`](Self::cancel_search).
    ///
    /// # Errors
    /// `NO_AVAILABLE_HANDLE`; the context lists what holds the memory.
    pub(super) fn allocate_copies(
        &mut self,
        now: Moment,
        request: &AllocRequest<'_>,
        search: &mut Option<SearchId>,
    ) -> Result<Allocation> {
        let open =
            self.inventory.pool.segments.open().iter().filter(|&&slot| request.filter.admits(slot));
        let Some(need) = footprint(request.length) else {
            return Err(self.too_large_error(now, request));
        };
        let possible =
            open.filter(|&&slot| self.inventory.pool.segments.at(slot).allocator.length() >= need);
        let copies = possible.take(request.replicas as usize).count();
        let mut replicas = Replicas::default();
        if search.is_none() {
            if copies == 0 {
                return self.await_segment(now, request);
            }
            let tried = self.inventory.pool.try_allocate(request, copies, &mut replicas);
            self.searches.steps += tried as u64;
        }
        if replicas.len() < copies || search.is_some() {
            let found = self.search_copies(now, (need, copies), request, replicas, search);
            let Some(more) = found else { return Err(self.out_of_space_error(now, need, request)) };
            match more {
                Allocation::Ready(found) => replicas = found,
                pending @ Allocation::Pending(_) => return Ok(pending),
            }
        }
        if replicas.len() < request.replicas as usize {
            self.inventory.log.counters.puts_with_fewer_copies += 1;
        }
        self.prepare_ahead(now, need, request.spared);
        Ok(Allocation::Ready(replicas))
    }

    /// Answers a request that no segment can take now.
    fn await_segment(&mut self, now: Moment, request: &AllocRequest<'_>) -> Result<Allocation> {
        match self
            .inventory
            .pool
            .unsynced_until()
            .filter(|_| self.inventory.pool.has_unsynced_mounts())
        {
            Some(position) => Ok(Allocation::Pending(Pending::Sync(position))),
            None => Err(self.too_large_error(now, request)),
        }
    }

    /// Frees memory that is due, in case `advance` is late. Returns whether there was any.
    fn release_due(&mut self, now: Moment) -> bool {
        let mut has_any = self.inventory.pool.release_synced();
        for _ in 0..RELEASE_SLICE {
            if !self.inventory.pool.free_due_quarantine(now) {
                break;
            }
            has_any = true;
        }
        has_any
    }
}

impl Inventory {
    /// Decides whether an object and its group may be evicted. Subtracts the other members that it
    /// examines from `steps`.
    pub(super) fn classify(
        &mut self,
        now: Moment,
        object: ObjectSlot,
        pass: EvictionPass,
        spared: Option<ObjectSlot>,
        steps: &mut usize,
    ) -> Verdict {
        if !self.drop_lost_replicas(object) {
            // The replicas are lost; the sweep removes the rest.
            return Verdict::Skip;
        }
        if self.catalog.groups.is_condemned(object) {
            return Verdict::Evict;
        }
        let flags = self.catalog.objects.at(object).flags;
        if flags.has(Flags::GROUPED) {
            return self.classify_group(now, object, pass, spared, steps);
        }
        let end = self.protected_until(now, object);
        if spared == Some(object) {
            Verdict::Skip
        } else if end > now.into() {
            Verdict::Wait(end)
        } else if pass == EvictionPass::Plain && flags.has(Flags::SOFT_PINNED) {
            Verdict::Demote
        } else {
            Verdict::Evict
        }
    }

    /// Decides whether the group of an object may be evicted, like [`classify`](Self::classify).
    fn classify_group(
        &mut self,
        now: Moment,
        object: ObjectSlot,
        pass: EvictionPass,
        spared: Option<ObjectSlot>,
        steps: &mut usize,
    ) -> Verdict {
        // A group is not looked through while the member that kept it before still does.
        let blocker =
            self.catalog.groups.blocker(object).map(|member| self.protected_until(now, member));
        if let Some(until) = blocker.filter(|&until| until > now.into()) {
            return Verdict::Wait(until);
        }
        let group = self.catalog.groups.index(object);
        if spared.is_some_and(|spared| self.catalog.groups.index(spared) == group) {
            return Verdict::Skip;
        }
        let members = self.catalog.groups.members(object);
        let mut examined = self.catalog.groups.examined(object);
        // A small group is examined at once.
        let slice = (*steps).max(GROUP_SLICE);
        let mut found = None;
        for &member in members[examined..].iter().take(slice) {
            let end = self.protected_until(now, member);
            if end > now.into() {
                found = Some((end, member));
                break;
            }
            examined += 1;
            *steps = steps.saturating_sub(usize::from(member != object));
        }
        let is_whole = examined == members.len();
        self.catalog.groups.set_examined(object, examined);
        if let Some((end, blocker)) = found {
            self.catalog.groups.set_blocker(object, blocker);
            Verdict::Wait(end)
        } else if !is_whole {
            *steps = 0;
            Verdict::Unfinished
        } else if pass == EvictionPass::Plain && self.catalog.groups.has_soft_pin(object) {
            Verdict::Demote
        } else {
            Verdict::Evict
        }
    }

    /// Returns until when the object itself, apart from its group, may not be evicted.
    pub(in crate::state) fn protected_until(&self, now: Moment, slot: ObjectSlot) -> Timestamp {
        let object = self.catalog.objects.at(slot);
        let mut end = object.protection.protected_until().max(self.catalog.copying_until(slot));
        if self.is_unclaimed(slot) {
            end = end.max(self.recovery.end().into());
        }
        if object.flags.has(Flags::HARD_PINNED) {
            end = end.max((now + GROUP_RETRY).into());
        }
        end
    }

    /// Evicts an object and its group: the first members at once, and the others in further calls
    /// of [`evict_condemned`](Self::evict_condemned). Returns the number of evicted objects.
    pub(super) fn evict_group(&mut self, now: Moment, object: ObjectSlot) -> usize {
        let first = self.catalog.first_of_group(object);
        if self.catalog.groups.members(object).len() > GROUP_SLICE {
            self.catalog.groups.condemn(object);
        }
        let mut evicted = 0;
        for member in first {
            self.catalog.dequeue(member);
            self.evict(now, member);
            evicted += 1;
        }
        evicted
    }

    /// Evicts a member of a condemned group. Returns whether there was one.
    pub(super) fn evict_condemned(&mut self, now: Moment) -> bool {
        let Some(member) = self.catalog.groups.next_condemned() else { return false };
        self.catalog.dequeue(member);
        self.evict(now, member);
        true
    }

    pub(super) fn evict(&mut self, now: Moment, object: ObjectSlot) {
        self.evict_value(now, object);
        self.catalog.remove_if_empty(object);
    }

    /// Evicts the value of an object; the entry of its key stays.
    pub(super) fn evict_value(&mut self, now: Moment, object: ObjectSlot) {
        self.log.counters.evicted_keys += 1;
        self.log.counters.evicted_bytes += self.catalog.objects.at(object).bytes();
        self.log.counters.offloads_missed += u64::from(self.wants_offload(object));
        let is_plain = !self.catalog.objects.at(object).flags.has(Flags::SOFT_PINNED);
        match self.catalog.released.position(object) {
            Some(position) => self.drop_released(now, object, position),
            None => self.drop_value(now, object),
        }
        if is_plain {
            self.catalog.queue.plain.on_evicted(object, self.catalog.objects.key_hash(object));
        }
    }
}

impl Catalog {
    /// Returns the object and the first of those that are evicted together with it: all of a small
    /// group. Each member of a condemned group is evicted on its own.
    pub(super) fn first_of_group(&self, object: ObjectSlot) -> SmallVec<[ObjectSlot; 1]> {
        let mut first = smallvec![object];
        if !self.groups.is_condemned(object) {
            let members = self.groups.members(object).iter().copied();
            first.extend(members.filter(|&member| member != object).take(GROUP_SLICE - 1));
        }
        first
    }

    /// Puts an object into the order of those that are evicted after all others.
    pub(super) fn demote(&mut self, object: ObjectSlot) {
        self.queue.soft.insert(object, KeyHash::new(0));
        self.record_waiting(object);
    }

    /// Records that a member of a group left the order of eviction, perhaps because of another.
    pub(super) fn record_waiting(&mut self, object: ObjectSlot) {
        let Self { groups, objects, queue, .. } = self;
        if !objects.at(object).flags.has(Flags::GROUPED) {
            return;
        }
        groups.add_waiting(object, |other| {
            let is_parked = objects.get(other).is_some_and(|found| found.flags.has(Flags::PARKED));
            is_parked || queue.soft.contains(other)
        });
    }

    pub(in crate::state) fn pop(&mut self, pass: EvictionPass) -> Option<ObjectSlot> {
        match pass {
            EvictionPass::Plain => self.queue.plain.pop(),
            EvictionPass::Soft => self.queue.soft.pop(),
        }
    }

    /// Returns an object to the head of its order.
    pub(in crate::state) fn put_back(&mut self, object: ObjectSlot) {
        let Some(flags) = self.objects.get(object).map(|object| object.flags) else { return };
        if !flags.has(Flags::COMPLETE) {
            return;
        }
        if flags.has(Flags::SOFT_PINNED) {
            self.queue.soft.put_back(object);
        } else {
            self.queue.plain.put_back(object);
        }
    }
}
