//! The rules of one master's election, without I/O: answers of the service and the time go in, calls
//! to the service and the role come out.
//!
//! Time is that of the machine and runs on through suspend. A lease counts from *before* the call that
//! extended it was sent, and ends a margin earlier than in the service. The margin covers clocks that
//! run at different rates. So no two masters lead at a time by their own clocks, whatever answers are
//! lost, late or repeated.

mod in_sync;

use std::{collections::BTreeSet, time::Duration};

use mooncake_base::{Error, Moment, Result, random::SplitMix64};

use self::in_sync::KnownSets;
use crate::{
    in_sync::{InSyncSet, MemberId},
    service::{Acquisition, Basis, Bid, Change, Hold, Snapshot},
    view::{Lease, OwnerToken, View},
};

/// Shortest and longest duration of a lease.
const TTL_MIN: Duration = Duration::from_secs(1);
const TTL_MAX: Duration = Duration::from_secs(3600);

/// Number of own attempts whose tokens are remembered: an attempt that was given up may still win.
const BIDS_KEPT: usize = 16;

/// Distance of a forced leader's views from the last one that it knows. Leaders that it did not follow
/// had views in between.
const FORCED_DISTANCE: u64 = 1 << 32;

/// The durations of an election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Duration of the lease in the service.
    pub ttl: Duration,
    /// Time before the end of the lease at which the leader stops. It covers the difference of two
    /// clocks over a lease.
    pub margin: Duration,
}

impl Timing {
    /// The durations for a lease, with a margin of a tenth of it.
    ///
    /// # Errors
    /// The lease is shorter than a second or longer than an hour.
    pub fn new(ttl: Duration) -> Result<Self> {
        if (TTL_MIN..=TTL_MAX).contains(&ttl) {
            return Ok(Self { ttl, margin: ttl / 10 });
        }
        let text = "the lease of a leader lasts from a second to an hour";
        Err(Error::invalid(text).with("lease", format_args!("{ttl:?}")))
    }

    /// Time between renewals, and limit of a call.
    fn third(self) -> Duration {
        self.ttl / 3
    }

    /// Pause after a call that failed.
    fn pause(self) -> Duration {
        self.ttl / 20
    }
}

/// The history of the cluster that a member has in its own log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum History {
    /// The log is empty.
    None,
    /// The log has changes up to this view.
    UpTo(View),
}

/// The part that a master plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Another master leads, or none.
    Follower(Obstacle),
    /// The master tries to become leader.
    Candidate,
    /// The master leads until this moment, or until the next renewal.
    Leader {
        /// The number of the leadership.
        view: View,
        /// The leadership is over at this moment unless it was renewed.
        valid_until: Moment,
    },
    /// The master led and may not answer as leader again; it waits for [`Election::restart`].
    Fenced {
        /// The number of the leadership that is over.
        view: View,
    },
}

/// The reason why a follower does not try to become leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// The service did not answer yet.
    Unknown,
    /// Another master leads.
    LeaderPresent,
    /// The in-sync set does not name this member.
    NotInSync,
    /// The log of this member may lack changes, which other members of the set have.
    MayLackChanges,
    /// The service has lost the in-sync set of a cluster that has a history.
    SetLost,
    /// The service's numbers of views are lower than those in the log.
    ViewTooLow,
    /// There is no set yet; members with a history may still say so.
    Founding,
}

/// What an operator's word disregards that makes a member lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overruled {
    /// Nobody has changes that the member lacks.
    Nothing,
    /// The set was lost: others may have led since, with changes that the member lacks.
    LostSet,
    /// The set names others, which have changes that the member lacks.
    Others,
}

/// A call to the service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// [`LeaseService::read`](crate::LeaseService::read).
    Read,
    /// [`LeaseService::acquire`](crate::LeaseService::acquire).
    Acquire(Bid),
    /// [`LeaseService::renew`](crate::LeaseService::renew).
    Renew(Lease),
    /// [`LeaseService::release`](crate::LeaseService::release).
    Release(Lease),
    /// [`LeaseService::mark_lost`](crate::LeaseService::mark_lost).
    MarkLost(InSyncSet),
}

/// A call to be made, with its deadline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Identifies the call.
    pub number: u64,
    /// The call.
    pub request: Request,
    /// The answer is of no use after this moment.
    pub deadline: Moment,
}

/// The answer to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// To a read.
    Snapshot(Snapshot),
    /// To an attempt.
    Acquisition(Acquisition),
    /// To a renewal.
    Hold(Hold),
    /// To a call without a result.
    Done,
    /// The call failed; the service may have carried it out.
    Failed,
}

/// The next step of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Make this call.
    Call(Call),
    /// Nothing is to be done until this moment, or an answer.
    WaitUntil(Moment),
}

#[derive(Debug)]
struct InFlight {
    call: Call,
    sent: Moment,
}

#[derive(Debug)]
enum Phase {
    Following { plan: Plan, due: Moment },
    Leading { lease: Lease, valid_until: Moment, renew_at: Moment, sets: KnownSets },
    Fenced { view: View },
}

/// The next call of a follower.
#[derive(Debug, Clone)]
enum Plan {
    Read,
    Bid(Basis, InSyncSet),
    /// The leader's key is that of an own attempt; a renewal tells until when.
    Confirm(Lease, InSyncSet),
    MarkLost(InSyncSet),
}

/// The election of one master.
#[derive(Debug)]
pub struct Election {
    timing: Timing,
    member: MemberId,
    history: History,
    /// The log has every change that this member has ever confirmed.
    is_complete: bool,
    random: SplitMix64,
    phase: Phase,
    obstacle: Obstacle,
    in_flight: Option<InFlight>,
    calls: u64,
    /// Tokens of own attempts, the latest last.
    bids: Vec<OwnerToken>,
    /// A lease that is to be given back.
    to_release: Option<Lease>,
    /// The highest view that the log or the service told.
    view_max: View,
    /// Since when, and until when, the service was seen without a set.
    set_missing: Option<(Moment, Moment)>,
    /// An operator's word that this member leads, with a number above which its views lie.
    forced: Option<View>,
    overruled: Overruled,
}

impl Election {
    /// Creates the election of a follower. `seed` is different for each process.
    pub fn new(timing: Timing, member: MemberId, history: History, seed: u64, now: Moment) -> Self {
        let view_max = match history {
            History::None => View(0),
            History::UpTo(view) => view,
        };
        Self {
            timing,
            member,
            history,
            is_complete: true,
            random: SplitMix64::new(seed),
            phase: Phase::Following { plan: Plan::Read, due: now },
            obstacle: Obstacle::Unknown,
            in_flight: None,
            calls: 0,
            bids: Vec::new(),
            to_release: None,
            view_max,
            set_missing: None,
            forced: None,
            overruled: Overruled::Nothing,
        }
    }

    /// Returns what is to be done.
    pub fn poll(&mut self, now: Moment) -> Step {
        self.fence_if_over(now);
        if let Some(in_flight) = &self.in_flight {
            if !in_flight.call.deadline.has_passed(now) {
                return Step::WaitUntil(in_flight.call.deadline);
            }
            let number = in_flight.call.number;
            self.answer(number, Answer::Failed, now);
        }
        if let Some(lease) = self.to_release {
            return self.call(Request::Release(lease), now + self.timing.third(), now);
        }
        match &self.phase {
            Phase::Fenced { .. } => Step::WaitUntil(now + self.timing.ttl),
            Phase::Leading { lease, valid_until, renew_at, .. } => {
                if !renew_at.has_passed(now) {
                    return Step::WaitUntil(*renew_at);
                }
                let deadline = (*valid_until).min(now + self.timing.third());
                self.call(Request::Renew(*lease), deadline, now)
            }
            Phase::Following { due, .. } if !due.has_passed(now) => Step::WaitUntil(*due),
            Phase::Following { plan, .. } => {
                let request = match plan.clone() {
                    Plan::Read => Request::Read,
                    Plan::MarkLost(set) => Request::MarkLost(set),
                    Plan::Confirm(lease, _) => Request::Renew(lease),
                    Plan::Bid(basis, set) => {
                        let owner = OwnerToken::new(self.random.number());
                        self.bids.push(owner);
                        let extra = self.bids.len().saturating_sub(BIDS_KEPT);
                        self.bids.drain(..extra);
                        Request::Acquire(Bid { owner, basis, set })
                    }
                };
                self.call(request, now + self.timing.third(), now)
            }
        }
    }

    /// Takes the answer to a call. Answers to calls that were given up, and second answers, are
    /// ignored.
    pub fn answer(&mut self, number: u64, answer: Answer, now: Moment) {
        self.fence_if_over(now);
        let is_awaited = |in_flight: &mut InFlight| in_flight.call.number == number;
        let Some(InFlight { call, sent }) = self.in_flight.take_if(is_awaited) else {
            return;
        };
        match (call.request, answer) {
            (Request::Release(lease), _) => {
                // If the call failed, the lease ends by itself.
                self.to_release.take_if(|pending| *pending == lease);
            }
            (Request::Renew(lease), Answer::Hold(hold)) => {
                self.record_renewal(lease, hold, sent, now)
            }
            (Request::Acquire(bid), Answer::Acquisition(Acquisition::Acquired(view))) => {
                self.lead(bid.lease(view), bid.set, sent, now);
            }
            (Request::Read, Answer::Snapshot(snapshot)) => self.observe(&snapshot, now),
            (_, Answer::Failed) => self.retry_later(now),
            // A refused attempt, a set that is marked as lost: the service says what there is now.
            _ => self.plan(Plan::Read, now),
        }
    }

    /// Takes the values that the service holds, from a read or a watch.
    pub fn observe(&mut self, snapshot: &Snapshot, now: Moment) {
        self.fence_if_over(now);
        if let Some(leader) = &snapshot.leader
            && !leader.owner.is_some_and(|owner| self.bids.contains(&owner))
        {
            self.view_max = self.view_max.max(leader.view);
        }
        let is_bidding = self.is_bidding();
        match &mut self.phase {
            Phase::Fenced { .. } => {}
            Phase::Leading { lease, sets, .. } => {
                let is_own = snapshot.leader.as_ref().is_some_and(|leader| {
                    leader.owner == Some(lease.owner) && leader.view == lease.view
                });
                // A watch may be behind, so that only a set of this view says something.
                if is_own && let Some(set) = &snapshot.in_sync {
                    sets.observe(set);
                }
            }
            // The answer of the attempt decides.
            Phase::Following { .. } if is_bidding => {}
            Phase::Following { .. } => self.follow(snapshot, now),
        }
    }

    /// Ends the leadership at once. The lease is given back afterwards.
    pub fn resign(&mut self) {
        if let Phase::Leading { lease, .. } = self.phase {
            self.fence(lease);
        }
    }

    /// Lets a fenced master take part again, once it has given up what it had as leader.
    pub fn restart(&mut self, history: History, now: Moment) {
        if let Phase::Fenced { view } = self.phase {
            self.history = history;
            self.view_max = self.view_max.max(view);
            self.obstacle = Obstacle::Unknown;
            self.phase = Phase::Following { plan: Plan::Read, due: now };
        }
    }

    /// Says whether the log has every change that this member has ever confirmed. Without them it leads
    /// only if the set names no other member.
    pub fn set_complete(&mut self, is_complete: bool, now: Moment) {
        self.is_complete = is_complete;
        if matches!(self.phase, Phase::Following { .. }) && !self.is_bidding() {
            self.plan(Plan::Read, now);
        }
    }

    /// Makes the master leader although the in-sync set does not name it, as soon as no other leads.
    /// Changes that it does not have are lost.
    ///
    /// `floor` is [`View::of_clock`]: the service may have lost its numbers, and clients and members may
    /// know views of leaders that this member never followed.
    pub fn force(&mut self, floor: View, now: Moment) {
        self.forced = Some(floor);
        if matches!(self.phase, Phase::Following { .. }) && !self.is_bidding() {
            self.plan(Plan::Read, now);
        }
    }

    /// Begins a change of the in-sync set. From now on every change of data needs the members of both
    /// sets, until [`end_change`](Self::end_change).
    ///
    /// # Errors
    /// The master does not lead, the outcomes of too many changes are unknown, or the set is invalid.
    pub fn begin_change(&mut self, members: BTreeSet<MemberId>, now: Moment) -> Result<Change> {
        self.fence_if_over(now);
        match &mut self.phase {
            Phase::Leading { lease, sets, .. } => sets.begin_change(*lease, members),
            _ => Err(Error::closed("only the leader changes the in-sync set")),
        }
    }

    /// Ends a change that was carried out. A change whose outcome is not known does not end; the next
    /// [`observe`](Self::observe) may tell.
    pub fn end_change(&mut self, change: &Change) {
        if let Phase::Leading { lease, sets, .. } = &mut self.phase
            && *lease == change.lease
        {
            sets.observe(&change.to);
        }
    }

    /// The members that must have a change of data before it is acknowledged: those of the set, and of
    /// every set that may have replaced it. `None` unless the master leads.
    pub fn required_members(&self, now: Moment) -> Option<BTreeSet<MemberId>> {
        match &self.phase {
            Phase::Leading { valid_until, sets, .. } if !valid_until.has_passed(now) => {
                Some(sets.required_members())
            }
            _ => None,
        }
    }

    /// The members of the set that the service holds, as far as this leader knows. One that is about to join
    /// is not among them, although changes wait for it. `None` unless the master leads.
    pub fn in_sync_members(&self, now: Moment) -> Option<&BTreeSet<MemberId>> {
        match &self.phase {
            Phase::Leading { valid_until, sets, .. } if !valid_until.has_passed(now) => {
                Some(sets.current_members())
            }
            _ => None,
        }
    }

    /// The highest view that the log or the service told.
    pub const fn view_max(&self) -> View {
        self.view_max
    }

    /// The role at this moment.
    pub fn role(&self, now: Moment) -> Role {
        match &self.phase {
            Phase::Leading { lease, valid_until, .. } if !valid_until.has_passed(now) => {
                Role::Leader { view: lease.view, valid_until: *valid_until }
            }
            Phase::Leading { lease, .. } => Role::Fenced { view: lease.view },
            Phase::Fenced { view } => Role::Fenced { view: *view },
            Phase::Following { plan: Plan::Bid(..) | Plan::Confirm(..), .. } => Role::Candidate,
            Phase::Following { .. } => Role::Follower(self.obstacle),
        }
    }

    /// The lease of a leader.
    pub fn lease(&self, now: Moment) -> Option<Lease> {
        match &self.phase {
            Phase::Leading { lease, valid_until, .. } if !valid_until.has_passed(now) => {
                Some(*lease)
            }
            _ => None,
        }
    }

    /// The lease that is given back if the member ends at this moment.
    pub fn lease_at_end(&self, now: Moment) -> Option<Lease> {
        self.lease(now).or(self.to_release)
    }

    /// Decides by the values in the service what a follower does next.
    fn follow(&mut self, snapshot: &Snapshot, now: Moment) {
        if let Some(set) = &snapshot.in_sync {
            self.set_missing = None;
            // The cluster has a history, also if this member began without one: a set that is missing later
            // was lost, and another member may have changes that this one lacks.
            self.history = History::UpTo(self.view_max.max(set.view));
        }
        if let Some(leader) = &snapshot.leader {
            let own = leader.owner.filter(|owner| self.bids.contains(owner));
            if let (Some(owner), Some(set)) = (own, &snapshot.in_sync) {
                let lease = Lease { owner, view: leader.view, view_base: set.view_base };
                return self.plan(Plan::Confirm(lease, set.clone()), now);
            }
            return self.wait_for_change(Obstacle::LeaderPresent, now);
        }
        if let Some(floor) = self.forced {
            let set = self.forced_set(snapshot, floor);
            self.overruled = self.overruled_by_force(snapshot);
            return self.plan(Plan::Bid(Basis::Forced, set), now);
        }
        self.overruled = Overruled::Nothing;
        match (&snapshot.in_sync, self.history) {
            (Some(set), _) if set.members.contains(&self.member) => {
                if !self.is_complete && set.members.len() > 1 {
                    return self.wait_for_change(Obstacle::MayLackChanges, now);
                }
                self.plan(Plan::Bid(Basis::Member, set.clone()), now);
            }
            (Some(set), _) if set.members.is_empty() => {
                self.wait_for_change(Obstacle::SetLost, now)
            }
            (Some(_), _) => self.wait_for_change(Obstacle::NotInSync, now),
            (None, History::UpTo(_)) => {
                self.obstacle = Obstacle::SetLost;
                self.plan(Plan::MarkLost(InSyncSet::lost(self.view_max)), now);
            }
            (None, History::None) => {
                // Members with a history have the duration of a lease to say that the set is lost, and a
                // leader whose set was lost has stopped by then. If the service was not seen for a
                // while, there may have been a leader meanwhile.
                let gap_max = self.timing.third() * 2;
                let earlier = self.set_missing.filter(|(_, seen)| now.since(*seen) <= gap_max);
                let since = earlier.map_or(now, |(since, _)| since);
                self.set_missing = Some((since, now));
                if (since + self.timing.ttl).has_passed(now) {
                    let set = InSyncSet::founded_by(&self.member);
                    self.plan(Plan::Bid(Basis::Founder, set), now);
                } else {
                    self.wait_for_change(Obstacle::Founding, now);
                }
            }
        }
    }

    /// The set that an operator asks for. Its views are above all that were seen by anybody, whatever the
    /// service counts from now on: the number of the clock is above those of other forced leaders, the
    /// distance covers a clock that is wrong.
    fn forced_set(&self, snapshot: &Snapshot, floor: View) -> InSyncSet {
        let set = snapshot.in_sync.as_ref();
        let number = set.map_or(1, |set| set.number.saturating_add(1));
        let known = set.map_or(self.view_max, |set| self.view_max.max(set.view));
        let base = set.map_or(0, |set| set.view_base);
        let view_base = known.0.saturating_add(FORCED_DISTANCE).max(floor.0).max(base);
        InSyncSet { number, view_base, ..InSyncSet::founded_by(&self.member) }
    }

    fn overruled_by_force(&self, snapshot: &Snapshot) -> Overruled {
        let Some(set) = snapshot.in_sync.as_ref().filter(|set| !set.members.is_empty()) else {
            return Overruled::LostSet;
        };
        let is_alone = set.members.len() == 1;
        if set.members.contains(&self.member) && (self.is_complete || is_alone) {
            Overruled::Nothing
        } else {
            Overruled::Others
        }
    }

    /// Returns what the present leadership disregards, or the attempt under way.
    pub const fn overruled(&self) -> Overruled {
        self.overruled
    }

    /// Takes the lead, unless the lease is over already, its view is not above all others, or another
    /// member has changes that this one may lack: the attempt may be one of before it gave up its log.
    fn lead(&mut self, lease: Lease, set: InSyncSet, sent: Moment, now: Moment) {
        let valid_until = self.valid_until(sent);
        let obstacle = if lease.view <= self.view_max {
            Some(Obstacle::ViewTooLow)
        } else if !self.is_complete && set.members.len() > 1 {
            Some(Obstacle::MayLackChanges)
        } else {
            valid_until.has_passed(now).then_some(Obstacle::Unknown)
        };
        if let Some(obstacle) = obstacle {
            self.to_release = Some(lease);
            return self.wait_for_change(obstacle, now);
        }
        self.view_max = lease.view;
        self.forced = None;
        let renew_at = sent + self.timing.third();
        let sets = KnownSets::new(set);
        self.phase = Phase::Leading { lease, valid_until, renew_at, sets };
    }

    fn record_renewal(&mut self, renewed: Lease, hold: Hold, sent: Moment, now: Moment) {
        let until = self.valid_until(sent);
        let renew = sent + self.timing.third();
        match &mut self.phase {
            Phase::Leading { lease, valid_until, renew_at, .. } if *lease == renewed => {
                match hold {
                    Hold::Held => {
                        *valid_until = until.max(*valid_until);
                        *renew_at = renew;
                    }
                    Hold::Lost => self.fence(renewed),
                }
            }
            Phase::Following { plan: Plan::Confirm(lease, set), .. } if *lease == renewed => {
                let set = set.clone();
                match hold {
                    Hold::Held => self.lead(renewed, set, sent, now),
                    Hold::Lost => self.plan(Plan::Read, now),
                }
            }
            _ => {}
        }
    }

    fn valid_until(&self, sent: Moment) -> Moment {
        sent + self.timing.ttl.saturating_sub(self.timing.margin)
    }

    fn fence_if_over(&mut self, now: Moment) {
        if let Phase::Leading { lease, valid_until, .. } = &self.phase
            && valid_until.has_passed(now)
        {
            self.fence(*lease);
        }
    }

    fn fence(&mut self, lease: Lease) {
        self.in_flight = None;
        self.to_release = Some(lease);
        self.phase = Phase::Fenced { view: lease.view };
    }

    fn is_bidding(&self) -> bool {
        self.in_flight.as_ref().is_some_and(|in_flight| {
            matches!(in_flight.call.request, Request::Acquire(_) | Request::Renew(_))
        })
    }

    /// Makes the next call at once.
    fn plan(&mut self, plan: Plan, now: Moment) {
        if let Phase::Following { .. } = self.phase {
            self.phase = Phase::Following { plan, due: now };
        }
    }

    /// Reads again after a while, in case the watch does not tell.
    fn wait_for_change(&mut self, obstacle: Obstacle, now: Moment) {
        self.obstacle = obstacle;
        self.plan(Plan::Read, now + self.timing.third());
    }

    fn retry_later(&mut self, now: Moment) {
        let at = now + self.timing.pause();
        match &mut self.phase {
            Phase::Leading { renew_at, .. } => *renew_at = at,
            // The outcome of an attempt is unknown, so that a read comes first.
            Phase::Following { .. } => self.plan(Plan::Read, at),
            Phase::Fenced { .. } => {}
        }
    }

    fn call(&mut self, request: Request, deadline: Moment, now: Moment) -> Step {
        self.calls += 1;
        let call = Call { number: self.calls, request, deadline };
        self.in_flight = Some(InFlight { call: call.clone(), sent: now });
        Step::Call(call)
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
