//! The state under its lock. What happened to objects is told, and goes to the log, before the lock
//! is given back, so that news and log keep the order of the changes.

use std::{
    cell::Cell,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use mooncake_base::sync::MutexGuard;

use crate::{events::Events, journal::Journal, state::State};

thread_local! {
    /// Where the last effects that this thread appended to the log end. A call runs on one thread,
    /// and may hold the state several times; none of the places in between need know of the log.
    static LOG_POSITION: Cell<u64> = const { Cell::new(0) };
}

/// Forgets what calls before have appended.
pub(super) fn reset_log_position() {
    LOG_POSITION.set(0);
}

/// Behind which position of the log lies all that this thread appended since; 0 if nothing.
pub(super) fn log_position() -> u64 {
    LOG_POSITION.get()
}

/// The state, as long as this is held.
#[derive(Debug)]
pub(super) struct StateGuard<'a> {
    pub(super) state: Option<MutexGuard<'a, State>>,
    pub(super) events: Option<&'a Arc<Events>>,
    pub(super) journal: Option<&'a Journal>,
}

const HELD: &str = "the lock is held until this is dropped";

impl StateGuard<'_> {
    /// Gives the lock back and lets somebody who waits for it have it first.
    pub(super) fn unlock_fair(mut self) {
        self.flush();
        if let Some(state) = self.state.take() {
            state.unlock_fair();
        }
    }

    fn flush(&mut self) {
        if let (Some(state), Some(events)) = (&mut self.state, self.events)
            && state.has_events()
        {
            events.push(state.take_events());
        }
        if let (Some(state), Some(journal)) = (&mut self.state, self.journal)
            && state.has_effects()
        {
            LOG_POSITION.set(journal.append(|into| state.take_effects(into)));
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
