//! The in-sync set of a leader: who is taken out because it is silent, and who is taken in.

use std::{collections::BTreeSet, time::Duration};

use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_election::MemberId;

use super::Cluster;
use crate::journal::{FollowerStatus, Journal};

/// Time for which changes wait for a member that is silent and cannot be taken out of the set; then they
/// fail.
const STUCK_AFTER: Duration = Duration::from_secs(5);

/// Bytes of changes that a standby may lack when changes begin to wait for it.
const JOINING_LAG_MAX: u64 = 64 << 10;

/// Pause after a change of the set that failed.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Maximum time of one change of the set. Meanwhile the leader does nothing else for its standbys.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);

/// The changes of a leader.
#[derive(Debug)]
pub(super) struct Supervision {
    rule: Rule,
    /// Why the last change of the set failed; `None` if it did not.
    failure: Option<Error>,
    /// Whether changes of data fail because a member is silent.
    is_stuck: bool,
    not_before: Moment,
    joining: Option<Joining>,
}

/// A set with a member that may lack changes which were acknowledged without it.
#[derive(Debug)]
struct Joining {
    members: BTreeSet<MemberId>,
    /// Changes in frames from here on wait for all members.
    end_frame: u64,
}

impl Supervision {
    pub(super) fn new(own: MemberId, copies: usize, timeout: Duration) -> Self {
        let rule = Rule { own, copies, timeout };
        let not_before = Moment::default();
        Self { rule, failure: None, is_stuck: false, not_before, joining: None }
    }

    /// Changes the set if a member has to go or can come.
    ///
    /// # Errors
    /// This master does not lead.
    pub(super) fn step(&mut self, cluster: &Cluster, journal: &Journal) -> Result<()> {
        let now = SystemClock.now();
        let required = cluster.elector.required_members()?;
        let Some(members) = self.begin_change(&required, journal, now) else {
            if self.failure.is_none() {
                cluster.unconfirmed.lock().take();
            }
            return Ok(());
        };
        let timeout = ATTEMPT_TIMEOUT.min(cluster.settings.ttl / 3);
        let changed = cluster.elector.change_in_sync(members, now + timeout);
        let now = SystemClock.now();
        let failure = changed.as_ref().err();
        *cluster.unconfirmed.lock() =
            failure.and_then(|error| unconfirmed(journal, error, self.rule.timeout, now));
        let required = cluster.elector.required_members()?;
        self.end_change(&required, changed, journal, now);
        Ok(())
    }

    /// Returns the members that the lease service is to be asked for, if a member has to go or can come.
    /// `required` are the members that must have a change of data now.
    pub(super) fn begin_change(
        &mut self,
        required: &BTreeSet<MemberId>,
        journal: &Journal,
        now: Moment,
    ) -> Option<BTreeSet<MemberId>> {
        self.fail_stuck_changes(journal, now);
        if !self.not_before.has_passed(now) {
            return None;
        }
        let Some(members) = self.rule.next_members(required, &journal.followers().status(), now)
        else {
            if self.joining.take().is_some() {
                journal.require_standbys(&others(&self.rule.own, required));
            }
            self.end_failure(journal);
            return None;
        };
        // One that is added must have every change from here on, whatever becomes of the call.
        let both = required.union(&members).cloned().collect();
        journal.require_standbys(&others(&self.rule.own, &both));
        if !members.is_subset(required) && !self.have_earlier_changes(&members, journal) {
            return None;
        }
        self.joining = None;
        tracing::info!(from = %names(required), to = %names(&members), "the in-sync set changes");
        Some(members)
    }

    /// Records the outcome of a change. `required` are the members that must have a change of data from
    /// now on.
    pub(super) fn end_change(
        &mut self,
        required: &BTreeSet<MemberId>,
        changed: Result<()>,
        journal: &Journal,
        now: Moment,
    ) {
        journal.require_standbys(&others(&self.rule.own, required));
        match changed {
            Ok(()) => self.end_failure(journal),
            Err(error) => self.record_failure(journal, error, now),
        }
    }

    /// Returns whether members have every change that was acknowledged before changes waited for all
    /// of them. Until then one that is new must not win an election.
    fn have_earlier_changes(&mut self, members: &BTreeSet<MemberId>, journal: &Journal) -> bool {
        let joining = match self.joining.take() {
            Some(joining) if joining.members == *members => joining,
            _ => Joining { members: members.clone(), end_frame: journal.end_frame() },
        };
        let end_frame = self.joining.insert(joining).end_frame;
        let standbys = journal.followers().status();
        standbys.iter().filter(|s| s.is_required).all(|standby| standby.next_frame >= end_frame)
    }

    fn end_failure(&mut self, journal: &Journal) {
        self.failure = None;
        if std::mem::take(&mut self.is_stuck) {
            journal.set_stuck(None);
        }
    }

    fn record_failure(&mut self, journal: &Journal, error: Error, now: Moment) {
        self.not_before = now + RETRY_PAUSE;
        tracing::warn!(%error, "the in-sync set cannot be changed");
        self.failure = Some(error);
        self.fail_stuck_changes(journal, now);
    }

    /// Lets changes of data fail while a member that must have them was silent for too long, and cannot be
    /// taken out of the set.
    fn fail_stuck_changes(&mut self, journal: &Journal, now: Moment) {
        let Some(error) = &self.failure else { return };
        let stuck = unconfirmed(journal, error, STUCK_AFTER, now);
        if stuck.is_some() != self.is_stuck {
            self.is_stuck = stuck.is_some();
            journal.set_stuck(stuck);
        }
    }
}

/// The rule of changes.
#[derive(Debug)]
struct Rule {
    own: MemberId,
    copies: usize,
    timeout: Duration,
}

impl Rule {
    /// Returns the members that the set should have; `None` if it is as it should be. Silent members go
    /// first; then a standby that lacks little takes a free place.
    fn next_members(
        &self,
        present: &BTreeSet<MemberId>,
        standbys: &[FollowerStatus],
        now: Moment,
    ) -> Option<BTreeSet<MemberId>> {
        let is_silent = |standby: &FollowerStatus| {
            standby.silent_since.is_some_and(|since| (since + self.timeout).has_passed(now))
        };
        let of = |member: &MemberId| {
            standbys.iter().find(|standby| standby.member == member.to_string())
        };
        let stays =
            |member: &&MemberId| **member == self.own || of(member).is_some_and(|s| !is_silent(s));
        let mut members: BTreeSet<MemberId> = present.iter().filter(stays).cloned().collect();
        members.insert(self.own.clone());
        if members == *present {
            let is_ready = |standby: &&FollowerStatus| {
                let is_near = standby.is_near && standby.lag_bytes <= JOINING_LAG_MAX;
                standby.is_attached && is_near && !is_silent(standby)
            };
            let ready = standbys.iter().filter(is_ready);
            let new = ready.filter_map(|standby| MemberId::new(&standby.member).ok());
            let new = new.filter(|member| !present.contains(member));
            members.extend(new.take(self.copies.saturating_sub(present.len())));
        }
        (members != *present).then_some(members)
    }
}

/// Returns whether a standby has everything that was acknowledged, and can lead next. `set` are the members
/// of the in-sync set: changes wait also for one that is about to join it, which may lack earlier ones.
pub(super) fn can_take_over(standby: &FollowerStatus, set: &BTreeSet<MemberId>) -> bool {
    let is_member = set.iter().any(|member| member.to_string() == standby.member);
    is_member && standby.is_attached && standby.is_near
}

/// Returns why changes of data are not confirmed: members that must have them are silent for a time, and
/// the set was not changed because of an error. `None` if no such member is.
fn unconfirmed(journal: &Journal, error: &Error, time: Duration, now: Moment) -> Option<Error> {
    let standbys = journal.followers().status();
    let is_silent = |standby: &&FollowerStatus| {
        let is_over = |since: Moment| (since + time).has_passed(now);
        standby.is_required && standby.silent_since.is_some_and(is_over)
    };
    let silent: Vec<_> = standbys.iter().filter(is_silent).map(place).collect();
    if silent.is_empty() {
        return None;
    }
    let text = "a standby that must have the change does not confirm it, and the lease service does not \
                take it out of the in-sync set; whether the change was made is not known";
    let stuck = Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text);
    Some(stuck.with("standby", silent.join(", ")).caused_by(error.clone()))
}

/// Returns the address of a standby, or its id if it has told none.
fn place(standby: &FollowerStatus) -> &str {
    if standby.address.is_empty() { &standby.member } else { &standby.address }
}

/// Returns the members without the leader, as the log names them.
pub(super) fn others(own: &MemberId, members: &BTreeSet<MemberId>) -> BTreeSet<String> {
    members.iter().filter(|member| *member != own).map(ToString::to_string).collect()
}

fn names(members: &BTreeSet<MemberId>) -> String {
    members.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::journal::{Directory, LogSync, SimulatedDisk};

    const TIMEOUT: Duration = Duration::from_millis(200);

    fn id(name: &str) -> MemberId {
        MemberId::new(name).unwrap()
    }

    fn at(millis: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(millis))
    }

    fn standby(member: &str, silent_since: Option<Moment>) -> FollowerStatus {
        FollowerStatus {
            member: member.to_owned(),
            address: String::new(),
            is_attached: true,
            level: crate::journal::level::RecordLevel::PRESENT,
            is_required: false,
            is_near: true,
            lag_bytes: 0,
            next_frame: 1,
            silent_since,
            heard: at(0),
        }
    }

    #[track_caller]
    fn check(present: &[&str], standbys: &[FollowerStatus], next: Option<&[&str]>) {
        let rule = Rule { own: id("a"), copies: 2, timeout: TIMEOUT };
        let set = |names: &[&str]| names.iter().map(|name| id(name)).collect::<BTreeSet<_>>();
        assert_eq!(rule.next_members(&set(present), standbys, at(1000)), next.map(set));
    }

    #[test]
    fn silent_member_goes_and_a_ready_one_comes() {
        let (recent, long) = (Some(at(900)), Some(at(800)));
        check(&["a"], &[], None);
        check(&["a", "b"], &[standby("b", None)], None);
        check(&["a", "b"], &[standby("b", recent)], None);
        check(&["a", "b"], &[standby("b", long)], Some(&["a"]));
        check(&["a", "b"], &[], Some(&["a"]));
        check(&["a"], &[standby("b", long)], None);
        check(&["a"], &[standby("b", recent)], Some(&["a", "b"]));
        check(&["a"], &[standby("b", None), standby("c", None)], Some(&["a", "b"]));
        check(&["a", "b"], &[standby("b", None), standby("c", None)], None);
        // One change at a time: first the silent one goes.
        check(&["a", "b"], &[standby("b", long), standby("c", None)], Some(&["a"]));
        let behind = FollowerStatus { is_near: false, ..standby("b", None) };
        let slow = FollowerStatus { lag_bytes: JOINING_LAG_MAX + 1, ..standby("b", None) };
        let away = FollowerStatus { is_attached: false, ..standby("b", None) };
        check(&["a"], &[behind, slow, away], None);
        // The leader of a set that another one made.
        check(&["b"], &[standby("b", None)], Some(&["a", "b"]));
    }

    #[test]
    fn changes_fail_five_seconds_after_the_standby_fell_silent() {
        let directory = Directory::on(Arc::new(SimulatedDisk::default()));
        let journal = Journal::open(directory, LogSync::Never).unwrap().journal;
        let required: BTreeSet<_> = [id("a"), id("b")].into();
        journal.require_standbys(&others(&id("a"), &required));
        let silent_since = journal.followers().status()[0].silent_since.unwrap();
        let after = |millis| silent_since + Duration::from_millis(millis);
        let mut supervision = Supervision::new(id("a"), 2, TIMEOUT);
        let next = supervision.begin_change(&required, &journal, after(4700));
        assert_eq!(next, Some([id("a")].into()));
        let failed = Error::internal("etcd is away");
        supervision.end_change(&required, Err(failed.clone()), &journal, after(4900));
        assert!(!supervision.is_stuck);
        // Before the next attempt.
        supervision.begin_change(&required, &journal, after(5000));
        assert!(supervision.is_stuck);
        let error = unconfirmed(&journal, &failed, STUCK_AFTER, after(5000)).unwrap().to_string();
        assert!(error.contains("standby=b") && error.contains("etcd is away"), "{error}");
        supervision.end_change(&[id("a")].into(), Ok(()), &journal, after(5200));
        assert!(!supervision.is_stuck);
    }
}
