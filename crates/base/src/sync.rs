//! Locks over those of the standard library, whose state is all in the lock itself.
//!
//! A lock with a process-wide table of its waiters (as some fast ones have) is broken in a forked
//! child: the table still points into stacks of threads that are not there, and the child's first
//! wait may walk over them. Ours hold nothing but a futex each, so that a child may go on with
//! locks of its own. They know no poison: a panic under a lock is a bug that others may outlive.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{
        self, PoisonError, TryLockError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a fair unlock waits for one of the waiters to get the lock.
const FAIR_WAIT: Duration = Duration::from_millis(1);

/// A lock to be held for a moment.
#[derive(Default)]
pub struct Mutex<T: ?Sized> {
    waiters: AtomicU32,
    lock: sync::Mutex<T>,
}

/// The right to use what a [`Mutex`] guards.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    waiters: &'a AtomicU32,
    /// Away only while a [`Condvar`] has it.
    guard: Option<sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// A lock around a value.
    pub const fn new(value: T) -> Self {
        Self { waiters: AtomicU32::new(0), lock: sync::Mutex::new(value) }
    }

    /// The value, when nobody can hold the lock any more.
    pub fn into_inner(self) -> T {
        self.lock.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock and takes it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        MutexGuard { waiters: &self.waiters, guard: Some(guard) }
    }

    /// Takes the lock if nobody has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = match self.lock.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(MutexGuard { waiters: &self.waiters, guard: Some(guard) })
    }

    /// The value, when nobody else can hold the lock.
    pub fn get_mut(&mut self) -> &mut T {
        self.lock.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Gives the lock back and lets somebody who waits for it have it first: for loops that take
    /// it again at once.
    pub fn unlock_fair(self) {
        let waiters = self.waiters;
        drop(self);
        let before = waiters.load(Ordering::Relaxed);
        if before == 0 {
            return;
        }
        let deadline = Instant::now() + FAIR_WAIT;
        while waiters.load(Ordering::Relaxed) >= before && Instant::now() < deadline {
            thread::yield_now();
        }
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("only a wait, which borrows it, takes it away")
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("only a wait, which borrows it, takes it away")
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// Where threads wait until what a [`Mutex`] guards has changed.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// The time was over.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// One that nobody waits at.
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    /// Wakes one of those who wait.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all who wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Gives the lock back, waits to be woken or until the time is over, and takes it again.
    /// There is no wait without an end.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) -> WaitTimeoutResult {
        let held = guard.guard.take().expect("a guard that can be borrowed is there");
        let (held, result) =
            self.0.wait_timeout(held, time).unwrap_or_else(PoisonError::into_inner);
        guard.guard = Some(held);
        WaitTimeoutResult(result.timed_out())
    }

    /// As [`wait_for`](Self::wait_for), until a moment.
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        until: Instant,
    ) -> WaitTimeoutResult {
        self.wait_for(guard, until.saturating_duration_since(Instant::now()))
    }
}

/// A lock that many may read under.
#[derive(Default)]
pub struct RwLock<T: ?Sized>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// A lock around a value.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits until nobody writes.
    pub fn read(&self) -> sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value, when nobody else can hold the lock.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody reads or writes.
    pub fn write(&self) -> sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A right that one thread at a time has, perhaps for long, and that is waited for with an end.
#[derive(Debug, Default)]
pub struct TimedMutex<T> {
    is_taken: Mutex<bool>,
    returned: Condvar,
    value: Mutex<T>,
}

/// The right of a [`TimedMutex`], and what belongs to it.
#[derive(Debug)]
pub struct TimedMutexGuard<'a, T> {
    value: Option<MutexGuard<'a, T>>,
    turn: &'a TimedMutex<T>,
}

impl<T> TimedMutex<T> {
    /// Waits for the turn for so long at the most.
    pub fn take_within(&self, time: Duration) -> Option<TimedMutexGuard<'_, T>> {
        let until = Instant::now() + time;
        let mut is_taken = self.is_taken.lock();
        while *is_taken {
            if self.returned.wait_until(&mut is_taken, until).timed_out() && *is_taken {
                return None;
            }
        }
        *is_taken = true;
        drop(is_taken);
        // Free: only who has the turn takes it.
        Some(TimedMutexGuard { value: Some(self.value.lock()), turn: self })
    }
}

impl<T> Deref for TimedMutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("only dropping takes it away")
    }
}

impl<T> DerefMut for TimedMutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("only dropping takes it away")
    }
}

impl<T> Drop for TimedMutexGuard<'_, T> {
    fn drop(&mut self) {
        drop(self.value.take());
        *self.turn.is_taken.lock() = false;
        self.turn.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_lock_outlives_a_panic_under_it() {
        let lock = Arc::new(Mutex::new(1));
        let other = Arc::clone(&lock);
        let panicked = thread::spawn(move || {
            let _guard = other.lock();
            panic!("under the lock");
        });
        assert!(panicked.join().is_err());
        *lock.lock() += 1;
        assert_eq!(*lock.lock(), 2);
    }

    #[test]
    fn a_wait_ends_when_it_is_woken_or_its_time_is_over() {
        let pair = Arc::new((Mutex::new(false), Condvar::new()));
        let mut guard = pair.0.lock();
        assert!(pair.1.wait_for(&mut guard, Duration::from_millis(1)).timed_out());
        let other = Arc::clone(&pair);
        let waker = thread::spawn(move || {
            *other.0.lock() = true;
            other.1.notify_all();
        });
        let until = Instant::now() + Duration::from_secs(60);
        while !*guard {
            assert!(!pair.1.wait_until(&mut guard, until).timed_out());
        }
        waker.join().unwrap();
    }

    #[test]
    fn a_fair_unlock_lets_the_waiter_go_first() {
        let lock = Arc::new(Mutex::new(0));
        let mut guard = lock.lock();
        let other = Arc::clone(&lock);
        let waiter = thread::spawn(move || *other.lock() += 1);
        let deadline = Instant::now() + Duration::from_secs(60);
        // Taken again at once, over and over: the waiter must get through all the same.
        while *guard == 0 {
            assert!(Instant::now() < deadline, "the waiter starves");
            guard.unlock_fair();
            guard = lock.lock();
        }
        drop(guard);
        waiter.join().unwrap();
    }

    #[test]
    fn a_turn_is_had_by_one_and_given_up_waiting_for_in_time() {
        let turn = Arc::new(TimedMutex::<u32>::default());
        let mut mine = turn.take_within(Duration::ZERO).unwrap();
        *mine = 7;
        assert!(turn.take_within(Duration::from_millis(1)).is_none());
        let other = Arc::clone(&turn);
        let waiter = thread::spawn(move || *other.take_within(Duration::from_secs(60)).unwrap());
        drop(mine);
        assert_eq!(waiter.join().unwrap(), 7);
    }
}
