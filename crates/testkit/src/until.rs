//! Waiting for a condition, with a deadline.

use std::time::{Duration, Instant};

/// The interval between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Polls until `poll` returns a value, and returns that value.
///
/// # Panics
/// If there is no value in time; the message names the condition.
pub fn until<T>(limit: Duration, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "timed out after {limit:?}: {what}");
        // No thread unparks this one on purpose: the conditions depend on other processes.
        std::thread::park_timeout(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_the_value() {
        let mut polls = 0;
        let found = until(Duration::from_secs(10), "three polls", || {
            polls += 1;
            (polls == 3).then_some(polls)
        });
        assert_eq!(found, 3);
    }

    #[test]
    #[should_panic(expected = ": nothing")]
    fn timeout_names_the_condition() {
        until(Duration::from_millis(5), "nothing", || None::<()>);
    }
}
