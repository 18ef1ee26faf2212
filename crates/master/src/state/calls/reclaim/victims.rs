//! The search along the eviction order: victims that lie side by side are evicted together.

use mooncake_base::Moment;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::{
    calls::reclaim::{Reclaimer, next_step::SearchOutcome, search::Search},
    catalog::order::EvictionPass,
    ids::{BlockId, ObjectSlot, SegmentSlot},
    inventory::{
        candidates::{self, Candidate},
        memory, moves, releases,
    },
    pool::request::{AllocRequest, SegmentFilter},
};

/// Steps of one search: objects taken from the order, and blocks looked at around them. About a
/// millisecond.
pub(super) const STEPS: usize = 1024;

/// Victims that a search passes over because their release is not on disk.
const PASSED_MAX: usize = 128;

/// A search for objects to evict.
#[derive(Debug)]
struct VictimSearch {
    /// Bytes that one segment must offer.
    need: u64,
    /// Per segment: bytes that are free or would be without the victims; `None` for a segment that
    /// is too small or excluded.
    reachable: FxHashMap<SegmentSlot, Option<u64>>,
    /// Whether only objects are evicted whose release is on disk.
    is_released_only: bool,
    /// Objects taken from the queue, in their order. Those in `blocks` are victims: they are evicted
    /// if their blocks form a large enough run.
    taken: Vec<ObjectSlot>,
    /// Members of groups among these.
    members: FxHashSet<ObjectSlot>,
    /// Blocks of the victims: segment and block, and the object.
    blocks: FxHashMap<(SegmentSlot, BlockId), ObjectSlot>,
    /// Steps left.
    steps: usize,
}

impl Reclaimer<'_> {
    /// Evicts the objects that the eviction order names until one more replica fits. Evicts nothing
    /// if that does not succeed within a bounded number of steps.
    pub(super) fn search_victims(
        &mut self,
        now: Moment,
        need: u64,
        request: &AllocRequest<'_>,
        found: &mut Search,
    ) -> SearchOutcome {
        if !self.has_useful_segment(need, request, found) {
            return SearchOutcome::Exhausted;
        }
        candidates::unpark_due(self.inventory, now);
        if releases::prefers_released(self.inventory, now) {
            let (outcome, taken) =
                self.search_order(now, need, true, &[EvictionPass::Plain], request, found);
            if taken > PASSED_MAX / 2 {
                releases::release_soon(self.inventory);
            }
            if outcome == SearchOutcome::Found {
                return outcome;
            }
        }
        let passes = EvictionPass::allowed(self.inventory.rules());
        self.search_order(now, need, false, passes, request, found).0
    }

    /// Returns whether evictions could make space for one more replica in any segment. A pool in which
    /// they could not is looked through once, and not for each put that is refused.
    fn has_useful_segment(
        &mut self,
        need: u64,
        request: &AllocRequest<'_>,
        found: &Search,
    ) -> bool {
        let segments = self.inventory.segments();
        if !segments.may_have_reclaimable(need) {
            return false;
        }
        let is_useful = |&slot: &SegmentSlot| self.is_useful(slot, need, request, found);
        let useful = segments.open().iter().position(is_useful);
        self.searches.steps += useful.unwrap_or_else(|| segments.open().len()) as u64;
        let is_all = found.replicas.is_empty() && matches!(request.filter, SegmentFilter::All);
        if useful.is_none() && is_all {
            memory::record_unreclaimable(self.inventory, need);
        }
        useful.is_some()
    }

    /// Runs a search with these passes. Returns the number of objects that it took from the order,
    /// too.
    fn search_order(
        &mut self,
        now: Moment,
        need: u64,
        is_released_only: bool,
        passes: &[EvictionPass],
        request: &AllocRequest<'_>,
        found: &mut Search,
    ) -> (SearchOutcome, usize) {
        let mut search = VictimSearch {
            need,
            reachable: FxHashMap::default(),
            is_released_only,
            taken: Vec::new(),
            members: FxHashSet::default(),
            blocks: FxHashMap::default(),
            steps: STEPS,
        };
        let mut outcome = SearchOutcome::Exhausted;
        for &pass in passes {
            outcome = self.search_pass(now, pass, request, &mut search, found);
            if outcome != SearchOutcome::Exhausted {
                break;
            }
        }
        self.searches.steps += (STEPS - search.steps) as u64;
        let taken = search.taken.len();
        candidates::put_back(self.inventory, search.taken);
        (outcome, taken)
    }

    /// Returns whether evictions in the segment could make space for one more replica.
    pub(super) fn is_useful(
        &self,
        slot: SegmentSlot,
        need: u64,
        request: &AllocRequest<'_>,
        found: &Search,
    ) -> bool {
        let segment = self.inventory.segment(slot);
        let is_taken = found.replicas.iter().any(|replica| replica.segment == slot);
        segment.accepts_new()
            && !is_taken
            && request.filter.admits(slot)
            && segment.reclaimable() >= need
    }

    fn search_pass(
        &mut self,
        now: Moment,
        pass: EvictionPass,
        request: &AllocRequest<'_>,
        search: &mut VictimSearch,
        found: &mut Search,
    ) -> SearchOutcome {
        loop {
            if search.steps == 0 {
                return SearchOutcome::TimeIsUp;
            }
            if search.is_released_only && search.taken.len() >= PASSED_MAX {
                return SearchOutcome::Exhausted;
            }
            search.steps -= 1;
            let steps = &mut search.steps;
            match candidates::next_candidate(self.inventory, now, pass, request.spared, steps) {
                Candidate::None { has_early: true } => return SearchOutcome::Unfinished,
                Candidate::None { has_early: false } => return SearchOutcome::Exhausted,
                Candidate::Postponed => {}
                Candidate::Spared(object) => search.taken.push(object),
                Candidate::Unfinished(object) => {
                    search.taken.push(object);
                    return SearchOutcome::Unfinished;
                }
                Candidate::Victim(object) => {
                    let group = self.inventory.catalog().first_of_group(object);
                    search.steps = search.steps.saturating_sub(group.len());
                    let is_passed_over =
                        search.is_released_only && !releases::are_released(self.inventory, &group);
                    if is_passed_over || !self.add_victims(search, &group, request, found) {
                        search.taken.push(object);
                        continue;
                    }
                    for &member in &group {
                        candidates::take_out(self.inventory, member);
                    }
                    // Several members of a large group may come first in the order.
                    let is_new =
                        |member: &&ObjectSlot| group.len() == 1 || search.members.insert(**member);
                    search.taken.extend(group.iter().filter(is_new));
                    if let Some(outcome) = self.evict_run(now, pass, search, &group, request, found)
                    {
                        return outcome;
                    }
                }
            }
        }
    }

    /// Evicts a run of adjacent victims that includes a block of the latest ones, if the object
    /// fits there. Evicts only this run and the groups of its objects. Returns `None` if there is no
    /// such run, or if it could not be evicted.
    fn evict_run(
        &mut self,
        now: Moment,
        pass: EvictionPass,
        search: &mut VictimSearch,
        latest: &[ObjectSlot],
        request: &AllocRequest<'_>,
        found: &mut Search,
    ) -> Option<SearchOutcome> {
        let copies =
            latest.iter().flat_map(|&object| self.inventory.object(object).replicas.iter());
        let run = copies.into_iter().find_map(|copy| {
            let segment = copy.segment;
            search.reachable.get(&segment)?.filter(|&bytes| bytes >= search.need)?;
            let is_taken = |block| search.blocks.contains_key(&(segment, block));
            let (length, steps) = (request.length, &mut search.steps);
            let allocator = &self.inventory.segment(segment).allocator;
            Some((segment, allocator.find_run(copy.block, length, steps, is_taken)?))
        });
        let (segment, first) = run?;
        if self.move_run_down(now, segment, first, request.length) {
            return Some(SearchOutcome::Moving);
        }
        self.evict_window(now, pass, search.need, request, segment, first, found)
    }

    /// Lets those objects move down that have to before a run is evicted, from its first block on.
    /// Returns whether there are any.
    pub(super) fn move_run_down(
        &mut self,
        now: Moment,
        segment: SegmentSlot,
        first: BlockId,
        length: u64,
    ) -> bool {
        if self.inventory.disks().is_empty() {
            return false;
        }
        let (mut is_moving, mut block) = (false, first);
        for _ in 0..STEPS {
            let allocator = &self.inventory.segment(segment).allocator;
            let is_last = allocator.window_fits(first, block, length);
            let next = if is_last { None } else { allocator.next_block(block) };
            if !allocator.is_block_free(block)
                && let Some(owner) = self.owner_of(segment, block)
            {
                is_moving |= moves::move_group_down(self.inventory, now, owner);
            }
            match next {
                Some(next) => block = next,
                None => break,
            }
        }
        is_moving
    }

    /// Counts the bytes that evicting these objects would free. Returns whether any are in a useful
    /// segment.
    fn add_victims(
        &self,
        search: &mut VictimSearch,
        group: &[ObjectSlot],
        request: &AllocRequest<'_>,
        found: &Search,
    ) -> bool {
        let mut helps = false;
        for &member in group {
            for replica in self.inventory.object(member).replicas.iter() {
                let slot = replica.segment;
                let reachable = search.reachable.entry(slot).or_insert_with(|| {
                    let is_useful = self.is_useful(slot, search.need, request, found);
                    is_useful.then(|| self.inventory.segment(slot).free())
                });
                if let Some(bytes) = reachable {
                    search.blocks.insert((slot, replica.block), member);
                    *bytes += self.inventory.segment(slot).allocator.size(replica.block);
                    helps = true;
                }
            }
        }
        helps
    }
}
