//! A futex in memory that all processes of the host map: one thread of a process sleeps on it until
//! a peer has written a frame into a ring.
//!
//! The thread announces that it sleeps, looks for frames, and sleeps; a writer looks at the
//! announcement after each frame. One of the two sees the other, since both write before they read.
//! Only the first writer after the announcement makes a system call. A peer that breaks the rules can
//! wake the thread for nothing, or not wake it: it looks again after the longest time of its sleep.
#![allow(unsafe_code, reason = "memory that two processes share")]

use std::{
    io,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use rustix::{
    thread::futex::{self, Flags, Timespec},
    time::Nsecs,
};

use crate::shared_memory::{SharedMemory, Use};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

/// The futex of a process, in that process or in a peer.
#[derive(Debug)]
pub(crate) struct SharedFutex(SharedMemory);

impl SharedFutex {
    /// Makes the futex of this process.
    pub(crate) fn create() -> io::Result<Self> {
        SharedMemory::create(size_of::<AtomicU32>()).map(Self)
    }

    /// Opens the futex of another process.
    pub(crate) fn open(process: u32, descriptor: i32) -> io::Result<Self> {
        let memory = SharedMemory::open(process, descriptor, Use::ReadAndWrite)?;
        if memory.length() != size_of::<AtomicU32>() {
            return Err(io::Error::other("the file of the peer holds no futex"));
        }
        Ok(Self(memory))
    }

    /// The descriptor that a peer opens.
    pub(crate) fn descriptor(&self) -> i32 {
        self.0.descriptor()
    }

    /// Announces that a thread sleeps. The caller then looks for frames, and calls [`Self::sleep`] if
    /// there are none.
    pub(crate) fn announce_sleep(&self) {
        self.word().store(ASLEEP, Ordering::SeqCst);
    }

    /// Sleeps at most `time`, unless somebody has called [`Self::wake`] since the announcement.
    pub(crate) fn sleep(&self, time: Duration) {
        let Ok(tv_sec) = i64::try_from(time.as_secs()) else { return };
        let time = Timespec { tv_sec, tv_nsec: Nsecs::from(time.subsec_nanos()) };
        // Whatever ends the sleep, the caller looks for frames.
        let _ = futex::wait(self.word(), Flags::empty(), ASLEEP, Some(&time));
    }

    /// Takes the announcement back.
    pub(crate) fn end_sleep(&self) {
        self.word().store(AWAKE, Ordering::SeqCst);
    }

    /// Wakes the thread that has announced that it sleeps, if there is one.
    pub(crate) fn wake(&self) {
        if self.word().swap(AWAKE, Ordering::SeqCst) == ASLEEP {
            // Fails only for an address that is none.
            let _ = futex::wake(self.word(), Flags::empty(), 1);
        }
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the memory is mapped as long as `self`, starts at a page and has this size; all
        // access is atomic.
        unsafe { self.0.memory().cast().as_ref() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use std::{sync::atomic::AtomicUsize, thread, time::Instant};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (SharedFutex, SharedFutex) {
        let made = SharedFutex::create().unwrap();
        let opened = SharedFutex::open(std::process::id(), made.descriptor()).unwrap();
        (made, opened)
    }

    /// A wake-up that is lost would end the test by its limit.
    #[test]
    fn each_sleep_ends_when_something_was_written() {
        const COUNT: usize = 20_000;
        let (sleeper, waker) = pair();
        let (written, seen) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=COUNT {
                    while seen.load(Ordering::SeqCst) < number - 1 {
                        thread::yield_now();
                    }
                    written.store(number, Ordering::SeqCst);
                    waker.wake();
                }
            });
            for number in 1..=COUNT {
                loop {
                    sleeper.announce_sleep();
                    if written.load(Ordering::SeqCst) >= number {
                        break;
                    }
                    sleeper.sleep(LONG);
                }
                sleeper.end_sleep();
                seen.store(number, Ordering::SeqCst);
            }
        });
        assert!(begun.elapsed() < LONG);
    }

    #[test]
    fn sleep_ends_with_its_time_and_after_an_early_wake() {
        let (sleeper, waker) = pair();
        sleeper.announce_sleep();
        let begun = Instant::now();
        sleeper.sleep(Duration::from_millis(20));
        assert!(begun.elapsed() >= Duration::from_millis(20));
        sleeper.announce_sleep();
        waker.wake();
        sleeper.sleep(LONG);
        assert!(begun.elapsed() < LONG);
    }

    #[test]
    fn memory_of_another_size_is_no_futex() {
        let memory = SharedMemory::create(4096).unwrap();
        SharedFutex::open(std::process::id(), memory.descriptor()).unwrap_err();
    }
}
