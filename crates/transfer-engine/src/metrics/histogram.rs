//! A latency histogram with power-of-two classes.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Classes: up to 1 µs, 2 µs, 4 µs … 8.4 s, and above.
pub(crate) const CLASSES: usize = 25;

/// Counts per class, and the sum of all durations.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: [AtomicU64; CLASSES],
    micros: AtomicU64,
}

/// A histogram at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LatencySnapshot {
    /// Number of batches per class: up to 1 µs, 2 µs, 4 µs and so on, not cumulative; the last
    /// class is unbounded.
    pub counts: Vec<u64>,
    /// Sum of all durations in microseconds.
    pub micros: u64,
}

impl Histogram {
    pub(crate) fn record(&self, took: Duration) {
        let micros = u64::try_from(took.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        let class = micros.clamp(1, 1 << CLASSES).next_power_of_two().trailing_zeros() as usize;
        self.counts[class.min(CLASSES - 1)].fetch_add(1, Ordering::Relaxed);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> LatencySnapshot {
        LatencySnapshot {
            counts: self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            micros: self.micros.load(Ordering::Relaxed),
        }
    }
}

impl LatencySnapshot {
    /// Total number of batches.
    pub fn batches(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns a percentile to within a factor of two; `None` if the histogram is empty.
    pub fn percentile(&self, percent: u64) -> Option<Duration> {
        let rank = (self.batches() * percent).div_ceil(100).max(1);
        let mut sum = 0;
        let class = self.counts.iter().position(|count| {
            sum += count;
            sum >= rank
        })?;
        Some(Duration::from_micros(1 << class))
    }

    /// Returns the difference to an earlier snapshot.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let counts = self.counts.iter().zip(&before.counts).map(|(now, before)| now - before);
        Self { counts: counts.collect(), micros: self.micros - before.micros }
    }

    /// Adds the counts of another snapshot.
    pub(crate) fn add(&mut self, other: &Self) {
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        self.micros += other.micros;
    }

    /// Returns the bounds of a class as text.
    pub(crate) fn label(class: usize) -> String {
        let begin = if class == 0 { 0 } else { 1_u64 << (class - 1) };
        match class < CLASSES - 1 {
            true => format!("{begin}-{}μs", 1_u64 << class),
            false => format!(">{begin}μs"),
        }
    }

    /// Returns the upper bound of a class in seconds; `None` for the last class.
    pub(crate) fn bound(class: usize) -> Option<f64> {
        (class < CLASSES - 1).then(|| (1_u64 << class) as f64 / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_is_in_the_class_with_the_next_upper_bound() {
        let histogram = Histogram::default();
        for micros in [0, 1, 2, 3, 4, 5, 1000, 8_388_608, 8_388_609, u64::MAX / 1000] {
            histogram.record(Duration::from_micros(micros));
        }
        let snapshot = histogram.snapshot();
        let counts: Vec<_> =
            snapshot.counts.iter().enumerate().filter(|(_, count)| **count > 0).collect();
        assert_eq!(counts, [(0, &2), (1, &1), (2, &2), (3, &1), (10, &1), (23, &1), (24, &2)]);
        assert_eq!(snapshot.batches(), 10);
    }

    #[test]
    fn labels_show_the_bounds_of_classes() {
        let label = LatencySnapshot::label;
        assert_eq!([label(0), label(1), label(4)], ["0-1μs", "1-2μs", "8-16μs"]);
        assert_eq!(label(CLASSES - 1), ">8388608μs");
    }

    #[test]
    fn percentiles_are_upper_bounds_of_classes() {
        let histogram = Histogram::default();
        assert_eq!(histogram.snapshot().percentile(50), None);
        (0..99).for_each(|_| histogram.record(Duration::from_micros(3)));
        histogram.record(Duration::from_micros(900));
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.percentile(50), Some(Duration::from_micros(4)));
        assert_eq!(snapshot.percentile(99), Some(Duration::from_micros(4)));
        assert_eq!(snapshot.percentile(100), Some(Duration::from_micros(1024)));
    }
}
