//! Waiting awake for what comes at once.
//!
//! A thread that sleeps until its answer comes has to be woken, which on an idle machine takes
//! longer than the answer itself: a processor that has stopped must be started from the other one.
//! So a thread asks its socket again and again for a moment before it sleeps. It does so only while
//! there is a processor for it and one for whoever is to send, and ever more seldom when nothing
//! comes in that moment (the peer is far away, slow, or has no processor) or when the system takes
//! the processor from it for others, who may belong to any program.

use std::{
    cell::Cell,
    io,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crate::process;

/// How long a thread stays awake. A small answer from this host takes half of it.
const MOMENT: Duration = Duration::from_micros(40);

/// After how many moments in vain the pauses between two of them grow no more.
const VAIN_MAX: u32 = 10;

/// After so many moments it is looked at how often the thread was made to give way.
const MOMENTS_A_LOOK: u32 = 8;

/// So often a thread is made to give way between two looks where others need the processor.
const YIELDS_MANY: i64 = 2;

/// The first pause when others need the processor, and how often it may double.
const CROWD_PAUSE: u32 = 256;
const CROWD_MAX: u32 = 5;

/// Threads of this process that drive a connection at present.
static ENGAGED: AtomicUsize = AtomicUsize::new(0);

/// That a thread drives a connection. Each counts as one, and one more at the other end.
#[derive(Debug)]
pub(super) struct Engaged(());

/// What became of staying awake for one connection.
#[derive(Debug, Default)]
pub(super) struct Vigil {
    /// Moments in a row in which nothing came.
    vain: u32,
    /// How many times no moment is spent before the next is tried.
    pause: u32,
    /// Moments since the last look at how often the thread had to give way.
    unseen: u32,
    /// Looks in a row that found a crowd.
    crowded: u32,
}

thread_local! {
    /// How often this thread had been made to give way when that was last looked at.
    static YIELDS: Cell<Option<i64>> = const { Cell::new(None) };
}

impl Engaged {
    pub(super) fn new() -> Self {
        ENGAGED.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Engaged {
    fn drop(&mut self) {
        ENGAGED.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Vigil {
    /// Tries again and again for a moment, if that is worth it. Nothing if nothing came.
    pub(super) fn keep<T>(
        &mut self,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> Option<io::Result<T>> {
        if !self.is_worth_it() {
            return None;
        }
        let until = Instant::now() + MOMENT;
        loop {
            let outcome = attempt();
            if !is_nothing(&outcome) {
                self.note(true);
                return Some(outcome);
            }
            if Instant::now() >= until {
                self.note(false);
                return None;
            }
            std::hint::spin_loop();
        }
    }

    fn is_worth_it(&mut self) -> bool {
        if ENGAGED.load(Ordering::Relaxed) * 2 > processors() {
            return false;
        }
        let is_due = self.pause == 0;
        self.pause = self.pause.saturating_sub(1);
        is_due
    }

    fn note(&mut self, has_come: bool) {
        self.vain = if has_come { 0 } else { (self.vain + 1).min(VAIN_MAX) };
        self.pause = if has_come { 0 } else { 1 << self.vain };
        self.unseen += 1;
        if self.unseen == MOMENTS_A_LOOK {
            self.unseen = 0;
            self.note_yields(yields_since_last_look());
        }
    }

    fn note_yields(&mut self, yields: i64) {
        if yields < YIELDS_MANY {
            self.crowded = 0;
            return;
        }
        self.pause = self.pause.max(CROWD_PAUSE << self.crowded);
        self.crowded = (self.crowded + 1).min(CROWD_MAX);
    }
}

fn yields_since_last_look() -> i64 {
    let yields = process::forced_yields();
    YIELDS.replace(Some(yields)).map_or(0, |before| yields - before)
}

/// How many processors this process may use.
pub(super) fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn is_nothing<T>(outcome: &io::Result<T>) -> bool {
    outcome.as_ref().is_err_and(|failure| failure.kind() == io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing() -> io::Result<u8> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    #[test]
    fn the_pauses_after_moments_in_vain_grow_and_end_with_success() {
        let mut vigil = Vigil::default();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            vigil.note(false);
            pauses.push(vigil.pause);
        }
        assert_eq!(pauses[..4], [2, 4, 8, 16]);
        assert!(pauses.is_sorted() && pauses[10..] == [1 << VAIN_MAX; 2]);
        vigil.note(true);
        assert_eq!((vigil.vain, vigil.pause), (0, 0));
    }

    #[test]
    fn a_crowd_is_given_way_to_for_longer_and_longer_and_forgotten() {
        let mut vigil = Vigil::default();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            vigil.pause = 0;
            vigil.note_yields(YIELDS_MANY);
            pauses.push(vigil.pause);
        }
        assert_eq!(pauses[..3], [256, 512, 1024]);
        assert_eq!(pauses[6..], [CROWD_PAUSE << CROWD_MAX; 2]);
        vigil.note_yields(YIELDS_MANY - 1);
        vigil.pause = 0;
        vigil.note_yields(YIELDS_MANY);
        assert_eq!(vigil.pause, CROWD_PAUSE);
    }

    #[test]
    fn what_is_there_is_taken_and_what_never_comes_is_not_waited_for() {
        let mut vigil = Vigil::default();
        // Tests beside this one may have made it a crowd.
        if let Some(come) = vigil.keep(|| Ok(7)) {
            assert_eq!(come.unwrap(), 7);
        }
        assert!((0..100).all(|_| vigil.keep(nothing).is_none()));
    }

    #[test]
    fn nobody_stays_awake_where_others_need_the_processors() {
        let _crowd: Vec<_> = (0..=processors()).map(|_| Engaged::new()).collect();
        let (mut vigil, mut asked) = (Vigil::default(), 0);
        for _ in 0..5 {
            let outcome = vigil.keep(|| {
                asked += 1;
                nothing()
            });
            assert!(outcome.is_none());
        }
        assert_eq!(asked, 0);
    }
}
