//! Circuit breaker: remembers for a while that the master could not be reached, so that a dead
//! master costs one connect time-out and not one per call.

use std::time::Duration;

use mooncake_base::{Error, Moment};

const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Closed while connections succeed. After a failure the circuit is open for about as long as the
/// failed attempt took, and then lets one attempt through at a time.
#[derive(Debug, Default)]
pub(super) struct Circuit {
    failure: Option<Failure>,
}

#[derive(Debug)]
struct Failure {
    error: Error,
    /// Attempts fail immediately until this time.
    until: Moment,
}

impl Circuit {
    /// Checks whether a connection attempt is allowed now. While the master counts as dead, only
    /// one caller at a time may try, and has `attempt` time for it.
    ///
    /// # Errors
    /// The remembered failure.
    pub(super) fn check_attempt(&mut self, now: Moment, attempt: Duration) -> Result<(), Error> {
        match &mut self.failure {
            None => Ok(()),
            Some(failure) if failure.until.has_passed(now) => {
                failure.until = now + attempt;
                Ok(())
            }
            Some(failure) => Err(failure.error.clone()),
        }
    }

    /// Records a successful connection.
    pub(super) fn record_success(&mut self) {
        self.failure = None;
    }

    /// Records an attempt whose caller stopped waiting: it says nothing about the master.
    pub(super) fn record_abandoned(&mut self, now: Moment) {
        if let Some(failure) = &mut self.failure {
            failure.until = now;
        }
    }

    /// Records an attempt that failed after `took`.
    pub(super) fn record_failure(&mut self, error: Error, now: Moment, took: Duration) {
        let until = now + took.clamp(PAUSE_MIN, PAUSE_MAX);
        self.failure = Some(Failure { error, until });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn abandoned_attempt_lets_the_next_one_through() {
        let mut circuit = Circuit::default();
        let now = Moment::default();
        circuit.record_abandoned(now);
        circuit.check_attempt(now, SECOND).unwrap();
        circuit.record_failure(error(), now, SECOND);
        circuit.check_attempt(now + SECOND, SECOND).unwrap();
        circuit.check_attempt(now + SECOND, SECOND).unwrap_err();
        circuit.record_abandoned(now + SECOND);
        circuit.check_attempt(now + SECOND, SECOND).unwrap();
    }

    fn error() -> Error {
        Error::internal("dead")
    }

    #[test]
    fn opens_after_failure_then_admits_one_attempt() {
        let mut circuit = Circuit::default();
        let start = Moment::from_boot(SECOND);
        circuit.check_attempt(start, SECOND).unwrap();
        circuit.check_attempt(start, SECOND).unwrap();
        circuit.record_failure(error(), start, SECOND * 2);
        assert!(circuit.check_attempt(start + SECOND, SECOND).is_err());
        circuit.check_attempt(start + SECOND * 2, SECOND).unwrap();
        assert!(circuit.check_attempt(start + SECOND * 2, SECOND).is_err(), "one at a time");
        circuit.record_success();
        circuit.check_attempt(start + SECOND * 2, SECOND).unwrap();
    }

    #[test]
    fn open_time_is_bounded_on_both_sides() {
        let mut circuit = Circuit::default();
        let start = Moment::default();
        circuit.record_failure(error(), start, Duration::ZERO);
        assert!(circuit.check_attempt(start, SECOND).is_err());
        circuit.record_failure(error(), start, Duration::from_secs(3600));
        assert!(circuit.check_attempt(start + PAUSE_MAX, SECOND).is_ok());
    }
}
