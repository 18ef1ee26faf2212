//! Whether a pair of devices may be tried: pairs that failed are set aside for pauses that grow.

use std::time::Duration;

use mooncake_base::{Backoff, Moment};

/// The first pause.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Failures of a pair of devices in a row.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Health {
    failures: u32,
    retry_at: Option<Moment>,
}

impl Health {
    /// Records a failure: the pair is not tried for a pause, twice as long as the last one.
    pub(crate) fn record_failure(&mut self, now: Moment, pause_max: Duration) {
        self.retry_at = Some(now + Backoff::new(PAUSE_MIN, pause_max).pause(self.failures));
        self.failures = self.failures.saturating_add(1);
    }

    /// Records a success, which ends all pauses.
    pub(crate) fn record_success(&mut self) {
        *self = Self::default();
    }

    /// Returns when the pair may be tried, if not now.
    pub(crate) fn retry_at(&self, now: Moment) -> Option<Moment> {
        self.retry_at.filter(|moment| !moment.has_passed(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_maximum_and_end_with_a_success() {
        let mut health = Health::default();
        let start = Moment::default();
        assert_eq!(health.retry_at(start), None);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            health.record_failure(start, Duration::from_secs(30));
            pauses.push(health.retry_at(start).unwrap().since(start).as_millis());
        }
        assert_eq!(pauses[..4], [50, 100, 200, 400]);
        assert_eq!(pauses[11], 30_000);
        assert_eq!(health.retry_at(start + Duration::from_secs(30)), None, "the pause is over");
        health.record_success();
        assert_eq!(health.retry_at(start), None);
        health.record_failure(start, Duration::from_secs(30));
        assert_eq!(health.retry_at(start), Some(start + PAUSE_MIN), "short again");
    }
}
