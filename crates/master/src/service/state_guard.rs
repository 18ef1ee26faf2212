//! The guard of the locked state. Before unlocking, object events are published and effects are
//! appended to the log, so that events and log keep the order of the changes.

use std::{
    cell::Cell,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use mooncake_base::Error;
use mooncake_base::sync::MutexGuard;
use tokio::sync::Notify;

use super::disk_progress::DiskProgress;
use crate::{
    events::Events,
    fatal::FatalError,
    journal::Journal,
    state::{State, disk_progress},
};

/// Log positions of the calls on a thread.
#[derive(Debug, Clone, Copy, Default)]
struct LogPositions {
    /// The position behind the last effects that the thread appended; 0: none.
    own: u64,
    /// The position behind all effects that the thread may have seen: those of others included.
    seen: u64,
}

thread_local! {
    /// The positions since the last reset. A call runs on one thread and may lock the state several
    /// times. A thread-local keeps the log out of the signatures in between.
    static LOG_POSITIONS: Cell<LogPositions> = const { Cell::new(LogPositions { own: 0, seen: 0 }) };
}

/// Resets the positions before a call.
pub(super) fn reset_log_position() {
    LOG_POSITIONS.set(LogPositions::default());
}

/// Returns the log position behind the effects appended by this thread since the reset; 0 if none.
pub(super) fn own_log_position() -> u64 {
    LOG_POSITIONS.get().own
}

/// Returns the log position behind everything that the state held when this thread last unlocked
/// it; 0 if it did not since the reset. An answer that must outlast a restart waits for it.
pub(super) fn seen_log_position() -> u64 {
    LOG_POSITIONS.get().seen
}

/// The locked state.
#[derive(Debug)]
pub(super) struct StateGuard<'a> {
    state: Option<MutexGuard<'a, State>>,
    events: Option<&'a Arc<Events>>,
    journal: Option<&'a Journal>,
    fatal: &'a FatalError,
    offload_signal: &'a Notify,
    disk_progress: &'a DiskProgress,
    /// Whether the thread was panicking when it locked the state.
    was_panicking: bool,
}

const HELD: &str = "the lock is held until this is dropped";

impl<'a> StateGuard<'a> {
    pub(super) fn new(
        state: MutexGuard<'a, State>,
        events: Option<&'a Arc<Events>>,
        journal: Option<&'a Journal>,
        fatal: &'a FatalError,
        offload_signal: &'a Notify,
        disk_progress: &'a DiskProgress,
    ) -> Self {
        let was_panicking = std::thread::panicking();
        Self {
            state: Some(state),
            events,
            journal,
            fatal,
            offload_signal,
            disk_progress,
            was_panicking,
        }
    }

    /// Unlocks the state and hands the lock to a waiting thread, if there is one.
    pub(super) fn unlock_fair(mut self) {
        self.flush();
        if let Some(state) = self.state.take() {
            state.unlock_fair();
        }
    }

    fn flush(&mut self) {
        if let Some(state) = &self.state {
            self.disk_progress.publish(disk_progress(state));
        }
        if self.state.as_mut().is_some_and(|state| state.log_mut().take_offload_signal()) {
            self.offload_signal.notify_waiters();
        }
        if let (Some(state), Some(events)) = (&mut self.state, self.events)
            && state.log().has_events()
        {
            events.push(state.log_mut().take_events());
        }
        if let (Some(state), Some(journal)) = (&mut self.state, self.journal) {
            let mut positions = LOG_POSITIONS.get();
            // A state that a panic left half changed must not reach the log.
            if state.log().has_effects() && !self.fatal.is_raised() {
                positions.own = journal.append(|into| state.log_mut().take_effects(into));
                if state.take_sync_request() {
                    journal.request_sync();
                }
            }
            positions.seen = journal.appended();
            LOG_POSITIONS.set(positions);
        }
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        if self.state.is_some() && std::thread::panicking() && !self.was_panicking {
            // Raised before the lock is free, so that nobody takes the state for whole.
            self.fatal.raise(torn_error());
            return;
        }
        self.flush();
    }
}

fn torn_error() -> Error {
    Error::internal(
        "a fault inside the master left its state half changed: its log is whole up to the change \
         before, and clients keep running; report the panic in its output, and start the master \
         again on its state directory",
    )
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect(HELD)
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect(HELD)
    }
}
