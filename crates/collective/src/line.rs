//! The operations of a group in the order of calls, and who carries them out: a thread that waits
//! for one of them, or the group's own thread.
//!
//! An operation is a future, so that a thread can leave it to another at any point. A thread that
//! leaves operations behind wakes the group's thread. Each operation that waits for a peer therefore
//! has the waker of a thread that goes on with it.

use std::{
    collections::VecDeque,
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use mooncake_base::{Error, Result, sync::Mutex};

use crate::{
    collectives::Operation,
    completion::{Completion, Outcome},
    group::{Core, RECHECK, closed},
    shared_futex::SharedFutex,
};

/// Most operations that wait for their turn.
const WAITING_MAX: usize = 1 << 16;

/// Carries out an operation.
pub(crate) trait CarryOut: Send + Sync {
    /// Returns what becomes of the operation.
    fn carry_out(self: Arc<Self>, operation: Operation) -> CarriedOut;
    /// Returns the group whose rings a waiting thread polls.
    fn core(&self) -> Option<&Core>;
}

pub(crate) type CarriedOut = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// The operations of a group.
#[derive(Default)]
pub(crate) struct Line {
    waiting: Mutex<Waiting>,
    first: Mutex<Option<(CarriedOut, Completion)>>,
    /// Threads that wait for an operation, and carry out what is before it.
    waiters: AtomicUsize,
    own_thread: OnceLock<Arc<Parker>>,
}

#[derive(Default)]
struct Waiting {
    operations: VecDeque<(Operation, Completion)>,
    is_closed: bool,
}

/// What a thread that carries out operations has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// Nothing.
    Nothing,
    /// Operations that wait for a peer, or that another thread carries out now.
    Operations,
}

impl Line {
    /// Adds an operation at the end.
    pub(crate) fn push(&self, operation: Operation, completion: Completion) -> Result<()> {
        let mut waiting = self.waiting.lock();
        if waiting.is_closed {
            return Err(closed());
        }
        if waiting.operations.len() >= WAITING_MAX {
            return Err(Error::invalid("too many operations wait: wait for some of them")
                .with("operations_max", WAITING_MAX));
        }
        waiting.operations.push_back((operation, completion));
        Ok(())
    }

    /// Lets the group's thread carry out operations.
    pub(crate) fn start(&self) {
        if let Some(thread) = self.own_thread.get() {
            thread.wake_by_ref();
        }
    }

    /// Fails the operations that have not begun, and lets [`Self::work`] end.
    pub(crate) fn close(&self) {
        let waiting = {
            let mut waiting = self.waiting.lock();
            waiting.is_closed = true;
            std::mem::take(&mut waiting.operations)
        };
        self.start();
        for (_, completion) in waiting {
            completion.complete(Outcome { error: Some(closed()), ..Outcome::default() });
        }
    }

    /// Carries out operations until the line is closed and nothing is left: the group's own thread.
    pub(crate) fn work(&self, group: &Arc<impl CarryOut>) {
        let parker = Arc::clone(self.own_thread.get_or_init(Parker::of_this_thread));
        let waker = Waker::from(Arc::clone(&parker));
        loop {
            let left = self.drive(group, &waker, || false);
            if left == Left::Nothing && self.waiting.lock().is_closed {
                return;
            }
            let core = group.core().filter(|_| left != Left::Nothing);
            let sleep = || match core {
                Some(core) => core.sleep(&parker, None, RECHECK),
                None => parker.park(RECHECK),
            };
            // Without a call, look for operations whose callers have not waited after all.
            while !sleep() && self.waiters.load(Ordering::SeqCst) > 0 {}
            if let Some(core) = group.core() {
                core.mesh.poll_all();
            }
        }
    }

    /// Waits at most `time` for an operation, and carries out what is before it and itself.
    /// Returns whether it is done.
    pub(crate) fn wait(
        &self,
        group: &Arc<impl CarryOut>,
        completion: &Completion,
        time: Duration,
    ) -> bool {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut left = Left::Nothing;
        let is_done = completion.wait_with(time, group.core(), |waker| {
            left = self.drive(group, waker, || completion.is_done());
        });
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        if left == Left::Operations || !is_done {
            self.start();
        }
        is_done
    }

    fn is_empty(&self) -> bool {
        self.waiting.lock().operations.is_empty()
    }

    /// Carries out operations until one waits for a peer, or it is enough.
    fn drive(
        &self,
        group: &Arc<impl CarryOut>,
        waker: &Waker,
        is_enough: impl Fn() -> bool,
    ) -> Left {
        let mut context = Context::from_waker(waker);
        loop {
            // A thread that has the lock leaves the operations to another, or is woken by a peer.
            let Some(mut first) = self.first.try_lock() else { return Left::Operations };
            if first.is_none() {
                if is_enough() && !self.is_empty() {
                    return Left::Operations;
                }
                let next = self.waiting.lock().operations.pop_front();
                let Some((operation, completion)) = next else {
                    drop(first);
                    // Who has added an operation meanwhile may have found the lock taken.
                    if self.is_empty() {
                        return Left::Nothing;
                    }
                    continue;
                };
                *first = Some((Arc::clone(group).carry_out(operation), completion));
            }
            let Some((operation, _)) = first.as_mut() else { return Left::Nothing };
            let Poll::Ready(outcome) = operation.as_mut().poll(&mut context) else {
                return Left::Operations;
            };
            let ended = first.take();
            drop(first);
            // Callbacks run in here, and may wait for other operations.
            if let Some((_, completion)) = ended {
                completion.complete(outcome);
            }
        }
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("waiters", &self.waiters).finish_non_exhaustive()
    }
}

/// Lets a thread sleep until it is woken.
#[derive(Debug)]
pub(crate) struct Parker {
    thread: Thread,
    is_woken: AtomicBool,
    is_on_futex: AtomicBool,
    futex: OnceLock<Arc<SharedFutex>>,
}

impl Parker {
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

impl Wake for Parker {
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use std::{future::poll_fn, thread::ThreadId};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// A group whose operations wait for a peer.
    #[derive(Default)]
    struct Fake {
        peer: Mutex<Peer>,
        carried_out_by: Mutex<Vec<ThreadId>>,
    }

    #[derive(Default)]
    struct Peer {
        answers: usize,
        waker: Option<Waker>,
    }

    impl Fake {
        fn answer(&self, count: usize) {
            let mut peer = self.peer.lock();
            peer.answers += count;
            if let Some(waker) = peer.waker.take() {
                waker.wake();
            }
        }
    }

    impl CarryOut for Fake {
        fn carry_out(self: Arc<Self>, _: Operation) -> CarriedOut {
            Box::pin(async move {
                poll_fn(|context| {
                    let mut peer = self.peer.lock();
                    if peer.answers == 0 {
                        peer.waker = Some(context.waker().clone());
                        return Poll::Pending;
                    }
                    peer.answers -= 1;
                    Poll::Ready(())
                })
                .await;
                self.carried_out_by.lock().push(thread::current().id());
                Outcome::default()
            })
        }

        fn core(&self) -> Option<&Core> {
            None
        }
    }

    fn begun(line: &Line, count: usize) -> Vec<Completion> {
        let completions: Vec<_> = (0..count).map(|_| Completion::default()).collect();
        for completion in &completions {
            line.push(Operation::Barrier, completion.clone()).unwrap();
        }
        completions
    }

    /// Runs a test beside the line's own thread.
    fn with_own_thread(test: impl FnOnce(&Line, &Arc<Fake>)) {
        let (line, group) = (Line::default(), Arc::new(Fake::default()));
        thread::scope(|scope| {
            scope.spawn(|| line.work(&group));
            test(&line, &group);
            group.answer(1 << 20);
            line.close();
        });
    }

    #[test]
    fn waiting_thread_carries_out_what_is_before_its_operation() {
        let (line, group) = (Line::default(), Arc::new(Fake::default()));
        let begun = begun(&line, 3);
        group.answer(3);
        assert!(line.wait(&group, &begun[1], LONG));
        assert_eq!(begun.iter().map(Completion::is_done).collect::<Vec<_>>(), [true, true, false]);
        assert_eq!(*group.carried_out_by.lock(), [thread::current().id(); 2]);
        assert!(line.wait(&group, &begun[2], LONG));
    }

    #[test]
    fn thread_that_stops_waiting_leaves_the_operation_to_another() {
        with_own_thread(|line, group| {
            let begun = begun(line, 2);
            assert!(!line.wait(group, &begun[0], Duration::from_millis(1)));
            group.answer(2);
            assert!(begun[1].wait_with(LONG, None, |_| {}));
            assert!(begun[0].is_done());
            assert!(!group.carried_out_by.lock().contains(&thread::current().id()));
        });
    }

    #[test]
    fn operation_that_nobody_waits_for_is_carried_out() {
        with_own_thread(|line, group| {
            let begun = begun(line, 1);
            group.answer(1);
            assert!(begun[0].wait_with(LONG, None, |_| {}));
        });
    }

    #[test]
    fn every_one_of_many_waiting_threads_goes_on() {
        with_own_thread(|line, group| {
            for _ in 0..300 {
                let begun = begun(line, 8);
                thread::scope(|scope| {
                    for completion in begun.iter().rev() {
                        scope.spawn(|| assert!(line.wait(group, completion, LONG)));
                    }
                    scope.spawn(|| (0..8).for_each(|_| group.answer(1)));
                });
            }
        });
    }

    #[test]
    fn operations_of_a_closed_line_fail() {
        let line = Line::default();
        let begun = begun(&line, 1);
        line.close();
        assert!(begun[0].outcome().unwrap().error.is_some());
        assert!(line.push(Operation::Barrier, Completion::default()).is_err());
        line.work(&Arc::new(Fake::default()));
    }
}
