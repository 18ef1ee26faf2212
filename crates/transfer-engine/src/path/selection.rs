//! Path selection: the path that was measured to be fastest for a batch's kind of memory and size.
//!
//! The search starts with the transports in order of their static cost. Every successful batch is a
//! measurement of its path. Now and then, for a small share of the time spent on transfers of that
//! kind, a batch takes another path as a trial. A path further down the list must be clearly faster
//! to be preferred, so that noise causes no change.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::{
    Backoff,
    running_mean::{size_class, updated_mean},
};

use crate::{transfer_entry::TransferEntry, transport::RemoteMemory};

/// Number of [`RemoteMemory`] kinds.
const MEMORY_KINDS: usize = 2;

/// Number of size classes; see [`TransferSizeClass::of`].
const SIZES: usize = 7;

/// Maximum number of paths to one peer.
pub(crate) const PATHS_MAX: usize = 4;

/// Entries up to this length count as small, which makes their batch scattered.
const SCATTERED_BYTES_MAX: u64 = 16 << 10;

/// A batch up to this size is over before a connection could be opened for a trial.
const TINY_BYTES: u64 = 32 << 10;

/// Upper ends of the next two size classes.
const MEDIUM_BYTES: u64 = 512 << 10;
const LARGE_BYTES: u64 = 8 << 20;

/// Transfers that a path serves before another path is tried.
const WARM_UP_TRANSFERS: u64 = 16;

/// Time spent on transfers of one kind before the first trial of another path.
const FIRST_TRIAL_NANOS: u64 = 10_000_000;

/// The first and the longest pause after a trial, in multiples of the trial's own duration.
const PAUSE_MIN: u32 = 64;
const PAUSE_MAX: u32 = 4096;

/// If process_vm_readv is probed to be slower than this, the path is unproven from the start.
const UNPROVEN_BYTES_PER_SECOND: u64 = 3_000_000_000;

/// Size class of a batch, together with its kind of remote memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TransferSizeClass {
    class: usize,
    bytes: u64,
}

/// The choice between two candidate paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The path that has served up to now, or that is further up the list.
    First,
    Second,
    /// The second path, as a trial.
    TrySecond,
    /// The first path, as a trial; the second one serves.
    TryFirst,
}

/// Measurements of the paths to one peer.
#[derive(Debug, Default)]
pub(crate) struct PathStats {
    classes: [ClassStats; MEMORY_KINDS * SIZES],
}

#[derive(Debug, Default)]
struct ClassStats {
    paths: [MeanCost; PATHS_MAX],
    /// Nanoseconds spent on transfers of this class, over all paths.
    spent: AtomicU64,
    /// The value of `spent` at which the next trial is due.
    trial_at: AtomicU64,
    /// Trials so far, which decide the next pause; [`UNPROVEN`] before the first.
    trials: AtomicU32,
}

#[derive(Debug, Default)]
struct MeanCost {
    count: AtomicU64,
    /// A running mean; 0 before the first measurement.
    nanos_per_mib: AtomicU64,
}

/// The measured speed of one path for one kind of memory and one size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathMeasurement {
    /// The kind of remote memory.
    pub remote_memory: RemoteMemory,
    /// The size class: `small`, `64KiB`, `1MiB`, `large`, or one of them `in small pieces`.
    pub size: &'static str,
    /// Index of the path in the order of the engine's transports.
    pub(crate) path: usize,
    /// Bytes per second, as a running mean.
    pub bytes_per_second: u64,
    /// Number of measured batches.
    pub batches: u64,
}

const SIZE_NAMES: [&str; SIZES] = [
    "small",
    "64KiB",
    "1MiB",
    "large",
    "64KiB in small pieces",
    "1MiB in small pieces",
    "large in small pieces",
];

impl PathMeasurement {
    /// Name of the kind of remote memory.
    pub const fn memory(&self) -> &'static str {
        match self.remote_memory {
            RemoteMemory::Mapped => "mapped",
            RemoteMemory::Process => "process",
        }
    }
}

impl TransferSizeClass {
    /// Returns the class of the entries that are still open. Classes end at 32 KiB, 512 KiB and 8
    /// MiB; from the second class on, batches of small entries have classes of their own.
    pub(crate) fn of(entries: &[TransferEntry], remote_memory: RemoteMemory) -> Self {
        let open = entries.iter().filter(|entry| entry.outcome.is_none());
        let (count, bytes) = open.fold((0_u64, 0_u64), |(count, bytes), entry| {
            (count + 1, bytes.saturating_add(entry.local.length() as u64))
        });
        let class = size_class(&[TINY_BYTES, MEDIUM_BYTES, LARGE_BYTES], bytes);
        let is_scattered = class > 0 && bytes / count.max(1) <= SCATTERED_BYTES_MAX;
        let class = if is_scattered { class + 3 } else { class };
        let class = match remote_memory {
            RemoteMemory::Mapped => class,
            RemoteMemory::Process => SIZES + class,
        };
        Self { class, bytes }
    }

    /// Returns whether a trial justifies opening a connection.
    pub(crate) const fn justifies_connection(&self) -> bool {
        self.bytes > TINY_BYTES
    }
}

impl PathStats {
    /// Decides between two paths, given by index, for a batch of this class.
    pub(crate) fn decide(
        &self,
        size_class: TransferSizeClass,
        first: usize,
        second: usize,
    ) -> Decision {
        let class = &self.classes[size_class.class];
        let (a, b) = (&class.paths[first], &class.paths[second]);
        if a.count.load(Ordering::Relaxed) < WARM_UP_TRANSFERS && !class.is_unproven() {
            return Decision::First;
        }
        let is_second_better = b.is_measured() && b.nanos() * 5 < a.nanos() * 4;
        let is_due = class.take_trial();
        match (is_second_better, is_due) {
            (false, false) => Decision::First,
            (false, true) => Decision::TrySecond,
            (true, false) => Decision::Second,
            (true, true) => Decision::TryFirst,
        }
    }

    /// Records the duration of a batch on a path.
    pub(crate) fn record(
        &self,
        size_class: TransferSizeClass,
        path: usize,
        took: Duration,
        is_trial: bool,
    ) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        let class = &self.classes[size_class.class];
        class.spent.fetch_add(nanos, Ordering::Relaxed);
        let cost = &class.paths[path];
        let per_mib = u128::from(nanos) * (1 << 20) / u128::from(size_class.bytes.max(1));
        cost.record(u64::try_from(per_mib).unwrap_or(u64::MAX));
        if is_trial {
            class.end_trial(Duration::from_nanos(nanos));
        }
    }

    /// Records the probed speed of the kernel's copy between processes.
    pub(crate) fn record_probe(&self, bytes_per_second: u64) {
        if bytes_per_second >= UNPROVEN_BYTES_PER_SECOND {
            return;
        }
        for class in &self.classes[SIZES..] {
            class.trials.store(UNPROVEN, Ordering::Relaxed);
        }
    }

    /// Returns all measurements.
    pub(crate) fn all(&self) -> Vec<PathMeasurement> {
        let one = |(index, class): (usize, &ClassStats)| {
            let remote_memory =
                if index < SIZES { RemoteMemory::Mapped } else { RemoteMemory::Process };
            let size = SIZE_NAMES[index % SIZES];
            let paths = class.paths.iter().enumerate().filter(|(_, cost)| cost.is_measured());
            paths
                .map(|(path, cost)| PathMeasurement {
                    remote_memory,
                    size,
                    path,
                    bytes_per_second: (1_000_000_000 << 20) / cost.nanos().max(1),
                    batches: cost.count.load(Ordering::Relaxed),
                })
                .collect::<Vec<_>>()
        };
        self.classes.iter().enumerate().flat_map(one).collect()
    }
}

/// The trials of a class whose first path is unproven and that had none yet.
const UNPROVEN: u32 = u32::MAX;

impl ClassStats {
    fn is_unproven(&self) -> bool {
        self.trials.load(Ordering::Relaxed) == UNPROVEN
    }

    /// Returns whether a trial is due and claims the trial for the caller.
    fn take_trial(&self) -> bool {
        let spent = self.spent.load(Ordering::Relaxed);
        let at = self.trial_at.load(Ordering::Relaxed);
        let due = if self.is_unproven() { at } else { at.max(FIRST_TRIAL_NANOS) };
        // If the trial fails, the next one is due after another second of transfers.
        let later = spent.saturating_add(1_000_000_000);
        spent >= due
            && self
                .trial_at
                .compare_exchange(at, later, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    fn end_trial(&self, took: Duration) {
        let before = self.trials.load(Ordering::Relaxed);
        let trials = if before == UNPROVEN { 0 } else { before };
        self.trials.store(trials + 1, Ordering::Relaxed);
        let pauses = Backoff::new(took.saturating_mul(PAUSE_MIN), took.saturating_mul(PAUSE_MAX));
        let pause = u64::try_from(pauses.pause(trials).as_nanos()).unwrap_or(u64::MAX);
        let spent = self.spent.load(Ordering::Relaxed);
        self.trial_at.store(spent.saturating_add(pause), Ordering::Relaxed);
    }
}

impl MeanCost {
    fn is_measured(&self) -> bool {
        self.nanos() > 0
    }

    fn nanos(&self) -> u64 {
        self.nanos_per_mib.load(Ordering::Relaxed)
    }

    /// Concurrent calls may lose one of two samples, which a running mean tolerates.
    fn record(&self, nanos: u64) {
        let nanos = nanos.min(u64::MAX / 16);
        // Load once: a concurrent store may change the value by orders of magnitude.
        let mean = updated_mean(self.nanos(), nanos);
        self.nanos_per_mib.store(mean.max(1), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer_entry::LocalRange;

    fn size_class(lengths: &[usize]) -> TransferSizeClass {
        let entry = |length: &usize| {
            // SAFETY: nothing is transferred.
            TransferEntry::new(unsafe { LocalRange::foreign(4096, *length) }, 0)
        };
        TransferSizeClass::of(&lengths.iter().map(entry).collect::<Vec<_>>(), RemoteMemory::Process)
    }

    /// Runs transfers of 1 MiB until `trials` trials were made; returns the decision between
    /// trials.
    fn run(path_stats: &PathStats, nanos: [u64; 2], trials: usize) -> (Decision, u64) {
        let size_class = size_class(&[1 << 20]);
        let (mut made, mut transfers, mut last) = (0, 0, Decision::First);
        while made < trials {
            let decision = path_stats.decide(size_class, 0, 1);
            let is_trial = matches!(decision, Decision::TrySecond | Decision::TryFirst);
            let path = usize::from(matches!(decision, Decision::Second | Decision::TrySecond));
            path_stats.record(size_class, path, Duration::from_nanos(nanos[path]), is_trial);
            made += usize::from(is_trial);
            transfers += 1;
            if !is_trial {
                last = decision;
            }
        }
        (last, transfers)
    }

    #[test]
    fn faster_path_serves_and_trials_cost_little() {
        let path_stats = PathStats::default();
        let (serves, transfers) = run(&path_stats, [100_000, 400_000], 4);
        assert_eq!(serves, Decision::First);
        // The four trials took the time of 16 transfers.
        assert!(transfers > 16 * 64, "{transfers}");
        let path_stats = PathStats::default();
        let (serves, _) = run(&path_stats, [400_000, 100_000], 4);
        assert_eq!(serves, Decision::Second);
    }

    #[test]
    fn pauses_between_trials_double() {
        for before in [0, UNPROVEN] {
            let class = ClassStats { trials: before.into(), ..ClassStats::default() };
            for factor in [64, 128, 256, 512, 1024, 2048, 4096, 4096] {
                class.end_trial(Duration::from_nanos(1000));
                assert_eq!(class.trial_at.load(Ordering::Relaxed), factor * 1000);
            }
        }
    }

    #[test]
    fn switches_only_for_a_clear_gain_and_back_from_a_slow_path() {
        let path_stats = PathStats::default();
        assert_eq!(run(&path_stats, [100_000, 90_000], 5).0, Decision::First);
        assert_eq!(run(&path_stats, [400_000, 90_000], 5).0, Decision::Second);
        assert_eq!(run(&path_stats, [50_000, 90_000], 12).0, Decision::First);
    }

    #[test]
    fn trials_wait_for_warm_up_unless_path_is_unproven() {
        let path_stats = PathStats::default();
        let one = size_class(&[1 << 20]);
        for _ in 0..WARM_UP_TRANSFERS {
            assert_eq!(path_stats.decide(one, 0, 1), Decision::First);
            path_stats.record(one, 0, Duration::from_millis(10), false);
        }
        assert_eq!(path_stats.decide(one, 0, 1), Decision::TrySecond);
        assert_eq!(path_stats.decide(one, 0, 1), Decision::First, "a trial is one caller's");
        let unproven = PathStats::default();
        unproven.record_probe(UNPROVEN_BYTES_PER_SECOND - 1);
        assert_eq!(unproven.decide(one, 0, 1), Decision::TrySecond);
        let trusted = PathStats::default();
        trusted.record_probe(UNPROVEN_BYTES_PER_SECOND);
        assert_eq!(trusted.decide(one, 0, 1), Decision::First);
    }

    #[test]
    fn concurrent_records_leave_a_plausible_mean() {
        for _ in 0..2000 {
            let (cost, start) = (MeanCost::default(), std::sync::Barrier::new(3));
            std::thread::scope(|scope| {
                for nanos in [1, 1_000_000, 1_000_000_000] {
                    let (cost, start) = (&cost, &start);
                    scope.spawn(move || {
                        start.wait();
                        (0..50).for_each(|_| cost.record(nanos));
                    });
                }
            });
            assert!((1..=1_000_000_000).contains(&cost.nanos()), "{cost:?}");
            assert_eq!(cost.count.load(Ordering::Relaxed), 150);
        }
    }

    #[test]
    fn size_classes_separate_sizes_and_small_entries() {
        let classes: Vec<usize> = [
            vec![4096],
            vec![32 << 10],
            vec![(32 << 10) + 1],
            vec![1 << 20],
            vec![9 << 20],
            vec![4096; 16],
            vec![4096; 256],
            vec![4096; 4096],
        ]
        .iter()
        .map(|lengths| size_class(lengths).class - SIZES)
        .collect();
        assert_eq!(classes, [0, 0, 1, 2, 3, 4, 5, 6]);
    }
}
