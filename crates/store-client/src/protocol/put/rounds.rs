//! Which failed puts of a batch are tried again, and until when.

use std::time::Duration;

use mooncake_base::{Error, ErrorCode};

/// Minimum delay between retries of a put that waits for memory.
const MEMORY_RETRY_MIN: Duration = Duration::from_millis(5);
/// Maximum delay; short, because readers release fences before they expire.
const MEMORY_RETRY_MAX: Duration = Duration::from_millis(20);

/// When a failed put may be tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutRetry {
    /// After this delay, when the fence may be over that holds the memory.
    After(Duration),
    /// After this delay, when objects may have moved down to disks that hold the memory.
    Moving(Duration),
    /// Once the client has registered again.
    Registered,
    /// If the master that started the put does not know the client any more, or another master has
    /// taken its place: then it knows nothing of the put.
    Forgotten,
}

impl PutRetry {
    /// Decides about a put that failed with this error.
    pub fn of(error: &Error) -> Option<Self> {
        match error.code() {
            ErrorCode::CLIENT_NOT_FOUND => Some(Self::Registered),
            ErrorCode::OBJECT_NOT_FOUND => Some(Self::Forgotten),
            ErrorCode::NO_AVAILABLE_HANDLE => {
                // The master adds the delay if the put only has to wait.
                let value = |wanted| error.context().find(|(name, _)| *name == wanted);
                let wait = Duration::from_millis(value("retry_after_ms")?.1.parse().ok()?);
                let wait = wait.clamp(MEMORY_RETRY_MIN, MEMORY_RETRY_MAX);
                Some(match value("moving_objects") {
                    Some(_) => Self::Moving(wait),
                    None => Self::After(wait),
                })
            }
            _ => None,
        }
    }

    /// Returns whether the put only has to wait.
    pub const fn waits_for_memory(&self) -> bool {
        matches!(self, Self::After(_) | Self::Moving(_))
    }
}

/// How often one call puts again what a master has forgotten.
const REGISTRATIONS_MAX: u32 = 8;

/// The rounds of a batch of puts: which failed ones are tried again, and until when.
#[derive(Debug)]
pub struct PutRounds {
    registrations_left: u32,
    patience: PutPatience,
    /// Time that the puts have waited for memory of the master of the last registration.
    waited: Duration,
    /// The number of that registration.
    registration: u64,
}

/// The longest times that puts wait for memory of one master.
#[derive(Debug, Clone, Copy)]
pub struct PutPatience {
    /// That only fences hold.
    pub fenced: Duration,
    /// Whose objects move down to disks.
    pub moving: Duration,
}

impl PutRounds {
    /// Before the first round.
    pub const fn new(patience: PutPatience) -> Self {
        let registrations_left = REGISTRATIONS_MAX;
        Self { registrations_left, patience, waited: Duration::ZERO, registration: 0 }
    }

    /// Returns whether the client should find out whether it has to register again.
    pub fn may_register(&self, retries: &[PutRetry]) -> bool {
        self.registrations_left > 0 && retries.iter().any(|retry| !retry.waits_for_memory())
    }

    /// The client has registered again, so that all failed puts are tried again. The time of this
    /// master counts anew.
    pub const fn registered(&mut self) {
        self.registrations_left -= 1;
        self.waited = Duration::ZERO;
    }

    /// Returns how long to wait before the puts that wait for memory are tried again; None if that
    /// would take too long, or there are none. `registration` is the number of the last one. Only
    /// these waits count, not the time in which no master answered.
    pub fn memory_wait(&mut self, retries: &[PutRetry], registration: u64) -> Option<Duration> {
        if self.registration != registration {
            self.registration = registration;
            self.waited = Duration::ZERO;
        }
        let waits = retries.iter().filter_map(|retry| {
            let (wait, longest) = match *retry {
                PutRetry::After(wait) => (wait, self.patience.fenced),
                PutRetry::Moving(wait) => (wait, self.patience.moving),
                PutRetry::Registered | PutRetry::Forgotten => return None,
            };
            (self.waited + wait <= longest).then_some(wait)
        });
        let wait = waits.min()?;
        self.waited += wait;
        Some(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_of_puts_have_two_limits() {
        let second = Duration::from_secs(1);
        let patience = PutPatience { fenced: second * 3, moving: second * 9 };
        let mut rounds = PutRounds::new(patience);
        let fenced = [PutRetry::After(second * 2), PutRetry::After(second), PutRetry::Forgotten];
        assert_eq!(rounds.memory_wait(&[PutRetry::Registered], 1), None);
        assert_eq!(rounds.memory_wait(&fenced[..1], 1), Some(second * 2));
        assert_eq!(rounds.memory_wait(&fenced[..1], 1), None);
        assert_eq!(rounds.memory_wait(&fenced, 1), Some(second), "the shortest wait, just in time");
        assert_eq!(rounds.memory_wait(&fenced, 1), None);
        let moving = [PutRetry::After(second), PutRetry::Moving(second * 2)];
        for _ in 0..3 {
            assert_eq!(rounds.memory_wait(&moving, 1), Some(second * 2));
        }
        assert_eq!(rounds.memory_wait(&moving, 1), None);
        assert_eq!(rounds.memory_wait(&fenced, 2), Some(second), "another master");
        assert!(!rounds.may_register(&fenced[..2]), "the master knows the client");
        for _ in 0..REGISTRATIONS_MAX {
            assert!(rounds.may_register(&fenced));
            rounds.registered();
        }
        assert!(!rounds.may_register(&fenced));
        assert_eq!(rounds.memory_wait(&fenced[..1], 2), Some(second * 2), "counted anew");
    }

    #[test]
    fn retries_only_puts_that_can_succeed_soon() {
        let full = |text: &'static str| Error::new(ErrorCode::NO_AVAILABLE_HANDLE, text);
        assert_eq!(PutRetry::of(&full("no memory is free")), None);
        let named = full("no memory is free").with("key", "retry_after_ms=9");
        assert_eq!(PutRetry::of(&named), None, "a key says nothing about the memory");
        let fenced = named.with("retry_after_ms", 9);
        let wait = Duration::from_millis(9);
        assert_eq!(PutRetry::of(&fenced), Some(PutRetry::After(wait)));
        let moving = fenced.with("moving_objects", 0);
        assert_eq!(PutRetry::of(&moving), Some(PutRetry::Moving(wait)));
        let of = |code| PutRetry::of(&Error::new(code, "unknown"));
        assert_eq!(of(ErrorCode::CLIENT_NOT_FOUND), Some(PutRetry::Registered));
        assert_eq!(of(ErrorCode::OBJECT_NOT_FOUND), Some(PutRetry::Forgotten));
        assert_eq!(of(ErrorCode::INVALID_PARAMS), None);
    }
}
