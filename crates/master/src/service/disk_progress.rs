//! Wakes puts that wait until disks have taken evicted objects over.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Moment, SystemClock};

/// The longest wait: a disk that stopped reporting is noticed by the put that waits for it.
const WAIT_MAX: Duration = Duration::from_millis(500);

/// The progress of disks that was published last, and the puts that wait for more.
#[derive(Debug, Default)]
pub(super) struct DiskProgress {
    published: AtomicU64,
    /// Held between a look at `published` and the wait.
    lock: Mutex<()>,
    changed: Condvar,
}

impl DiskProgress {
    /// Wakes the waiting threads if there is progress. Called under the lock of the state, so that the
    /// number never falls.
    pub(super) fn publish(&self, progress: u64) {
        if self.published.load(Ordering::Relaxed) != progress {
            let _held = self.lock.lock();
            self.published.store(progress, Ordering::Relaxed);
            self.changed.notify_all();
        }
    }

    /// Waits until there is more progress than `seen`, until the deadline, or for [`WAIT_MAX`].
    pub(super) fn wait(&self, seen: u64, deadline: Moment) {
        let until = deadline.min(SystemClock.now() + WAIT_MAX);
        let mut held = self.lock.lock();
        while self.published.load(Ordering::Relaxed) <= seen {
            let left = until.left(SystemClock.now());
            if left.is_zero() {
                return;
            }
            self.changed.wait_for(&mut held, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn wakes_on_progress_and_not_before() {
        let progress = Arc::new(DiskProgress::default());
        progress.publish(3);
        let later = SystemClock.now() + Duration::from_secs(3600);
        progress.wait(2, later);
        let waiter = Arc::clone(&progress);
        let waiting = std::thread::spawn(move || {
            while waiter.published.load(Ordering::Relaxed) == 3 {
                waiter.wait(3, later);
            }
            waiter.published.load(Ordering::Relaxed)
        });
        progress.publish(4);
        assert_eq!(waiting.join().unwrap(), 4);
        progress.wait(4, SystemClock.now());
    }
}
