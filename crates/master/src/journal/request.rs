//! Requests to a maintenance thread: any number of them wakes the thread once.

use std::time::Duration;

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, SystemClock};

/// The requests to one thread.
#[derive(Debug, Default)]
pub(super) struct Requests {
    open: Mutex<Open>,
    arrived: Condvar,
}

/// What the thread has not taken yet.
#[derive(Debug, Default)]
struct Open {
    has_request: bool,
    is_stopped: bool,
}

/// The reason why a wait for requests ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wake {
    /// There was a request.
    Requested,
    /// There was none for the whole wait.
    TimedOut,
    /// The thread must end.
    Stopped,
}

impl Requests {
    /// Asks the thread to act. Does not wait.
    pub(super) fn request(&self) {
        let open = &mut *self.open.lock();
        if !std::mem::replace(&mut open.has_request, true) {
            self.arrived.notify_one();
        }
    }

    /// Tells the thread to end.
    pub(super) fn stop(&self) {
        self.open.lock().is_stopped = true;
        self.arrived.notify_one();
    }

    /// Waits for a request for at most `time`, and takes it.
    pub(super) fn wait(&self, time: Duration) -> Wake {
        let end = SystemClock.now() + time;
        let mut open = self.open.lock();
        loop {
            if open.is_stopped {
                return Wake::Stopped;
            }
            if std::mem::take(&mut open.has_request) {
                return Wake::Requested;
            }
            let left = end.left(SystemClock.now());
            if left.is_zero() {
                return Wake::TimedOut;
            }
            self.arrived.wait_for(&mut open, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_before_wait_are_taken_once() {
        let requests = Requests::default();
        requests.request();
        requests.request();
        assert_eq!(requests.wait(Duration::ZERO), Wake::Requested);
        assert_eq!(requests.wait(Duration::ZERO), Wake::TimedOut);
        requests.request();
        requests.stop();
        assert_eq!(requests.wait(Duration::from_secs(60)), Wake::Stopped);
    }

    #[test]
    fn request_wakes_waiting_thread() {
        let requests = Requests::default();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| requests.wait(Duration::from_secs(60)));
            requests.request();
            assert_eq!(waiting.join().unwrap(), Wake::Requested);
        });
    }
}
