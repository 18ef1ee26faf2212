//! Windows of adjacent memory that hold only free blocks and evictable objects.
//!
//! A scan looks at every block of the candidate segments once, in the order of addresses, and
//! remembers its place between two slices by marks, which follow blocks that are merged. It begins
//! behind the window that was evicted last, so that large objects replace each other in turn.
//! A window is evicted in slices as well. What was evicted is joined into one block that nobody
//! else can allocate.

use mooncake_base::Moment;
use rustc_hash::FxHashSet;

use crate::state::{
    calls::reclaim::{Reclaimer, next_step::SearchOutcome, search::Search, victims},
    catalog::order::EvictionPass,
    ids::{BlockId, ObjectSlot, SegmentSlot},
    inventory::{
        eviction::Verdict,
        memory::{self, Window},
    },
    pool::{allocator::Mark, freed::KeptBlocks, request::AllocRequest, segment::Segments},
    replica::Replica,
};

/// Steps of one slice: blocks looked at, and group members examined for them. About a millisecond.
const STEPS: usize = 2048;

/// Steps that the eviction of one object counts.
const EVICT_STEPS: usize = 8;

/// A scan of the candidate segments.
#[derive(Debug)]
pub(super) struct Scan {
    /// Candidates in the order of the scan.
    segments: Vec<SegmentSlot>,
    next: usize,
    /// Index of the eviction order that is allowed.
    pass: usize,
    present: Option<SegmentScan>,
}

/// The place of a scan in a segment.
#[derive(Debug)]
struct SegmentScan {
    segment: SegmentSlot,
    /// First block of the window.
    first: Mark,
    /// Next block to look at.
    at: Mark,
    /// Where the scan of the segment began.
    origin: u64,
    has_wrapped: bool,
    /// The window that is being evicted.
    eviction: Option<WindowEviction>,
}

/// The eviction of a window.
#[derive(Debug, Default)]
struct WindowEviction {
    /// What was evicted or was free, joined into one block.
    block: Option<BlockId>,
    /// Blocks of the window that were evicted with the group of another object.
    kept: KeptBlocks,
}

/// The end of the search for a window in a segment.
enum WindowSearch {
    Found,
    /// The segment has none.
    None,
    TimeIsUp,
}

/// Whether the object of a block may be evicted.
enum Evictable {
    Is(ObjectSlot),
    /// Once disks have it.
    Moves,
    IsNot,
    /// Its group takes more steps to examine.
    Unknown,
}

/// How a scan goes on after a part of a window was evicted.
enum EvictionStep {
    /// The replica was added.
    Done,
    Continue,
    Moving,
}

/// The end of one slice of an eviction.
enum EvictedPart {
    Done(BlockId),
    /// This block cannot be evicted; `None`: the memory ends before the window does.
    Blocked(Option<BlockId>),
    TimeIsUp,
    /// Disks have to take the next objects over first.
    Moving,
}

impl Scan {
    pub(super) fn forget(&mut self, is_gone: impl Fn(SegmentSlot) -> bool) {
        if self.present.as_ref().is_some_and(|present| is_gone(present.segment)) {
            self.present = None;
        }
        // Slots are reused; a segment that left is no candidate any more.
        let done = self.segments[..self.next].iter().filter(|&&slot| is_gone(slot)).count();
        self.segments.retain(|&slot| !is_gone(slot));
        self.next -= done;
    }

    /// Returns the bytes that the scan holds, and their segment.
    pub(super) fn held(&self, segments: &Segments) -> Option<(SegmentSlot, u64)> {
        let present = self.present.as_ref()?;
        let eviction = present.eviction.as_ref()?;
        let allocator = &segments.at(present.segment).allocator;
        let blocks = eviction.block.iter().chain(&eviction.kept.blocks);
        Some((present.segment, blocks.map(|&block| allocator.size(block)).sum()))
    }

    #[cfg(test)]
    pub(super) fn blocks(&self) -> Vec<(SegmentSlot, BlockId)> {
        let Some(present) = &self.present else { return Vec::new() };
        let Some(eviction) = &present.eviction else { return Vec::new() };
        let blocks = eviction.block.iter().chain(&eviction.kept.blocks);
        blocks.map(|&block| (present.segment, block)).collect()
    }
}

impl Reclaimer<'_> {
    /// Begins a scan of the segments that could take one more replica.
    pub(super) fn begin_scan(
        &mut self,
        need: u64,
        request: &AllocRequest<'_>,
        found: &Search,
    ) -> Scan {
        let mut segments = memory::preferred_order(self.inventory, request);
        segments.extend(self.inventory.segments().open());
        let mut seen = FxHashSet::default();
        segments.retain(|&slot| seen.insert(slot) && self.is_useful(slot, need, request, found));
        Scan { segments, next: 0, pass: 0, present: None }
    }

    /// Ends the scan of a search and frees what it holds.
    pub(super) fn end_scan(&mut self, search: &mut Search) {
        if let Some(present) = search.scan.take().and_then(|scan| scan.present) {
            self.end_segment_scan(present);
        }
    }

    /// Runs one slice of a scan.
    pub(super) fn step_scan(
        &mut self,
        now: Moment,
        need: u64,
        request: &AllocRequest<'_>,
        search: &mut Search,
    ) -> SearchOutcome {
        let mut steps = STEPS;
        let outcome = self.scan_slice(now, need, request, search, &mut steps);
        self.searches.steps += (STEPS - steps) as u64;
        outcome
    }

    fn scan_slice(
        &mut self,
        now: Moment,
        need: u64,
        request: &AllocRequest<'_>,
        search: &mut Search,
        steps: &mut usize,
    ) -> SearchOutcome {
        let Some(mut scan) = search.scan.take() else { return SearchOutcome::TimeIsUp };
        let passes = EvictionPass::allowed(self.inventory.rules());
        loop {
            let Some(present) = &mut scan.present else {
                let Some(&slot) = scan.segments.get(scan.next) else {
                    scan.pass += 1;
                    scan.next = 0;
                    if scan.pass < passes.len() {
                        continue;
                    }
                    return SearchOutcome::Exhausted;
                };
                scan.next += 1;
                *steps = steps.saturating_sub(1);
                if self.is_useful(slot, need, request, search) {
                    scan.present = self.begin_segment_scan(slot);
                }
                continue;
            };
            if *steps == 0 {
                search.scan = Some(scan);
                return SearchOutcome::TimeIsUp;
            }
            let pass = passes[scan.pass];
            if present.eviction.is_none() {
                match self.find_window(now, pass, request, present, steps) {
                    WindowSearch::Found => {}
                    WindowSearch::None => {
                        if let Some(present) = scan.present.take() {
                            self.end_segment_scan(present);
                        }
                        continue;
                    }
                    WindowSearch::TimeIsUp => {
                        search.scan = Some(scan);
                        return SearchOutcome::TimeIsUp;
                    }
                }
            }
            match self.step_eviction(now, pass, request, present, steps, search) {
                EvictionStep::Done => {
                    if let Some(present) = scan.present.take() {
                        self.end_segment_scan(present);
                    }
                    return SearchOutcome::Found;
                }
                EvictionStep::Moving => {
                    search.scan = Some(scan);
                    return SearchOutcome::Moving;
                }
                EvictionStep::Continue => {}
            }
        }
    }

    /// Evicts a window that consists of free blocks and of objects known to be evictable. Returns
    /// `None` if that fails. If a large group takes too many steps, a scan goes on with the window.
    pub(super) fn evict_window(
        &mut self,
        now: Moment,
        pass: EvictionPass,
        need: u64,
        request: &AllocRequest<'_>,
        segment: SegmentSlot,
        first: BlockId,
        found: &mut Search,
    ) -> Option<SearchOutcome> {
        let mut eviction = WindowEviction::default();
        let mut steps = EVICT_STEPS * victims::STEPS;
        let part = self.evict_part(now, pass, request, segment, first, &mut eviction, &mut steps);
        found.position = found.position.max(eviction.kept.position);
        match part {
            EvictedPart::Done(block) => {
                self.add_found(found, segment, block);
                Some(SearchOutcome::Found)
            }
            EvictedPart::Blocked(_) => {
                self.give_up_eviction(segment, eviction);
                None
            }
            EvictedPart::Moving => {
                self.give_up_eviction(segment, eviction);
                Some(SearchOutcome::Moving)
            }
            EvictedPart::TimeIsUp => {
                let passes = EvictionPass::allowed(self.inventory.rules());
                let mut scan = self.begin_scan(need, request, found);
                scan.pass = passes.iter().position(|&other| other == pass).unwrap_or(0);
                scan.present = Some(self.scan_from(segment, first, Some(eviction)));
                found.scan = Some(scan);
                Some(SearchOutcome::TimeIsUp)
            }
        }
    }

    fn begin_segment_scan(&mut self, segment: SegmentSlot) -> Option<SegmentScan> {
        let block = self.inventory.segment(segment).allocator.rover()?;
        Some(self.scan_from(segment, block, None))
    }

    fn scan_from(
        &mut self,
        segment: SegmentSlot,
        block: BlockId,
        eviction: Option<WindowEviction>,
    ) -> SegmentScan {
        let mut marks = memory::marks(self.inventory, segment);
        let (first, at) = (marks.mark(block), marks.mark(block));
        let origin = marks.offset(block);
        SegmentScan { segment, first, at, origin, has_wrapped: false, eviction }
    }

    fn end_segment_scan(&mut self, present: SegmentScan) {
        let SegmentScan { segment, first, at, eviction, .. } = present;
        let mut marks = memory::marks(self.inventory, segment);
        // The next scan begins here: a search that is repeated goes on in this way.
        marks.set_rover(marks.marked(first));
        marks.unmark(first);
        marks.unmark(at);
        if let Some(eviction) = eviction {
            self.give_up_eviction(segment, eviction);
        }
    }

    /// Looks for a window from the place of the scan on.
    fn find_window(
        &mut self,
        now: Moment,
        pass: EvictionPass,
        request: &AllocRequest<'_>,
        present: &mut SegmentScan,
        steps: &mut usize,
    ) -> WindowSearch {
        let SegmentScan { segment, first, at, origin, .. } = *present;
        while *steps > 0 {
            *steps -= 1;
            let allocator = &self.inventory.segment(segment).allocator;
            let block = allocator.marked(at);
            let is_clear = allocator.is_block_free(block)
                || match self.evictable(now, pass, request, segment, block, steps) {
                    Evictable::Is(_) | Evictable::Moves => true,
                    Evictable::IsNot => false,
                    Evictable::Unknown => return WindowSearch::TimeIsUp,
                };
            let mut marks = memory::marks(self.inventory, segment);
            if is_clear && marks.window_fits(marks.marked(first), block, request.length) {
                present.eviction = Some(WindowEviction::default());
                return WindowSearch::Found;
            }
            match marks.next_block(block) {
                Some(next) => {
                    marks.move_mark(at, next);
                    if !is_clear {
                        marks.move_mark(first, next);
                    }
                }
                None if present.has_wrapped => return WindowSearch::None,
                None => {
                    present.has_wrapped = true;
                    let Some(start) = marks.first_block() else {
                        return WindowSearch::None;
                    };
                    marks.move_mark(at, start);
                    marks.move_mark(first, start);
                }
            }
            if present.has_wrapped && marks.offset(marks.marked(first)) >= origin {
                // All windows from here on were looked at before.
                return WindowSearch::None;
            }
        }
        WindowSearch::TimeIsUp
    }

    /// Evicts a part of the window.
    fn step_eviction(
        &mut self,
        now: Moment,
        pass: EvictionPass,
        request: &AllocRequest<'_>,
        present: &mut SegmentScan,
        steps: &mut usize,
        found: &mut Search,
    ) -> EvictionStep {
        let segment = present.segment;
        let Some(mut eviction) = present.eviction.take() else { return EvictionStep::Continue };
        let first = self.inventory.segment(segment).allocator.marked(present.first);
        let part = self.evict_part(now, pass, request, segment, first, &mut eviction, steps);
        found.position = found.position.max(eviction.kept.position);
        match part {
            EvictedPart::Done(block) => {
                let mut marks = memory::marks(self.inventory, segment);
                let next = marks.next_block(block).or_else(|| marks.first_block());
                marks.move_mark(present.first, next.unwrap_or(block));
                self.add_found(found, segment, block);
                return EvictionStep::Done;
            }
            EvictedPart::TimeIsUp => present.eviction = Some(eviction),
            EvictedPart::Moving => {
                present.eviction = Some(eviction);
                return EvictionStep::Moving;
            }
            EvictedPart::Blocked(obstacle) => {
                // The object was used or pinned meanwhile. The scan goes on behind it.
                let mut marks = memory::marks(self.inventory, segment);
                let place = obstacle.unwrap_or(first);
                marks.move_mark(present.first, place);
                marks.move_mark(present.at, place);
                self.give_up_eviction(segment, eviction);
            }
        }
        EvictionStep::Continue
    }

    fn add_found(&mut self, found: &mut Search, segment: SegmentSlot, block: BlockId) {
        let ordinal = found.replicas.len() as u32;
        found.replicas.push(Replica { segment, block, ordinal });
    }

    /// Evicts and joins blocks from `first` on until the object fits.
    fn evict_part(
        &mut self,
        now: Moment,
        pass: EvictionPass,
        request: &AllocRequest<'_>,
        segment: SegmentSlot,
        first: BlockId,
        eviction: &mut WindowEviction,
        steps: &mut usize,
    ) -> EvictedPart {
        let length = request.length;
        loop {
            let allocator = &self.inventory.segment(segment).allocator;
            let next = match eviction.block {
                None => first,
                Some(block) => match allocator.next_block(block) {
                    None => return EvictedPart::Blocked(None),
                    Some(next) => next,
                },
            };
            if *steps == 0 {
                return EvictedPart::TimeIsUp;
            }
            *steps -= 1;
            let window = Window { segment, block: eviction.block, next, length };
            if self.inventory.groups().next_condemned().is_some() {
                // Other members of a group of which this window had one may lie in it.
                self.evict_for_window(now, None, window, eviction, steps);
                continue;
            }
            if !allocator.is_block_free(next) && !eviction.kept.blocks.remove(&next) {
                let victim = match self.evictable(now, pass, request, segment, next, steps) {
                    Evictable::Is(victim) => Some(victim),
                    Evictable::IsNot => return EvictedPart::Blocked(Some(next)),
                    Evictable::Moves => {
                        let begin = eviction.block.unwrap_or(first);
                        let left = length.saturating_sub(
                            self.inventory.segment(segment).allocator.offset(next)
                                - self.inventory.segment(segment).allocator.offset(begin),
                        );
                        self.move_run_down(now, segment, next, left.max(1));
                        return EvictedPart::Moving;
                    }
                    Evictable::Unknown => return EvictedPart::TimeIsUp,
                };
                self.evict_for_window(now, victim, window, eviction, steps);
                if !eviction.kept.blocks.remove(&next) {
                    return EvictedPart::Blocked(Some(next));
                }
            }
            let (block, fits) = memory::join_next(self.inventory, window, eviction.kept.position);
            eviction.block = Some(block);
            if fits {
                return EvictedPart::Done(block);
            }
        }
    }

    /// Evicts an object with its group, or else a member of a condemned group, and keeps those of
    /// their blocks that belong to the window.
    fn evict_for_window(
        &mut self,
        now: Moment,
        victim: Option<ObjectSlot>,
        window: Window,
        eviction: &mut WindowEviction,
        steps: &mut usize,
    ) {
        let kept = &mut eviction.kept;
        let evicted = memory::evict_for_window(self.inventory, now, victim, window, kept);
        *steps = steps.saturating_sub(EVICT_STEPS * evicted);
    }

    fn give_up_eviction(&mut self, segment: SegmentSlot, eviction: WindowEviction) {
        let KeptBlocks { blocks, position } = eviction.kept;
        for block in eviction.block.into_iter().chain(blocks) {
            memory::free_block(self.inventory, segment, block, position);
        }
    }

    /// Returns the complete object that the block belongs to.
    pub(super) fn owner_of(&self, segment: SegmentSlot, block: BlockId) -> Option<ObjectSlot> {
        let owner = self.inventory.segment(segment).allocator.owner(block);
        let owner = ObjectSlot::new(owner?);
        let object = self.inventory.objects().get(owner).filter(|found| found.is_complete());
        // The owner is known from the start of the put, and may have other memory by now.
        let is_here = object.is_some_and(|object| {
            let mut replicas = object.replicas.iter();
            replicas.any(|replica| (replica.segment, replica.block) == (segment, block))
        });
        is_here.then_some(owner)
    }

    /// Returns whether an object may be evicted for this block. Subtracts the members of its group
    /// from `steps`.
    fn evictable(
        &mut self,
        now: Moment,
        pass: EvictionPass,
        request: &AllocRequest<'_>,
        segment: SegmentSlot,
        block: BlockId,
        steps: &mut usize,
    ) -> Evictable {
        let Some(owner) = self.owner_of(segment, block) else { return Evictable::IsNot };
        match self.inventory.classify(now, owner, pass, request.spared, steps) {
            Verdict::Evict => Evictable::Is(owner),
            Verdict::Move => Evictable::Moves,
            Verdict::Unfinished => Evictable::Unknown,
            Verdict::Wait(_) | Verdict::Demote | Verdict::Skip => Evictable::IsNot,
        }
    }
}
