//! The network: loses, duplicates and delays messages.

use std::time::Duration;

use crate::{plan::Faults, random::Random};

/// The longest delay of an ordinary message.
const ORDINARY_MAX: Duration = Duration::from_millis(2);

/// Returns the delay of each delivery: none for a lost message, two for a duplicated one.
pub(crate) fn deliveries(random: &mut Random, faults: &Faults) -> Vec<Duration> {
    let copies = match () {
        () if random.happens(faults.lost) => 0,
        () if random.happens(faults.duplicated) => 2,
        () => 1,
    };
    (0..copies).map(|_| delay(random, faults)).collect()
}

/// Returns the delay of a message or of a piece of data.
pub(crate) fn delay(random: &mut Random, faults: &Faults) -> Duration {
    let max = if random.happens(faults.slow) { faults.slow_max } else { ORDINARY_MAX };
    Duration::from_micros(20 + random.below(max.as_micros() as u64))
}
