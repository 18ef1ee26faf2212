//! Exponential back-off: the pauses between attempts that fail.

use std::time::Duration;

/// Pauses that double from the first one up to a maximum. The caller counts the attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    max: Duration,
}

impl Backoff {
    /// Creates the rule from its first and its longest pause. A shorter maximum wins.
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self { first, max }
    }

    /// Returns the pause that follows on this number of earlier pauses in a row.
    pub fn pause(self, earlier: u32) -> Duration {
        let factor = 1_u32.checked_shl(earlier).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_from_the_first_to_the_maximum() {
        for (first, max, pauses) in [
            (50, 1000, [50, 100, 200, 400, 800, 1000, 1000]),
            (250, 1000, [250, 500, 1000, 1000, 1000, 1000, 1000]),
            (30, 30, [30; 7]),
            (30, 7, [7; 7]),
            (0, 7, [0; 7]),
        ] {
            let backoff = Backoff::new(Duration::from_millis(first), Duration::from_millis(max));
            let found = [0, 1, 2, 3, 4, 5, 6].map(|earlier| backoff.pause(earlier).as_millis());
            assert_eq!(found, pauses, "{backoff:?}");
        }
    }

    #[test]
    fn any_number_of_pauses_leads_to_the_maximum() {
        for (first, max) in
            [(Duration::from_nanos(1), Duration::from_secs(1)), (Duration::MAX, Duration::MAX)]
        {
            for earlier in [31, 32, 33, 64, u32::MAX] {
                assert_eq!(Backoff::new(first, max).pause(earlier), max, "{earlier}");
            }
        }
    }
}
