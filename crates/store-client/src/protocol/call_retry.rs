//! Decides whether a failed call is sent again, and when.

use std::time::Duration;

use mooncake_base::{Backoff, Moment};

/// Delays from the second repetition on; the first one follows at once, since a connection that was
/// found dead is the usual cause.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
/// Delays of a call that an overloaded master refused.
const OVERLOAD_PAUSES: Backoff =
    Backoff::new(Duration::from_millis(20), Duration::from_millis(500));
/// Delays while there is no connection: a repetition then costs next to nothing, since the link
/// limits how often a connection is attempted.
const UNREACHABLE_PAUSES: Backoff =
    Backoff::new(Duration::from_millis(5), Duration::from_millis(100));

/// Minimum time limit of one attempt of a call that closes a put.
const ATTEMPT_MIN: Duration = Duration::from_millis(500);

/// What a second execution of a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallKind {
    /// The same as the first: the call is idempotent, or carries a number by which the master knows
    /// a repetition.
    Repeatable,
    /// Ends or revokes a put, which is repeatable. Repeated until the deadline, whatever failed:
    /// nobody else can do it, and until then the object is unreadable and its memory is held.
    ClosesPut,
    /// Something else than the first. Such a call is repeated only if it was not sent.
    SentOnce,
}

/// Why an attempt of a call has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptFailure {
    /// There is no connection; the request was not sent.
    Unreachable,
    /// The request was not sent completely, over a connection that was made earlier.
    Unsent,
    /// The connection broke after the request was sent; the master may have executed it.
    Broken,
    /// The connection broke after the request was sent, since the network to the master is cut; the
    /// master may have executed it.
    CutOff,
    /// No answer arrived in time; the master may have executed the request.
    TimedOut,
    /// The master is overloaded and refused, or a daemon in between failed to forward the call.
    Refused,
    /// Any repetition fails, too: the link is closed, or the request is too large.
    Final,
}

/// How long an ordinary call is repeated.
#[derive(Debug, Clone, Copy)]
pub struct RetryPatience {
    /// Time from the first failure. Zero: the call is not repeated.
    pub time: Duration,
    /// Whether a call that finds no connection waits for one. If not, only the calls that were
    /// under way when the connection broke are repeated.
    pub awaits_connection: bool,
}

/// The repetitions of one call.
#[derive(Debug)]
pub struct CallRetry {
    kind: CallKind,
    deadline: Moment,
    patience: RetryPatience,
    /// The end of repetitions; set by the first failure.
    give_up_at: Option<Moment>,
    /// Whether the deadline, and nothing else, forbade another repetition.
    is_out_of_time: bool,
    repetitions: u32,
    jitter: u64,
}

impl CallRetry {
    /// A call that has until `deadline`, and is repeated with `patience` unless it closes a put.
    /// `seed` decides the random part of its delays.
    pub fn new(kind: CallKind, deadline: Moment, patience: RetryPatience, seed: u64) -> Self {
        Self {
            kind,
            deadline,
            patience,
            give_up_at: None,
            is_out_of_time: false,
            repetitions: 0,
            jitter: seed,
        }
    }

    /// Returns the time limit of the next attempt. A call that closes a put leaves time for a
    /// repetition over another connection, in case this one is silently dead.
    pub fn attempt_deadline(&self, now: Moment) -> Moment {
        match self.kind {
            CallKind::ClosesPut => {
                self.deadline.min(now + (self.deadline.left(now) / 2).max(ATTEMPT_MIN))
            }
            CallKind::Repeatable | CallKind::SentOnce => self.deadline,
        }
    }

    /// Decides after a failed attempt: the delay before the next one, or `None` to give up.
    pub fn after_failure(&mut self, failure: AttemptFailure, now: Moment) -> Option<Duration> {
        let is_first = self.repetitions == 0;
        let is_allowed = match (failure, self.kind) {
            (AttemptFailure::Final, _) => false,
            (_, CallKind::ClosesPut) => true,
            // A master that was there a moment ago probably restarts.
            (AttemptFailure::Unreachable, _) => !is_first || self.patience.awaits_connection,
            (AttemptFailure::Unsent | AttemptFailure::Refused, CallKind::Repeatable)
            | (AttemptFailure::Unsent, CallKind::SentOnce)
            | (
                AttemptFailure::Broken | AttemptFailure::CutOff | AttemptFailure::TimedOut,
                CallKind::Repeatable,
            ) => true,
            (_, CallKind::SentOnce) => false,
        };
        let give_up_at = *self.give_up_at.get_or_insert_with(|| match (self.kind, failure) {
            // TCP would have sent the request again until the deadline, only at longer intervals.
            (CallKind::ClosesPut, _) | (_, AttemptFailure::CutOff) => self.deadline,
            _ => self.deadline.min(now + self.patience.time),
        });
        let pause = self.pause(failure);
        self.is_out_of_time = is_allowed && self.deadline <= now + pause;
        if !is_allowed || give_up_at <= now + pause {
            return None;
        }
        self.repetitions += 1;
        Some(pause)
    }

    /// Returns whether an earlier attempt may have been executed.
    pub fn is_repetition(&self) -> bool {
        self.repetitions > 0
    }

    /// Returns whether the call was given up because its deadline leaves no time for a repetition.
    pub fn is_out_of_time(&self) -> bool {
        self.is_out_of_time
    }

    fn pause(&mut self, failure: AttemptFailure) -> Duration {
        let most = match failure {
            AttemptFailure::Refused => OVERLOAD_PAUSES.pause(self.repetitions),
            AttemptFailure::Unreachable => UNREACHABLE_PAUSES.pause(self.repetitions),
            _ if self.repetitions == 0 => return Duration::ZERO,
            _ => PAUSES.pause(self.repetitions - 1),
        };
        // Between half and all of it, so that the callers of a restarted master do not come at once.
        self.jitter =
            self.jitter.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let share = (self.jitter >> 48) as u32;
        most / 2 + most / 2 * share / (1 << 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const START: Moment = Moment::from_boot(SECOND);
    const AWAITING: RetryPatience =
        RetryPatience { time: Duration::from_secs(2), awaits_connection: true };
    const PROMPT: RetryPatience = RetryPatience { awaits_connection: false, ..AWAITING };

    /// Returns the time until the call gives up, if each attempt fails like this at once.
    fn waited(kind: CallKind, failure: AttemptFailure, patience: RetryPatience) -> Duration {
        let mut retry = CallRetry::new(kind, START + SECOND * 30, patience, 7);
        let mut now = START;
        while let Some(pause) = retry.after_failure(failure, now) {
            assert!(pause <= Duration::from_millis(500));
            now = now + pause.max(Duration::from_micros(100));
        }
        now.since(START)
    }

    #[test]
    fn call_that_closes_a_put_is_repeated_until_its_deadline() {
        use AttemptFailure::{Broken, CutOff, Refused, TimedOut, Unreachable, Unsent};
        for failure in [Unreachable, Unsent, Broken, CutOff, TimedOut, Refused] {
            let waited = waited(CallKind::ClosesPut, failure, PROMPT);
            assert!((SECOND * 29..SECOND * 30).contains(&waited), "{failure:?}: {waited:?}");
        }
        let closed = waited(CallKind::ClosesPut, AttemptFailure::Final, AWAITING);
        assert_eq!(closed, Duration::ZERO);
    }

    #[test]
    fn ordinary_call_is_repeated_for_a_short_time() {
        use AttemptFailure::{Broken, Refused, TimedOut, Unreachable, Unsent};
        for failure in [Unsent, Broken, TimedOut, Refused, Unreachable] {
            let waited = waited(CallKind::Repeatable, failure, AWAITING);
            assert!((SECOND..=SECOND * 2).contains(&waited), "{failure:?}: {waited:?}");
            let impatient = RetryPatience { time: Duration::ZERO, ..AWAITING };
            assert_eq!(self::waited(CallKind::Repeatable, failure, impatient), Duration::ZERO);
        }
    }

    #[test]
    fn dead_master_is_reported_at_once_where_nobody_waits() {
        use AttemptFailure::{Broken, Unreachable};
        for kind in [CallKind::Repeatable, CallKind::SentOnce] {
            assert_eq!(waited(kind, Unreachable, PROMPT), Duration::ZERO, "{kind:?}");
        }
        assert!(waited(CallKind::Repeatable, Broken, PROMPT) >= SECOND);
    }

    #[test]
    fn call_that_is_sent_once_is_repeated_only_if_unsent() {
        use AttemptFailure::{Broken, CutOff, Final, Refused, TimedOut, Unreachable, Unsent};
        for failure in [Broken, CutOff, TimedOut, Refused, Final] {
            let waited = waited(CallKind::SentOnce, failure, AWAITING);
            assert_eq!(waited, Duration::ZERO, "{failure:?}");
        }
        for failure in [Unsent, Unreachable] {
            assert!(waited(CallKind::SentOnce, failure, AWAITING) > SECOND, "{failure:?}");
        }
    }

    #[test]
    fn restarting_master_is_awaited_after_a_broken_connection() {
        let mut retry = CallRetry::new(CallKind::Repeatable, START + SECOND * 30, PROMPT, 1);
        let first = retry.after_failure(AttemptFailure::Broken, START);
        assert_eq!(first, Some(Duration::ZERO));
        assert!(retry.after_failure(AttemptFailure::Unreachable, START + SECOND).is_some());
        assert!(retry.after_failure(AttemptFailure::Unreachable, START + SECOND * 2).is_none());
    }

    #[test]
    fn master_behind_a_cut_network_is_awaited_until_the_deadline() {
        let mut retry = CallRetry::new(CallKind::Repeatable, START + SECOND * 30, PROMPT, 1);
        assert_eq!(retry.after_failure(AttemptFailure::CutOff, START), Some(Duration::ZERO));
        for seconds in [5, 15, 28] {
            let now = START + SECOND * seconds;
            assert!(retry.after_failure(AttemptFailure::Unreachable, now).is_some());
        }
        let end = START + SECOND * 30;
        assert!(retry.after_failure(AttemptFailure::Unreachable, end).is_none());
    }

    #[test]
    fn attempts_to_close_a_put_leave_time_for_another() {
        let retry = CallRetry::new(CallKind::ClosesPut, START + SECOND * 30, PROMPT, 1);
        assert_eq!(retry.attempt_deadline(START), START + SECOND * 15);
        assert_eq!(retry.attempt_deadline(START + SECOND * 30), START + SECOND * 30);
        let other = CallRetry::new(CallKind::Repeatable, START + SECOND * 30, PROMPT, 1);
        assert_eq!(other.attempt_deadline(START), START + SECOND * 30);
    }
}
