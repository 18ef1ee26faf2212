//! Waiting until the log is written and on disk. One thread writes or syncs for all that wait.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use mooncake_base::sync::MutexGuard;
use mooncake_base::{Clock, Moment, SystemClock};
use tokio::sync::futures::Notified;

use super::{Journal, LogSync, Writer, disk::LogFile};

/// The synced position while nothing has to wait for a sync: the log is never synced, or is broken.
pub(super) const NOTHING_WAITS: u64 = u64::MAX;

/// How a task goes on with a log position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    /// It is durable.
    Reached,
    /// The task waits for progress.
    Waits,
    /// The task has a thread wait in the name of all, with [`Journal::lead`].
    Leads,
}

impl Journal {
    /// Waits until everything up to the position is written, and synced if [`LogSync::Always`] is
    /// set. Returns at once if it is, or if the log is broken: the master then continues without
    /// the log.
    pub fn wait_durable(&self, position: u64) {
        self.wait_written(position);
        while self.sync == LogSync::Always && self.synced_position() < position {
            // The lock is free when the sync of another thread has ended.
            if !self.sync_unless(position) {
                return;
            }
        }
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

    /// Returns what a task must do until the position is durable as in
    /// [`wait_durable`](Self::wait_durable). Writes the queue if no other thread does. Does not wait
    /// for other threads, which may be held up by the disk.
    pub(crate) fn try_durable(&self, position: u64) -> Durability {
        if self.written.load(Ordering::Acquire) < position {
            let Some(writer) = self.try_lock_writer() else { return Durability::Waits };
            if self.written.load(Ordering::Acquire) < position {
                self.write_queue(writer);
            }
        }
        if self.sync != LogSync::Always || self.synced_position() >= position {
            return Durability::Reached;
        }
        match self.is_led.swap(true, Ordering::AcqRel) {
            true => Durability::Waits,
            false => Durability::Leads,
        }
    }

    /// Waits until the position is durable, in the name of all tasks.
    pub(crate) fn lead(&self, position: u64) {
        self.wait_durable(position);
        self.is_led.store(false, Ordering::Release);
        self.progress.notify_waiters();
    }

    /// Returns a future that ends when a position has risen after this call.
    pub(crate) fn progress(&self) -> Notified<'_> {
        self.progress.notified()
    }

    /// Locks the writer if it is free or becomes free within microseconds.
    fn try_lock_writer(&self) -> Option<MutexGuard<'_, Writer>> {
        const SPINS: u32 = 200;
        for _ in 0..SPINS {
            if let Some(writer) = self.writer.try_lock() {
                return Some(writer);
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Returns the position up to which all effects are on disk. It is `u64::MAX` with
    /// [`LogSync::Never`], which starts a new timeline after a crash of the machine, and while the
    /// log is broken and its files are removed. It falls back from there when the log is restarted.
    pub fn synced_position(&self) -> u64 {
        self.synced.load(Ordering::Acquire)
    }

    /// Asks for a sync at once. Does not wait.
    pub(crate) fn request_sync(&self) {
        self.command(|commands| &mut commands.sync);
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
            self.request_sync();
            self.wakes_sync_waiters.wait_for(&mut waiters, left);
        }
        true
    }

    /// Sets the synced position and wakes the threads that wait for it.
    pub(super) fn set_synced(&self, position: u64) {
        {
            let _waiters = self.sync_waiters.lock();
            self.synced.store(position, Ordering::Release);
            self.wakes_sync_waiters.notify_all();
        }
        self.progress.notify_waiters();
    }

    /// Writes and syncs everything appended so far.
    pub fn sync_now(&self) {
        self.sync_unless(u64::MAX);
    }

    /// Writes and syncs everything appended so far, unless all up to `position` is on disk when the
    /// sync of another thread has ended. Returns `false` if there is no file to sync.
    fn sync_unless(&self, position: u64) -> bool {
        let _one = self.syncing.lock();
        if self.synced_position() >= position && position != u64::MAX {
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
                    Ok(()) => self.end_sync(writer, &files, (position, frame)),
                    Err(error) => self.fail(writer, "cannot be synced", error),
                }
            }
        });
        true
    }

    fn end_sync(
        &self,
        writer: &mut Writer,
        files: &[Arc<dyn LogFile>],
        (position, frame): (u64, u64),
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
