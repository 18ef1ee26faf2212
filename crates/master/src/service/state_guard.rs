//! The guard of the locked state. Before unlocking, object events are published and effects are
//! appended to the log, so that events and log keep the order of the changes.

use std::{
    cell::Cell,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use mooncake_base::sync::MutexGuard;

use crate::{events::Events, journal::Journal, state::State};

thread_local! {
    /// The log position behind the last effects that this thread appended. A call runs on one
    /// thread and may lock the state several times. A thread-local keeps the log out of the
    /// signatures in between.
    static LOG_POSITION: Cell<u64> = const { Cell::new(0) };
}

/// Resets the position before a call.
pub(super) fn reset_log_position() {
    LOG_POSITION.set(0);
}

/// Returns the log position behind all effects appended by this thread since the reset; 0 if none.
pub(super) fn log_position() -> u64 {
    LOG_POSITION.get()
}

/// Runs a read, whose effects nobody has to wait for.
pub(super) fn without_waiting<R>(read: impl FnOnce() -> R) -> R {
    let before = LOG_POSITION.get();
    let result = read();
    LOG_POSITION.set(before);
    result
}

/// The locked state.
#[derive(Debug)]
pub(super) struct StateGuard<'a> {
    pub(super) state: Option<MutexGuard<'a, State>>,
    pub(super) events: Option<&'a Arc<Events>>,
    pub(super) journal: Option<&'a Journal>,
}

const HELD: &str = "the lock is held until this is dropped";

impl StateGuard<'_> {
    /// Unlocks the state and hands the lock to a waiting thread, if there is one.
    pub(super) fn unlock_fair(mut self) {
        self.flush();
        if let Some(state) = self.state.take() {
            state.unlock_fair();
        }
    }

    fn flush(&mut self) {
        if let (Some(state), Some(events)) = (&mut self.state, self.events)
            && state.log().has_events()
        {
            events.push(state.log_mut().take_events());
        }
        if let (Some(state), Some(journal)) = (&mut self.state, self.journal)
            && state.log().has_effects()
        {
            LOG_POSITION.set(journal.append(|into| state.log_mut().take_effects(into)));
            if state.take_sync_request() {
                journal.request_sync();
            }
        }
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        self.flush();
    }
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
