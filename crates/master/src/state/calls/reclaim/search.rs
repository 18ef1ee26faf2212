//! Searches for memory that go on over several calls, and what they hold meanwhile.

use std::time::Duration;

use mooncake_base::Moment;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

#[cfg(test)]
use crate::state::ids::BlockId;
use crate::state::{
    calls::reclaim::{
        Allocation, Pending, Reclaimer,
        next_step::{SearchMethod, SearchOutcome, SearchStep, SearchView},
        out_of_space::RefusedUse,
        window::Scan,
    },
    ids::SegmentSlot,
    inventory::{memory, moves, releases},
    pool::{Pool, request::AllocRequest},
    replica::{Replica, Replicas},
};

/// Searches that scan segments at the same time. Others wait for their turn.
const SCANS_MAX: usize = 8;

/// A search that nobody continued for this long is given up.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Id of a search between two calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::state) struct SearchId(u64);

/// Searches between two calls.
#[derive(Debug, Default)]
pub(in crate::state) struct Searches {
    by_id: FxHashMap<SearchId, Search>,
    last_id: u64,
    /// Steps of all searches, tasks and drain jobs so far.
    pub(in crate::state) steps: u64,
    /// Use of the memory when a put was last refused.
    pub(in crate::state) refused: Option<RefusedUse>,
}

/// A search for memory: what it found, and where it continues.
#[derive(Debug, Default)]
pub(in crate::state) struct Search {
    /// Blocks for the new object.
    pub(super) replicas: Replicas,
    /// Log position behind the records of what was evicted for them.
    pub(super) position: u64,
    /// The way in which it looks for the next replica.
    method: SearchMethod,
    pub(super) scan: Option<Scan>,
    /// How often it waited for memory that others had freed.
    freed_waits: u32,
    /// How often it waited for the log and began again.
    restarts: u32,
    /// A wait for the log was counted.
    has_waited: bool,
    continued: Moment,
}

impl Search {
    /// Returns the bytes that the search holds, by segment.
    fn held(&self, pool: &Pool) -> SmallVec<[(SegmentSlot, u64); 2]> {
        let size = |replica: &Replica| {
            (replica.segment, pool.segments.at(replica.segment).allocator.size(replica.block))
        };
        let scanned = self.scan.as_ref().and_then(|scan| scan.held(&pool.segments));
        self.replicas.iter().map(size).chain(scanned).collect()
    }
}

impl Searches {
    /// Returns how many steps all searches have taken: segments tried, objects and blocks looked at
    /// or evicted, for the text of a refusal, too.
    pub(in crate::state) fn steps(&self) -> u64 {
        self.steps
    }

    pub(in crate::state) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Forgets what lies in segments that left the pool.
    pub(in crate::state) fn forget(&mut self, is_gone: impl Fn(SegmentSlot) -> bool) {
        for search in self.by_id.values_mut() {
            search.replicas.retain(|replica| !is_gone(replica.segment));
            if let Some(scan) = &mut search.scan {
                scan.forget(&is_gone);
            }
        }
    }

    fn scans(&self) -> usize {
        self.by_id.values().filter(|search| search.scan.is_some()).count()
    }

    /// Returns all blocks that searches hold.
    #[cfg(test)]
    pub(in crate::state) fn blocks(&self) -> impl Iterator<Item = (SegmentSlot, BlockId)> {
        self.by_id.values().flat_map(|search| {
            let replicas = search.replicas.iter().map(|replica| (replica.segment, replica.block));
            replicas.chain(search.scan.iter().flat_map(Scan::blocks)).collect::<Vec<_>>()
        })
    }
}

impl Reclaimer<'_> {
    /// Goes on with a search, or begins one with the replicas found in free memory. Returns `None`
    /// if there is no memory.
    pub(super) fn search_copies(
        &mut self,
        now: Moment,
        need: u64,
        copies: usize,
        request: &AllocRequest<'_>,
        replicas: Replicas,
        id: &mut Option<SearchId>,
    ) -> Option<Allocation> {
        let mut search = match id.take() {
            Some(id) => self.resume_search(id),
            None => Search { replicas, ..Search::default() },
        };
        if let Some(pending) = self.step_search(now, need, copies, request, &mut search) {
            *id = Some(self.park_search(now, search));
            return Some(Allocation::Pending(pending));
        }
        let replicas = std::mem::take(&mut search.replicas);
        self.give_up(search);
        (!replicas.is_empty()).then_some(Allocation::Ready(replicas))
    }

    /// Gives up a search and frees what it holds.
    pub(in crate::state) fn cancel_search(&mut self, id: Option<SearchId>) {
        if let Some(id) = id {
            let search = self.resume_search(id);
            self.give_up(search);
        }
    }

    /// Gives up searches that nobody continues.
    pub(in crate::state) fn expire_searches(&mut self, now: Moment) {
        if self.searches.is_empty() {
            return;
        }
        let idle: Vec<SearchId> = self
            .searches
            .by_id
            .iter()
            .filter(|(_, search)| (search.continued + IDLE_MAX).has_passed(now))
            .map(|(&id, _)| id)
            .collect();
        idle.into_iter().for_each(|id| self.cancel_search(Some(id)));
    }

    fn park_search(&mut self, now: Moment, mut search: Search) -> SearchId {
        search.continued = now;
        for (segment, bytes) in search.held(self.inventory.pool()) {
            memory::withhold(self.inventory, segment, bytes);
        }
        self.searches.last_id += 1;
        let id = SearchId(self.searches.last_id);
        self.searches.by_id.insert(id, search);
        id
    }

    /// Takes a search out of the table; an empty one if it was given up meanwhile.
    fn resume_search(&mut self, id: SearchId) -> Search {
        let search = self.searches.by_id.remove(&id).unwrap_or_default();
        for (segment, bytes) in search.held(self.inventory.pool()) {
            memory::end_withholding(self.inventory, segment, bytes);
        }
        search
    }

    /// Frees what a search holds.
    fn give_up(&mut self, mut search: Search) {
        self.end_scan(&mut search);
        for replica in search.replicas.iter() {
            memory::free_block(self.inventory, replica.segment, replica.block, search.position);
        }
    }

    /// Runs one slice of a search. Returns `None` when it is over.
    fn step_search(
        &mut self,
        now: Moment,
        need: u64,
        copies: usize,
        request: &AllocRequest<'_>,
        search: &mut Search,
    ) -> Option<Pending> {
        if search.replicas.len() < copies {
            memory::release_due(self.inventory, now);
            let mut replicas = std::mem::take(&mut search.replicas);
            let tried = memory::allocate(self.inventory, request, copies, &mut replicas);
            self.searches.steps += tried as u64;
            search.replicas = replicas;
        }
        let (mut has_searched, mut is_exhausted) = (false, false);
        loop {
            let view = self.view(search, copies, has_searched, is_exhausted);
            let outcome = match view.next_step(|| self.may_fit_when_synced(need, request, search)) {
                SearchStep::SearchOrder => self.search_victims(now, need, request, search),
                SearchStep::Scan => self.step_scan(now, need, request, search),
                SearchStep::BeginScan => {
                    search.scan = Some(self.begin_scan(need, request, search));
                    self.step_scan(now, need, request, search)
                }
                SearchStep::Busy => return Some(Pending::Busy),
                SearchStep::AwaitFreed => {
                    search.freed_waits += 1;
                    self.await_log(now, need, 0, request, search);
                    return self.inventory.pool().unsynced_until().map(Pending::Sync);
                }
                SearchStep::AwaitEvicted => {
                    let evicted = search.position;
                    let position = self.await_log(now, need, evicted, request, search);
                    return Some(Pending::Sync(position));
                }
                SearchStep::Restart(position) => {
                    search.restarts += 1;
                    search.method = SearchMethod::Order;
                    self.end_scan(search);
                    return Some(Pending::Sync(position));
                }
                SearchStep::End => return None,
            };
            has_searched = true;
            self.count(search.method, outcome);
            search.method = search.method.after(outcome);
            match outcome {
                SearchOutcome::Found => {}
                SearchOutcome::Exhausted => is_exhausted = true,
                SearchOutcome::TimeIsUp | SearchOutcome::Unfinished => return Some(Pending::Yield),
                SearchOutcome::Moving => {
                    let progress = moves::await_disks(self.inventory, now, need);
                    return Some(Pending::Disks(progress));
                }
            }
        }
    }

    /// Returns what the rules of a search look at.
    fn view(
        &self,
        search: &Search,
        copies: usize,
        has_searched: bool,
        is_exhausted: bool,
    ) -> SearchView {
        let is_scanning = search.scan.is_some();
        let would_scan = search.method == SearchMethod::Scan && !is_scanning && !is_exhausted;
        debug_assert!(search.replicas.len() <= copies, "a search finds what is missing");
        let pool = self.inventory.pool();
        SearchView {
            missing: copies.saturating_sub(search.replicas.len()),
            method: search.method,
            is_scanning,
            may_scan: !would_scan || self.searches.scans() < SCANS_MAX,
            has_searched,
            is_exhausted,
            freed_waits: search.freed_waits,
            restarts: search.restarts,
            is_synced: pool.is_synced(search.position),
            unsynced_until: pool.unsynced_until(),
        }
    }

    /// Counts a step of a search. A search along the order that goes on with the same objects counts
    /// when it does not.
    fn count(&mut self, method: SearchMethod, outcome: SearchOutcome) {
        let counters = self.inventory.counters_mut();
        let goes_on = matches!(outcome, SearchOutcome::Moving | SearchOutcome::Unfinished);
        counters.evictions_attempted += u64::from(method == SearchMethod::Order && !goes_on);
        counters.evictions_succeeded += u64::from(outcome == SearchOutcome::Found);
    }

    /// Returns the log position that a search waits for, at least `evicted`. At its first wait,
    /// objects are released ahead: later puts should not have to wait.
    fn await_log(
        &mut self,
        now: Moment,
        need: u64,
        evicted: u64,
        request: &AllocRequest<'_>,
        search: &mut Search,
    ) -> u64 {
        if std::mem::replace(&mut search.has_waited, true) {
            evicted
        } else {
            releases::raise_ahead(self.inventory, now, need, evicted, request.spared)
        }
    }

    /// Returns whether freed memory waits for the log, and a replica may fit once it no longer does.
    /// Objects are not evicted while that is possible.
    fn may_fit_when_synced(&self, need: u64, request: &AllocRequest<'_>, search: &Search) -> bool {
        self.inventory.pool().unsynced_until().is_some()
            && self.inventory.segments().open().iter().any(|&slot| {
                let segment = self.inventory.segment(slot);
                let withheld = segment.reserved().withheld;
                let is_taken = search.replicas.iter().any(|replica| replica.segment == slot);
                let is_candidate =
                    !is_taken && request.filter.admits(slot) && segment.accepts_new();
                is_candidate && withheld > 0 && segment.free() + withheld >= need
            })
    }
}
