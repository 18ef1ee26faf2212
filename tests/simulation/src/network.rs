//! What becomes of a message: how often it arrives, and when.

use std::time::Duration;

use crate::{plan::Faults, random::Random};

/// How long an ordinary message takes at the most.
const ORDINARY_MAX: Duration = Duration::from_millis(2);

/// The delays of the copies that arrive: none if it is lost, two if it is doubled.
pub(crate) fn deliveries(random: &mut Random, faults: &Faults) -> Vec<Duration> {
    let copies = match () {
        () if random.happens(faults.lost) => 0,
        () if random.happens(faults.doubled) => 2,
        () => 1,
    };
    (0..copies).map(|_| delay(random, faults)).collect()
}

/// How long a message or a piece of data takes that arrives.
pub(crate) fn delay(random: &mut Random, faults: &Faults) -> Duration {
    let max = if random.happens(faults.slow) { faults.slow_max } else { ORDINARY_MAX };
    Duration::from_micros(20 + random.below(max.as_micros() as u64))
}
