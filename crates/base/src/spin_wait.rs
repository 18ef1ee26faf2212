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
pub const ANSWER_SPIN_TIME: Duration = Duration::from_micros(100);

/// How long for the next call: as long as it takes to copy a MiB and come again.
pub const NEXT_CALL_SPIN_TIME: Duration = Duration::from_micros(200);

/// The first pause after a moment in vain. Each further one makes it twice as long, up to…
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// … so much that trying costs next to nothing.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// So many answers in a row within their moments make the next pause a short one again.
const ANSWERS_IN_TIME: u32 = 64;

static IS_ALLOWED: LazyLock<bool> = LazyLock::new(|| env::MC_BUSY_POLL.is_on());

/// Threads of this process that drive a connection at present.
static ACTIVE_THREADS: AtomicUsize = AtomicUsize::new(0);

/// That a thread drives a connection. Each counts as one, and one more at the other end.
#[derive(Debug)]
pub struct ActiveThread(());

/// What became of staying awake for one connection.
#[derive(Debug)]
pub struct SpinWait {
    /// How long a thread stays awake.
    spin_time: Duration,
    /// Until then nobody stays awake.
    pause_until: Option<Instant>,
    /// The next pause.
    pause: Duration,
    /// Answers in a row within their moments.
    in_time: u32,
}

impl ActiveThread {
    /// Counts this thread until it is dropped.
    #[must_use = "the thread counts for as long as this lives"]
    #[expect(clippy::new_without_default, reason = "a default that counts would surprise")]
    pub fn new() -> Self {
        ACTIVE_THREADS.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for ActiveThread {
    fn drop(&mut self) {
        ACTIVE_THREADS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl SpinWait {
    /// One of so long: [`ANSWER_SPIN_TIME`] or [`NEXT_CALL_SPIN_TIME`].
    pub const fn new(spin_time: Duration) -> Self {
        Self { spin_time, pause_until: None, pause: PAUSE_MIN, in_time: 0 }
    }

    /// Tries again and again for a moment, if that is worth it. Nothing if nothing came.
    pub fn poll<T>(&mut self, mut attempt: impl FnMut() -> io::Result<T>) -> Option<io::Result<T>> {
        let begin = Instant::now();
        if !self.should_spin(begin) {
            return None;
        }
        loop {
            let outcome = attempt();
            let now = Instant::now();
            let is_over = now - begin > self.spin_time;
            let has_come = !is_nothing(&outcome);
            if has_come || is_over {
                // What came, but only after the processor had been taken away, came late too.
                self.record(!is_over, now);
                return has_come.then_some(outcome);
            }
            std::hint::spin_loop();
        }
    }

    fn should_spin(&self, now: Instant) -> bool {
        *IS_ALLOWED
            && ACTIVE_THREADS.load(Ordering::Relaxed) * 2 <= cpu_count()
            && self.pause_until.is_none_or(|until| until <= now)
    }

    fn record(&mut self, is_in_time: bool, now: Instant) {
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
pub fn cpu_count() -> usize {
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
        let (mut spin_wait, mut now, mut pause) =
            (SpinWait::new(ANSWER_SPIN_TIME), Instant::now(), PAUSE_MIN);
        for _ in 0..20 {
            spin_wait.record(false, now);
            assert_eq!(spin_wait.pause_until, Some(now + pause));
            now += pause;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        assert_eq!(pause, PAUSE_MAX);
        for _ in 1..ANSWERS_IN_TIME {
            spin_wait.record(true, now);
        }
        spin_wait.record(false, now);
        assert_eq!(spin_wait.pause_until, Some(now + PAUSE_MAX), "one answer too few");
        for _ in 0..ANSWERS_IN_TIME {
            spin_wait.record(true, now);
        }
        spin_wait.record(false, now);
        assert_eq!(spin_wait.pause_until, Some(now + PAUSE_MIN));
    }

    #[test]
    fn what_is_there_is_taken_and_what_never_comes_is_not_waited_for() {
        let mut spin_wait = SpinWait::new(ANSWER_SPIN_TIME);
        // Tests beside this one may need the processors.
        if let Some(come) = spin_wait.poll(|| Ok(7)) {
            assert_eq!(come.unwrap(), 7);
        }
        assert!((0..100).all(|_| spin_wait.poll(nothing).is_none()));
    }

    #[test]
    fn what_came_after_its_moment_is_taken_and_was_late() {
        let (mut spin_wait, mut asked) = (SpinWait::new(ANSWER_SPIN_TIME), 0);
        let come = spin_wait.poll(|| {
            asked += 1;
            let late = Instant::now() + ANSWER_SPIN_TIME * 2;
            while Instant::now() < late {}
            Ok(7)
        });
        if asked > 0 {
            assert_eq!(come.unwrap().unwrap(), 7);
            assert!(spin_wait.pause_until.is_some());
        }
    }

    #[test]
    fn nobody_stays_awake_where_others_need_the_processors() {
        let _crowd: Vec<_> = (0..=cpu_count()).map(|_| ActiveThread::new()).collect();
        let (mut spin_wait, mut asked) = (SpinWait::new(ANSWER_SPIN_TIME), 0);
        for _ in 0..5 {
            let outcome = spin_wait.poll(|| {
                asked += 1;
                nothing()
            });
            assert!(outcome.is_none());
        }
        assert_eq!(asked, 0);
    }
}
