//! Waiting for something to become true, within a deadline.

use std::time::{Duration, Instant};

/// How long between two looks.
const LOOK: Duration = Duration::from_millis(2);

/// Looks again and again until there is something, and hands it out.
///
/// # Panics
/// If there is nothing in time; the message says what was waited for.
pub fn until<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {limit:?} in vain: {what}");
        // Nobody unparks this thread on purpose: the conditions are those of other processes.
        std::thread::park_timeout(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_hands_out_what_it_waited_for() {
        let mut looks = 0;
        let found = until(Duration::from_secs(10), "three looks", || {
            looks += 1;
            (looks == 3).then_some(looks)
        });
        assert_eq!(found, 3);
    }

    #[test]
    #[should_panic(expected = "in vain: nothing")]
    fn it_says_what_did_not_come() {
        until(Duration::from_millis(5), "nothing", || None::<()>);
    }
}
