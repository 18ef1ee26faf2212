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
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use mooncake_base::{Error, Result, sync::Mutex};

use crate::{
    collectives::Operation,
    completion::{Completion, Driver, RECHECK},
    frame_wait::FrameWait,
    outcome::Outcome,
    thread_waker::ThreadWaker,
};

/// Most operations that wait for their turn.
const WAITING_MAX: usize = 1 << 16;

/// Carries out an operation.
pub(crate) trait CarryOut: Send + Sync {
    /// Returns what becomes of the operation.
    fn carry_out(self: Arc<Self>, operation: Operation) -> CarriedOut;
}

pub(crate) type CarriedOut = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// The operations of a group.
pub(crate) struct OperationQueue {
    runner: Arc<dyn CarryOut>,
    frames: Arc<FrameWait>,
    waiting: Mutex<Waiting>,
    first: Mutex<Option<(CarriedOut, Completion)>>,
    /// Threads that wait for an operation, and carry out what is before it.
    waiters: AtomicUsize,
    own_thread: OnceLock<Arc<ThreadWaker>>,
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

impl OperationQueue {
    pub(crate) fn new(runner: Arc<dyn CarryOut>, frames: Arc<FrameWait>) -> Arc<Self> {
        Arc::new(Self {
            runner,
            frames,
            waiting: Mutex::default(),
            first: Mutex::default(),
            waiters: AtomicUsize::new(0),
            own_thread: OnceLock::new(),
        })
    }

    /// Returns the end of an operation that a thread carries out while it waits for it.
    pub(crate) fn new_completion(self: &Arc<Self>) -> Completion {
        let queue: Arc<dyn Driver> = Arc::<Self>::clone(self);
        Completion::driven_by(Arc::downgrade(&queue), None)
    }

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
    pub(crate) fn work(&self) {
        let thread = Arc::clone(self.own_thread.get_or_init(ThreadWaker::of_this_thread));
        let waker = Waker::from(Arc::clone(&thread));
        loop {
            let left = self.drive(&waker, || false);
            if left == Left::Nothing && self.waiting.lock().is_closed {
                return;
            }
            let sleep = || match left {
                Left::Operations => self.frames.sleep(&thread, None, RECHECK),
                Left::Nothing => thread.park(RECHECK),
            };
            // Without a call, look for operations whose callers have not waited after all.
            while !sleep() && self.waiters.load(Ordering::SeqCst) > 0 {}
            self.frames.poll_all();
        }
    }

    fn is_empty(&self) -> bool {
        self.waiting.lock().operations.is_empty()
    }

    /// Carries out operations until one waits for a peer, or it is enough.
    fn drive(&self, waker: &Waker, is_enough: impl Fn() -> bool) -> Left {
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
                *first = Some((Arc::clone(&self.runner).carry_out(operation), completion));
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

impl Driver for OperationQueue {
    /// Carries out what is before the operation, and the operation.
    fn wait(&self, completion: &Completion, time: Duration) -> bool {
        if time.is_zero() {
            return self.frames.look(completion);
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut left = Left::Nothing;
        let is_done = self.frames.wait_with(completion, time, |waker| {
            left = self.drive(waker, || completion.is_done());
        });
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        if left == Left::Operations || !is_done {
            self.start();
        }
        is_done
    }

    fn detach(&self, _: &Completion) {
        self.start();
    }
}

impl fmt::Debug for OperationQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationQueue").field("waiters", &self.waiters).finish_non_exhaustive()
    }
}

pub(crate) fn closed() -> Error {
    Error::closed("the process group is closed")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use std::{
        future::poll_fn,
        thread::{self, ThreadId},
    };

    use super::*;
    use crate::mesh::Mesh;

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
    }

    fn queue_of(group: &Arc<Fake>) -> Arc<OperationQueue> {
        let mesh = Mesh::new(0, 1, None, None);
        OperationQueue::new(Arc::<Fake>::clone(group), FrameWait::new(mesh, Arc::default()))
    }

    fn begun(queue: &OperationQueue, count: usize) -> Vec<Completion> {
        let completions: Vec<_> = (0..count).map(|_| Completion::default()).collect();
        for completion in &completions {
            queue.push(Operation::Barrier, completion.clone()).unwrap();
        }
        completions
    }

    /// Runs a test beside the queue's own thread.
    fn with_own_thread(test: impl FnOnce(&OperationQueue, &Arc<Fake>)) {
        let group = Arc::new(Fake::default());
        let queue = queue_of(&group);
        thread::scope(|scope| {
            scope.spawn(|| queue.work());
            test(&queue, &group);
            group.answer(1 << 20);
            queue.close();
        });
    }

    #[test]
    fn waiting_thread_carries_out_what_is_before_its_operation() {
        let group = Arc::new(Fake::default());
        let queue = queue_of(&group);
        let begun = begun(&queue, 3);
        group.answer(3);
        assert!(queue.wait(&begun[1], LONG));
        assert_eq!(begun.iter().map(Completion::is_done).collect::<Vec<_>>(), [true, true, false]);
        assert_eq!(*group.carried_out_by.lock(), [thread::current().id(); 2]);
        assert!(queue.wait(&begun[2], LONG));
    }

    #[test]
    fn thread_that_stops_waiting_leaves_the_operation_to_another() {
        with_own_thread(|queue, group| {
            let begun = begun(queue, 2);
            assert!(!queue.wait(&begun[0], Duration::from_millis(1)));
            group.answer(2);
            assert!(begun[1].wait(LONG));
            assert!(begun[0].is_done());
            assert!(!group.carried_out_by.lock().contains(&thread::current().id()));
        });
    }

    #[test]
    fn operation_that_nobody_waits_for_is_carried_out() {
        with_own_thread(|queue, group| {
            let begun = begun(queue, 1);
            group.answer(1);
            assert!(begun[0].wait(LONG));
        });
    }

    #[test]
    fn every_one_of_many_waiting_threads_goes_on() {
        with_own_thread(|queue, group| {
            for _ in 0..300 {
                let begun = begun(queue, 8);
                thread::scope(|scope| {
                    for completion in begun.iter().rev() {
                        scope.spawn(|| assert!(queue.wait(completion, LONG)));
                    }
                    scope.spawn(|| (0..8).for_each(|_| group.answer(1)));
                });
            }
        });
    }

    #[test]
    fn operations_of_a_closed_queue_fail() {
        let queue = queue_of(&Arc::default());
        let begun = begun(&queue, 1);
        queue.close();
        assert!(begun[0].outcome().unwrap().error.is_some());
        assert!(queue.push(Operation::Barrier, Completion::default()).is_err());
        queue.work();
    }
}
