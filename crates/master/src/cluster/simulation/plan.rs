//! What varies from run to run.

use std::time::Duration;

use mooncake_base::random::SplitMix64;

use super::{TICK, bugs::Bug};
use crate::journal::LogSync;

/// Bytes of a page in most runs. All fences are short then.
pub(super) const SMALL_PAGE: u64 = 4096;

/// Bytes of a page in runs with fences of about a second: memory under longer ones has records of its own.
pub(super) const MEDIUM_PAGE: u64 = 9 << 20;

/// Bytes of a page in runs with fences of up to four seconds: no bytes are moved, so that they cost
/// nothing.
pub(super) const LARGE_PAGE: u64 = 30 << 20;

/// Write windows. Within a long one another master may take over, and grant memory.
pub(super) const SHORT_WINDOW: Duration = Duration::from_millis(400);
pub(super) const LONG_WINDOW: Duration = Duration::from_secs(4);

/// The plan of a run.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) seed: u64,
    /// The rule that the run leaves out.
    pub(super) bug: Option<Bug>,
    pub(super) members: usize,
    pub(super) copies: usize,
    pub(super) sync: LogSync,
    /// Time after which a silent member is taken out of the set.
    pub(super) timeout: Duration,
    /// Time within which a client writes what it puts.
    pub(super) write_window: Duration,
    /// Bytes of a page: the lengths of objects are counted in pages.
    pub(super) page_bytes: u64,
    pub(super) faults: Faults,
}

/// How rare faults are: each happens at one step of so many, to one process or pair of them; 0: never.
#[derive(Debug, Clone, Default)]
pub(super) struct Faults {
    pub(super) stop: usize,
    pub(super) kill: usize,
    /// A process is ended in order: a leader gives its lease back.
    pub(super) shutdown: usize,
    /// The same, for a leader that has just freed memory which a client reads: at one change of so many.
    pub(super) reader_shutdown: usize,
    /// The leader is asked to hand over.
    pub(super) handover: usize,
    /// A leader is killed while it writes: the standbys have what its file has not.
    pub(super) hanging_write: usize,
    pub(super) power_loss: usize,
    pub(super) wipe: usize,
    pub(super) partition: usize,
    /// A member reaches neither the others nor the service; only clients reach it.
    pub(super) isolation: usize,
    /// The same, for a leader whose log is to have the record of a longer fence: at one record of so many.
    pub(super) fence_isolation: usize,
    /// A connection between members breaks.
    pub(super) reset: usize,
    /// The clock of a machine stands still, so that no lease ends there.
    pub(super) clock_stop: usize,
    pub(super) service_cut: usize,
    pub(super) service_away: usize,
    pub(super) service_emptied: usize,
    /// The reads of a member show what the service held earlier.
    pub(super) stale_reads: usize,
    /// The leader is killed, a former one that was stopped goes on, and reads show that it leads.
    pub(super) leader_return: usize,
    /// One message of so many.
    pub(super) late: usize,
    pub(super) lost: usize,
    /// One message between members of so many has a bit that is another one.
    pub(super) damaged: usize,
}

impl Plan {
    pub(super) fn new(seed: u64, bug: Option<Bug>) -> Self {
        let random = &mut SplitMix64::new(!seed);
        let members = 2 + random.below(2);
        let copies = if members > 2 && random.below(3) == 0 { 3 } else { 2 };
        let sync = match random.below(10) {
            0 => LogSync::Never,
            1..=3 => LogSync::Always,
            _ => LogSync::Interval(Duration::from_millis(100)),
        };
        let mut of = |usual: usize| rarity(random, usual);
        let mut faults = Faults {
            stop: of(300),
            kill: of(300),
            power_loss: of(500),
            wipe: of(3000) * 2,
            partition: of(300),
            service_cut: of(300),
            service_away: of(500),
            service_emptied: of(1000) * 4,
            late: of(20),
            lost: of(40),
            hanging_write: of(300),
            clock_stop: 0,
            reset: of(300),
            shutdown: of(600),
            handover: of(200),
            damaged: of(200),
            isolation: of(1000),
            fence_isolation: of(8),
            stale_reads: 0,
            leader_return: 0,
            reader_shutdown: 0,
        };
        let timeout = Duration::from_millis(200);
        let page_bytes = if random.below(6) == 0 { LARGE_PAGE } else { SMALL_PAGE };
        let write_window = if random.below(4) == 0 { LONG_WINDOW } else { SHORT_WINDOW };
        // Drawn last, so that seeds have the plans that they had before.
        faults.stale_reads = rarity(random, 300);
        faults.leader_return = rarity(random, 300);
        let plan =
            Self { seed, bug, members, copies, sync, timeout, write_window, page_bytes, faults };
        match bug {
            None => plan,
            Some(bug) => plan.focused(bug),
        }
    }

    /// Returns how many steps there are between two syncs of a log; `None`: it is never synced at an
    /// interval.
    pub(super) fn sync_steps(&self) -> Option<usize> {
        match self.sync {
            LogSync::Never => None,
            LogSync::Always => Some(5),
            LogSync::Interval(interval) => Some((interval.as_millis() / TICK.as_millis()) as usize),
        }
    }

    pub(super) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }
}

/// Returns how rare a fault is in a run: as usual, more so, or never.
fn rarity(random: &mut SplitMix64, usual: usize) -> usize {
    match random.below(4) {
        0 => 0,
        1 => usual * 4,
        _ => usual,
    }
}
