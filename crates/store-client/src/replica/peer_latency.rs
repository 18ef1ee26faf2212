//! Measured transfer latency of peers. Decides which replica is read, and whether transfers to
//! several peers are worth a thread each.
//!
//! Only transfers with a choice are measured: those of objects with several replicas, and those to
//! several peers at once.

use std::time::Duration;

use mooncake_base::{
    Moment,
    running_mean::{size_class, updated_mean},
    sync::Mutex,
};
use mooncake_transfer_engine::Opcode;
use rustc_hash::FxHashMap;

/// Upper bounds of the size classes in bytes; the last class has none.
const SIZE_CLASS_ENDS: [u64; 3] = [16 << 10, 256 << 10, 4 << 20];
const SIZE_CLASSES: usize = SIZE_CLASS_ENDS.len() + 1;

/// Up to this size, transfer time does not depend on the size.
const SMALL_BYTES: u64 = SIZE_CLASS_ENDS[0];

/// Maximum age of a sample. A peer that was slow gets another chance afterwards.
const SAMPLE_AGE_MAX: Duration = Duration::from_secs(10);

/// Minimum number of samples of a usable estimate.
const SAMPLES_MIN: u64 = 8;

/// A sample counts as at most this multiple of the mean, because the duration of an interrupted
/// transfer is not representative.
const OUTLIER_FACTOR: u64 = 4;

/// Maximum number of peers in the table.
const PEERS_MAX: usize = 1024;

/// Default estimate for an unmeasured peer: bytes per microsecond, and the extra time for a peer on
/// another host.
const DEFAULT_BYTES_PER_MICRO: u64 = 4000;
const DEFAULT_OTHER_HOST: Duration = Duration::from_micros(50);

/// Default estimate of the time until a new thread runs.
const DEFAULT_THREAD_START: Duration = Duration::from_micros(50);

/// The latency estimates of all peers.
#[derive(Debug, Default)]
pub(crate) struct LatencyTable(Mutex<Samples>);

#[derive(Debug, Default)]
struct Samples {
    peers: FxHashMap<String, [LatencyEstimate; 2 * SIZE_CLASSES]>,
    start: LatencyEstimate,
}

/// A running latency estimate: the minimum of the first few samples, which may include connection
/// setup, then a running mean.
#[derive(Debug, Clone, Copy, Default)]
struct LatencyEstimate {
    count: u64,
    nanos: u64,
    bytes: u64,
    at: Option<Moment>,
}

/// Location of a peer, derived from its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Locality {
    SameHost,
    OtherHost,
}

impl LatencyTable {
    /// Records the duration of a transfer with a peer.
    pub(crate) fn record(
        &self,
        endpoint: &str,
        opcode: Opcode,
        bytes: u64,
        took: Duration,
        now: Moment,
    ) {
        let mut samples = self.0.lock();
        let peers = &mut samples.peers;
        if !peers.contains_key(endpoint) {
            if peers.len() >= PEERS_MAX {
                peers.retain(|_, table| table.iter().any(|estimate| estimate.is_fresh(now)));
            }
            if peers.len() >= PEERS_MAX {
                return;
            }
            peers.insert(endpoint.to_owned(), Default::default());
        }
        if let Some(table) = peers.get_mut(endpoint) {
            table[table_index(opcode, bytes)].record(took, bytes, now);
        }
    }

    /// Records the time between spawning a thread and its start.
    pub(crate) fn record_thread_start(&self, took: Duration, now: Moment) {
        self.0.lock().start.record(took, 0, now);
    }

    /// Estimates the duration of a transfer with a peer.
    pub(crate) fn expected(
        &self,
        endpoint: &str,
        locality: Locality,
        opcode: Opcode,
        bytes: u64,
        now: Moment,
    ) -> Duration {
        let samples = self.0.lock();
        let estimate = samples.peers.get(endpoint).map(|table| table[table_index(opcode, bytes)]);
        estimate
            .and_then(|estimate| estimate.expected(bytes, now))
            .unwrap_or_else(|| default_latency(locality, bytes))
    }

    /// Estimates the time until a new thread runs.
    pub(crate) fn expected_thread_start(&self, now: Moment) -> Duration {
        self.0.lock().start.expected(0, now).unwrap_or(DEFAULT_THREAD_START)
    }
}

impl LatencyEstimate {
    fn record(&mut self, took: Duration, bytes: u64, now: Moment) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX / 8);
        // An expired estimate is discarded.
        let old = if self.is_fresh(now) { *self } else { Self::default() };
        let count = old.count + 1;
        *self = match old.count {
            0 => Self { count, nanos, bytes, at: Some(now) },
            1..SAMPLES_MIN if nanos < old.nanos => Self { count, nanos, bytes, at: Some(now) },
            1..SAMPLES_MIN => Self { count, at: Some(now), ..old },
            _ => Self {
                count,
                nanos: updated_mean(old.nanos, nanos.min(old.nanos.saturating_mul(OUTLIER_FACTOR))),
                bytes: updated_mean(old.bytes, bytes),
                at: Some(now),
            },
        };
    }

    fn is_fresh(&self, now: Moment) -> bool {
        self.at.is_some_and(|at| !(at + SAMPLE_AGE_MAX).has_passed(now))
    }

    fn expected(&self, bytes: u64, now: Moment) -> Option<Duration> {
        let is_small = bytes <= SMALL_BYTES || self.bytes == 0;
        let nanos = if is_small {
            self.nanos
        } else {
            u64::try_from(u128::from(self.nanos) * u128::from(bytes) / u128::from(self.bytes))
                .unwrap_or(u64::MAX)
        };
        (self.is_fresh(now) && self.count >= SAMPLES_MIN).then(|| Duration::from_nanos(nanos))
    }
}

fn table_index(opcode: Opcode, bytes: u64) -> usize {
    let class = size_class(&SIZE_CLASS_ENDS, bytes);
    match opcode {
        Opcode::Read => class,
        Opcode::Write => SIZE_CLASSES + class,
    }
}

fn default_latency(locality: Locality, bytes: u64) -> Duration {
    let near = Duration::from_micros(bytes / DEFAULT_BYTES_PER_MICRO);
    match locality {
        Locality::SameHost => near,
        // Bandwidth is unknown; the distance adds latency.
        Locality::OtherHost => near * 2 + DEFAULT_OTHER_HOST,
    }
}

/// Returns whether work with these expected durations finishes sooner with a thread each than
/// sequentially, if a thread takes `start` to begin and about as long to be joined.
pub(crate) fn is_worth_threads(expected: impl Iterator<Item = Duration>, start: Duration) -> bool {
    let (sum, longest) = expected.fold((Duration::ZERO, Duration::ZERO), |(sum, longest), one| {
        (sum.saturating_add(one), longest.max(one))
    });
    sum - longest > start * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn at(seconds: u64) -> Moment {
        Moment::default() + Duration::from_secs(seconds)
    }

    #[test]
    fn estimate_holds_until_samples_expire() {
        let table = LatencyTable::default();
        let (read, bytes) = (Opcode::Read, MIB);
        let default = table.expected("a", Locality::SameHost, read, bytes, at(1));
        assert!(default < table.expected("a", Locality::OtherHost, read, bytes, at(1)));
        table.record("a", read, bytes, Duration::from_millis(80), at(1));
        (1..SAMPLES_MIN)
            .for_each(|_| table.record("a", read, bytes, Duration::from_millis(3), at(1)));
        let expected = table.expected("a", Locality::SameHost, read, bytes, at(2));
        assert_eq!(expected, Duration::from_millis(3), "the first sample included setup");
        let half = table.expected("a", Locality::SameHost, Opcode::Read, MIB / 2, at(2));
        assert_eq!(half, Duration::from_micros(1500), "proportional within a size class");
        let other = table.expected("a", Locality::SameHost, Opcode::Write, MIB, at(2));
        assert_eq!(other, default, "writes are estimated separately");
        assert_eq!(table.expected("a", Locality::SameHost, read, bytes, at(12)), default);
    }

    #[test]
    fn slow_peer_is_detected_within_few_transfers() {
        let table = LatencyTable::default();
        let (read, bytes) = (Opcode::Read, 4096);
        (0..20).for_each(|_| table.record("a", read, bytes, Duration::from_micros(8), at(1)));
        (0..20).for_each(|_| table.record("a", read, bytes, Duration::from_micros(800), at(1)));
        assert!(
            table.expected("a", Locality::SameHost, read, bytes, at(1))
                > Duration::from_micros(600)
        );
    }

    #[test]
    fn single_outlier_barely_changes_estimate() {
        let table = LatencyTable::default();
        let (read, bytes) = (Opcode::Read, 4096);
        (0..20).for_each(|_| table.record("a", read, bytes, Duration::from_micros(8), at(1)));
        table.record("a", read, bytes, Duration::from_millis(50), at(1));
        assert!(
            table.expected("a", Locality::SameHost, read, bytes, at(1)) < Duration::from_micros(16)
        );
    }

    #[test]
    fn uses_threads_only_if_they_save_time() {
        let micros = |times: &[u64]| {
            let times: Vec<_> = times.iter().map(|time| Duration::from_micros(*time)).collect();
            is_worth_threads(times.into_iter(), Duration::from_micros(50))
        };
        assert!(!micros(&[]));
        assert!(!micros(&[10_000]), "one transfer cannot be shared");
        assert!(!micros(&[100, 100]));
        assert!(micros(&[101, 101]));
        assert!(!micros(&[10_000, 60]), "overlapping the short one gains nothing");
        assert!(micros(&[60, 60, 60]));
    }
}
