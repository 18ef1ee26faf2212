//! Whether a client may still make calls, and waits that its end interrupts.

use std::time::Duration;

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Error, Moment, Result, SystemClock};
use mooncake_os::{call_limit, fork};

/// The lifetime of one client: from its creation until it is closed, in the process that made it.
#[derive(Debug)]
pub(crate) struct Lifetime {
    /// The name of the client.
    name: String,
    generation: u64,
    state: Mutex<LifetimeState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LifetimeState {
    is_closed: bool,
    is_heartbeat_stopped: bool,
    /// The next heartbeat is due at once.
    is_heartbeat_due: bool,
}

impl Lifetime {
    pub(crate) fn new(name: String) -> Self {
        Self {
            name,
            generation: fork::generation(),
            state: Mutex::default(),
            changed: Condvar::default(),
        }
    }

    /// Returns the name of the client.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Checks that calls may be made.
    ///
    /// # Errors
    /// A closed error after a fork or after closing; the message names the reason.
    pub(crate) fn check_open(&self) -> Result<()> {
        // The fork check comes first: after a fork, a lock may be held forever by a thread that
        // does not exist in this process.
        if self.is_forked() {
            let text = "the client was made before a fork; make another one in this process";
            return Err(Error::closed(text).with("client", &self.name));
        }
        if self.is_closed() {
            return Err(Error::closed("the client was closed").with("client", &self.name));
        }
        Ok(())
    }

    /// Returns whether the client belongs to the parent of this process.
    pub(crate) fn is_forked(&self) -> bool {
        fork::is_forked_since(self.generation)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }

    /// Closes the client and wakes all that wait. Returns false if it was closed before.
    pub(crate) fn close(&self) -> bool {
        let was_closed = std::mem::replace(&mut self.state.lock().is_closed, true);
        self.changed.notify_all();
        !was_closed
    }

    /// Sleeps for `time`, until the client is closed or until the limit of the call. Returns whether the client is still open.
    pub(crate) fn sleep_or_closed(&self, time: Duration) -> bool {
        let until = SystemClock.now() + time;
        let mut state = self.state.lock();
        while !state.is_closed {
            let left = call_limit::next_wait(until);
            if left.is_zero() {
                return true;
            }
            self.changed.wait_for(&mut state, left);
        }
        false
    }

    /// Makes the next heartbeat due at once.
    pub(crate) fn hasten_heartbeat(&self) {
        self.state.lock().is_heartbeat_due = true;
        self.changed.notify_all();
    }

    /// Sleeps until the next heartbeat is due, after `time` at the latest. Returns whether the client is
    /// still open.
    pub(crate) fn wait_for_heartbeat(&self, time: Duration) -> bool {
        let until = SystemClock.now() + time;
        let mut state = self.state.lock();
        while !state.is_closed {
            let left = until.left(SystemClock.now());
            if std::mem::take(&mut state.is_heartbeat_due) || left.is_zero() {
                return true;
            }
            self.changed.wait_for(&mut state, left);
        }
        false
    }

    /// Records that the heartbeat thread has ended.
    pub(crate) fn record_heartbeat_end(&self) {
        self.state.lock().is_heartbeat_stopped = true;
        self.changed.notify_all();
    }

    /// Waits until the heartbeat thread has ended, or until the given time.
    pub(crate) fn await_heartbeat_end(&self, until: Moment) {
        let mut state = self.state.lock();
        while !state.is_heartbeat_stopped {
            let left = until.left(SystemClock.now());
            if left.is_zero() {
                // The thread ends by itself when its call returns, since it then finds the client
                // closed.
                return;
            }
            self.changed.wait_for(&mut state, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use mooncake_base::ErrorKind;

    use super::*;

    #[test]
    fn heartbeat_that_is_due_at_once_does_not_wait() {
        let lifetime = Lifetime::new("node".to_owned());
        lifetime.hasten_heartbeat();
        assert!(lifetime.wait_for_heartbeat(Duration::from_secs(3600)));
        assert!(lifetime.wait_for_heartbeat(Duration::ZERO));
        lifetime.close();
        assert!(!lifetime.wait_for_heartbeat(Duration::from_secs(3600)));
    }

    #[test]
    fn closing_ends_a_sleep_and_refuses_calls() {
        let lifetime = Lifetime::new("node".to_owned());
        lifetime.check_open().unwrap();
        assert!(lifetime.sleep_or_closed(Duration::ZERO));
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| lifetime.sleep_or_closed(Duration::from_secs(3600)));
            assert!(lifetime.close());
            assert!(!sleeper.join().unwrap());
        });
        assert!(!lifetime.close(), "it was closed before");
        let error = lifetime.check_open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert!(error.to_string().contains("client=node"), "{error}");
    }
}
