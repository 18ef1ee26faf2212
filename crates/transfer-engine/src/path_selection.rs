//! Which way a batch takes: the one that was measured to be the fastest for its kind of memory and
//! its size.
//!
//! A transport's cost is only where the search begins. Every batch that went well is a measurement
//! of its way; now and then, for a small share of the time that transfers of that kind have taken,
//! a batch goes the other way to see how fast that one is. A way further down the list must be
//! clearly faster to be preferred, so that noise moves nobody.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::transfer_entry::TransferEntry;

/// What the memory at the far end is, as far as it decides how fast a way is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteMemory {
    /// It is mapped here: a copy.
    Mapped,
    /// The kernel copies between two processes.
    Process,
}

/// Kinds of memory that are told apart.
const MEMORY_KINDS: usize = 2;

/// Sizes of batches that are told apart; see [`TransferSizeClass::of`].
const SIZES: usize = 7;

/// The most ways there can be to one peer.
pub(crate) const PATHS_MAX: usize = 4;

/// Pieces up to this length count as small, which makes their batch scattered.
const SCATTERED_BYTES_MAX: u64 = 16 << 10;

/// Up to this many bytes a batch is over before a connection could be made for a trial.
const TINY_BYTES: u64 = 32 << 10;

/// Where the next two sizes end.
const MEDIUM_BYTES: u64 = 512 << 10;
const LARGE_BYTES: u64 = 8 << 20;

/// How many transfers a way has served before another is tried.
const WARM_UP_TRANSFERS: u64 = 16;

/// How long transfers of one kind have taken before another way is tried for the first time.
const FIRST_TRIAL_NANOS: u64 = 10_000_000;

/// A trial is followed by this many times its own length without one, at least and at most.
const PAUSE_MIN: u64 = 64;
const PAUSE_MAX: u64 = 4096;

/// Slower than this, the system's copy between processes is doubted from the start.
const UNPROVEN_BYTES_PER_SECOND: u64 = 3_000_000_000;

/// What a batch is like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TransferSizeClass {
    class: usize,
    bytes: u64,
}

/// Which of two ways to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The one that has served up to now, or is further up the list.
    First,
    Second,
    /// The second, to measure it.
    TrySecond,
    /// The first, to measure it again; the second serves.
    TryFirst,
}

/// What the ways to one peer were measured to give.
#[derive(Debug, Default)]
pub(crate) struct PathStats {
    classes: [ClassStats; MEMORY_KINDS * SIZES],
}

#[derive(Debug, Default)]
struct ClassStats {
    paths: [MeanCost; PATHS_MAX],
    /// Nanoseconds that transfers of this kind have taken, over all paths.
    spent: AtomicU64,
    /// Nanoseconds on that clock at which the next trial is due.
    trial_at: AtomicU64,
    /// The pause after the last trial, in lengths of it.
    pause: AtomicU64,
}

#[derive(Debug, Default)]
struct MeanCost {
    count: AtomicU64,
    /// A running mean; 0 until there is one.
    nanos_per_mib: AtomicU64,
}

/// How a way does for one kind of memory and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathMeasurement {
    /// What the memory is.
    pub remote_memory: RemoteMemory,
    /// The class of the size: `small`, `64KiB`, `1MiB`, `large`, or one of them in small entries.
    pub size: &'static str,
    /// Index of the way in the order of the engine's transports.
    pub(crate) path: usize,
    /// Bytes a second, as a running mean.
    pub bytes_per_second: u64,
    /// Batches that were measured.
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
    /// The kind of the memory, in a word.
    pub const fn memory(&self) -> &'static str {
        match self.remote_memory {
            RemoteMemory::Mapped => "mapped",
            RemoteMemory::Process => "process",
        }
    }
}

impl TransferSizeClass {
    /// The size_class of what is still to be moved. Sizes up to 32 KiB, 512 KiB, 8 MiB and above; from
    /// the second on, batches of small entries are a kind of their own.
    pub(crate) fn of(entries: &[TransferEntry], remote_memory: RemoteMemory) -> Self {
        let open = entries.iter().filter(|entry| entry.outcome.is_none());
        let (count, bytes) = open.fold((0_u64, 0_u64), |(count, bytes), entry| {
            (count + 1, bytes.saturating_add(entry.local.length() as u64))
        });
        let ends = [TINY_BYTES, MEDIUM_BYTES, LARGE_BYTES];
        let class = ends.iter().filter(|end| bytes > **end).count();
        let is_scattered = class > 0 && bytes / count.max(1) <= SCATTERED_BYTES_MAX;
        let class = if is_scattered { class + 3 } else { class };
        let class = match remote_memory {
            RemoteMemory::Mapped => class,
            RemoteMemory::Process => SIZES + class,
        };
        Self { class, bytes }
    }

    /// Whether a trial is worth a connection that is not there yet.
    pub(crate) const fn justifies_connection(&self) -> bool {
        self.bytes > TINY_BYTES
    }
}

impl PathStats {
    /// Which of two ways, by their index, a batch of this size_class is to take.
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

    /// Notes what a way took for a batch of this size_class.
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
            class.end_trial(nanos);
        }
    }

    /// Takes over what a probe found out about the system's copy between processes.
    pub(crate) fn record_probe(&self, bytes_per_second: u64) {
        if bytes_per_second >= UNPROVEN_BYTES_PER_SECOND {
            return;
        }
        for class in &self.classes[SIZES..] {
            class.pause.store(UNPROVEN, Ordering::Relaxed);
        }
    }

    /// Everything that was measured.
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

/// The pause of a class whose first way is doubted and of which no trial was made yet.
const UNPROVEN: u64 = u64::MAX;

impl ClassStats {
    fn is_unproven(&self) -> bool {
        self.pause.load(Ordering::Relaxed) == UNPROVEN
    }

    /// Whether a trial is due; then it is the caller's, and nobody else's for a while.
    fn take_trial(&self) -> bool {
        let spent = self.spent.load(Ordering::Relaxed);
        let at = self.trial_at.load(Ordering::Relaxed);
        let due = if self.is_unproven() { at } else { at.max(FIRST_TRIAL_NANOS) };
        // Should the trial fail, there is none for as long as a second of transfers takes.
        let later = spent.saturating_add(1_000_000_000);
        spent >= due
            && self
                .trial_at
                .compare_exchange(at, later, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    fn end_trial(&self, nanos: u64) {
        let before = self.pause.load(Ordering::Relaxed);
        let pause = match before {
            UNPROVEN | 0 => PAUSE_MIN,
            pause => (pause * 2).min(PAUSE_MAX),
        };
        self.pause.store(pause, Ordering::Relaxed);
        let spent = self.spent.load(Ordering::Relaxed);
        self.trial_at.store(spent.saturating_add(nanos.saturating_mul(pause)), Ordering::Relaxed);
    }
}

impl MeanCost {
    fn is_measured(&self) -> bool {
        self.nanos() > 0
    }

    fn nanos(&self) -> u64 {
        self.nanos_per_mib.load(Ordering::Relaxed)
    }

    /// Two threads that note at once may lose one of the two, which a mean can bear.
    fn record(&self, nanos: u64) {
        let nanos = nanos.min(u64::MAX / 16);
        // Read once: what another thread stores in the meantime may be larger or smaller by far.
        let mean = match self.nanos() {
            0 => nanos,
            mean => mean - mean / 8 + nanos / 8,
        };
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

    /// Transfers of 1 MiB until so many trials were made; which way served between them.
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
    fn the_faster_way_serves_and_trials_cost_little() {
        let path_stats = PathStats::default();
        let (serves, transfers) = run(&path_stats, [100_000, 400_000], 4);
        assert_eq!(serves, Decision::First);
        // The four trials took 16 transfers' time.
        assert!(transfers > 16 * 64, "{transfers}");
        let path_stats = PathStats::default();
        let (serves, _) = run(&path_stats, [400_000, 100_000], 4);
        assert_eq!(serves, Decision::Second);
    }

    #[test]
    fn a_way_that_is_a_little_faster_is_not_worth_a_change_and_one_that_became_slow_is() {
        let path_stats = PathStats::default();
        assert_eq!(run(&path_stats, [100_000, 90_000], 5).0, Decision::First);
        assert_eq!(run(&path_stats, [400_000, 90_000], 5).0, Decision::Second);
        assert_eq!(run(&path_stats, [50_000, 90_000], 12).0, Decision::First);
    }

    #[test]
    fn nothing_is_tried_before_a_way_is_warm_unless_it_is_doubted() {
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
    fn threads_that_note_at_once_leave_a_mean_of_what_they_noted() {
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
    fn sizes_and_small_pieces_are_told_apart() {
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
