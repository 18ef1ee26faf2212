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

use crate::piece::Piece;

/// What the memory at the far end is, as far as it decides how fast a way is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Footing {
    /// It is mapped here: a copy.
    Mapped,
    /// The kernel copies between two processes.
    Process,
}

/// Kinds of memory that are told apart.
const FOOTINGS: usize = 2;

/// Sizes of batches that are told apart; see [`Shape::of`].
const SIZES: usize = 7;

/// The most ways there can be to one peer.
pub(crate) const WAYS: usize = 4;

/// Pieces up to this length count as small, which makes their batch scattered.
const SCATTERED_BYTES_MAX: u64 = 16 << 10;

/// Up to this many bytes a batch is over before a connection could be made for a trial.
const TINY_BYTES: u64 = 32 << 10;

/// Where the next two sizes end.
const MEDIUM_BYTES: u64 = 512 << 10;
const LARGE_BYTES: u64 = 8 << 20;

/// How many transfers a way has served before another is tried.
const WARM: u64 = 16;

/// How long transfers of one kind have taken before another way is tried for the first time.
const FIRST_TRIAL_NANOS: u64 = 10_000_000;

/// A trial is followed by this many times its own length without one, at least and at most.
const PAUSE_MIN: u64 = 64;
const PAUSE_MAX: u64 = 4096;

/// Slower than this, the system's copy between processes is doubted from the start.
const DOUBTED_BYTES_PER_SECOND: u64 = 3_000_000_000;

/// What a batch is like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    row: usize,
    bytes: u64,
}

/// Which of two ways to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pick {
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
pub(crate) struct Scores {
    rows: [Row; FOOTINGS * SIZES],
}

#[derive(Debug, Default)]
struct Row {
    ways: [Score; WAYS],
    /// Nanoseconds that transfers of this kind have taken, over all ways.
    spent: AtomicU64,
    /// Nanoseconds on that clock at which the next trial is due.
    trial_at: AtomicU64,
    /// The pause after the last trial, in lengths of it.
    pause: AtomicU64,
}

#[derive(Debug, Default)]
struct Score {
    count: AtomicU64,
    /// A running mean; 0 until there is one.
    nanos_per_mib: AtomicU64,
}

/// How a way does for one kind of memory and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// What the memory is.
    pub footing: Footing,
    /// The class of the size: `small`, `64KiB`, `1MiB`, `large`, or one of them in small pieces.
    pub size: &'static str,
    /// Index of the way in the order of the engine's transports.
    pub(crate) way: usize,
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

impl Measured {
    /// The kind of the memory, in a word.
    pub const fn memory(&self) -> &'static str {
        match self.footing {
            Footing::Mapped => "mapped",
            Footing::Process => "process",
        }
    }
}

impl Shape {
    /// The shape of what is still to be moved. Sizes up to 32 KiB, 512 KiB, 8 MiB and above; from
    /// the second on, batches of small pieces are a kind of their own.
    pub(crate) fn of(pieces: &[Piece], footing: Footing) -> Self {
        let open = pieces.iter().filter(|piece| piece.outcome.is_none());
        let (count, bytes) = open.fold((0_u64, 0_u64), |(count, bytes), piece| {
            (count + 1, bytes.saturating_add(piece.local.length() as u64))
        });
        let ends = [TINY_BYTES, MEDIUM_BYTES, LARGE_BYTES];
        let class = ends.iter().filter(|end| bytes > **end).count();
        let is_scattered = class > 0 && bytes / count.max(1) <= SCATTERED_BYTES_MAX;
        let class = if is_scattered { class + 3 } else { class };
        let row = match footing {
            Footing::Mapped => class,
            Footing::Process => SIZES + class,
        };
        Self { row, bytes }
    }

    /// Whether a trial is worth a connection that is not there yet.
    pub(crate) const fn is_worth_a_connection(&self) -> bool {
        self.bytes > TINY_BYTES
    }
}

impl Scores {
    /// Which of two ways, by their index, a batch of this shape is to take.
    pub(crate) fn pick(&self, shape: Shape, first: usize, second: usize) -> Pick {
        let row = &self.rows[shape.row];
        let (a, b) = (&row.ways[first], &row.ways[second]);
        if a.count.load(Ordering::Relaxed) < WARM && !row.is_doubted() {
            return Pick::First;
        }
        let is_second_better = b.is_measured() && b.nanos() * 5 < a.nanos() * 4;
        let is_due = row.take_trial();
        match (is_second_better, is_due) {
            (false, false) => Pick::First,
            (false, true) => Pick::TrySecond,
            (true, false) => Pick::Second,
            (true, true) => Pick::TryFirst,
        }
    }

    /// Notes what a way took for a batch of this shape.
    pub(crate) fn note(&self, shape: Shape, way: usize, took: Duration, is_trial: bool) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        let row = &self.rows[shape.row];
        row.spent.fetch_add(nanos, Ordering::Relaxed);
        let score = &row.ways[way];
        let per_mib = u128::from(nanos) * (1 << 20) / u128::from(shape.bytes.max(1));
        score.note(u64::try_from(per_mib).unwrap_or(u64::MAX));
        if is_trial {
            row.end_trial(nanos);
        }
    }

    /// Takes over what a probe found out about the system's copy between processes.
    pub(crate) fn seed(&self, bytes_per_second: u64) {
        if bytes_per_second >= DOUBTED_BYTES_PER_SECOND {
            return;
        }
        for row in &self.rows[SIZES..] {
            row.pause.store(DOUBT, Ordering::Relaxed);
        }
    }

    /// Everything that was measured.
    pub(crate) fn all(&self) -> Vec<Measured> {
        let one = |(index, row): (usize, &Row)| {
            let footing = if index < SIZES { Footing::Mapped } else { Footing::Process };
            let size = SIZE_NAMES[index % SIZES];
            let ways = row.ways.iter().enumerate().filter(|(_, score)| score.is_measured());
            ways.map(|(way, score)| Measured {
                footing,
                size,
                way,
                bytes_per_second: (1_000_000_000 << 20) / score.nanos().max(1),
                batches: score.count.load(Ordering::Relaxed),
            })
            .collect::<Vec<_>>()
        };
        self.rows.iter().enumerate().flat_map(one).collect()
    }
}

/// The pause of a row whose first way is doubted and of which no trial was made yet.
const DOUBT: u64 = u64::MAX;

impl Row {
    fn is_doubted(&self) -> bool {
        self.pause.load(Ordering::Relaxed) == DOUBT
    }

    /// Whether a trial is due; then it is the caller's, and nobody else's for a while.
    fn take_trial(&self) -> bool {
        let spent = self.spent.load(Ordering::Relaxed);
        let at = self.trial_at.load(Ordering::Relaxed);
        let due = if self.is_doubted() { at } else { at.max(FIRST_TRIAL_NANOS) };
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
            DOUBT | 0 => PAUSE_MIN,
            pause => (pause * 2).min(PAUSE_MAX),
        };
        self.pause.store(pause, Ordering::Relaxed);
        let spent = self.spent.load(Ordering::Relaxed);
        self.trial_at.store(spent.saturating_add(nanos.saturating_mul(pause)), Ordering::Relaxed);
    }
}

impl Score {
    fn is_measured(&self) -> bool {
        self.nanos() > 0
    }

    fn nanos(&self) -> u64 {
        self.nanos_per_mib.load(Ordering::Relaxed)
    }

    /// Two threads that note at once may lose one of the two, which a mean can bear.
    fn note(&self, nanos: u64) {
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
    use crate::piece::LocalRange;

    fn shape(lengths: &[usize]) -> Shape {
        let piece = |length: &usize| {
            // SAFETY: nothing is transferred.
            Piece::new(unsafe { LocalRange::foreign(4096, *length) }, 0)
        };
        Shape::of(&lengths.iter().map(piece).collect::<Vec<_>>(), Footing::Process)
    }

    /// Transfers of 1 MiB until so many trials were made; which way served between them.
    fn run(scores: &Scores, nanos: [u64; 2], trials: usize) -> (Pick, u64) {
        let shape = shape(&[1 << 20]);
        let (mut made, mut transfers, mut last) = (0, 0, Pick::First);
        while made < trials {
            let pick = scores.pick(shape, 0, 1);
            let is_trial = matches!(pick, Pick::TrySecond | Pick::TryFirst);
            let way = usize::from(matches!(pick, Pick::Second | Pick::TrySecond));
            scores.note(shape, way, Duration::from_nanos(nanos[way]), is_trial);
            made += usize::from(is_trial);
            transfers += 1;
            if !is_trial {
                last = pick;
            }
        }
        (last, transfers)
    }

    #[test]
    fn the_faster_way_serves_and_trials_cost_little() {
        let scores = Scores::default();
        let (serves, transfers) = run(&scores, [100_000, 400_000], 4);
        assert_eq!(serves, Pick::First);
        // The four trials took 16 transfers' time.
        assert!(transfers > 16 * 64, "{transfers}");
        let scores = Scores::default();
        let (serves, _) = run(&scores, [400_000, 100_000], 4);
        assert_eq!(serves, Pick::Second);
    }

    #[test]
    fn a_way_that_is_a_little_faster_is_not_worth_a_change_and_one_that_became_slow_is() {
        let scores = Scores::default();
        assert_eq!(run(&scores, [100_000, 90_000], 5).0, Pick::First);
        assert_eq!(run(&scores, [400_000, 90_000], 5).0, Pick::Second);
        assert_eq!(run(&scores, [50_000, 90_000], 12).0, Pick::First);
    }

    #[test]
    fn nothing_is_tried_before_a_way_is_warm_unless_it_is_doubted() {
        let scores = Scores::default();
        let one = shape(&[1 << 20]);
        for _ in 0..WARM {
            assert_eq!(scores.pick(one, 0, 1), Pick::First);
            scores.note(one, 0, Duration::from_millis(10), false);
        }
        assert_eq!(scores.pick(one, 0, 1), Pick::TrySecond);
        assert_eq!(scores.pick(one, 0, 1), Pick::First, "a trial is one caller's");
        let doubted = Scores::default();
        doubted.seed(DOUBTED_BYTES_PER_SECOND - 1);
        assert_eq!(doubted.pick(one, 0, 1), Pick::TrySecond);
        let trusted = Scores::default();
        trusted.seed(DOUBTED_BYTES_PER_SECOND);
        assert_eq!(trusted.pick(one, 0, 1), Pick::First);
    }

    #[test]
    fn threads_that_note_at_once_leave_a_mean_of_what_they_noted() {
        for _ in 0..2000 {
            let (score, start) = (Score::default(), std::sync::Barrier::new(3));
            std::thread::scope(|scope| {
                for nanos in [1, 1_000_000, 1_000_000_000] {
                    let (score, start) = (&score, &start);
                    scope.spawn(move || {
                        start.wait();
                        (0..50).for_each(|_| score.note(nanos));
                    });
                }
            });
            assert!((1..=1_000_000_000).contains(&score.nanos()), "{score:?}");
            assert_eq!(score.count.load(Ordering::Relaxed), 150);
        }
    }

    #[test]
    fn sizes_and_small_pieces_are_told_apart() {
        let rows: Vec<usize> = [
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
        .map(|lengths| shape(lengths).row - SIZES)
        .collect();
        assert_eq!(rows, [0, 0, 1, 2, 3, 4, 5, 6]);
    }
}
