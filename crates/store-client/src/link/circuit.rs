//! Remembers for a moment that the master could not be reached, so that a dead master costs one
//! connect time-out and not one per call.

use std::time::Duration;

use mooncake_base::{Error, Moment};

const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Closed while connections succeed; after a failure it is open for about as long as the failed
/// attempt took, then lets one attempt through at a time.
#[derive(Debug, Default)]
pub(super) struct Circuit {
    failure: Option<Failure>,
}

#[derive(Debug)]
struct Failure {
    error: Error,
    /// Until then attempts fail at once.
    until: Moment,
}

impl Circuit {
    /// Whether a connection may be tried now; while the master is thought dead, by one caller at
    /// a time, who has the given time for it.
    ///
    /// # Errors
    /// The failure that is remembered.
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

    /// A connection was made.
    pub(super) fn record_success(&mut self) {
        self.failure = None;
    }

    /// An attempt failed after so long.
    pub(super) fn record_failure(&mut self, error: Error, now: Moment, took: Duration) {
        let until = now + took.clamp(PAUSE_MIN, PAUSE_MAX);
        self.failure = Some(Failure { error, until });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn error() -> Error {
        Error::internal("dead")
    }

    #[test]
    fn after_a_failure_attempts_fail_at_once_and_then_one_is_let_through() {
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
    fn the_pause_is_neither_nothing_nor_for_ever() {
        let mut circuit = Circuit::default();
        let start = Moment::default();
        circuit.record_failure(error(), start, Duration::ZERO);
        assert!(circuit.check_attempt(start, SECOND).is_err());
        circuit.record_failure(error(), start, Duration::from_secs(3600));
        assert!(circuit.check_attempt(start + PAUSE_MAX, SECOND).is_ok());
    }
}
