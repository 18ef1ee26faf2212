//! Histograms of the duration of calls, by method.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_proto::calls::Method;

/// The upper bounds of the classes in microseconds. One more class has no upper bound.
pub const BOUNDS_US: [u64; 16] = [
    25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    1_000_000, 5_000_000, 30_000_000,
];

/// The durations of the calls of each method.
#[derive(Debug)]
pub struct CallTimes([Durations; Method::ALL.len()]);

impl Default for CallTimes {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Durations::default()))
    }
}

#[derive(Debug, Default)]
struct Durations {
    classes: [AtomicU64; BOUNDS_US.len() + 1],
    nanos: AtomicU64,
}

/// A snapshot of the durations of the calls of a method.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTime {
    /// Name of the method.
    pub call: &'static str,
    /// Number of calls by class. The counts are not cumulative.
    pub classes: [u64; BOUNDS_US.len() + 1],
    /// Duration of all calls together.
    pub sum: Duration,
}

impl CallTimes {
    /// Counts a call.
    pub(super) fn record(&self, method: Method, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let class = BOUNDS_US.partition_point(|bound| bound * 1000 < nanos);
        let durations = &self.0[method as usize];
        durations.classes[class].fetch_add(1, Ordering::Relaxed);
        durations.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns the methods that were called at least once.
    pub fn snapshot(&self) -> Vec<CallTime> {
        let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let time = |(durations, method): (&Durations, Method)| CallTime {
            call: method.name(),
            classes: std::array::from_fn(|class| read(&durations.classes[class])),
            sum: Duration::from_nanos(read(&durations.nanos)),
        };
        let times = self.0.iter().zip(Method::ALL).map(time);
        times.filter(|time| time.classes.iter().any(|&calls| calls > 0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_at_bound_counts_in_lower_class() {
        let times = CallTimes::default();
        for micros in [1, 25, 26, 31_000_000] {
            times.record(Method::Status, Duration::from_micros(micros));
        }
        let [time] = &times.snapshot()[..] else { panic!() };
        assert_eq!(time.call, "status");
        assert_eq!((time.classes[0], time.classes[1], time.classes[16]), (2, 1, 1));
        assert_eq!(time.sum, Duration::from_micros(31_000_052));
    }
}
