//! Lets a thread sleep until another thread of the process, or a peer, wakes it.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::Wake,
    thread::{self, Thread},
    time::{Duration, Instant},
};

use crate::shared_futex::SharedFutex;

/// Lets a thread sleep until it is woken.
#[derive(Debug)]
pub(crate) struct ThreadWaker {
    thread: Thread,
    is_woken: AtomicBool,
    is_on_futex: AtomicBool,
    futex: OnceLock<Arc<SharedFutex>>,
}

impl ThreadWaker {
    pub(crate) fn of_this_thread() -> Arc<Self> {
        Arc::new(Self {
            thread: thread::current(),
            is_woken: AtomicBool::new(false),
            is_on_futex: AtomicBool::new(false),
            futex: OnceLock::new(),
        })
    }

    /// Returns whether the next call of [`Self::park`] returns at once.
    pub(crate) fn is_woken(&self) -> bool {
        self.is_woken.load(Ordering::SeqCst)
    }

    /// Waits at most `time`. Returns whether this thread was woken since the last call.
    pub(crate) fn park(&self, time: Duration) -> bool {
        let begun = Instant::now();
        loop {
            if self.is_woken.swap(false, Ordering::SeqCst) {
                return true;
            }
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return false;
            }
            thread::park_timeout(left);
        }
    }

    /// Waits as [`Self::park`], on the futex of this process. Calls `look` each time that a peer has
    /// woken it, and once before.
    pub(crate) fn sleep_on(
        &self,
        futex: &Arc<SharedFutex>,
        time: Duration,
        look: impl Fn(),
    ) -> bool {
        let futex = self.futex.get_or_init(|| Arc::clone(futex));
        self.is_on_futex.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        let is_woken = loop {
            futex.announce_sleep();
            look();
            if self.is_woken.swap(false, Ordering::SeqCst) {
                break true;
            }
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() {
                break false;
            }
            futex.sleep(left);
        };
        futex.end_sleep();
        self.is_on_futex.store(false, Ordering::SeqCst);
        is_woken
    }
}

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.is_woken.swap(true, Ordering::SeqCst) || self.thread.id() == thread::current().id()
        {
            return;
        }
        self.thread.unpark();
        if let (true, Some(futex)) = (self.is_on_futex.load(Ordering::SeqCst), self.futex.get()) {
            futex.wake();
        }
    }
}
