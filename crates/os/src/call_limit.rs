//! The limit of the call that this thread carries out for its caller: a deadline for all of the
//! call, and whether the caller was interrupted (Ctrl-C) and waits no longer.
//!
//! The limit belongs to the thread, so that every wait of a call heeds it without passing it down:
//! [`next_wait`] says how long a wait may last before it asks again. Threads that help with a call
//! take its limit over with [`current`] and [`CallLimit::run`].

use std::{
    cell::RefCell,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, sync_channel},
    },
    thread,
    time::Duration,
};

use mooncake_base::{Clock, Moment, SystemClock};

use crate::threads;

/// Interval at which a wait asks whether its caller was interrupted.
pub const INTERRUPTION_POLL: Duration = Duration::from_millis(50);

thread_local! {
    static CURRENT: RefCell<Option<Active>> = const { RefCell::new(None) };
}

/// The limit of one call, shared by the threads that carry it out.
#[derive(Debug, Clone)]
pub struct CallLimit(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    deadline: Option<Moment>,
    /// Whether anybody may set `is_interrupted`.
    is_interruptible: bool,
    is_interrupted: AtomicBool,
}

/// Returns whether the caller was interrupted; asked by the calling thread during its waits.
pub type Interruption = Rc<dyn Fn() -> bool>;

struct Active {
    limit: CallLimit,
    interruption: Option<Interruption>,
    /// When `interruption` was asked last, or the call began.
    asked_at: Moment,
}

impl CallLimit {
    /// A limit with a deadline for the whole call, if there is one.
    pub fn new(deadline: Option<Moment>, is_interruptible: bool) -> Self {
        Self(Arc::new(Shared {
            deadline,
            is_interruptible,
            is_interrupted: AtomicBool::new(false),
        }))
    }

    /// Returns whether the caller was interrupted during the call.
    pub fn is_interrupted(&self) -> bool {
        self.0.is_interrupted.load(Ordering::Relaxed)
    }

    /// Interrupts the call: its waits end within [`INTERRUPTION_POLL`] if the limit is interruptible.
    pub fn interrupt(&self) {
        self.0.is_interrupted.store(true, Ordering::Relaxed);
    }

    /// Runs `call` on this thread under the limit. `interruption` is asked during waits.
    pub fn run<T>(&self, interruption: Option<Interruption>, call: impl FnOnce() -> T) -> T {
        let asked_at = SystemClock.now();
        let active = Active { limit: self.clone(), interruption, asked_at };
        let before = CURRENT.replace(Some(active));
        let _restore = Restore(before);
        call()
    }

    fn capped(&self, deadline: Moment) -> Moment {
        match self.0.deadline {
            _ if self.is_interrupted() => Moment::default(),
            Some(limit) => deadline.min(limit),
            None => deadline,
        }
    }
}

/// Restores the limit of the thread, also after a panic.
struct Restore(Option<Active>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// Returns the limit of this thread, for a thread that helps with the call.
pub fn current() -> Option<CallLimit> {
    CURRENT.with_borrow(|active| Some(active.as_ref()?.limit.clone()))
}

/// Runs `call` under a limit of another thread, if that thread had one.
pub fn run_under<T>(limit: Option<CallLimit>, call: impl FnOnce() -> T) -> T {
    match limit {
        Some(limit) => limit.run(None, call),
        None => call(),
    }
}

/// Returns the deadline, or the end of the call's limit if that is earlier.
pub fn capped(deadline: Moment) -> Moment {
    CURRENT.with_borrow(|active| match active {
        Some(active) => active.limit.capped(deadline),
        None => deadline,
    })
}

/// Returns the end of the call's limit, if it has one. It is in the past after an interruption.
pub fn deadline() -> Option<Moment> {
    CURRENT.with_borrow(|active| {
        let limit = &active.as_ref()?.limit;
        if limit.is_interrupted() { Some(Moment::default()) } else { limit.0.deadline }
    })
}

/// Returns whether the call of this thread was interrupted.
pub fn is_interrupted() -> bool {
    CURRENT.with_borrow(|active| active.as_ref().is_some_and(|it| it.limit.is_interrupted()))
}

/// Returns whether the call has no time left, because of its deadline or an interruption.
pub fn is_over() -> bool {
    CURRENT.with_borrow(|active| match active {
        Some(Active { limit, .. }) => {
            limit.is_interrupted()
                || limit.0.deadline.is_some_and(|deadline| deadline.has_passed(SystemClock.now()))
        }
        None => false,
    })
}

/// Returns the time until `deadline`, or until the end of the call's limit if that is earlier. Asks
/// now and then whether the caller was interrupted; then no time is left.
pub fn left(deadline: Moment) -> Duration {
    let now = SystemClock.now();
    let interruption = CURRENT.with_borrow_mut(|active| {
        let active = active.as_mut()?;
        if now.since(active.asked_at) < INTERRUPTION_POLL {
            return None;
        }
        active.asked_at = now;
        active.interruption.clone()
    });
    // Asked without the borrow: a signal handler may make calls of its own.
    let is_interrupted = interruption.is_some_and(|is_interrupted| is_interrupted());
    CURRENT.with_borrow(|active| {
        let Some(Active { limit, .. }) = active else { return deadline.left(now) };
        if is_interrupted {
            limit.0.is_interrupted.store(true, Ordering::Relaxed);
        }
        limit.capped(deadline).left(now)
    })
}

/// Returns how long a wait that ends at `deadline` may last before it asks again; zero if it is
/// over.
pub fn next_wait(deadline: Moment) -> Duration {
    let left = left(deadline);
    let is_interruptible =
        CURRENT.with_borrow(|active| active.as_ref().is_some_and(|it| it.limit.0.is_interruptible));
    if is_interruptible { left.min(INTERRUPTION_POLL) } else { left }
}

/// Sleeps until `until` or the end of the call's limit.
pub fn sleep(until: Moment) {
    loop {
        let wait = next_wait(until);
        if wait.is_zero() {
            return;
        }
        thread::park_timeout(wait);
    }
}

/// Runs blocking work that cannot be interrupted. If the call can be, the work runs on a thread of
/// its own, which is left behind when the call is over. `None`: the deadline passed first.
pub fn run_blocking<T: Send + 'static>(
    deadline: Moment,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    if !current().is_some_and(|limit| limit.0.is_interruptible) {
        return Some(work());
    }
    let (sender, receiver) = sync_channel(1);
    let run = move || {
        // Fails if the caller has stopped waiting.
        let _ = sender.send(work());
    };
    threads::start_detached("mooncake-wait", run).ok()?;
    receive(&receiver, deadline)
}

/// Waits for a value of another thread. `None`: none came before the deadline.
pub fn receive<T>(receiver: &Receiver<T>, deadline: Moment) -> Option<T> {
    loop {
        let wait = next_wait(deadline);
        match receiver.recv_timeout(wait) {
            Ok(value) => return Some(value),
            Err(RecvTimeoutError::Timeout) if !wait.is_zero() => {}
            Err(_) => return None,
        }
    }
}

/// Scoped helper threads of a call that are not done yet. The calling thread waits for them before
/// the scope does, so that an interruption reaches them.
#[derive(Debug)]
pub struct Helpers {
    running: AtomicUsize,
    caller: thread::Thread,
}

impl Helpers {
    /// No helpers of this thread yet.
    pub fn new() -> Self {
        Self { running: AtomicUsize::new(0), caller: thread::current() }
    }

    /// Announces a helper; to be called before its thread starts.
    pub fn add(&self) -> Helper<'_> {
        self.running.fetch_add(1, Ordering::AcqRel);
        Helper(self)
    }

    /// Waits until no helper is running. Does nothing if the call cannot be interrupted: then the
    /// end of the scope waits.
    pub fn wait(&self) {
        if !current().is_some_and(|limit| limit.0.is_interruptible) {
            return;
        }
        while self.running.load(Ordering::Acquire) > 0 {
            // An interruption ends the waits of the helpers; they are still awaited here.
            next_wait(SystemClock.now() + INTERRUPTION_POLL);
            thread::park_timeout(INTERRUPTION_POLL);
        }
    }
}

impl Default for Helpers {
    fn default() -> Self {
        Self::new()
    }
}

/// A running helper, until it is dropped.
#[derive(Debug)]
pub struct Helper<'a>(&'a Helpers);

impl Drop for Helper<'_> {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.caller.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const FAR: Duration = Duration::from_secs(3600);

    fn far() -> Moment {
        SystemClock.now() + FAR
    }

    #[test]
    fn thread_without_limit_waits_until_its_deadline() {
        assert!(next_wait(far()) > INTERRUPTION_POLL);
        assert!(next_wait(Moment::default()).is_zero());
        assert!(!is_over());
        assert_eq!(run_blocking(far(), || 7), Some(7));
    }

    #[test]
    fn deadline_of_the_call_caps_every_wait() {
        let now = SystemClock.now();
        CallLimit::new(Some(now), false).run(None, || {
            assert!(next_wait(far()).is_zero());
            assert_eq!(capped(far()), now);
            assert!(is_over());
            sleep(far());
        });
        assert!(!is_over(), "the limit ended with the call");
    }

    #[test]
    fn interruption_ends_the_waits_of_all_threads_of_the_call() {
        let limit = CallLimit::new(None, true);
        let asked = Rc::new(Cell::new(0));
        let counter = Rc::clone(&asked);
        let interruption: Interruption = Rc::new(move || {
            counter.set(counter.get() + 1);
            counter.get() == 3
        });
        limit.run(Some(interruption), || {
            let helpers = Helpers::new();
            thread::scope(|scope| {
                let (limit, helper) = (current(), helpers.add());
                scope.spawn(move || {
                    let _helper = helper;
                    run_under(limit, || sleep(far()));
                });
                helpers.wait();
            });
            assert!(run_blocking(far(), || thread::park_timeout(FAR)).is_none());
            sleep(far());
            assert!(is_over());
        });
        assert!(limit.is_interrupted());
        assert!(asked.get() >= 3);
    }
}
