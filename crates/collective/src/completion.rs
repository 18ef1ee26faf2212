//! The end of an operation, which any number of threads wait for.

use std::{
    fmt,
    sync::{Arc, Weak},
    task::Waker,
    time::{Duration, Instant},
};

use mooncake_base::{Error, sync::Mutex};

use crate::{
    group::{Core, RECHECK},
    line::Parker,
    mesh::waiting::Attention,
    metrics::Recording,
};

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
    recording: Option<Recording>,
    /// The group of an operation for which a waiting thread polls.
    group: Option<Weak<Core>>,
    /// Whether the waiting thread carries out the operation.
    is_carried_out: bool,
}

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    callbacks: Vec<Callback>,
    /// Threads that wait.
    wakers: Vec<Waker>,
    /// Lets peers announce their frames, for an operation that ends without a thread that waits.
    attention: Option<Attention>,
}

impl Completion {
    /// Returns a completion that counts the operation when it ends.
    pub(crate) fn counted(recording: Recording, group: Weak<Core>) -> Self {
        let (recording, group) = (Some(recording), Some(group));
        Self(Arc::new(Shared { recording, group, ..Shared::default() }))
    }

    /// Returns a completion of an operation that is carried out by who waits for it.
    pub(crate) fn carried_out_in(group: Weak<Core>) -> Self {
        Self(Arc::new(Shared { group: Some(group), is_carried_out: true, ..Shared::default() }))
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
        let wakers = std::mem::take(&mut state.wakers);
        let attention = state.attention.take();
        drop(state);
        drop(attention);
        wakers.into_iter().for_each(Waker::wake);
        callbacks.into_iter().for_each(|callback| callback());
    }

    /// Lets the group carry out the operation without a thread that waits for it.
    pub fn start(&self) {
        if let Some(group) = self.group().filter(|_| self.0.is_carried_out) {
            group.line.start();
        }
    }

    /// Lets peers wake this process for their frames until the operation is done.
    pub(crate) fn attend(&self, group: &Core) {
        let attention = group.prepare_sleep();
        let mut state = self.0.state.lock();
        if state.outcome.is_none() && state.attention.is_none() {
            state.attention = Some(attention);
        }
    }

    /// Waits at most `time` and returns whether the operation is done. The waiting thread carries
    /// out a small operation itself.
    pub fn wait(&self, time: Duration) -> bool {
        if self.is_done() {
            return true;
        }
        match self.group() {
            Some(group) if time.is_zero() => {
                group.mesh.poll_all();
                if !self.is_done() {
                    drop(group.prepare_sleep());
                }
                self.is_done()
            }
            Some(group) if self.0.is_carried_out => group.line.wait(&group, self, time),
            group => self.wait_with(time, group.as_deref(), |_| {}),
        }
    }

    /// Waits, and calls `step` at the begin and each time that its waker was woken.
    pub(crate) fn wait_with(
        &self,
        time: Duration,
        group: Option<&Core>,
        mut step: impl FnMut(&Waker),
    ) -> bool {
        let parker = Parker::of_this_thread();
        let waker = Waker::from(Arc::clone(&parker));
        self.0.state.lock().wakers.push(waker.clone());
        let begun = Instant::now();
        loop {
            let polling = group.and_then(|group| group.mesh.begin_polling());
            step(&waker);
            if self.is_done() {
                return true;
            }
            if let (Some(group), Some(polling)) = (group, &polling) {
                group.spin(polling, || parker.is_woken());
            }
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() {
                self.0.state.lock().wakers.retain(|other| !other.will_wake(&waker));
                return false;
            }
            if !parker.park(Duration::ZERO) {
                match group {
                    Some(group) => group.sleep(&parker, polling, left.min(RECHECK)),
                    None => parker.park(left.min(RECHECK)),
                };
            }
        }
    }

    /// Returns whether both are the end of one operation.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns whether the operation is done.
    pub fn is_done(&self) -> bool {
        self.0.state.lock().outcome.is_some()
    }

    fn group(&self) -> Option<Arc<Core>> {
        self.0.group.as_ref().and_then(Weak::upgrade)
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
            drop(state);
            match self.group() {
                Some(group) if self.0.is_carried_out => group.line.start(),
                Some(group) => self.attend(&group),
                None => {}
            }
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
