//! A latency histogram of constant size with a relative error below 1/64.

use std::time::Duration;

/// The base-2 logarithm of the number of buckets per power of two of nanoseconds.
const PARTS_LOG2: u32 = 6;
const PARTS: usize = 1 << PARTS_LOG2;

/// A histogram of durations.
#[derive(Debug, Clone)]
pub(super) struct Latencies {
    buckets: Vec<u64>,
    count: u64,
    sum_ns: u128,
    max_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { buckets: vec![0; bucket(u64::MAX) + 1], count: 0, sum_ns: 0, max_ns: 0 }
    }
}

impl Latencies {
    pub(super) fn record(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(ns)] += 1;
        self.count += 1;
        self.sum_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    pub(super) fn merge(&mut self, other: &Self) {
        for (own, others) in self.buckets.iter_mut().zip(&other.buckets) {
            *own += others;
        }
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the mean in microseconds.
    pub(super) fn mean_us(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum_ns as f64 / self.count as f64 / 1e3 }
    }

    /// Returns the maximum in microseconds.
    pub(super) fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1e3
    }

    /// Returns the quantile in microseconds: the duration that the given share of all samples did
    /// not exceed. The share is above 0 and at most 1.
    pub(super) fn quantile_us(&self, share: f64) -> f64 {
        let wanted = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return (highest(index).min(self.max_ns)) as f64 / 1e3;
            }
        }
        self.max_us()
    }
}

fn bucket(ns: u64) -> usize {
    if ns < PARTS as u64 {
        return ns as usize;
    }
    let shift = ns.ilog2() - PARTS_LOG2;
    (shift as usize + 1) * PARTS + ((ns >> shift) as usize - PARTS)
}

/// Returns the longest duration in nanoseconds that the bucket counts.
fn highest(bucket: usize) -> u64 {
    if bucket < PARTS {
        return bucket as u64;
    }
    let shift = (bucket / PARTS - 1) as u32;
    let low = ((bucket % PARTS + PARTS) as u64) << shift;
    low + ((1 << shift) - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn buckets_are_exact_to_one_part_in_64(ns in any::<u64>()) {
            let top = highest(bucket(ns));
            prop_assert!(top >= ns && top - ns <= ns / 64, "{ns} {top}");
        }

        #[test]
        fn quantiles_match_the_sorted_list(
            mut list in prop::collection::vec(0_u64..1 << 40, 1..200),
            share in 0.001..=1.0_f64,
        ) {
            let mut latencies = Latencies::default();
            let (mut even, mut odd) = (Latencies::default(), Latencies::default());
            for (index, ns) in list.iter().enumerate() {
                let half = if index % 2 == 0 { &mut even } else { &mut odd };
                half.record(Duration::from_nanos(*ns));
            }
            latencies.merge(&even);
            latencies.merge(&odd);
            list.sort_unstable();
            let rank = ((list.len() as f64 * share).ceil() as usize).max(1) - 1;
            let wanted = list[rank] as f64 / 1e3;
            let actual = latencies.quantile_us(share);
            prop_assert!(actual >= wanted && actual <= wanted * (1.0 + 1.0 / 64.0) + 1e-9);
            prop_assert_eq!(latencies.count(), list.len() as u64);
            prop_assert_eq!(latencies.max_us(), *list.last().unwrap() as f64 / 1e3);
        }
    }

    #[test]
    fn empty_histogram_reports_zeros() {
        let none = Latencies::default();
        assert_eq!((none.count(), none.mean_us(), none.quantile_us(0.5)), (0, 0.0, 0.0));
    }
}
