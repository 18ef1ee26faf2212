//! The state under its lock. What happened to objects is told before the lock is given back, so
//! that news keep the order of the changes.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
};

use mooncake_base::sync::MutexGuard;

use crate::{events::Events, state::State};

/// The state, as long as this is held.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    pub(super) state: Option<MutexGuard<'a, State>>,
    pub(super) events: Option<&'a Arc<Events>>,
}

const HELD: &str = "the lock is held until this is dropped";

impl Locked<'_> {
    /// Gives the lock back and lets somebody who waits for it have it first.
    pub(super) fn unlock_fair(mut self) {
        self.tell();
        if let Some(state) = self.state.take() {
            state.unlock_fair();
        }
    }

    fn tell(&mut self) {
        if let (Some(state), Some(events)) = (&mut self.state, self.events)
            && state.has_news()
        {
            events.push(state.take_news());
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.tell();
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect(HELD)
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect(HELD)
    }
}
