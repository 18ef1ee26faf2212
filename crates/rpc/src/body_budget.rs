//! The memory that bodies take which no application has taken yet.

use std::sync::Arc;

use mooncake_base::{
    Clock, Error, ErrorCode, Moment, Result, SystemClock, sync::Condvar, sync::Mutex,
};

/// The bytes of all bodies of a server.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    max: u64,
    used: Mutex<u64>,
    freed: Condvar,
}

/// The bytes of one body, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct BodyBytes {
    budget: Arc<BodyBudget>,
    bytes: u64,
}

impl BodyBudget {
    pub(crate) fn new(max: u64) -> Arc<Self> {
        Arc::new(Self { max, used: Mutex::new(0), freed: Condvar::default() })
    }

    /// Begins a body without bytes.
    pub(crate) fn begin(self: &Arc<Self>) -> BodyBytes {
        BodyBytes { budget: Arc::clone(self), bytes: 0 }
    }
}

impl BodyBytes {
    /// Adds bytes that are about to arrive; waits for those of other bodies if there is no room.
    ///
    /// # Errors
    /// There was no room until the deadline.
    pub(crate) fn grow(&mut self, bytes: u64, deadline: Moment) -> Result<()> {
        let mut used = self.budget.used.lock();
        while used.saturating_add(bytes) > self.budget.max {
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                let text = "other messages take all memory for bodies";
                return Err(Error::new(ErrorCode::RPC_FAIL, text)
                    .with("bytes", *used)
                    .with("bodies_bytes_max", self.budget.max));
            }
            self.budget.freed.wait_for(&mut used, left);
        }
        *used += bytes;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for BodyBytes {
    fn drop(&mut self) {
        *self.budget.used.lock() -= self.bytes;
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;

    #[test]
    fn body_waits_for_the_bytes_of_others() {
        let budget = BodyBudget::new(10);
        let mut first = budget.begin();
        first.grow(4, Moment::default()).unwrap();
        first.grow(4, Moment::default()).unwrap();
        let mut second = budget.begin();
        let error = second.grow(3, Moment::default()).unwrap_err();
        assert!(error.to_string().contains("bodies_bytes_max=10"), "{error}");
        thread::scope(|scope| {
            let later = SystemClock.now() + Duration::from_secs(20);
            let waiting = scope.spawn(move || second.grow(3, later).map(|()| second));
            drop(first);
            let second = waiting.join().unwrap().unwrap();
            assert_eq!(*budget.used.lock(), 3);
            drop(second);
        });
        assert_eq!(*budget.used.lock(), 0);
    }
}
