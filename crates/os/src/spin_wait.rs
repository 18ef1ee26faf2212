//! Busy-polling for a reply or a call that is expected within microseconds.
//!
//! A thread that sleeps until its reply comes has to be woken. On an idle machine the wake-up takes
//! longer than the reply itself, because the other CPU has to leave its idle state. So a thread
//! polls its socket for a short spin time before it sleeps. Where every CPU has work, a polling
//! thread takes CPU time from a thread that needs it, perhaps from its own peer. The outcome of
//! each attempt shows which case it is: polling continues while most replies arrive within the spin
//! time. Otherwise the thread sleeps at once, and tries to poll again after pauses that grow.
//!
//! Some replies need a third process: a leader asks its standby before it answers. That process may be
//! queued for the CPU of a polling thread, which then has to [give way](SpinWait::giving_way). Others
//! must not: threads that take turns on one CPU stay there while another CPU is idle.

use std::{
    io,
    os::fd::AsFd,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use mooncake_base::Backoff;
use rustix::net::RecvFlags;

use crate::cpu::cpu_count;

/// Spin time for a reply: enough to wake the other side, whose CPU is idle, and to be answered.
pub const ANSWER_SPIN_TIME: Duration = Duration::from_micros(100);

/// Spin time for a reply for which the other side asks a third process, and for that process's own.
pub const RELAYED_ANSWER_SPIN_TIME: Duration = Duration::from_micros(200);

/// Spin time for the next call: enough for the caller to copy a MiB and call again.
pub const NEXT_CALL_SPIN_TIME: Duration = Duration::from_micros(200);

/// For how long a thread that gives way polls without doing so, if replies usually come within that time.
const AT_ONCE: Duration = Duration::from_micros(20);

/// Pauses after polls without success. Polling once per second costs next to nothing.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_secs(1));

/// Those of a thread that gives way, whose polling takes little from others.
const SHORT_PAUSES: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(100));

/// Replies in time for each late one with which a thread goes on polling without pauses.
const IN_TIME_PER_LATE: u32 = 64;

/// The same for a thread that gives way.
const FEW_IN_TIME_PER_LATE: u32 = 32;

/// The highest count of late replies: the next pause is the longest.
const LATE_MAX: u32 = 11;

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
    /// Whether other threads may need the CPU between two polls.
    gives_way: bool,
    /// No polling before this time.
    pause_until: Option<Instant>,
    /// Late replies, each counted as often as replies in time make up for it, less replies in time.
    late: u32,
    /// How long replies in time take: the mean of the last few.
    usual: Duration,
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
        Self { spin_time, gives_way: false, pause_until: None, late: 0, usual: Duration::ZERO }
    }

    /// Creates a policy for replies that may need a third process, perhaps on this CPU.
    pub const fn giving_way() -> Self {
        Self { gives_way: true, ..Self::new(RELAYED_ANSWER_SPIN_TIME) }
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
        let at_once = if self.usual > AT_ONCE { Duration::ZERO } else { AT_ONCE };
        loop {
            let outcome = attempt();
            let now = Instant::now();
            let waited = now - begin;
            let is_over = waited > self.spin_time;
            let has_come = !would_block(&outcome);
            if has_come || is_over {
                // A reply that came only after this thread had lost its CPU counts as late, too.
                if is_over {
                    self.record_late(now);
                } else {
                    self.record_in_time(waited);
                }
                return has_come.then_some(outcome);
            }
            if self.gives_way && waited > at_once {
                thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    fn record_in_time(&mut self, waited: Duration) {
        self.late = self.late.saturating_sub(1);
        self.usual = (self.usual * 7 + waited) / 8;
    }

    fn record_late(&mut self, now: Instant) {
        let (per_late, pauses) = if self.gives_way {
            (FEW_IN_TIME_PER_LATE, SHORT_PAUSES)
        } else {
            (IN_TIME_PER_LATE, PAUSES)
        };
        let pause = (self.late / per_late).checked_sub(1).map(|index| pauses.pause(index));
        self.pause_until = pause.map(|pause| now + pause);
        self.late = (self.late + per_late).min(LATE_MAX * per_late);
    }
}

/// Looks for bytes that have come to a socket, without waiting and without consuming them: an attempt for
/// [`SpinWait::poll`]. Returns 0 if the peer has closed the connection.
///
/// # Errors
/// `WouldBlock` if nothing has come, or that of the connection.
pub fn peek(socket: impl AsFd) -> io::Result<usize> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (_, received) = rustix::net::recv(socket, &mut [0_u8; 1], flags)?;
    Ok(received)
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
    fn pauses_double_while_replies_are_late() {
        let (mut spin_wait, now) = (SpinWait::new(ANSWER_SPIN_TIME), Instant::now());
        spin_wait.record_late(now);
        assert_eq!(spin_wait.pause_until, None, "one late reply says little");
        for pause in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1000] {
            spin_wait.record_late(now);
            assert_eq!(spin_wait.pause_until, Some(now + Duration::from_millis(pause)));
        }
        for _ in 0..LATE_MAX * IN_TIME_PER_LATE {
            spin_wait.record_in_time(Duration::ZERO);
        }
        spin_wait.record_late(now);
        assert_eq!(spin_wait.pause_until, None, "late replies are forgotten");
    }

    #[test]
    fn rare_late_replies_cause_no_pauses() {
        let (mut spin_wait, now) = (SpinWait::giving_way(), Instant::now());
        for _ in 0..100 {
            spin_wait.record_late(now);
            assert_eq!(spin_wait.pause_until, None);
            (0..FEW_IN_TIME_PER_LATE).for_each(|_| spin_wait.record_in_time(Duration::ZERO));
        }
        for _ in 0..100 {
            spin_wait.record_late(now);
            (1..FEW_IN_TIME_PER_LATE).for_each(|_| spin_wait.record_in_time(Duration::ZERO));
        }
        assert!(spin_wait.pause_until > Some(now), "too many are late");
    }

    #[test]
    fn usual_time_is_that_of_the_last_few_replies() {
        let mut spin_wait = SpinWait::giving_way();
        for (reply, is_at_once) in [(5, true), (60, false), (5, true)] {
            (0..30).for_each(|_| spin_wait.record_in_time(Duration::from_micros(reply)));
            assert_eq!(spin_wait.usual <= AT_ONCE, is_at_once, "{reply} us");
        }
    }

    #[test]
    fn thread_that_gives_way_polls_on() {
        let (mut spin_wait, mut left) = (SpinWait::giving_way(), 20);
        spin_wait.usual = 2 * AT_ONCE;
        let outcome = spin_wait.poll_if(true, || {
            left -= 1;
            if left == 0 { Ok(7) } else { nothing() }
        });
        // Others may have had the CPU for longer than the spin time.
        assert!(outcome.is_some() || spin_wait.late > 0);
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
        spin_wait.record_late(Instant::now());
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
