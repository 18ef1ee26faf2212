//! Starts and closes puts. Both work on the items of one message, by their numbers.

use std::time::Duration;

use mooncake_base::{Error, ErrorCode, Moment, ObjectKey, Result, Version};
use smallvec::SmallVec;

use super::own_puts::UnconfirmedPut;

/// Starts of one item: a start is repeated after a put that stood in its way was revoked.
const STARTS_MAX: u32 = 4;

/// Minimum delay between retries of a put that waits for memory.
const MEMORY_RETRY_MIN: Duration = Duration::from_millis(5);
/// Maximum delay; short, because readers release fences before they expire.
const MEMORY_RETRY_MAX: Duration = Duration::from_millis(20);

/// The next step of starting puts.
#[derive(Debug, PartialEq, Eq)]
pub enum StartStep {
    /// Revoke these puts of this client; they stand in the way. Report with
    /// [`StartPuts::settled`].
    Settle(Vec<UnconfirmedPut>),
    /// Send a start of these items (`None`: all), and report refused ones with
    /// [`StartPuts::refused`].
    Send(Option<Vec<usize>>),
    /// All items are started or have failed.
    Done,
}

/// The master's refusal to start one item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The error code.
    pub code: ErrorCode,
    /// The unfinished put of this client that is in the way, unless it is being written.
    pub orphan: Option<Version>,
}

/// What a refusal means for the item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartVerdict {
    /// An object of that key exists, or another put is writing it; it is kept.
    Existed,
    /// The put fails with the error of the refusal.
    Fail,
    /// A given-up put of this client was in the way. The item is started again.
    Again,
}

/// Starts the puts of one message, after what stands in their way is settled.
#[derive(Debug)]
pub struct StartPuts {
    is_upsert: bool,
    starts: u32,
    /// Puts to revoke, and the items for which they stand in the way.
    to_settle: Vec<(usize, UnconfirmedPut)>,
    /// Items to start; `None`: all.
    to_send: Option<Vec<usize>>,
    is_sent: bool,
}

impl StartPuts {
    /// Puts of `items` items. `unconfirmed` lists unconfirmed puts of their keys.
    pub fn new(is_upsert: bool, unconfirmed: Vec<(usize, UnconfirmedPut)>) -> Self {
        Self { is_upsert, starts: 0, to_settle: unconfirmed, to_send: None, is_sent: false }
    }

    /// Returns the next step.
    pub fn next_step(&mut self) -> StartStep {
        if !self.to_settle.is_empty() {
            return StartStep::Settle(self.to_settle.iter().map(|(_, put)| put.clone()).collect());
        }
        if self.is_sent || self.to_send.as_ref().is_some_and(Vec::is_empty) {
            return StartStep::Done;
        }
        self.is_sent = true;
        self.starts += 1;
        StartStep::Send(self.to_send.take())
    }

    /// Reports the puts of the last [`StartStep::Settle`], in order: whether the master is known not
    /// to hold them any more. Returns the items that fail because it is not.
    pub fn settled(&mut self, items: usize, is_settled: &[bool]) -> Vec<usize> {
        let outcomes = std::mem::take(&mut self.to_settle).into_iter().zip(is_settled);
        let mut failed: Vec<usize> =
            outcomes.filter(|(_, settled)| !**settled).map(|((item, _), _)| item).collect();
        failed.sort_unstable();
        failed.dedup();
        if !failed.is_empty() {
            let open = self.to_send.take().unwrap_or_else(|| (0..items).collect());
            let is_open = |item: &usize| failed.binary_search(item).is_err();
            self.to_send = Some(open.into_iter().filter(is_open).collect());
        }
        failed
    }

    /// Decides about an item that the master refused to start. `key` makes a copy of its key.
    ///
    /// # Errors
    /// The key is invalid.
    pub fn refused(
        &mut self,
        item: usize,
        key: impl FnOnce() -> Result<ObjectKey>,
        refusal: &Refusal,
    ) -> Result<StartVerdict> {
        if refusal.code != ErrorCode::OBJECT_ALREADY_EXISTS {
            return Ok(StartVerdict::Fail);
        }
        if let Some(version) = refusal.orphan {
            if self.starts >= STARTS_MAX {
                return Ok(StartVerdict::Fail);
            }
            // Nobody has written to it: no caller has learned its places.
            let failed_replicas = SmallVec::new();
            let put = UnconfirmedPut { key: key()?, version, failed_replicas };
            self.to_settle.push((item, put));
            self.to_send.get_or_insert_default().push(item);
            self.is_sent = false;
            return Ok(StartVerdict::Again);
        }
        Ok(if self.is_upsert { StartVerdict::Fail } else { StartVerdict::Existed })
    }
}

/// How a written put is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closing {
    /// It is ended: the object becomes readable.
    End,
    /// No replica is whole: it is revoked.
    NoReplica,
    /// Its write window is over: it is revoked.
    TooLate,
}

impl Closing {
    /// Decides for a put that was written until `now`.
    pub fn of(has_replica: bool, window_end: Moment, now: Moment) -> Self {
        if !has_replica {
            Self::NoReplica
        } else if window_end.has_passed(now) {
            Self::TooLate
        } else {
            Self::End
        }
    }
}

/// The next step of closing puts. Whole objects come first: failed ones can wait.
#[derive(Debug, PartialEq, Eq)]
pub enum CloseStep {
    /// End these items.
    End(Vec<usize>),
    /// Revoke these items.
    Revoke(Vec<usize>),
    /// All items are closed or unconfirmed.
    Done,
}

/// Closes puts: ends the whole ones, then revokes the others.
#[derive(Debug, Default)]
pub struct ClosePuts {
    ends: Vec<usize>,
    revocations: Vec<usize>,
}

impl ClosePuts {
    /// No puts, with room for this many.
    pub fn with_capacity(items: usize) -> Self {
        Self { ends: Vec::with_capacity(items), revocations: Vec::new() }
    }

    /// Adds a put.
    pub fn push(&mut self, item: usize, closing: Closing) {
        match closing {
            Closing::End => self.ends.push(item),
            Closing::NoReplica | Closing::TooLate => self.revocations.push(item),
        }
    }

    /// Returns the next step.
    pub fn next_step(&mut self) -> CloseStep {
        if !self.ends.is_empty() {
            return CloseStep::End(std::mem::take(&mut self.ends));
        }
        if !self.revocations.is_empty() {
            return CloseStep::Revoke(std::mem::take(&mut self.revocations));
        }
        CloseStep::Done
    }
}

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

    fn key(name: &str) -> Result<ObjectKey> {
        ObjectKey::new(name.as_bytes())
    }

    fn put(name: &str, version: u64) -> UnconfirmedPut {
        let failed_replicas = SmallVec::new();
        UnconfirmedPut { key: key(name).unwrap(), version: Version(version), failed_replicas }
    }

    fn refusal(orphan: Option<u64>) -> Refusal {
        Refusal { code: ErrorCode::OBJECT_ALREADY_EXISTS, orphan: orphan.map(Version) }
    }

    #[test]
    fn message_without_trouble_is_sent_once() {
        let mut start = StartPuts::new(false, Vec::new());
        assert_eq!(start.next_step(), StartStep::Send(None));
        assert_eq!(start.refused(1, || key("b"), &refusal(None)).unwrap(), StartVerdict::Existed);
        let full = Refusal { code: ErrorCode::NO_AVAILABLE_HANDLE, orphan: None };
        assert_eq!(start.refused(2, || key("c"), &full).unwrap(), StartVerdict::Fail);
        assert_eq!(start.next_step(), StartStep::Done);
        let mut start = StartPuts::new(true, Vec::new());
        start.next_step();
        assert_eq!(start.refused(0, || key("a"), &refusal(None)).unwrap(), StartVerdict::Fail);
    }

    #[test]
    fn unconfirmed_puts_are_settled_before_the_start() {
        let unconfirmed = vec![(0, put("a", 7)), (2, put("c", 8))];
        let mut start = StartPuts::new(false, unconfirmed);
        assert_eq!(start.next_step(), StartStep::Settle(vec![put("a", 7), put("c", 8)]));
        assert_eq!(start.settled(3, &[true, false]), [2], "it may still be there");
        assert_eq!(start.next_step(), StartStep::Send(Some(vec![0, 1])));
        assert_eq!(start.next_step(), StartStep::Done);
        let mut start = StartPuts::new(false, vec![(0, put("a", 7))]);
        start.next_step();
        assert_eq!(start.settled(1, &[false]), [0]);
        assert_eq!(start.next_step(), StartStep::Done, "nothing is left to start");
    }

    #[test]
    fn orphan_is_revoked_and_its_item_started_again() {
        let mut start = StartPuts::new(false, Vec::new());
        start.next_step();
        assert_eq!(start.refused(1, || key("b"), &refusal(Some(9))).unwrap(), StartVerdict::Again);
        assert_eq!(start.next_step(), StartStep::Settle(vec![put("b", 9)]));
        assert!(start.settled(2, &[true]).is_empty());
        assert_eq!(start.next_step(), StartStep::Send(Some(vec![1])));
        for version in 10.. {
            match start.refused(1, || key("b"), &refusal(Some(version))).unwrap() {
                StartVerdict::Again => {}
                verdict => {
                    assert_eq!(verdict, StartVerdict::Fail, "an endless stream of orphans");
                    break;
                }
            }
            start.next_step();
            start.settled(2, &[true]);
            start.next_step();
        }
    }

    #[test]
    fn whole_puts_are_ended_before_failed_ones_are_revoked() {
        let now = Moment::from_boot(Duration::from_secs(9));
        let later = now + Duration::from_secs(1);
        let mut close = ClosePuts::default();
        close.push(0, Closing::of(false, later, now));
        close.push(1, Closing::of(true, later, now));
        close.push(2, Closing::of(true, now, now));
        assert_eq!(close.next_step(), CloseStep::End(vec![1]));
        assert_eq!(close.next_step(), CloseStep::Revoke(vec![0, 2]));
        assert_eq!(close.next_step(), CloseStep::Done);
    }

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
