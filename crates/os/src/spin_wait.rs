//! Busy-polling for a reply or a call that is expected within microseconds.
//!
//! A thread that sleeps until its reply comes has to be woken. On an idle machine the wake-up takes
//! longer than the reply itself, because the other CPU has to leave its idle state. So a thread
//! polls its socket for a short spin time before it sleeps. Where every CPU has work, a polling
//! thread takes CPU time from a thread that needs it, perhaps from its own peer. The outcome of
//! each attempt shows which case it is: polling continues only while replies arrive within the spin
//! time. Otherwise the thread sleeps at once, and tries to poll again after pauses that grow.

use std::{
    io,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use mooncake_base::Backoff;

use crate::cpu::cpu_count;

/// Spin time for a reply: enough to wake the other side, whose CPU is idle, and to be answered.
pub const ANSWER_SPIN_TIME: Duration = Duration::from_micros(100);

/// Spin time for the next call: enough for the caller to copy a MiB and call again.
pub const NEXT_CALL_SPIN_TIME: Duration = Duration::from_micros(200);

/// Pauses after polls without success. Polling once per second costs next to nothing.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_secs(1));

/// Consecutive replies within the spin time after which the pauses are short again.
const ANSWERS_IN_TIME: u32 = 64;

/// Whether threads of this process poll at all.
static IS_ENABLED: AtomicBool = AtomicBool::new(true);

/// Threads of this process that drive a connection at present.
static ACTIVE_THREADS: AtomicUsize = AtomicUsize::new(0);

/// Turns busy-polling on or off for all threads of this process, which share the CPUs. It is on
/// unless an entry point turns it off.
pub fn set_enabled(is_enabled: bool) {
    IS_ENABLED.store(is_enabled, Ordering::Relaxed);
}

/// An RAII guard that counts the current thread as one that drives a connection.
#[derive(Debug)]
pub struct ActiveThread(());

/// The busy-poll policy of one connection: whether polling has paid off lately.
#[derive(Debug)]
pub struct SpinWait {
    /// How long a thread polls before it sleeps.
    spin_time: Duration,
    /// No polling before this time.
    pause_until: Option<Instant>,
    /// Pauses since the last reset.
    pauses: u32,
    /// Consecutive replies within the spin time.
    in_time: u32,
}

impl ActiveThread {
    /// Counts this thread until the guard is dropped.
    #[must_use = "the thread counts only while the guard lives"]
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
    /// Creates a policy with this spin time: [`ANSWER_SPIN_TIME`] or [`NEXT_CALL_SPIN_TIME`].
    pub const fn new(spin_time: Duration) -> Self {
        Self { spin_time, pause_until: None, pauses: 0, in_time: 0 }
    }

    /// Repeats `attempt` for the spin time while it returns `WouldBlock`, if polling is worthwhile.
    /// Returns `None` if nothing came or polling is paused.
    pub fn poll<T>(&mut self, attempt: impl FnMut() -> io::Result<T>) -> Option<io::Result<T>> {
        let may_spin = IS_ENABLED.load(Ordering::Relaxed)
            && has_spare_cpus(ACTIVE_THREADS.load(Ordering::Relaxed), cpu_count());
        self.poll_if(may_spin, attempt)
    }

    fn poll_if<T>(
        &mut self,
        may_spin: bool,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> Option<io::Result<T>> {
        let begin = Instant::now();
        if !may_spin || self.pause_until.is_some_and(|until| until > begin) {
            return None;
        }
        loop {
            let outcome = attempt();
            let now = Instant::now();
            let is_over = now - begin > self.spin_time;
            let has_come = !would_block(&outcome);
            if has_come || is_over {
                // A reply that came only after this thread had lost its CPU counts as late, too.
                self.record(!is_over, now);
                return has_come.then_some(outcome);
            }
            std::hint::spin_loop();
        }
    }

    fn record(&mut self, is_in_time: bool, now: Instant) {
        if !is_in_time {
            self.in_time = 0;
            self.pause_until = Some(now + PAUSES.pause(self.pauses));
            self.pauses = self.pauses.saturating_add(1);
            return;
        }
        self.in_time += 1;
        if self.in_time == ANSWERS_IN_TIME {
            (self.in_time, self.pauses) = (0, 0);
        }
    }
}

/// Each active thread occupies a CPU, and its peer at the other end occupies another.
fn has_spare_cpus(active_threads: usize, cpus: usize) -> bool {
    active_threads * 2 <= cpus
}

fn would_block<T>(outcome: &io::Result<T>) -> bool {
    outcome.as_ref().is_err_and(|failure| failure.kind() == io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing() -> io::Result<u8> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    #[test]
    fn pauses_double_and_reset_after_replies_in_time() {
        let (mut spin_wait, now) = (SpinWait::new(ANSWER_SPIN_TIME), Instant::now());
        for pause in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1000] {
            spin_wait.record(false, now);
            assert_eq!(spin_wait.pause_until, Some(now + Duration::from_millis(pause)));
        }
        for _ in 1..ANSWERS_IN_TIME {
            spin_wait.record(true, now);
        }
        spin_wait.record(false, now);
        assert_eq!(spin_wait.pause_until, Some(now + Duration::from_secs(1)), "one reply too few");
        for _ in 0..ANSWERS_IN_TIME {
            spin_wait.record(true, now);
        }
        spin_wait.record(false, now);
        assert_eq!(spin_wait.pause_until, Some(now + Duration::from_millis(1)));
    }

    #[test]
    fn returns_what_is_ready() {
        let outcome = SpinWait::new(ANSWER_SPIN_TIME).poll_if(true, || Ok(7));
        assert_eq!(outcome.unwrap().unwrap(), 7);
        let failure = SpinWait::new(ANSWER_SPIN_TIME)
            .poll_if(true, || Err::<u8, _>(io::ErrorKind::BrokenPipe.into()));
        assert_eq!(failure.unwrap().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn gives_up_after_the_spin_time_and_pauses() {
        let (mut spin_wait, mut attempts) = (SpinWait::new(ANSWER_SPIN_TIME), 0);
        let begin = Instant::now();
        let outcome = spin_wait.poll_if(true, || {
            attempts += 1;
            nothing()
        });
        assert!(outcome.is_none() && attempts > 0);
        assert!(begin.elapsed() > ANSWER_SPIN_TIME);
        // The pause is made longer than any delay of this thread.
        spin_wait.pause_until = Some(Instant::now() + Duration::from_secs(3600));
        assert!(spin_wait.poll_if(true, || -> io::Result<u8> { panic!("paused") }).is_none());
    }

    #[test]
    fn a_reply_after_the_spin_time_is_returned_and_counts_as_late() {
        let mut spin_wait = SpinWait::new(ANSWER_SPIN_TIME);
        let outcome = spin_wait.poll_if(true, || {
            let late = Instant::now() + ANSWER_SPIN_TIME * 2;
            while Instant::now() < late {}
            Ok(7)
        });
        assert_eq!(outcome.unwrap().unwrap(), 7);
        assert!(spin_wait.pause_until.is_some());
    }

    #[test]
    fn does_not_poll_where_it_may_not() {
        let mut spin_wait = SpinWait::new(ANSWER_SPIN_TIME);
        assert!(spin_wait.poll_if(false, || -> io::Result<u8> { panic!("it polls") }).is_none());
        assert!(spin_wait.pause_until.is_none(), "an attempt that was not made is no failure");
    }

    #[test]
    fn polling_needs_two_cpus_per_active_thread() {
        assert!(has_spare_cpus(0, 1) && has_spare_cpus(1, 2) && has_spare_cpus(2, 5));
        assert!(!has_spare_cpus(1, 1) && !has_spare_cpus(3, 5));
    }

    #[test]
    fn active_threads_are_counted_until_the_guard_drops() {
        let guards: Vec<_> = (0..=cpu_count()).map(|_| ActiveThread::new()).collect();
        // Other tests may count threads meanwhile, so only the lower limit is certain.
        assert!(ACTIVE_THREADS.load(Ordering::Relaxed) > cpu_count());
        let mut spin_wait = SpinWait::new(ANSWER_SPIN_TIME);
        assert!(spin_wait.poll(|| -> io::Result<u8> { panic!("no CPU to spare") }).is_none());
        drop(guards);
    }
}
