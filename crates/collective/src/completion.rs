//! The end of an operation, which any number of threads wait for.

use std::{fmt, sync::Arc, time::Duration};

use mooncake_base::{
    Error,
    sync::{Condvar, Mutex},
};

use crate::metrics::Recording;

type Callback = Box<dyn FnOnce() + Send>;

/// What became of an operation.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Why the operation failed as a whole.
    pub error: Option<Error>,
    /// Slots that were lost while it ran.
    pub failed_slots: Vec<usize>,
    /// Slot that a receive got its message from.
    pub source: Option<usize>,
}

/// The end of one operation.
#[derive(Clone, Default)]
pub struct Completion(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    done: Condvar,
    recording: Option<Recording>,
}

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    callbacks: Vec<Callback>,
}

impl Completion {
    /// Returns a completion that counts the operation when it ends.
    pub(crate) fn counted(recording: Recording) -> Self {
        Self(Arc::new(Shared { recording: Some(recording), ..Shared::default() }))
    }

    /// Returns a completion that is done.
    pub fn of(outcome: Outcome) -> Self {
        let completion = Self::default();
        completion.complete(outcome);
        completion
    }

    /// Ends the operation, once; later calls are ignored. Runs the callbacks.
    pub(crate) fn complete(&self, outcome: Outcome) {
        let mut state = self.0.state.lock();
        if state.outcome.is_some() {
            return;
        }
        // Who sees the end of the operation sees it counted.
        if let Some(recording) = &self.0.recording {
            recording.end(&outcome);
        }
        state.outcome = Some(outcome);
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.0.done.notify_all();
        callbacks.into_iter().for_each(|callback| callback());
    }

    /// Waits at most `time` and returns whether the operation is done.
    pub fn wait(&self, time: Duration) -> bool {
        let mut state = self.0.state.lock();
        if state.outcome.is_none() && !time.is_zero() {
            self.0.done.wait_for(&mut state, time);
        }
        state.outcome.is_some()
    }

    /// Returns what became of the operation, if it is done.
    pub fn outcome(&self) -> Option<Outcome> {
        self.0.state.lock().outcome.clone()
    }

    /// Calls `callback` once the operation is done: at once if it is.
    pub fn on_done(&self, callback: Callback) {
        let mut state = self.0.state.lock();
        if state.outcome.is_none() {
            state.callbacks.push(callback);
            return;
        }
        drop(state);
        callback();
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Completion").field(&self.outcome()).finish()
    }
}
