//! Allocation of memory for replicas, and eviction to make space.

mod out_of_space;

use std::time::Duration;

use mooncake_base::{Moment, Result};

use rustc_hash::FxHashMap;

use super::{
    State,
    allocator::{BlockId, footprint},
    eviction::EvictionPolicy,
    ids::{KeyHash, ObjectSlot, SegmentSlot, Slot},
    lease::Timestamp,
    object::{Flags, Replica, Replicas},
    placement::PlacementRequest,
    put_options::PutOptions,
};

/// Wait before a group with a hard-pinned member is examined again.
const GROUP_RETRY: Duration = Duration::from_secs(1);
/// Objects evicted ahead of need at a time.
const AHEAD_SLICE: usize = 64;
/// Wait before the next try while nothing can be evicted.
const AHEAD_RETRY: Duration = Duration::from_secs(1);

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
}

impl SegmentFilter<'_> {
    fn admits(&self, segment: SegmentSlot) -> bool {
        match self {
            Self::All => true,
            Self::Only(these) => these.contains(&segment),
            Self::Except(these) => !these.contains(&segment),
        }
    }
}

/// A search for objects to evict.
#[derive(Debug)]
struct VictimSearch {
    /// Bytes that one segment must offer.
    need: u64,
    /// Per segment: bytes that are free or would be without the victims; `None` for a segment that
    /// is too small or excluded.
    reachable: Vec<Option<u64>>,
    /// Objects taken from the queue, evicted if their blocks form a large enough run.
    victims: Vec<ObjectSlot>,
    /// Blocks of the victims: segment and block, and the object.
    blocks: FxHashMap<(SegmentSlot, BlockId), ObjectSlot>,
    /// Objects taken from the queue without success.
    set_aside: Vec<ObjectSlot>,
}

/// The two eviction orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EvictionPass {
    Plain,
    Soft,
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
}

impl State {
    /// Allocates replicas on distinct segments: as many as requested if possible, at least one.
    ///
    /// # Errors
    /// `NO_AVAILABLE_HANDLE`; the context lists what holds the memory.
    pub(super) fn allocate_copies(
        &mut self,
        now: Moment,
        request: &AllocRequest<'_>,
    ) -> Result<Replicas> {
        let open = self.segments.open().iter().filter(|&&slot| request.filter.admits(slot));
        let Some(need) = footprint(request.length) else {
            return Err(self.too_large_error(now, request));
        };
        let possible = open.filter(|&&slot| self.segments.at(slot).allocator.length() >= need);
        let copies = possible.take(request.replicas as usize).count();
        if copies == 0 {
            return Err(self.too_large_error(now, request));
        }
        let mut replicas = Replicas::default();
        self.try_allocate(request, copies, &mut replicas);
        if replicas.len() < copies && self.release_due(now) {
            self.try_allocate(request, copies, &mut replicas);
        }
        while replicas.len() < copies && self.evict_for(now, need, request, &mut replicas) {}
        if replicas.is_empty() {
            return Err(self.out_of_space_error(now, need, request));
        }
        if replicas.len() < request.replicas as usize {
            self.counters.puts_with_fewer_copies += 1;
        }
        Ok(replicas)
    }

    /// Evicts ahead of need, a slice at a time. Returns when to continue.
    pub(super) fn evict_ahead(&mut self, now: Moment) -> Option<Moment> {
        let watermark = self.rules.watermark?;
        let (used, capacity) = self.sums();
        let low = (watermark.high - watermark.ratio) * capacity as f64;
        let limit = if self.is_evicting { low } else { watermark.high * capacity as f64 };
        self.is_evicting = used as f64 > limit;
        if !self.is_evicting {
            return None;
        }
        let goal = self.counters.evicted_bytes + (used as f64 - low).ceil() as u64;
        self.unpark_due(now);
        for _ in 0..AHEAD_SLICE {
            if self.counters.evicted_bytes >= goal {
                break;
            }
            let passes = [EvictionPass::Plain, EvictionPass::Soft];
            let next = passes.into_iter().find_map(|pass| Some((pass, self.pop(pass)?)));
            let Some((pass, object)) = next else { return Some(now + AHEAD_RETRY) };
            match self.classify(now, object, pass, None) {
                Verdict::Evict => {
                    for member in self.eviction_group(object) {
                        self.dequeue(member);
                        self.evict(now, member);
                    }
                }
                Verdict::Wait(until) => self.park(object, until),
                Verdict::Demote => self.queue.soft.insert(object, KeyHash::new(0)),
                Verdict::Skip => self.put_back(object),
            }
        }
        Some(now)
    }

    /// Allocates replicas from free memory.
    fn try_allocate(&mut self, request: &AllocRequest<'_>, copies: usize, replicas: &mut Replicas) {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        self.preferred_order(request, &mut candidates);
        self.try_segments(&candidates, request, copies, replicas);
        // The other segments, perhaps thousands, are tried after the preferred ones.
        if replicas.len() < copies {
            candidates.clear();
            candidates.extend(self.segments.open());
            self.try_segments(&candidates, request, copies, replicas);
        }
        self.candidates = candidates;
    }

    /// Frees memory that is due, in case `advance` is late. Returns whether there was any.
    fn release_due(&mut self, now: Moment) -> bool {
        let mut has_any = false;
        while self.free_due_quarantine(now) | self.release_oldest_write(now) {
            has_any = true;
        }
        has_any
    }

    /// Lists the segments to try first, in order.
    fn preferred_order(&mut self, request: &AllocRequest<'_>, candidates: &mut Vec<SegmentSlot>) {
        for name in &request.options.preferred_segments {
            candidates.extend(self.segments.named(name));
        }
        let open = self.segments.open();
        if request.options.is_same_node_preferred && !request.host.is_empty() {
            candidates
                .extend(open.iter().filter(|&&slot| *self.segments.at(slot).host == *request.host));
        }
        let placement = PlacementRequest { host: request.host, replicas: request.replicas };
        self.placement.order(&self.segments, &placement, candidates);
    }

    fn try_segments(
        &mut self,
        slots: &[SegmentSlot],
        request: &AllocRequest<'_>,
        copies: usize,
        replicas: &mut Replicas,
    ) {
        for &slot in slots.iter().filter(|&&slot| request.filter.admits(slot)) {
            if replicas.len() == copies {
                return;
            }
            self.try_segment(slot, request.length, replicas);
        }
    }

    fn try_segment(&mut self, slot: SegmentSlot, length: u64, replicas: &mut Replicas) {
        let segment = self.segments.at_mut(slot);
        let is_taken = replicas.iter().any(|replica| replica.segment == slot);
        if is_taken || !segment.accepts_new() || segment.free() < length {
            return;
        }
        if let Some(block) = segment.allocator.allocate(length) {
            replicas.push(Replica { segment: slot, block, ordinal: replicas.len() as u16 });
        }
    }

    /// Evicts until one more replica fits. Evicts nothing if that cannot succeed.
    fn evict_for(
        &mut self,
        now: Moment,
        need: u64,
        request: &AllocRequest<'_>,
        replicas: &mut Replicas,
    ) -> bool {
        self.counters.evictions_attempted += 1;
        let mut reachable = vec![None; self.segments.slot_count()];
        for &slot in self.segments.open() {
            let segment = self.segments.at(slot);
            let is_taken = replicas.iter().any(|replica| replica.segment == slot);
            if !is_taken && request.filter.admits(slot) && segment.reclaimable() >= need {
                reachable[slot.index()] = Some(segment.free());
            }
        }
        if reachable.iter().all(Option::is_none) {
            return false;
        }
        self.unpark_due(now);
        let mut search = VictimSearch {
            need,
            reachable,
            victims: Vec::new(),
            blocks: FxHashMap::default(),
            set_aside: Vec::new(),
        };
        let mut is_found =
            self.search_victims(now, EvictionPass::Plain, request, &mut search, replicas);
        if !is_found && self.rules.is_soft_pin_evictable {
            is_found = self.search_victims(now, EvictionPass::Soft, request, &mut search, replicas);
        }
        for object in search.victims.into_iter().chain(search.set_aside).rev() {
            self.put_back(object);
        }
        self.counters.evictions_succeeded += u64::from(is_found);
        is_found
    }

    fn search_victims(
        &mut self,
        now: Moment,
        pass: EvictionPass,
        request: &AllocRequest<'_>,
        search: &mut VictimSearch,
        replicas: &mut Replicas,
    ) -> bool {
        while let Some(object) = self.pop(pass) {
            match self.classify(now, object, pass, request.spared) {
                Verdict::Wait(until) => self.park(object, until),
                Verdict::Demote => self.queue.soft.insert(object, KeyHash::new(0)),
                Verdict::Skip => search.set_aside.push(object),
                Verdict::Evict => {
                    let group = self.eviction_group(object);
                    if !self.add_victims(search, &group) {
                        search.set_aside.push(object);
                        continue;
                    }
                    for &member in &group {
                        self.dequeue(member);
                    }
                    search.victims.extend(&group);
                    if self.evict_run(now, search, &group, request.length, replicas) {
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Evicts a run of adjacent victims that includes a block of the latest ones, if the object
    /// fits there. Evicts only this run and the groups of its objects.
    fn evict_run(
        &mut self,
        now: Moment,
        search: &mut VictimSearch,
        latest: &[ObjectSlot],
        length: u64,
        replicas: &mut Replicas,
    ) -> bool {
        let copies = latest.iter().flat_map(|&object| self.objects.at(object).replicas.iter());
        let found = copies.into_iter().find_map(|copy| {
            let segment = copy.segment;
            search.reachable.get(segment.index())?.filter(|&bytes| bytes >= search.need)?;
            let is_taken = |block| search.blocks.contains_key(&(segment, block));
            let run = self.segments.at(segment).allocator.find_run(copy.block, length, is_taken)?;
            Some((segment, run))
        });
        let Some((segment, run)) = found else { return false };
        for block in run {
            // A block whose object was evicted with its group is free already.
            let Some(&object) = search.blocks.get(&(segment, block)) else { continue };
            for member in self.eviction_group(object) {
                for copy in self.objects.at(member).replicas.iter() {
                    search.blocks.remove(&(copy.segment, copy.block));
                }
                self.evict(now, member);
            }
        }
        let before = replicas.len();
        self.try_segment(segment, length, replicas);
        replicas.len() > before
    }

    /// Counts the bytes that evicting these objects would free. Returns whether any are in a useful
    /// segment.
    fn add_victims(&self, search: &mut VictimSearch, group: &[ObjectSlot]) -> bool {
        let mut helps = false;
        for &member in group {
            for replica in self.objects.at(member).replicas.iter() {
                if let Some(Some(bytes)) = search.reachable.get_mut(replica.segment.index()) {
                    search.blocks.insert((replica.segment, replica.block), member);
                    *bytes += self.segments.at(replica.segment).allocator.size(replica.block);
                    helps = true;
                }
            }
        }
        helps
    }

    pub(super) fn classify(
        &mut self,
        now: Moment,
        object: ObjectSlot,
        pass: EvictionPass,
        spared: Option<ObjectSlot>,
    ) -> Verdict {
        if !self.drop_lost_replicas(object) {
            // The replicas are lost; the sweep removes the rest.
            return Verdict::Skip;
        }
        let group = self.eviction_group(object);
        let mut end = Timestamp::default();
        let mut is_soft = false;
        for &member in &group {
            if self.is_unclaimed(member) {
                end = end.max(self.recovery.end().into());
            }
            let held = self.objects.at(member);
            if held.flags.has(Flags::HARD_PINNED) {
                end = end.max((now + GROUP_RETRY).into());
            }
            end = end.max(held.protection.protected_until()).max(self.copying_until(member));
            is_soft |= held.flags.has(Flags::SOFT_PINNED);
        }
        if spared.is_some_and(|spared| group.contains(&spared)) {
            Verdict::Skip
        } else if end > now.into() {
            Verdict::Wait(end)
        } else if is_soft && pass == EvictionPass::Plain {
            Verdict::Demote
        } else {
            Verdict::Evict
        }
    }

    /// Returns the objects that are evicted together with this one, itself included.
    pub(super) fn eviction_group(&self, object: ObjectSlot) -> Vec<ObjectSlot> {
        match self.groups.members(object) {
            [] => vec![object],
            siblings => siblings.to_vec(),
        }
    }

    pub(super) fn evict(&mut self, now: Moment, object: ObjectSlot) {
        self.counters.evicted_keys += 1;
        self.counters.evicted_bytes += self.objects.at(object).bytes();
        self.counters.offloads_missed += u64::from(self.wants_offload(object));
        let is_plain = !self.objects.at(object).flags.has(Flags::SOFT_PINNED);
        self.drop_value(now, object);
        if is_plain {
            self.queue.plain.on_evicted(object, self.objects.key_hash(object));
        }
        self.remove_if_empty(object);
    }

    fn pop(&mut self, pass: EvictionPass) -> Option<ObjectSlot> {
        match pass {
            EvictionPass::Plain => self.queue.plain.pop(),
            EvictionPass::Soft => self.queue.soft.pop(),
        }
    }

    /// Returns an object to the head of its order.
    fn put_back(&mut self, object: ObjectSlot) {
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
