//! The rules of a search for memory: what its next step is.

/// How often a search waits for memory that was freed before it evicts: others may take it first.
const FREED_WAITS_MAX: u32 = 2;

/// How often a search may wait for the log and begin again.
const RESTARTS_MAX: u32 = 8;

/// The way in which a search looks for the next replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum SearchMethod {
    /// Along the order of eviction.
    #[default]
    Order,
    /// By a scan for a window, since the order did not give the replica.
    Scan,
}

/// What a step of a search in one of these ways gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SearchOutcome {
    /// A replica was added.
    Found,
    /// All evictable objects together do not make a large enough run.
    Exhausted,
    /// The step took too long. The scan of the search goes on, if there is one.
    TimeIsUp,
    /// Disks have to take the victims over first.
    Moving,
    /// The group of the next victim takes more steps to examine. The next search goes on with it.
    Unfinished,
}

/// What a search has so far, and what the memory is like.
#[derive(Debug, Clone, Copy)]
pub(super) struct SearchView {
    /// Replicas that are still missing.
    pub(super) missing: usize,
    pub(super) method: SearchMethod,
    /// The search has a scan.
    pub(super) is_scanning: bool,
    /// It may begin a scan: few others scan.
    pub(super) may_scan: bool,
    /// It has looked for a replica in this slice, ...
    pub(super) has_searched: bool,
    /// ... and there is nothing more to evict.
    pub(super) is_exhausted: bool,
    /// How often it waited for memory that others had freed.
    pub(super) freed_waits: u32,
    /// How often it waited for the log and began again.
    pub(super) restarts: u32,
    /// The records of what was evicted for it are on disk.
    pub(super) is_synced: bool,
    /// Log position at which all freed memory can be reused; `None` if none waits.
    pub(super) unsynced_until: Option<u64>,
}

/// The next step of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SearchStep {
    /// Wait for the log: memory that others freed may be enough.
    AwaitFreed,
    /// Evict along the order.
    SearchOrder,
    /// Begin a scan.
    BeginScan,
    /// Go on with the scan.
    Scan,
    /// Wait until one of the others has ended its scan.
    Busy,
    /// Wait for the log, which does not have the records yet of what was evicted.
    AwaitEvicted,
    /// Wait for the log up to this position, and begin again.
    Restart(u64),
    /// The search is over, with all replicas or with those that there are.
    End,
}

impl SearchMethod {
    /// Returns the way of the next step after one with that outcome.
    pub(super) fn after(self, outcome: SearchOutcome) -> Self {
        match outcome {
            SearchOutcome::Found => Self::Order,
            SearchOutcome::Exhausted | SearchOutcome::TimeIsUp => Self::Scan,
            SearchOutcome::Moving | SearchOutcome::Unfinished => self,
        }
    }
}

impl SearchView {
    /// Returns the next step of the search. `may_fit_when_synced` says whether a replica may fit once no
    /// freed memory waits for the log; it is asked only if that matters, since it takes time.
    pub(super) fn next_step(&self, may_fit_when_synced: impl FnOnce() -> bool) -> SearchStep {
        let is_missing = self.missing > 0;
        // Objects are not evicted while freed memory may be enough.
        let may_await_freed = !self.has_searched && self.freed_waits < FREED_WAITS_MAX;
        if is_missing && may_await_freed && may_fit_when_synced() {
            return SearchStep::AwaitFreed;
        }
        if is_missing && !self.is_exhausted {
            return match self.method {
                _ if self.is_scanning => SearchStep::Scan,
                SearchMethod::Order => SearchStep::SearchOrder,
                SearchMethod::Scan if self.may_scan => SearchStep::BeginScan,
                SearchMethod::Scan => SearchStep::Busy,
            };
        }
        if !self.is_synced {
            return SearchStep::AwaitEvicted;
        }
        match self.unsynced_until {
            // Memory that waits for the log may be enough.
            Some(position) if is_missing && self.restarts < RESTARTS_MAX => {
                SearchStep::Restart(position)
            }
            _ => SearchStep::End,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A search that has just begun.
    const NEW: SearchView = SearchView {
        missing: 1,
        method: SearchMethod::Order,
        is_scanning: false,
        may_scan: true,
        has_searched: false,
        is_exhausted: false,
        freed_waits: 0,
        restarts: 0,
        is_synced: true,
        unsynced_until: None,
    };

    /// A search that has found nothing more to evict.
    const EXHAUSTED: SearchView =
        SearchView { method: SearchMethod::Scan, has_searched: true, is_exhausted: true, ..NEW };

    #[track_caller]
    fn check(view: SearchView, may_fit_when_synced: bool, step: SearchStep) {
        assert_eq!(view.next_step(|| may_fit_when_synced), step, "{view:?}");
    }

    #[test]
    fn search_waits_for_freed_memory_before_it_evicts() {
        check(NEW, true, SearchStep::AwaitFreed);
        check(SearchView { is_scanning: true, ..NEW }, true, SearchStep::AwaitFreed);
        check(SearchView { freed_waits: 1, ..NEW }, true, SearchStep::AwaitFreed);
        check(SearchView { freed_waits: FREED_WAITS_MAX, ..NEW }, true, SearchStep::SearchOrder);
        check(SearchView { has_searched: true, ..NEW }, true, SearchStep::SearchOrder);
        check(SearchView { missing: 0, ..NEW }, true, SearchStep::End);
    }

    #[test]
    fn order_comes_before_a_scan() {
        let scan = SearchView { method: SearchMethod::Scan, ..NEW };
        check(NEW, false, SearchStep::SearchOrder);
        check(SearchView { may_scan: false, ..NEW }, false, SearchStep::SearchOrder);
        check(scan, false, SearchStep::BeginScan);
        check(SearchView { may_scan: false, ..scan }, false, SearchStep::Busy);
        check(SearchView { is_scanning: true, may_scan: false, ..scan }, false, SearchStep::Scan);
        // A window was begun along the order.
        check(SearchView { is_scanning: true, ..NEW }, false, SearchStep::Scan);
    }

    #[test]
    fn evicted_memory_is_not_used_before_the_log_says_so() {
        let found = SearchView { missing: 0, is_synced: false, ..NEW };
        check(found, false, SearchStep::AwaitEvicted);
        check(SearchView { is_synced: true, ..found }, false, SearchStep::End);
        check(SearchView { is_synced: false, ..EXHAUSTED }, false, SearchStep::AwaitEvicted);
        check(SearchView { is_synced: false, ..NEW }, false, SearchStep::SearchOrder);
    }

    #[test]
    fn search_begins_again_while_memory_waits_for_the_log() {
        let waiting = SearchView { unsynced_until: Some(7), ..EXHAUSTED };
        check(EXHAUSTED, false, SearchStep::End);
        check(waiting, false, SearchStep::Restart(7));
        check(SearchView { restarts: RESTARTS_MAX - 1, ..waiting }, false, SearchStep::Restart(7));
        check(SearchView { restarts: RESTARTS_MAX, ..waiting }, false, SearchStep::End);
        check(SearchView { missing: 0, ..waiting }, false, SearchStep::End);
        check(SearchView { is_synced: false, ..waiting }, false, SearchStep::AwaitEvicted);
    }

    #[test]
    fn freed_memory_is_looked_at_only_if_that_matters() {
        let refuse = || panic!("not to be asked");
        assert_eq!(EXHAUSTED.next_step(refuse), SearchStep::End);
        assert_eq!(SearchView { missing: 0, ..NEW }.next_step(refuse), SearchStep::End);
        let waited = SearchView { freed_waits: FREED_WAITS_MAX, ..NEW };
        assert_eq!(waited.next_step(refuse), SearchStep::SearchOrder);
    }

    #[test]
    fn outcome_decides_the_next_method() {
        use SearchMethod::{Order, Scan};
        use SearchOutcome::{Exhausted, Found, Moving, TimeIsUp, Unfinished};
        let rows =
            [(Order, [Order, Scan, Scan, Order, Order]), (Scan, [Order, Scan, Scan, Scan, Scan])];
        for (before, after) in rows {
            let outcomes = [Found, Exhausted, TimeIsUp, Moving, Unfinished];
            assert_eq!(outcomes.map(|outcome| before.after(outcome)), after, "{before:?}");
        }
    }
}
