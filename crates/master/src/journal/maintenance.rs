//! The maintenance threads of the log: one writes it for the tasks of the runtime, one syncs it, and
//! one takes snapshots and restarts the log after a failure.

use std::{
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use mooncake_base::sync::MutexGuard;
use mooncake_base::{Clock, Error, Result, SegmentId, SystemClock};
use mooncake_os::threads::Threads;

use super::{Journal, LogSync, Snapshot, request::Wake};
use crate::state::State;

/// How soon a failed log is restarted.
const RETRY: Duration = Duration::from_secs(2);
/// How soon a failed snapshot is tried again.
const SNAPSHOT_RETRY: Duration = Duration::from_secs(30);
/// How often effects are written that nobody waits for.
const WRITE_INTERVAL: Duration = Duration::from_secs(5);
/// How often a log that is synced on request is synced without one.
const IDLE_SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// The number of objects written to a snapshot per lock of the state.
const SLICE_OBJECTS: u32 = 2048;

/// The owner of the state that the log belongs to.
pub(crate) trait StateOwner: Send + Sync + 'static {
    /// Returns the log, if there is one.
    fn journal(&self) -> Option<&Journal>;
    /// Locks the state, with all its effects appended to the log.
    ///
    /// # Errors
    /// The state is of no use any more.
    fn lock_state(&self) -> Result<MutexGuard<'_, State>>;
    /// Returns the present time of the owner's clock.
    fn now(&self) -> mooncake_base::Moment;
}

/// The handle of the maintenance threads. Dropping it ends them, and syncs the log.
#[derive(Debug)]
pub(crate) struct Maintenance<O: StateOwner> {
    owner: Weak<O>,
    threads: Threads,
}

impl<O: StateOwner> Maintenance<O> {
    /// Starts the threads.
    ///
    /// # Errors
    /// A thread cannot be created.
    pub(crate) fn start(owner: &Arc<O>) -> Result<Self> {
        let maintenance = Self { owner: Arc::downgrade(owner), threads: Threads::unbounded() };
        maintenance.start_thread("mc-log-write", run_writes)?;
        maintenance.start_thread("mc-log-sync", run_syncs)?;
        maintenance.start_thread("mc-snapshot", run_snapshots)?;
        Ok(maintenance)
    }

    fn start_thread(&self, name: &str, run: fn(&Weak<O>)) -> Result<()> {
        let owner = self.owner.clone();
        self.threads.spawn(name, move || run(&owner)).map_err(|source| {
            Error::internal("cannot create a maintenance thread of the log").caused_by(source)
        })
    }
}

impl<O: StateOwner> Drop for Maintenance<O> {
    fn drop(&mut self) {
        // Held until the threads have ended, so that none of them drops the owner.
        let owner = self.owner.upgrade();
        self.threads.stop(|| {
            if let Some(journal) = owner.as_ref().and_then(|owner| owner.journal()) {
                journal.write_requests.stop();
                journal.sync_requests.stop();
                journal.snapshot_requests.stop();
            }
        });
    }
}

/// Writes the log when asked.
fn run_writes<O: StateOwner>(owner: &Weak<O>) {
    while let Some(owner) = owner.upgrade() {
        let Some(journal) = owner.journal() else { return };
        let wake = journal.write_requests.wait(WRITE_INTERVAL);
        journal.wait_written(u64::MAX);
        if wake == Wake::Stopped {
            return;
        }
    }
}

/// Syncs the log at its interval and when asked.
fn run_syncs<O: StateOwner>(owner: &Weak<O>) {
    while let Some(owner) = owner.upgrade() {
        let Some(journal) = owner.journal() else { return };
        let interval = match journal.sync {
            LogSync::Interval(interval) => interval,
            LogSync::Always => IDLE_SYNC_INTERVAL,
            LogSync::Never => return,
        };
        let wake = journal.sync_requests.wait(interval);
        journal.sync_now();
        if wake == Wake::Stopped {
            return;
        }
    }
}

/// Takes the snapshots that are due.
fn run_snapshots<O: StateOwner>(owner: &Weak<O>) {
    let mut not_before = SystemClock.now();
    let mut is_put_off = false;
    while let Some(owner) = owner.upgrade() {
        let Some(journal) = owner.journal() else { return };
        let wake = journal.snapshot_requests.wait(RETRY);
        if wake == Wake::Stopped {
            return;
        }
        if journal.fatal.is_raised() {
            // The files stay as they are.
            continue;
        }
        is_put_off |= wake == Wake::Requested;
        // What this master began as a standby ends by itself.
        let Some(_making) = journal.directory.snapshots().try_lock() else { continue };
        let is_requested = std::mem::take(&mut is_put_off);
        if !journal.is_healthy.load(Ordering::Acquire) {
            let new_timeline_id = SegmentId::random().to_bytes();
            if let Err(error) = take_snapshot(&*owner, journal, Some(new_timeline_id)) {
                Snapshot::give_up(journal);
                tracing::warn!(%error, "the log cannot be restarted yet");
            }
        } else if is_requested
            && not_before.has_passed(SystemClock.now())
            && let Err(error) = take_snapshot(&*owner, journal, None)
        {
            not_before = SystemClock.now() + SNAPSHOT_RETRY;
            tracing::error!(%error, "the snapshot failed; the log keeps growing");
        }
    }
}

/// Takes a snapshot of the state. The log continues in a file with another timeline id if it was
/// broken.
fn take_snapshot(
    owner: &impl StateOwner,
    journal: &Journal,
    new_timeline_id: Option<[u8; 16]>,
) -> Result<()> {
    let mut snapshot = Snapshot::prepare(journal, new_timeline_id)?;
    snapshot.begin(journal, &*owner.lock_state()?, owner.now());
    loop {
        snapshot.write(journal)?;
        let state = owner.lock_state()?;
        let is_last = snapshot.slice(&state, SLICE_OBJECTS);
        state.unlock_fair();
        if is_last {
            break;
        }
    }
    snapshot.finish(journal, owner.now())
}
