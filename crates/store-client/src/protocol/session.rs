//! A client's registration with its master: what follows from each answer, which segments are
//! announced, and when the next heartbeat is due.
//!
//! A master drops a client from which it heard no heartbeat for too long, and a restarted master
//! knows nothing of its clients. The client notices by the next heartbeat and registers again. What
//! is to become of its memory depends on the master: one that continues the history of the client's
//! last master knows the objects in it, any other must get memory whose addresses no client ever
//! learned.

pub mod registration;

use std::time::Duration;

use bytes::Bytes;
use mooncake_base::{ErrorCode, Result};

use self::registration::Registration;

/// Minimum interval between heartbeats; the master's setting cannot go below it.
const INTERVAL_MIN: Duration = Duration::from_millis(10);

/// Maximum delay of the next heartbeat after a failed one.
const RETRY_INTERVAL_MAX: Duration = Duration::from_millis(500);

/// A running master.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MasterIdentity {
    /// The id of the master; each start has a new one.
    pub master: Bytes,
    /// The id of the history that it continues after a restart; empty: none.
    pub timeline: Bytes,
}

/// How much of its log a master had on disk, as it said last. The client tells the next master, which
/// can thereby notice that it has lost a part of that log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogMark {
    /// The first bytes of the id of the master.
    pub master: u64,
    /// The first bytes of the id of its timeline.
    pub timeline: u64,
    /// Everything before this frame was on disk.
    pub synced_frame: u64,
}

impl MasterIdentity {
    /// Returns the mark of this master, of whose log nothing is known to be on disk.
    fn mark(&self) -> LogMark {
        let (master, timeline) = (first_bytes(&self.master), first_bytes(&self.timeline));
        LogMark { master, timeline, synced_frame: 0 }
    }
}

/// Returns the first bytes of an id, as a [`LogMark`] has them.
fn first_bytes(id: &[u8]) -> u64 {
    let mut first = [0; 8];
    first.iter_mut().zip(id).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(first)
}

/// The answer to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeartbeatAnswer {
    /// The master that answered.
    pub identity: MasterIdentity,
    /// Whether the master knows the registration.
    pub is_known: bool,
    /// How much of its log is on disk.
    pub log_mark: Option<LogMark>,
}

/// The kind of an announcement of segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Announcement {
    /// The segments are new.
    Mount,
    /// The segments were mounted before and their contents are intact.
    Resume,
    /// The complete list of the client's segments; the master drops all others.
    All,
}

/// What follows from the answer to a mount of new segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountVerdict {
    /// The segments are mounted.
    Mounted,
    /// The master does not know the client: register again, and mount once more.
    RegisterAgain,
    /// The mount has failed. The master may know the segments nevertheless, until it is told the
    /// complete list.
    Uncertain,
}

impl MountVerdict {
    /// Decides after a mount, which is made at most twice.
    pub fn of(outcome: &Result<()>, is_repeated: bool) -> Self {
        match outcome {
            Ok(()) => Self::Mounted,
            Err(error) if error.code() == ErrorCode::CLIENT_NOT_FOUND && !is_repeated => {
                Self::RegisterAgain
            }
            Err(_) => Self::Uncertain,
        }
    }
}

/// The registration of a client.
#[derive(Debug, Default)]
pub struct Session {
    /// The master of the last registration.
    identity: MasterIdentity,
    /// The number that the master gave this registration.
    registration: u64,
    interval: Duration,
    /// The number of registrations so far.
    registrations: u64,
    /// Whether the master's list of this client's segments may be wrong.
    is_uncertain: bool,
    /// The sequence number of the last announcement of segments.
    announcements: u64,
    log_mark: Option<LogMark>,
    ignores_tenants: bool,
}

impl Session {
    /// Returns whether the master keeps all objects under the default tenant.
    pub fn ignores_tenants(&self) -> bool {
        self.ignores_tenants
    }

    /// Returns the number that heartbeats carry.
    pub fn registration(&self) -> u64 {
        self.registration
    }

    /// Returns the number of registrations so far. A thread that finds the client unknown compares
    /// it with the number from before its call: if it differs, another thread has registered.
    pub fn registrations(&self) -> u64 {
        self.registrations
    }

    /// Returns the sequence number of the next announcement of segments, by which the master drops
    /// those that arrive late.
    pub fn next_announcement(&mut self) -> u64 {
        self.announcements += 1;
        self.announcements
    }

    /// Records that the master's list of segments may be wrong. The next heartbeat is followed by a
    /// registration, which announces the complete list.
    pub fn mark_segments_uncertain(&mut self) {
        self.is_uncertain = true;
    }

    /// Returns the mark to report to the next master.
    pub fn log_mark(&self) -> Option<LogMark> {
        self.log_mark
    }

    /// Records how much of its log the master of the last registration has on disk.
    pub fn record_log_mark(&mut self, mark: LogMark) {
        let is_older = |last: LogMark| {
            (last.master, last.timeline) == (mark.master, mark.timeline)
                && last.synced_frame > mark.synced_frame
        };
        // What the next master says before the client has registered there must not replace what the
        // client has to tell it.
        let is_next = mark.master != self.identity.mark().master;
        if !is_next && !self.log_mark.is_some_and(is_older) {
            self.log_mark = Some(mark);
        }
    }

    /// Handles the answer to a heartbeat that carried the number `registration`. Returns whether the
    /// client must register again.
    pub fn heartbeat_answered(&mut self, answer: HeartbeatAnswer) -> bool {
        let is_same = answer.identity.master == self.identity.master;
        if !answer.is_known || !is_same || self.is_uncertain {
            return true;
        }
        if let Some(mark) = answer.log_mark {
            self.record_log_mark(mark);
        }
        // A master whose log was broken starts another timeline.
        self.identity.timeline = answer.identity.timeline;
        false
    }

    /// Returns the time until the next heartbeat, after one that succeeded or failed.
    pub fn heartbeat_pause(&self, has_succeeded: bool) -> Duration {
        if has_succeeded { self.interval } else { self.interval.min(RETRY_INTERVAL_MAX) }
    }

    /// Records a complete registration.
    pub fn complete(&mut self, registration: Registration) {
        let Some(answer) = registration.answer else { return };
        self.identity = answer.identity;
        let mark = self.identity.mark();
        if self.log_mark.is_none_or(|last| last.master != mark.master) {
            self.log_mark = Some(mark);
        }
        self.registration = answer.registration;
        self.ignores_tenants = answer.ignores_tenants;
        self.interval = answer.heartbeat_interval.max(INTERVAL_MIN);
        self.registrations += 1;
        self.is_uncertain = false;
    }
}

#[cfg(test)]
mod tests {
    use mooncake_base::Error;

    use super::{
        registration::{LostSegments, Registered, RegistrationStep},
        *,
    };

    fn identity(master: &'static str, timeline: &'static str) -> MasterIdentity {
        let bytes = |name: &'static str| Bytes::from_static(name.as_bytes());
        MasterIdentity { master: bytes(master), timeline: bytes(timeline) }
    }

    fn answer(master: &'static str, timeline: &'static str) -> Registered {
        Registered {
            identity: identity(master, timeline),
            registration: 7,
            heartbeat_interval: Duration::from_secs(1),
            ignores_tenants: false,
        }
    }

    /// A client that is registered with master "a" of timeline "t".
    fn registered() -> Session {
        let mut session = Session::default();
        let mut registration = Registration::new(&session, false);
        assert_eq!(registration.next_step(), RegistrationStep::Register);
        registration.registered(answer("a", "t"), 0);
        assert_eq!(registration.next_step(), RegistrationStep::Done, "nothing to announce");
        session.complete(registration);
        session
    }

    fn heartbeat(master: &'static str, is_known: bool) -> HeartbeatAnswer {
        HeartbeatAnswer { identity: identity(master, "t"), is_known, log_mark: None }
    }

    fn error(code: ErrorCode) -> Result<()> {
        Err(Error::new(code, "injected"))
    }

    #[test]
    fn lost_or_uncertain_client_registers_again() {
        let mut session = registered();
        assert_eq!((session.registration(), session.registrations()), (7, 1));
        assert!(!session.heartbeat_answered(heartbeat("a", true)));
        assert!(session.heartbeat_answered(heartbeat("a", false)), "it has expired");
        assert!(session.heartbeat_answered(heartbeat("b", true)), "the master restarted");
        session.mark_segments_uncertain();
        assert!(session.heartbeat_answered(heartbeat("a", true)));
        let mut registration = Registration::new(&session, false);
        registration.registered(answer("a", "t"), 0);
        assert_eq!(registration.next_step(), RegistrationStep::AnnounceAll, "an empty list");
        registration.announced([]).unwrap();
        session.complete(registration);
        assert!(!session.heartbeat_answered(heartbeat("a", true)));
        assert_eq!(session.registrations(), 2);
    }

    #[test]
    fn only_a_master_of_the_same_history_gets_used_memory() {
        use RegistrationStep::{Replace, Resume};
        let session = registered();
        let step = |master, timeline| {
            let mut registration = Registration::new(&session, false);
            registration.registered(answer(master, timeline), 2);
            registration.next_step()
        };
        assert_eq!(step("a", "t"), Resume, "the same master");
        assert_eq!(step("a", ""), Resume, "the same master, whose log is broken");
        assert_eq!(step("b", "t"), Resume, "a master that continues the log");
        assert_eq!(step("b", "u"), Replace(LostSegments::All));
        assert_eq!(step("b", ""), Replace(LostSegments::All), "no log at all");
        let mut registration = Registration::new(&Session::default(), false);
        registration.registered(answer("b", ""), 1);
        assert_eq!(registration.next_step(), Replace(LostSegments::All));
    }

    #[test]
    fn segments_that_the_master_lost_are_replaced() {
        let mut registration = Registration::new(&registered(), false);
        registration.registered(answer("b", "t"), 3);
        let lost = [Ok(()), error(ErrorCode::SEGMENT_NOT_FOUND), Ok(())];
        registration.announced(lost).unwrap();
        let replace = RegistrationStep::Replace(LostSegments::Some(vec![1]));
        assert_eq!(registration.next_step(), replace);
        registration.replaced(3);
        assert_eq!(registration.next_step(), RegistrationStep::AnnounceAll);
        let known = [error(ErrorCode::SEGMENT_ALREADY_EXISTS), Ok(()), Ok(())];
        registration.announced(known).unwrap();
        assert_eq!(registration.next_step(), RegistrationStep::Done);
    }

    #[test]
    fn refused_segment_fails_the_registration() {
        for known in ["a", "c"] {
            let mut registration = Registration::new(&registered(), false);
            registration.registered(answer(known, ""), 1);
            if known == "c" {
                registration.replaced(1);
            }
            let refused = registration.announced([error(ErrorCode::CLIENT_NOT_FOUND)]);
            assert_eq!(refused.unwrap_err().code(), ErrorCode::CLIENT_NOT_FOUND);
        }
    }

    #[test]
    fn master_that_ignores_tenants_is_refused_if_wanted() {
        let session = Session::default();
        let shared = Registered { ignores_tenants: true, ..answer("a", "t") };
        for (refuses, expected) in
            [(true, RegistrationStep::RefuseIgnoredTenant), (false, RegistrationStep::Done)]
        {
            let mut registration = Registration::new(&session, refuses);
            registration.registered(shared.clone(), 0);
            assert_eq!(registration.next_step(), expected);
            assert!(registration.is_first_without_tenants());
        }
    }

    #[test]
    fn failed_heartbeat_is_repeated_soon() {
        let mut session = registered();
        assert_eq!(session.heartbeat_pause(true), Duration::from_secs(1));
        assert_eq!(session.heartbeat_pause(false), RETRY_INTERVAL_MAX);
        session.interval = Duration::from_millis(50);
        assert_eq!(session.heartbeat_pause(false), Duration::from_millis(50));
    }

    #[test]
    fn mount_is_repeated_once_after_a_registration() {
        let unknown = error(ErrorCode::CLIENT_NOT_FOUND);
        assert_eq!(MountVerdict::of(&Ok(()), false), MountVerdict::Mounted);
        assert_eq!(MountVerdict::of(&unknown, false), MountVerdict::RegisterAgain);
        assert_eq!(MountVerdict::of(&unknown, true), MountVerdict::Uncertain);
        let lost = error(ErrorCode::RPC_TIMEOUT);
        assert_eq!(MountVerdict::of(&lost, false), MountVerdict::Uncertain);
    }

    #[test]
    fn highest_log_mark_of_the_registered_master_is_kept() {
        let mut session = registered();
        let mark = |master: u8, synced_frame| LogMark {
            master: master.into(),
            timeline: b't'.into(),
            synced_frame,
        };
        assert_eq!(session.log_mark(), Some(mark(b'a', 0)));
        for (heard, kept) in [(5, 5), (3, 5), (9, 9)] {
            session.record_log_mark(mark(b'a', heard));
            assert_eq!(session.log_mark(), Some(mark(b'a', kept)));
        }
        session.record_log_mark(mark(b'b', 20));
        assert_eq!(session.log_mark(), Some(mark(b'a', 9)), "what master b will be told");
        let mut registration = Registration::new(&session, false);
        registration.registered(answer("b", "t"), 0);
        session.complete(registration);
        assert_eq!(session.log_mark(), Some(mark(b'b', 0)), "that of master a was reported");
        let log_mark = Some(mark(b'b', 4));
        assert!(!session.heartbeat_answered(HeartbeatAnswer { log_mark, ..heartbeat("b", true) }));
        assert_eq!(session.log_mark(), log_mark);
    }
}
