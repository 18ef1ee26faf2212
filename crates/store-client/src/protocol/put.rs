//! Starts and closes puts. Both work on the items of one message, by their numbers.

pub mod rounds;

use mooncake_base::{ErrorCode, Moment, ObjectKey, Result, Version};
use smallvec::SmallVec;

use super::own_puts::UnconfirmedPut;

/// Starts of one item: a start is repeated after a put that stood in its way was revoked.
const STARTS_MAX: u32 = 4;

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

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
}
