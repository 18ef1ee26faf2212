//! The end of an operation, which any number of threads wait for.

use std::{
    fmt,
    sync::{Arc, Weak},
    task::Waker,
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;

use crate::{metrics::Recording, outcome::Outcome, thread_waker::ThreadWaker};

/// How often a wait looks for its end, where it is not announced.
pub(crate) const RECHECK: Duration = Duration::from_millis(100);

type Callback = Box<dyn FnOnce() + Send>;

/// Brings operations to their end, while threads wait for them and while none does.
pub(crate) trait Driver: Send + Sync {
    /// Waits at most `time` and returns whether the operation is done.
    fn wait(&self, completion: &Completion, time: Duration) -> bool;
    /// Lets the operation end without a thread that waits for it.
    fn detach(&self, completion: &Completion);
}

/// The end of one operation.
#[derive(Clone, Default)]
pub struct Completion(Arc<SharedCompletion>);

#[derive(Default)]
struct SharedCompletion {
    state: Mutex<CompletionState>,
    recording: Option<Recording>,
    driver: Option<Weak<dyn Driver>>,
}

#[derive(Default)]
struct CompletionState {
    outcome: Option<Outcome>,
    callbacks: Vec<Callback>,
    /// Threads that wait.
    wakers: Vec<Waker>,
    /// Dropped at the end of the operation.
    guard: Option<Box<dyn Send>>,
}

impl Completion {
    /// Returns a completion of an operation that the driver brings to its end.
    pub(crate) fn driven_by(driver: Weak<dyn Driver>, recording: Option<Recording>) -> Self {
        Self(Arc::new(SharedCompletion {
            recording,
            driver: Some(driver),
            ..SharedCompletion::default()
        }))
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
        // A thread that sees the end of the operation sees the operation counted.
        if let Some(recording) = &self.0.recording {
            recording.end(&outcome);
        }
        state.outcome = Some(outcome);
        let callbacks = std::mem::take(&mut state.callbacks);
        let wakers = std::mem::take(&mut state.wakers);
        let guard = state.guard.take();
        drop(state);
        drop(guard);
        wakers.into_iter().for_each(Waker::wake);
        callbacks.into_iter().for_each(|callback| callback());
    }

    /// Lets the group carry out the operation without a thread that waits for it.
    pub fn start(&self) {
        if let Some(driver) = self.driver() {
            driver.detach(self);
        }
    }

    /// Keeps a guard until the operation is done, if none is kept already.
    pub(crate) fn keep(&self, guard: impl Send + 'static) {
        let mut state = self.0.state.lock();
        if state.outcome.is_none() && state.guard.is_none() {
            state.guard = Some(Box::new(guard));
        }
    }

    /// Waits at most `time` and returns whether the operation is done. The waiting thread carries
    /// out a small operation itself.
    pub fn wait(&self, time: Duration) -> bool {
        if self.is_done() {
            return true;
        }
        match self.driver() {
            Some(driver) => driver.wait(self, time),
            None => self.sleep_until_done(time),
        }
    }

    fn sleep_until_done(&self, time: Duration) -> bool {
        let thread = ThreadWaker::of_this_thread();
        let waker = Waker::from(Arc::clone(&thread));
        self.add_waker(waker.clone());
        let begun = Instant::now();
        while !self.is_done() {
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() {
                self.remove_waker(&waker);
                return false;
            }
            thread.park(left.min(RECHECK));
        }
        true
    }

    /// Lets the end of the operation wake a thread.
    pub(crate) fn add_waker(&self, waker: Waker) {
        self.0.state.lock().wakers.push(waker);
    }

    pub(crate) fn remove_waker(&self, waker: &Waker) {
        self.0.state.lock().wakers.retain(|other| !other.will_wake(waker));
    }

    /// Returns whether both are the end of one operation.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns whether the operation is done.
    pub fn is_done(&self) -> bool {
        self.0.state.lock().outcome.is_some()
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.0.driver.as_ref().and_then(Weak::upgrade)
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
            if let Some(driver) = self.driver() {
                driver.detach(self);
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
