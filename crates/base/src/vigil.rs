//! Waiting awake for what comes at once.
//!
//! A thread that sleeps until its answer comes has to be woken, which on an idle machine takes
//! longer than the answer itself: a processor that has stopped must be started from the other one.
//! So a thread asks its socket again and again for a moment before it sleeps. Where every processor
//! has work it would keep one from somebody who could do it, perhaps from him whom it waits for. What
//! came of it tells which it is: only while answers come within the moment does it go on, else it
//! sleeps at once and tries again after pauses that grow.

use std::{
    io,
    sync::{
        LazyLock, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crate::env;

/// How long a thread stays awake for an answer: as long as it takes to wake the other side, whose
/// processor has gone to sleep, and to be answered.
pub const ANSWER: Duration = Duration::from_micros(100);

/// How long for the next call: as long as it takes to copy a MiB and come again.
pub const NEXT_CALL: Duration = Duration::from_micros(200);

/// The first pause after a moment in vain. Each further one makes it twice as long, up to…
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// … so much that trying costs next to nothing.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// So many answers in a row within their moments make the next pause a short one again.
const ANSWERS_IN_TIME: u32 = 64;

static IS_ALLOWED: LazyLock<bool> = LazyLock::new(|| env::MC_STAY_AWAKE.is_on());

/// Threads of this process that drive a connection at present.
static ENGAGED: AtomicUsize = AtomicUsize::new(0);

/// That a thread drives a connection. Each counts as one, and one more at the other end.
#[derive(Debug)]
pub struct Engaged(());

/// What became of staying awake for one connection.
#[derive(Debug)]
pub struct Vigil {
    /// How long a thread stays awake.
    moment: Duration,
    /// Until then nobody stays awake.
    pause_until: Option<Instant>,
    /// The next pause.
    pause: Duration,
    /// Answers in a row within their moments.
    in_time: u32,
}

impl Engaged {
    /// Counts this thread until it is dropped.
    #[must_use = "the thread counts for as long as this lives"]
    #[expect(clippy::new_without_default, reason = "a default that counts would surprise")]
    pub fn new() -> Self {
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
    /// One of so long: [`ANSWER`] or [`NEXT_CALL`].
    pub const fn new(moment: Duration) -> Self {
        Self { moment, pause_until: None, pause: PAUSE_MIN, in_time: 0 }
    }

    /// Tries again and again for a moment, if that is worth it. Nothing if nothing came.
    pub fn keep<T>(&mut self, mut attempt: impl FnMut() -> io::Result<T>) -> Option<io::Result<T>> {
        let begin = Instant::now();
        if !self.is_worth_it(begin) {
            return None;
        }
        loop {
            let outcome = attempt();
            let now = Instant::now();
            let is_over = now - begin > self.moment;
            let has_come = !is_nothing(&outcome);
            if has_come || is_over {
                // What came, but only after the processor had been taken away, came late too.
                self.note(!is_over, now);
                return has_come.then_some(outcome);
            }
            std::hint::spin_loop();
        }
    }

    fn is_worth_it(&self, now: Instant) -> bool {
        *IS_ALLOWED
            && ENGAGED.load(Ordering::Relaxed) * 2 <= processors()
            && self.pause_until.is_none_or(|until| until <= now)
    }

    fn note(&mut self, is_in_time: bool, now: Instant) {
        if !is_in_time {
            self.in_time = 0;
            self.pause_until = Some(now + self.pause);
            self.pause = (self.pause * 2).min(PAUSE_MAX);
            return;
        }
        self.in_time += 1;
        if self.in_time == ANSWERS_IN_TIME {
            (self.in_time, self.pause) = (0, PAUSE_MIN);
        }
    }
}

/// How many processors this process may use.
pub fn processors() -> usize {
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
    fn the_pauses_after_moments_in_vain_grow_and_are_short_again_after_answers_in_time() {
        let (mut vigil, mut now, mut pause) = (Vigil::new(ANSWER), Instant::now(), PAUSE_MIN);
        for _ in 0..20 {
            vigil.note(false, now);
            assert_eq!(vigil.pause_until, Some(now + pause));
            now += pause;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        assert_eq!(pause, PAUSE_MAX);
        for _ in 1..ANSWERS_IN_TIME {
            vigil.note(true, now);
        }
        vigil.note(false, now);
        assert_eq!(vigil.pause_until, Some(now + PAUSE_MAX), "one answer too few");
        for _ in 0..ANSWERS_IN_TIME {
            vigil.note(true, now);
        }
        vigil.note(false, now);
        assert_eq!(vigil.pause_until, Some(now + PAUSE_MIN));
    }

    #[test]
    fn what_is_there_is_taken_and_what_never_comes_is_not_waited_for() {
        let mut vigil = Vigil::new(ANSWER);
        // Tests beside this one may need the processors.
        if let Some(come) = vigil.keep(|| Ok(7)) {
            assert_eq!(come.unwrap(), 7);
        }
        assert!((0..100).all(|_| vigil.keep(nothing).is_none()));
    }

    #[test]
    fn what_came_after_its_moment_is_taken_and_was_late() {
        let (mut vigil, mut asked) = (Vigil::new(ANSWER), 0);
        let come = vigil.keep(|| {
            asked += 1;
            let late = Instant::now() + ANSWER * 2;
            while Instant::now() < late {}
            Ok(7)
        });
        if asked > 0 {
            assert_eq!(come.unwrap().unwrap(), 7);
            assert!(vigil.pause_until.is_some());
        }
    }

    #[test]
    fn nobody_stays_awake_where_others_need_the_processors() {
        let _crowd: Vec<_> = (0..=processors()).map(|_| Engaged::new()).collect();
        let (mut vigil, mut asked) = (Vigil::new(ANSWER), 0);
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
