//! Waiting until the log is written and on disk. One thread writes or syncs for all that wait.

use std::{
    io,
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use mooncake_base::{
    Clock, Error, Moment, Result, SystemClock,
    sync::{Condvar, MutexGuard},
};

use super::{Journal, LogSync, LogWriter, confirmations::RECHECK, disk::LogFile};

/// The synced position while nothing has to wait for a sync: the log is never synced, or is broken.
pub(super) const NOTHING_WAITS: u64 = u64::MAX;

impl Journal {
    /// Waits until everything up to the position is written, and synced if [`LogSync::Always`] is
    /// set, and until all in-sync standbys have it. Returns at once if it is, or if the log is broken:
    /// the master then continues without the log. Writes and syncs on the calling thread, which a disk
    /// that hangs holds.
    ///
    /// # Errors
    /// A standby that must have a change does not confirm it: see [`outcome`](Self::outcome).
    pub fn wait_durable(&self, position: u64) -> Result<()> {
        self.wait_written(position);
        while self.sync == LogSync::Always && self.disk_position() < position {
            // The lock is free when the sync of another thread has ended.
            if !self.sync_unless(position) {
                break;
            }
        }
        self.wait_confirmed(position)
    }

    pub(super) fn wait_written(&self, position: u64) {
        if self.written.load(Ordering::Acquire) >= position {
            return;
        }
        let writer = self.writer.lock();
        // Most threads find that the previous holder of the lock has written their effects, too.
        if self.written.load(Ordering::Acquire) < position {
            self.write_queue(writer);
        }
    }

    /// Waits as [`wait_durable`](Self::wait_durable) does, without blocking the thread: a
    /// maintenance thread writes or syncs.
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// As [`wait_durable`](Self::wait_durable).
    pub(crate) async fn durable(&self, position: u64) -> Result<()> {
        loop {
            let mut progress = pin!(self.progress.notified());
            // Progress from here on is noticed.
            progress.as_mut().enable();
            if let Some(outcome) = self.outcome(position) {
                return outcome;
            }
            match self.sync {
                LogSync::Always if self.disk_position() < position => self.sync_requests.request(),
                _ if self.written.load(Ordering::Acquire) < position => {
                    self.write_requests.request()
                }
                _ => {}
            }
            self.followers.read_for_task(position);
            progress.await;
        }
    }

    /// Returns whether an answer need not wait for the position, whatever it says then.
    pub fn is_durable(&self, position: u64) -> bool {
        self.outcome(position).is_some()
    }

    /// Returns how the wait for a position has ended; `None` while it goes on. An answer says what is
    /// returned here: later, a standby that never confirmed the change may be waited for again, or not
    /// be needed any more.
    ///
    /// It is an error if a standby that must have the change has not confirmed it, and it is not known
    /// when it will. After the fatal error, which every answer tells, nothing is waited for.
    pub(crate) fn outcome(&self, position: u64) -> Option<Result<()>> {
        let is_written = self.written.load(Ordering::Acquire) >= position
            && (self.sync != LogSync::Always || self.disk_position() >= position);
        if is_written { self.confirmation(position) } else { None }
    }

    /// Returns how the wait for the standbys has ended; `None` while it goes on.
    fn confirmation(&self, position: u64) -> Option<Result<()>> {
        if self.followers.confirmed() >= position || self.fatal.is_raised() {
            return Some(Ok(()));
        }
        if !self.is_stuck.load(Ordering::Acquire) {
            return None;
        }
        self.stuck.lock().clone().map(Err)
    }

    /// Returns the position up to which answers need not wait; `None` if they wait only until the log is
    /// written, which takes little time.
    pub(crate) fn answerable_position(&self) -> Option<u64> {
        let confirmed = self.followers.confirmed();
        let synced = match self.sync {
            LogSync::Always => self.disk_position(),
            LogSync::Interval(_) | LogSync::Never => NOTHING_WAITS,
        };
        let position = confirmed.min(synced);
        (position != NOTHING_WAITS).then(|| position.min(self.written.load(Ordering::Acquire)))
    }

    /// Returns the position up to which all effects survive a restart of the master, and a crash of
    /// the machine if the log is used after one.
    pub fn durable_position(&self) -> u64 {
        self.synced_position().min(self.written.load(Ordering::Acquire))
    }

    /// Returns the position up to which all effects are on disk. It is `u64::MAX` with
    /// [`LogSync::Never`], which starts a new timeline after a crash of the machine, and while the
    /// log is broken and its files are removed. It falls back from there when the log is restarted.
    ///
    /// Counts the in-sync standbys, too: any of them may lead next.
    pub fn synced_position(&self) -> u64 {
        self.disk_position().min(self.followers.confirmed())
    }

    /// Returns the position up to which all effects are on the own disk.
    fn disk_position(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Waits until all in-sync standbys have everything up to the position. Reads their confirmations, as
    /// far as no other thread does.
    fn wait_confirmed(&self, position: u64) -> Result<()> {
        loop {
            if let Some(outcome) = self.confirmation(position) {
                return outcome;
            }
            // Held during the search: that another thread ends its reading is noticed after it.
            let mut waiters = self.sync_waiters.lock();
            if let Some(unread) = self.followers.unread(position) {
                drop(waiters);
                unread.read_up_to(position, self);
            } else if self.confirmation(position).is_none() {
                wait(&self.wakes_sync_waiters, &mut waiters, RECHECK);
            }
        }
    }

    /// Makes changes that lack a standby fail with this error, or wait for it again.
    pub(crate) fn set_stuck(&self, error: Option<Error>) {
        let mut stuck = self.stuck.lock();
        self.is_stuck.store(error.is_some(), Ordering::Release);
        *stuck = error;
        drop(stuck);
        self.wake_waiters();
    }

    /// Wakes all that wait for the log.
    pub(super) fn wake_waiters(&self) {
        // Who waits has seen the former state under this lock. It is free when they wake up.
        let waiters = *self.sync_waiters.lock();
        if waiters > 0 {
            self.wakes_sync_waiters.notify_all();
        }
        self.progress.notify_waiters();
    }

    /// Asks for a sync at once, or for a write if the log is never synced. Does not wait.
    pub(crate) fn request_sync(&self) {
        match self.sync {
            LogSync::Never => self.write_requests.request(),
            LogSync::Always | LogSync::Interval(_) => self.sync_requests.request(),
        }
    }

    /// Asks for a sync and waits until all effects up to `position` are on disk. Returns `false` if
    /// they are not by `deadline`. All threads that wait share one sync. Must not be called while
    /// the state is locked.
    pub(crate) fn wait_synced(&self, position: u64, deadline: Moment) -> bool {
        let mut waiters = self.sync_waiters.lock();
        while self.synced_position() < position {
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                return false;
            }
            if self.disk_position().min(self.written.load(Ordering::Acquire)) < position {
                self.request_sync();
            }
            self.followers.read_for_task(position);
            wait(&self.wakes_sync_waiters, &mut waiters, left);
        }
        true
    }

    /// Sets the synced position and wakes the threads that wait for it.
    pub(super) fn set_synced(&self, position: u64) {
        self.synced.store(position, Ordering::Release);
        self.wake_waiters();
    }

    /// Writes and syncs everything appended so far.
    pub fn sync_now(&self) {
        self.sync_unless(u64::MAX);
    }

    /// Writes and syncs everything appended so far, unless all up to `position` is on disk when the
    /// sync of another thread has ended. Returns `false` if there is no file to sync.
    fn sync_unless(&self, position: u64) -> bool {
        let _one = self.syncing.lock();
        if self.disk_position() >= position && position != u64::MAX {
            return true;
        }
        self.wait_written(u64::MAX);
        let started = self.with_writer(|writer| {
            let mut files = writer.unsynced.clone();
            let file = writer.file.clone()?;
            if writer.synced_frame < writer.next_frame {
                files.push(file);
            }
            let failures = self.failures.load(Ordering::Acquire);
            Some((files, writer.position, writer.next_frame, failures))
        });
        let Some((files, position, frame, failures)) = started else { return false };
        // Earlier files first: the frames of a later one say that they are on disk.
        let outcome = files.iter().try_for_each(|file| self.sync_file(&**file));
        self.with_writer(|writer| {
            if self.failures.load(Ordering::Acquire) == failures {
                match outcome {
                    Ok(()) => self.end_sync(writer, &files, position, frame),
                    Err(error) => self.fail(writer, "cannot be synced", error),
                }
            }
        });
        true
    }

    fn end_sync(
        &self,
        writer: &mut LogWriter,
        files: &[Arc<dyn LogFile>],
        position: u64,
        frame: u64,
    ) {
        writer.synced_frame = frame;
        if self.sync != LogSync::Never {
            self.synced_frame.store(frame, Ordering::Release);
        }
        writer.unsynced.retain(|old| !files.iter().any(|file| Arc::ptr_eq(file, old)));
        if self.sync != LogSync::Never {
            self.set_synced(position);
        }
    }

    fn sync_file(&self, file: &dyn LogFile) -> io::Result<()> {
        let start = SystemClock.now();
        file.sync()?;
        let time = SystemClock.now().since(start);
        let status = &mut *self.status.lock();
        status.syncs += 1;
        status.sync_time += time;
        status.sync_time_max = status.sync_time_max.max(time);
        Ok(())
    }
}

/// Waits until another thread wakes those that wait, or the time is over. `waiters` counts them.
fn wait(wakes: &Condvar, waiters: &mut MutexGuard<'_, usize>, time: Duration) {
    **waiters += 1;
    wakes.wait_for(waiters, time);
    **waiters -= 1;
}
