//! Histograms of the duration of calls, by method.

use std::time::Duration;

use mooncake_base::histogram::{BucketCounts, Buckets};
use mooncake_proto::calls::Method;

/// The upper bounds of the classes in microseconds. One more class has no upper bound.
pub const BOUNDS_US: [u64; 16] = [
    25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    1_000_000, 5_000_000, 30_000_000,
];

/// The number of classes.
const CLASSES: usize = BOUNDS_US.len() + 1;

/// The durations of the calls of each method.
#[derive(Debug)]
pub struct CallTimes([Buckets<CLASSES>; Method::ALL.len()]);

/// The number of calls of a method by class, and their duration in nanoseconds.
pub type CallTime = BucketCounts<CLASSES>;

impl Default for CallTimes {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Buckets::default()))
    }
}

impl CallTimes {
    /// Counts a call.
    pub(super) fn record(&self, method: Method, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let class = BOUNDS_US.partition_point(|bound| bound * 1000 < nanos);
        self.0[method as usize].record(class, nanos);
    }

    /// Returns the methods that were called at least once, by name.
    pub fn snapshot(&self) -> Vec<(&'static str, CallTime)> {
        let times = Method::ALL.iter().zip(&self.0);
        let times = times.map(|(method, times)| (method.name(), times.snapshot()));
        times.filter(|(_, time)| time.counts.iter().any(|&calls| calls > 0)).collect()
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
        let [(call, time)] = times.snapshot()[..] else { panic!() };
        assert_eq!(call, "status");
        assert_eq!((time.counts[0], time.counts[1], time.counts[16]), (2, 1, 1));
        assert_eq!(Duration::from_nanos(time.sum), Duration::from_micros(31_000_052));
    }
}
