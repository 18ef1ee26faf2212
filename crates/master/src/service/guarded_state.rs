//! The state behind its guard, with the log and without calls, for the simulation of a cluster: it
//! executes calls slice by slice, and waits for the log as the service does.

use std::sync::Arc;

use mooncake_base::{Moment, SystemClock, sync::MutexGuard};
#[cfg(test)]
use mooncake_proto::v1::LogMark;

use super::{shared_state::SharedState, state_guard};
#[cfg(test)]
use crate::state::LeaseSweep;
use crate::{journal::Journal, state::State};

/// The state and the log of a running master.
#[derive(Debug)]
pub struct GuardedState(SharedState);

/// The outcome of a slice of a call.
#[derive(Debug)]
pub struct Slice<R> {
    /// The result of the slice.
    pub result: R,
    /// The effects that were appended to the log.
    pub effects: Vec<u8>,
    /// The log position for which the answer of the call has to wait.
    pub position: u64,
}

impl GuardedState {
    /// Creates a guarded state whose log has everything that was recovered.
    pub fn new(state: State, journal: Journal) -> Self {
        Self(SharedState::new(state, Arc::new(SystemClock), Some(journal)))
    }

    /// Runs a slice of a call under the lock, and appends its effects to the log.
    pub fn run<R>(&self, slice: impl FnOnce(&mut State) -> R) -> Slice<R> {
        // A panic is left to the simulation, which reports it with the seed.
        state_guard::reset_log_position();
        let (result, effects) = self.lock(slice);
        Slice { result, effects, position: state_guard::seen_log_position() }
    }

    /// Runs a slice of a read, for whose effects nobody waits.
    pub fn read<R>(&self, slice: impl FnOnce(&mut State) -> R) -> Slice<R> {
        let (result, effects) = self.lock(slice);
        Slice { result, effects, position: 0 }
    }

    /// Lets no client expire because of the time since `since`, in which the log answered nobody.
    pub fn record_stall(&self, since: Moment) {
        self.0.lock().clients().record_stall(since);
    }

    /// Locks the state for a look at it. Changes stay out of the log until the next slice.
    pub fn look(&self) -> MutexGuard<'_, State> {
        self.0.lock_for_journal().expect("no slice panicked")
    }

    /// Returns the log.
    pub fn journal(&self) -> Option<&Journal> {
        self.0.journal()
    }

    /// Returns what clients tell a later master of the log.
    #[cfg(test)]
    pub(crate) fn log_mark(&self) -> Option<LogMark> {
        self.0.log_mark()
    }

    /// Returns whether a client heard of more of the log than was recovered.
    #[cfg(test)]
    pub(crate) fn has_lost_log(&self, heard: &LogMark) -> bool {
        self.0.has_lost_log(heard)
    }

    /// Tells the standbys which objects got a lease since the last call.
    #[cfg(test)]
    pub(crate) fn tell_leases(&self, sweep: &mut LeaseSweep) {
        self.0.tell_leases(sweep);
    }

    fn lock<R>(&self, slice: impl FnOnce(&mut State) -> R) -> (R, Vec<u8>) {
        let mut state = self.0.lock();
        let result = slice(&mut state);
        let effects = state.log().pending_effects().to_vec();
        (result, effects)
    }
}
