//! Latency histogram with four buckets per octave: values are exact to 25 %, from an eighth of a
//! microsecond to half a minute. Histograms whose buckets the caller chooses.

use std::time::Duration;

use crate::counter::Counter;

/// Resolution of the histogram.
const UNIT_NANOS: u64 = 125;

/// Buckets per octave, as a power of two.
const SPLIT_BITS: u32 = 2;
const SPLIT: usize = 1 << SPLIT_BITS;

/// Number of octaves; the last bucket starts at 29 s and is unbounded.
const OCTAVES: usize = 26;

const CLASSES: usize = SPLIT * (OCTAVES + 1);

/// A concurrent histogram of values whose buckets the caller chooses.
#[derive(Debug)]
pub struct Buckets<const N: usize> {
    counts: [Counter; N],
    sum: Counter,
}

/// A snapshot of buckets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketCounts<const N: usize> {
    /// Non-cumulative counts by bucket.
    pub counts: [u64; N],
    /// The sum of all values.
    pub sum: u64,
}

impl<const N: usize> Default for Buckets<N> {
    fn default() -> Self {
        Self { counts: std::array::from_fn(|_| Counter::default()), sum: Counter::default() }
    }
}

impl<const N: usize> Buckets<N> {
    /// Counts a value in a bucket, whose number must be less than `N`.
    #[inline]
    pub fn record(&self, bucket: usize, value: u64) {
        self.counts[bucket].increment();
        self.sum.add(value);
    }

    /// Returns what was recorded so far.
    pub fn snapshot(&self) -> BucketCounts<N> {
        let counts = std::array::from_fn(|bucket| self.counts[bucket].get());
        BucketCounts { counts, sum: self.sum.get() }
    }
}

impl<const N: usize> Default for BucketCounts<N> {
    fn default() -> Self {
        Self { counts: [0; N], sum: 0 }
    }
}

impl<const N: usize> BucketCounts<N> {
    /// Returns the upper bound and the count of each bucket, given the bounds of all but the last.
    pub fn with_bounds(&self, bounds: &[u64]) -> impl Iterator<Item = (Option<u64>, u64)> {
        self.counts.iter().enumerate().map(|(at, count)| (bounds.get(at).copied(), *count))
    }
}

/// A concurrent latency histogram.
#[derive(Debug, Default)]
pub struct Histogram(Buckets<CLASSES>);

/// A snapshot of a latency histogram.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Latency {
    /// Non-cumulative counts by bucket; empty if nothing was recorded.
    counts: Vec<u64>,
    nanos: u64,
}

impl Histogram {
    /// Counts a duration.
    pub fn record(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.0.record(class_of(nanos), nanos);
    }

    /// Returns what was recorded so far.
    pub fn snapshot(&self) -> Latency {
        let BucketCounts { counts, sum } = self.0.snapshot();
        Latency { counts: counts.into(), nanos: sum }
    }
}

impl Latency {
    /// Returns the number of samples.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of all samples.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    /// Returns the mean; `None` without samples.
    pub fn mean(&self) -> Option<Duration> {
        self.nanos.checked_div(self.count()).map(Duration::from_nanos)
    }

    /// Returns an upper bound of the quantile (0.5: the median), at most 25 % above the true value;
    /// `None` without samples.
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let count = self.count();
        let rank = ((count as f64 * part).ceil() as u64).clamp(1, count.max(1));
        let mut sum = 0;
        let class = self.counts.iter().position(|count| {
            sum += count;
            sum >= rank
        })?;
        Some(Duration::from_nanos(end_of(class) * UNIT_NANOS))
    }

    /// Returns the samples since an earlier snapshot of the same histogram.
    pub fn since(&self, before: &Self) -> Self {
        let earlier = before.counts.iter().copied().chain(std::iter::repeat(0));
        let counts = self.counts.iter().zip(earlier).map(|(now, before)| now - before);
        Self { counts: counts.collect(), nanos: self.nanos - before.nanos }
    }

    /// Adds the samples of another snapshot.
    pub fn add(&mut self, other: &Self) {
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        self.nanos += other.nanos;
    }

    /// Returns non-cumulative counts by upper bound in microseconds, one per power of two; the last
    /// bucket is unbounded.
    pub fn octaves(&self) -> Vec<(Option<u64>, u64)> {
        let mut octaves = Vec::new();
        let mut sum = 0;
        for (class, count) in self.counts.iter().enumerate() {
            sum += count;
            let (units, micro) = (end_of(class), 1000 / UNIT_NANOS);
            let is_last = class + 1 == CLASSES;
            if is_last || units.is_power_of_two() && units >= micro {
                octaves.push(((!is_last).then_some(units / micro), std::mem::take(&mut sum)));
            }
        }
        octaves
    }
}

fn class_of(nanos: u64) -> usize {
    // The upper bound of a bucket is inclusive.
    let units = nanos.saturating_sub(1) / UNIT_NANOS;
    if units < SPLIT as u64 {
        return units as usize;
    }
    let octave = units.ilog2() - SPLIT_BITS;
    let class = (octave as usize) * SPLIT + (units >> octave) as usize;
    class.min(CLASSES - 1)
}

/// Returns the upper bound of a bucket in units.
fn end_of(class: usize) -> u64 {
    if class < SPLIT {
        return class as u64 + 1;
    }
    let octave = class / SPLIT - 1;
    ((SPLIT + class % SPLIT + 1) as u64) << octave
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_lands_in_first_bucket_that_holds_it() {
        for nanos in [0, 1, 125, 126, 500, 501, 625, 626, 1000, 1001, 4_000_000, 4_000_001] {
            let class = class_of(nanos);
            assert!(end_of(class) * UNIT_NANOS >= nanos, "{nanos} in bucket {class}");
            assert!(class == 0 || end_of(class - 1) * UNIT_NANOS < nanos, "{nanos} in {class}");
        }
        assert_eq!(class_of(u64::MAX), CLASSES - 1);
        let ends: Vec<_> = (0..CLASSES).map(end_of).collect();
        assert!(ends.is_sorted_by(|a, b| a < b), "{ends:?}");
    }

    #[test]
    fn last_of_the_callers_buckets_has_no_bound() {
        let buckets = Buckets::<3>::default();
        for (bucket, value) in [(0, 1), (2, 30), (2, 40)] {
            buckets.record(bucket, value);
        }
        let counts = buckets.snapshot();
        assert_eq!(counts, BucketCounts { counts: [1, 0, 2], sum: 71 });
        let bounds: Vec<_> = counts.with_bounds(&[10, 20]).collect();
        assert_eq!(bounds, [(Some(10), 1), (Some(20), 0), (None, 2)]);
    }

    #[test]
    fn quantiles_exceed_true_value_by_at_most_25_percent() {
        let histogram = Histogram::default();
        assert_eq!(histogram.snapshot().quantile(0.5), None);
        (0..99).for_each(|_| histogram.record(Duration::from_micros(3)));
        histogram.record(Duration::from_millis(90));
        let latency = histogram.snapshot();
        let half = latency.quantile(0.5).unwrap();
        assert!((3000..=3750).contains(&half.as_nanos()), "{half:?}");
        let worst = latency.quantile(1.0).unwrap();
        assert!((90..=113).contains(&worst.as_millis()), "{worst:?}");
        assert_eq!(latency.mean(), Some(Duration::from_nanos(902_970)));
    }

    #[test]
    fn differences_and_sums_of_snapshots() {
        let histogram = Histogram::default();
        let (first, second) = (Duration::from_micros(3), Duration::from_millis(90));
        histogram.record(first);
        let before = histogram.snapshot();
        histogram.record(second);
        let mut since = histogram.snapshot().since(&before);
        assert_eq!((since.count(), since.sum()), (1, second));
        assert_eq!(before.since(&Latency::default()), before);
        since.add(&before);
        assert_eq!(since, histogram.snapshot());
        let mut sum = Latency::default();
        sum.add(&before);
        assert_eq!(sum, before);
    }

    #[test]
    fn octaves_count_every_sample_by_power_of_two() {
        let histogram = Histogram::default();
        for nanos in [1, 1000, 1001, 2000, 2001, 1_000_000_000_000] {
            histogram.record(Duration::from_nanos(nanos));
        }
        let octaves = histogram.snapshot().octaves();
        assert_eq!(octaves[..3], [(Some(1), 2), (Some(2), 2), (Some(4), 1)]);
        assert_eq!(octaves.last(), Some(&(None, 1)));
        assert_eq!(octaves.iter().map(|(_, count)| count).sum::<u64>(), 6);
    }
}
