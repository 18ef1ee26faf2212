//! Who reads the confirmations of a standby. A thread that waits for one reads it itself, so that no other
//! thread has to be woken first. The thread of the connection reads while no thread does, and for tasks,
//! which must not block.

use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use mooncake_base::{
    Clock, Error, Moment, Result, SystemClock,
    sync::{Condvar, Mutex},
};

use super::{
    Journal,
    followers::{FollowerId, Followers},
};

/// For how long a thread that waits reads before it looks whether it should still wait.
/// In tests it is long, so that they notice a wake-up that is missed.
pub(super) const RECHECK: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 100 });

/// Time after which the thread of the connection reads again, once no thread that waits does. Shorter than
/// any silence after which a standby is given up.
const IDLE: Duration = Duration::from_millis(25);

/// What a standby has: everything up to a position, and all frames below a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StandbyProgress {
    pub(crate) position: u64,
    pub(crate) next_frame: u64,
}

/// The end of a connection at which the confirmations of a standby arrive.
pub(crate) trait ConfirmationSource: fmt::Debug + Send {
    /// Waits for the next one.
    ///
    /// # Errors
    /// The connection broke, or the standby is silent.
    fn receive(&mut self) -> Result<StandbyProgress>;

    /// Waits for the next one for a time; returns `None` if none came.
    ///
    /// # Errors
    /// The connection broke.
    fn receive_within(&mut self, time: Duration) -> Result<Option<StandbyProgress>>;
}

/// The confirmations that arrive over one connection.
#[derive(Debug)]
pub(crate) struct Confirmations {
    id: FollowerId,
    /// Locked by the thread that reads.
    source: Mutex<Box<dyn ConfirmationSource>>,
    /// A thread waits for a confirmation that another one reads.
    is_asked: AtomicBool,
    reading: Mutex<Reading>,
    /// It is the turn of the connection's thread.
    changed: Condvar,
}

/// Decides when the thread of the connection reads.
#[derive(Debug)]
struct Reading {
    /// Tasks wait for this position.
    awaited: u64,
    /// What the standby has.
    confirmed: u64,
    /// When something was read last.
    read: Moment,
    /// Why nothing is read any more.
    failure: Option<Error>,
}

impl Confirmations {
    pub(crate) fn new(id: FollowerId, source: impl ConfirmationSource + 'static) -> Self {
        let read = SystemClock.now();
        Self {
            id,
            source: Mutex::new(Box::new(source)),
            is_asked: AtomicBool::new(false),
            reading: Mutex::new(Reading { awaited: 0, confirmed: 0, read, failure: None }),
            changed: Condvar::new(),
        }
    }

    /// Reads on the thread of the connection, in turn with threads that wait, until the connection ends.
    ///
    /// # Errors
    /// Why it ended.
    pub(crate) fn read_all(&self, journal: &Journal) -> Result<()> {
        loop {
            self.wait_for_turn()?;
            let mut source = self.source.lock();
            while !self.is_handed_over() {
                let received = source.receive().map(Some);
                if self.take(journal.followers(), received).is_none() {
                    break;
                }
                journal.wake_waiters();
            }
            drop(source);
            journal.wake_waiters();
        }
    }

    /// Reads on a thread that waits for a position, unless another thread reads. Returns early if nothing
    /// arrives for some time.
    pub(super) fn read_up_to(&self, position: u64, journal: &Journal) {
        let Some(mut source) = self.source.try_lock() else { return };
        loop {
            match self.take(journal.followers(), source.receive_within(RECHECK)) {
                Some(confirmed) if confirmed < position => journal.wake_waiters(),
                Some(_) => break drop(source),
                // The thread of the connection may be waiting for its turn.
                None => break source.unlock_fair(),
            }
        }
        journal.wake_waiters();
    }

    /// Returns whether no thread reads. If one does, it lets a thread that waits read after it.
    pub(super) fn is_unread(&self) -> bool {
        let is_unread = self.source.try_lock().is_some();
        if !is_unread {
            self.is_asked.store(true, Ordering::Release);
        }
        is_unread
    }

    /// Makes the thread of the connection read until the standby has a position, as a task waits for it.
    pub(super) fn read_for_task(&self, position: u64) {
        let reading = &mut *self.reading.lock();
        reading.awaited = reading.awaited.max(position);
        self.changed.notify_all();
    }

    fn wait_for_turn(&self) -> Result<()> {
        let mut reading = self.reading.lock();
        loop {
            if let Some(failure) = reading.failure.take() {
                return Err(failure);
            }
            let left = (reading.read + IDLE).left(SystemClock.now());
            if reading.awaited > reading.confirmed || left.is_zero() {
                return Ok(());
            }
            self.changed.wait_for(&mut reading, left);
        }
    }

    /// Returns whether a thread that waits should read, and no task needs the thread of the connection.
    fn is_handed_over(&self) -> bool {
        let reading = self.reading.lock();
        reading.awaited <= reading.confirmed && self.is_asked.swap(false, Ordering::AcqRel)
    }

    /// Records what was received. Returns the position that the standby has; `None` if nothing was
    /// received.
    fn take(
        &self,
        followers: &Followers,
        received: Result<Option<StandbyProgress>>,
    ) -> Option<u64> {
        let progress = match received {
            Ok(progress) => progress?,
            Err(error) => {
                followers.detach(self.id);
                self.reading.lock().failure = Some(error);
                self.changed.notify_all();
                return None;
            }
        };
        followers.confirm(self.id, progress);
        let reading = &mut *self.reading.lock();
        reading.confirmed = reading.confirmed.max(progress.position);
        reading.read = SystemClock.now();
        Some(reading.confirmed)
    }
}
