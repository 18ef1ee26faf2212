//! Locks over those of the standard library, which keep all of their state in the lock itself.
//!
//! A lock with a process-wide table of its waiters (as some fast ones have) is broken in a forked
//! child: the table still points into stacks of threads that do not exist there, and the child's
//! first wait may walk over them. These locks hold nothing but a futex each, so that a child can use
//! locks of its own. They ignore poisoning: a panic under a lock is a bug that other threads can
//! survive.

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

/// The maximum time that a fair unlock waits for a waiter to get the lock.
const FAIR_WAIT: Duration = Duration::from_millis(1);

/// A mutual exclusion lock, to be held briefly.
#[derive(Default)]
pub struct Mutex<T: ?Sized> {
    waiters: AtomicU32,
    lock: sync::Mutex<T>,
}

/// An RAII guard for the value of a [`Mutex`].
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    waiters: &'a AtomicU32,
    /// `None` only while a [`Condvar`] waits with it.
    guard: Option<sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// Creates a lock around a value.
    pub const fn new(value: T) -> Self {
        Self { waiters: AtomicU32::new(0), lock: sync::Mutex::new(value) }
    }

    /// Returns the value; ownership proves that the lock is free.
    pub fn into_inner(self) -> T {
        self.lock.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Acquires the lock; blocks until it is free.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        MutexGuard { waiters: &self.waiters, guard: Some(guard) }
    }

    /// Acquires the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = match self.lock.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(MutexGuard { waiters: &self.waiters, guard: Some(guard) })
    }

    /// Returns the value; the exclusive borrow proves that the lock is free.
    pub fn get_mut(&mut self) -> &mut T {
        self.lock.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Releases the lock and yields until one of the waiting threads has acquired it, for at most
    /// 1 ms. For loops that acquire the lock again at once: the underlying futex lock is not fair,
    /// and such a loop would starve the waiters.
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
        self.guard.as_ref().expect("only a wait takes the guard, and it borrows us meanwhile")
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("only a wait takes the guard, and it borrows us meanwhile")
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// A condition variable for the value of a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

/// The outcome of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Returns whether the wait ended by its timeout.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Creates a condition variable.
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Releases the lock, waits for a notification or the timeout, and acquires the lock again.
    /// There is no wait without a timeout.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, time: Duration) -> WaitTimeoutResult {
        let held = guard.guard.take().expect("a guard that can be borrowed holds the lock");
        let (held, result) =
            self.0.wait_timeout(held, time).unwrap_or_else(PoisonError::into_inner);
        guard.guard = Some(held);
        WaitTimeoutResult(result.timed_out())
    }

    /// Like [`wait_for`](Self::wait_for), with a deadline.
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        until: Instant,
    ) -> WaitTimeoutResult {
        self.wait_for(guard, until.saturating_duration_since(Instant::now()))
    }
}

/// A reader-writer lock.
#[derive(Default)]
pub struct RwLock<T: ?Sized>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// Creates a lock around a value.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Acquires the lock for reading.
    pub fn read(&self) -> sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the value; the exclusive borrow proves that the lock is free.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acquires the lock for writing.
    pub fn write(&self) -> sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A lock that may be held for long, and that is acquired with a timeout.
#[derive(Debug, Default)]
pub struct TimedMutex<T> {
    is_taken: Mutex<bool>,
    returned: Condvar,
    value: Mutex<T>,
}

/// An RAII guard for the value of a [`TimedMutex`].
#[derive(Debug)]
pub struct TimedMutexGuard<'a, T> {
    value: Option<MutexGuard<'a, T>>,
    mutex: &'a TimedMutex<T>,
}

impl<T> TimedMutex<T> {
    /// Acquires the lock; `None` if that takes longer than `time`.
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
        // Uncontended: only the thread that set `is_taken` locks the value.
        Some(TimedMutexGuard { value: Some(self.value.lock()), mutex: self })
    }
}

impl<T> Deref for TimedMutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("only dropping takes the guard")
    }
}

impl<T> DerefMut for TimedMutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("only dropping takes the guard")
    }
}

impl<T> Drop for TimedMutexGuard<'_, T> {
    fn drop(&mut self) {
        drop(self.value.take());
        *self.mutex.is_taken.lock() = false;
        self.mutex.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn lock_stays_usable_after_a_panic() {
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
    fn wait_ends_by_notification_or_timeout() {
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
    fn fair_unlock_lets_a_waiter_go_first() {
        let lock = Arc::new(Mutex::new(0));
        let mut guard = lock.lock();
        let other = Arc::clone(&lock);
        let waiter = thread::spawn(move || *other.lock() += 1);
        let deadline = Instant::now() + Duration::from_secs(60);
        // The lock is acquired again at once, over and over: the waiter must still get through.
        while *guard == 0 {
            assert!(Instant::now() < deadline, "the waiter starves");
            guard.unlock_fair();
            guard = lock.lock();
        }
        drop(guard);
        waiter.join().unwrap();
    }

    #[test]
    fn timed_mutex_is_exclusive_and_times_out() {
        let mutex = Arc::new(TimedMutex::<u32>::default());
        let mut mine = mutex.take_within(Duration::ZERO).unwrap();
        *mine = 7;
        assert!(mutex.take_within(Duration::from_millis(1)).is_none());
        let other = Arc::clone(&mutex);
        let waiter = thread::spawn(move || *other.take_within(Duration::from_secs(60)).unwrap());
        drop(mine);
        assert_eq!(waiter.join().unwrap(), 7);
    }
}
