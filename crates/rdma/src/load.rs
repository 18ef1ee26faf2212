//! What a connection has in flight and how fast it was, and the estimate that follows.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::{Moment, running_mean::updated_mean};

/// How long a measured rate counts.
const MEASURED_FOR: Duration = Duration::from_secs(10);

/// What the connection of several queues has in flight, and how fast it was.
#[derive(Debug)]
pub(crate) struct Load {
    /// Rate of the link in bytes per second; 0: not known.
    link_rate: u64,
    bytes: AtomicU64,
    /// Measured rate in bytes per second; 0: not measured yet.
    rate: AtomicU64,
    /// When the rate was last measured, in nanoseconds since boot.
    measured: AtomicU64,
    /// When a request ended, or the first was posted, in nanoseconds since boot.
    progress: AtomicU64,
    /// A slice was moved since the queue pairs were connected.
    has_moved: AtomicBool,
}

impl Load {
    /// Creates the load of a connection whose link has this rate in bytes per second; 0: not known.
    pub(crate) fn new(link_rate: u64) -> Self {
        Self {
            link_rate,
            bytes: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            measured: AtomicU64::new(0),
            progress: AtomicU64::new(0),
            has_moved: AtomicBool::new(false),
        }
    }

    /// Counts bytes as in flight. Returns their sum.
    pub(crate) fn add(&self, bytes: u64, now: Moment) -> u64 {
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if before == 0 {
            self.record_progress(now);
        }
        before + bytes
    }

    pub(crate) fn remove(&self, bytes: u64, now: Moment) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.record_progress(now);
    }

    pub(crate) fn record_progress(&self, now: Moment) {
        self.progress.store(nanoseconds(now), Ordering::Relaxed);
    }

    /// Records that a slice was moved.
    pub(crate) fn record_moved(&self) {
        self.has_moved.store(true, Ordering::Relaxed);
    }

    /// Forgets what was measured: the queue pairs were connected anew.
    pub(crate) fn reset(&self, now: Moment) {
        self.rate.store(0, Ordering::Relaxed);
        self.has_moved.store(false, Ordering::Relaxed);
        self.record_progress(now);
    }

    /// Returns whether a slice was moved since the queue pairs were connected.
    pub(crate) fn has_moved(&self) -> bool {
        self.has_moved.load(Ordering::Relaxed)
    }

    /// Returns how long ago a request ended, or the queue pairs were connected.
    pub(crate) fn idle(&self, now: Moment) -> Duration {
        now.since(Moment::from_boot(Duration::from_nanos(self.progress.load(Ordering::Relaxed))))
    }

    /// Learns the rate from a posting: all that was queued with it has ended since.
    pub(crate) fn measure(&self, queued: u64, took: Duration, now: Moment) {
        let took = took.as_secs_f64().max(1e-7);
        let sample = (queued as f64 / took) as u64;
        let rate = updated_mean(self.rate.load(Ordering::Relaxed), sample);
        self.rate.store(rate.max(1), Ordering::Relaxed);
        self.measured.store(nanoseconds(now), Ordering::Relaxed);
    }

    /// Estimates when bytes that are posted now would be transferred. A connection that was not measured
    /// for a while is taken to be as fast as its link, so that it is measured: one that was slow once
    /// would get nothing while others suffice, and never be found fast again.
    pub(crate) fn estimate(&self, bytes: u64, now: Moment) -> Duration {
        let queued = self.bytes.load(Ordering::Relaxed) + bytes;
        let age = nanoseconds(now).saturating_sub(self.measured.load(Ordering::Relaxed));
        let is_recent = age < MEASURED_FOR.as_nanos() as u64;
        let rate = if is_recent { self.rate.load(Ordering::Relaxed) } else { 0 };
        match (rate, self.link_rate) {
            (0, 0) => Duration::from_nanos(queued / 100),
            (0, rate) | (rate, _) => Duration::from_secs_f64(queued as f64 / rate as f64),
        }
    }

    /// Returns how long requests are in flight without an end of one, if any are.
    pub(crate) fn stalled(&self, now: Moment) -> Duration {
        if self.bytes.load(Ordering::Relaxed) == 0 {
            return Duration::ZERO;
        }
        self.idle(now)
    }
}

fn nanoseconds(moment: Moment) -> u64 {
    u64::try_from(moment.since_boot().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_is_of_the_link_until_it_is_measured() {
        let now = Moment::default();
        let (slow, fast) = (Load::new(1_000_000), Load::new(4_000_000));
        assert_eq!(slow.estimate(1_000_000, now), Duration::from_secs(1));
        assert!(fast.estimate(2_000_000, now) < slow.estimate(1_000_000, now));
        fast.measure(1_000_000, Duration::from_secs(10), now);
        assert_eq!(fast.estimate(1_000_000, now), Duration::from_secs(10), "slower than its link");
        slow.add(3_000_000, now);
        assert_eq!(
            slow.estimate(1_000_000, now),
            Duration::from_secs(4),
            "behind what is in flight"
        );
        let unknown = Load::new(0).estimate(1000, now);
        assert!(unknown < Duration::from_micros(1), "an unknown link is fast");
    }

    #[test]
    fn slow_measurement_does_not_count_for_ever() {
        let (start, load) = (Moment::default(), Load::new(1_000_000));
        let slow = || load.measure(1_000_000, Duration::from_secs(100), start);
        slow();
        let just_before = start + MEASURED_FOR.mul_f64(0.99);
        assert_eq!(load.estimate(1_000_000, just_before), Duration::from_secs(100));
        assert_eq!(load.estimate(1_000_000, start + MEASURED_FOR), Duration::from_secs(1));
        slow();
        load.reset(start);
        assert_eq!(load.estimate(1_000_000, start), Duration::from_secs(1), "connected anew");
    }
}
