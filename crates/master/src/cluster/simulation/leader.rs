//! A member that leads: what its thread, the threads that ship the log and those that answer calls do.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
    time::Duration,
};

use mooncake_base::{Clock, Error, Moment, Result as BaseResult};
use mooncake_election::{Change, Hold, MemberId, Overruled, View};
use mooncake_proto::{
    standby::{Attach, Confirm, Frames, FromLeader, FromStandby, Start, ViewStart},
    v1::LogMark,
};

use super::{
    Simulation, TTL,
    bugs::Bug,
    client::{Call, Client, Reply, execute, rules},
    handover::Handover,
    leads_in,
    node::{HangingWrite, Part, Process},
    standby::{SILENCE_MAX, Standby},
    wire::{Message, ServiceAnswer, ServiceCall},
};
use crate::{
    cluster::{
        channel::KEEPALIVE,
        lease_notes,
        member::Membership,
        own_log::{self, NewTerm},
        shipping::{answer_attach, for_each_part},
        supervision::{Supervision, others},
    },
    journal::{
        FollowerId, Journal, LogSync, Newcomer, NextShipment, OnLogFailure, Snapshot,
        StandbyProgress, file_end, level::RecordLevel,
    },
    service::GuardedState,
    state::{LeaseNotes, LeaseSweep, State},
};

/// Objects in a slice of a snapshot.
const SLICE_OBJECTS: u32 = 4;

/// A member that leads.
#[derive(Debug)]
pub(super) struct Leader {
    pub(super) view: View,
    guarded: GuardedState,
    membership: Membership,
    pub(super) own: MemberId,
    supervision: Supervision,
    standbys: BTreeMap<u64, Shipping>,
    /// A change of the set that the service was asked for.
    pub(super) change: Option<OpenChange>,
    /// The state was compared with what clients know.
    is_checked: bool,
    is_announced: bool,
    pub(super) handover: Option<Handover>,
    announce_at: Moment,
    /// Answers that wait for the log.
    answers: Vec<Answer>,
    /// The highest position that any standby has confirmed.
    confirmed_by_any: u64,
    sweep: LeaseSweep,
    /// For a planted bug: when the changes begin to wait for standbys.
    requires_at: Option<Moment>,
}

/// A connection of a standby.
#[derive(Debug)]
struct Shipping {
    stage: ShippingStage,
    heard: Moment,
    sent: Moment,
    position: u64,
    /// Notes that go with the next frames: a message of their own would hold frames up that come later.
    leases: LeaseNotes,
}

#[derive(Debug)]
enum ShippingStage {
    /// The standby has said nothing yet.
    Open,
    /// It reads a snapshot.
    Snapshot(Attach),
    Following(FollowerId),
}

/// A change of the set whose outcome is awaited.
#[derive(Debug)]
pub(super) struct OpenChange {
    pub(super) change: Change,
    pub(super) until: Moment,
    /// The change failed, and the service was asked for the set.
    pub(super) is_reading: bool,
}

/// An answer that waits.
#[derive(Debug)]
struct Answer {
    client: usize,
    number: u64,
    position: u64,
    reply: Reply,
    /// Whether the lease was valid when the call was executed.
    was_valid: bool,
}

impl Leader {
    pub(super) fn journal(&self) -> &Journal {
        self.guarded.journal().expect("a member has a log")
    }

    /// Returns whether an answer waits.
    pub(super) fn owes(&self, client: usize, number: u64) -> bool {
        self.answers.iter().any(|answer| (answer.client, answer.number) == (client, number))
    }

    /// Returns whether any answer waits.
    pub(super) fn owes_any(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Takes out the answers that will not be given: by client, the number of the call.
    pub(super) fn take_answers(&mut self) -> Vec<(usize, u64)> {
        self.answers.drain(..).map(|answer| (answer.client, answer.number)).collect()
    }

    /// Tells the standbys of leases.
    pub(super) fn tell_leases(&mut self) {
        self.guarded.tell_leases(&mut self.sweep);
    }

    /// Runs a slice of a call. Returns the position for which its answer waits.
    pub(super) fn run<R>(&self, bug: Option<Bug>, slice: impl FnOnce(&mut State) -> R) -> (R, u64) {
        let slice = self.guarded.run(|state| {
            if bug == Some(Bug::ReusesUnconfirmed) {
                state.confirm_synced(u64::MAX);
            }
            if bug == Some(Bug::FencesUnconfirmed) {
                state.confirm_durable(u64::MAX);
            }
            slice(state)
        });
        (slice.result, slice.position)
    }

    /// Returns what clients hear of the log.
    pub(super) fn mark(&self, bug: Option<Bug>) -> Option<LogMark> {
        let mut mark = self.guarded.log_mark()?;
        if bug == Some(Bug::MarksOwnLog) {
            self.journal().sync_now();
            mark.synced_frame = self.journal().end_frame();
        }
        Some(mark)
    }

    fn outcome(&self, position: u64, bug: Option<Bug>) -> Option<BaseResult<()>> {
        let by_any = bug == Some(Bug::AnyConfirmation) && position <= self.confirmed_by_any;
        if by_any { Some(Ok(())) } else { self.journal().outcome(position) }
    }

    /// Returns the set with an attached standby that is not in it; for a planted bug.
    fn with_newcomer(&self, required: &BTreeSet<MemberId>) -> Option<BTreeSet<MemberId>> {
        let standbys =
            self.journal().followers().status().into_iter().filter(|standby| standby.is_attached);
        let ids = standbys.filter_map(|standby| MemberId::new(&standby.member).ok());
        let newcomer = { ids }.find(|id| !required.contains(id))?;
        Some(required.iter().cloned().chain([newcomer]).collect())
    }

    fn take_snapshot(&self, now: Moment) -> BaseResult<()> {
        let journal = self.journal();
        let mut snapshot = Snapshot::prepare(journal, None)?;
        snapshot.begin(journal, &self.guarded.look(), now);
        loop {
            snapshot.write(journal)?;
            if snapshot.slice(&self.guarded.look(), SLICE_OBJECTS) {
                break;
            }
        }
        snapshot.finish(journal, now)
    }
}

impl Simulation {
    /// Begins to lead.
    pub(super) fn take_over(
        &mut self,
        index: usize,
        process: &mut Process,
        view: View,
    ) -> Result<(), String> {
        let (bug, local) = (self.plan.bug, self.nodes[index].local(self.now));
        let failed = |error: Error| format!("member {index} cannot lead: {error}");
        let Some(required) = process.election.required_members(local) else { return Ok(()) };
        let Part::Following(standby) = mem::replace(&mut process.part, Part::None) else {
            return Ok(());
        };
        let Standby { log, mut membership, .. } = *standby;
        let own = MemberId::new(&process.member).map_err(failed)?;
        let is_late = bug == Some(Bug::RequiresLate);
        let required = if is_late { [own.clone()].into() } else { required };
        let clock: Arc<dyn Clock> = Arc::<super::node::NodeClock>::clone(&self.nodes[index].clock);
        let overruled = process.election.overruled();
        let required = others(&own, &required);
        let term = NewTerm { view, required, overruled, clock };
        let recovered = own_log::lead(log, &mut membership, term).map_err(failed)?;
        process.set_complete(true, bug, local);
        if overruled == Overruled::Others {
            self.history.forget();
        }
        if !self.history.is_new_view(view.0) {
            if !mem::take(&mut self.views_may_fall) {
                return Err(format!("member {index} leads in view {view}, which is not new"));
            }
            self.history.restart_views();
            self.clients.iter_mut().for_each(Client::restart_views);
        }
        let rules = rules(self.plan.write_window);
        let quiet = if recovered.may_lack_end { rules.late_end() } else { Duration::ZERO };
        let seed = self.random.number();
        let mut image = recovered.image;
        if bug == Some(Bug::UsesRestingMemory) {
            image.set_rest_logged();
        }
        let (state, restored) = State::restore(rules, seed, local, image, quiet);
        if restored.conflicts > 0 {
            return Err(format!("the log of member {index} grants memory twice: {restored:?}"));
        }
        self.history.record_whole(&process.member);
        let journal = recovered.journal.with_failure_policy(OnLogFailure::Stop);
        self.outcome.leaders += 1;
        let (copies, timeout) = (self.plan.copies, self.plan.timeout);
        process.part = Part::Leading(Box::new(Leader {
            view,
            guarded: GuardedState::new(state, journal),
            membership,
            supervision: Supervision::new(own.clone(), copies, timeout),
            own,
            standbys: BTreeMap::new(),
            change: None,
            is_checked: false,
            is_announced: false,
            handover: None,
            announce_at: Moment::default(),
            answers: Vec::new(),
            sweep: LeaseSweep::default(),
            confirmed_by_any: 0,
            requires_at: is_late.then(|| self.now + Duration::from_millis(300)),
        }));
        Ok(())
    }

    /// Stops to lead, and follows.
    pub(super) fn end_term(&mut self, index: usize, process: &mut Process) -> Result<(), String> {
        match self.close_term(process) {
            Some(membership) => self.follow_again(index, process, membership),
            None => Ok(()),
        }
    }

    /// Stops to lead.
    pub(super) fn close_term(&mut self, process: &mut Process) -> Option<Membership> {
        let part = mem::replace(&mut process.part, Part::None);
        let Part::Leading(leader) = part else {
            process.part = part;
            return None;
        };
        for connection in leader.standbys.keys() {
            self.close_connection(*connection);
        }
        leader.journal().retire();
        process.election.resign();
        Some(leader.membership)
    }

    /// Lets a member follow that has led.
    pub(super) fn follow_again(
        &mut self,
        index: usize,
        process: &mut Process,
        membership: Membership,
    ) -> Result<(), String> {
        let (local, mut membership) = (self.nodes[index].local(self.now), membership);
        process.election.restart(membership.history(), local);
        let directory = Arc::clone(&process.directory);
        let log = own_log::open(directory, self.plan.sync, &mut membership)
            .map_err(|error| format!("member {index} cannot follow: {error}"))?;
        if !membership.is_complete() {
            process.set_complete(false, self.plan.bug, local);
        }
        process.part = Part::Following(Box::new(Standby::new(log, membership)));
        Ok(())
    }

    /// Does what the threads of a leader do.
    pub(super) fn step_leader(
        &mut self,
        index: usize,
        process: &mut Process,
    ) -> Result<(), String> {
        let (now, local) = (self.now, self.nodes[index].local(self.now));
        let (writes, syncs) = (self.chance(3), self.syncs());
        let Part::Leading(leader) = &mut process.part else { return Ok(()) };
        let (expired, _) = leader.run(self.plan.bug, |state| {
            state.advance(local);
            !state.take_expired().is_empty()
        });
        if expired {
            self.history.forget();
        }
        // Before the clients have announced their memory, its objects are hidden. The state of a leader
        // whose lease is over is of no interest.
        let leads = leads_in(&process.election, leader.view, local);
        let is_checked = leader.is_checked && self.random.below(5) > 0;
        // Where clocks stand still, a former leader may take itself for the present one.
        let view = self.service.snapshot(now).leader.map(|leader| leader.view);
        let leads = leads && (!self.history.own_keys_only || view == Some(leader.view));
        if leads && !is_checked && !leader.guarded.look().is_recovering(local) {
            leader.is_checked = true;
            self.history.check_state(&leader.guarded.look(), local)?;
        }
        let hangs = self.happens(self.plan.faults.hanging_write);
        let Part::Leading(leader) = &mut process.part else { return Ok(()) };
        let (file, length) = file_end(leader.journal());
        match self.plan.sync {
            _ if hangs => leader.journal().write_only(),
            LogSync::Always if !writes => leader.journal().sync_now(),
            LogSync::Interval(_) if syncs => leader.journal().sync_now(),
            _ if !writes => leader.journal().write_only(),
            _ => {}
        }
        let (file_now, length_now) = file_end(leader.journal());
        if hangs && file_now == file && length_now > length {
            self.ship(process);
            let killed_at = now + self.milliseconds(500);
            self.nodes[index].hanging_write = Some(HangingWrite { file, length, killed_at });
            return Ok(());
        }
        if leader.requires_at.take_if(|at| at.has_passed(now)).is_some()
            && let Some(required) = process.election.required_members(local)
        {
            leader.journal().require_standbys(&others(&leader.own, &required));
        }
        leader.tell_leases();
        if self.chance(400) {
            let Part::Leading(leader) = &process.part else { return Ok(()) };
            leader.take_snapshot(local).map_err(|error| format!("no snapshot: {error}"))?;
        }
        self.ship(process);
        self.supervise(index, process);
        self.announce(index, process);
        self.answer(index, process)?;
        self.step_handover(index, process)
    }

    fn announce(&mut self, index: usize, process: &mut Process) {
        let local = self.nodes[index].local(self.now);
        let Part::Leading(leader) = &mut process.part else { return };
        if leader.is_announced || !leader.announce_at.has_passed(self.now) {
            return;
        }
        leader.announce_at = self.now + TTL / 3;
        if let Some(lease) = process.election.lease(local) {
            let call = ServiceCall::Announce(lease, index.to_string());
            let boot = self.nodes[index].boots;
            self.send(Message::ToService { from: index, boot, call });
        }
    }

    /// Sends what was written to the standbys.
    fn ship(&mut self, process: &mut Process) {
        let now = self.now;
        let Part::Leading(leader) = &mut process.part else { return };
        let journal = leader.guarded.journal().expect("a member has a log");
        let level = journal.level().get().0;
        let mut ended = Vec::new();
        for (&connection, shipping) in &mut leader.standbys {
            let is_open = self.wire.connections.contains_key(&connection);
            if !is_open || (shipping.heard + SILENCE_MAX).has_passed(now) {
                ended.push(connection);
                continue;
            }
            let ShippingStage::Following(id) = shipping.stage else { continue };
            loop {
                let mut is_rest_logged = false;
                let (bytes, position) = match journal.followers().next(id, Duration::ZERO) {
                    NextShipment::Frames(sent) => (sent.frames.to_vec(), sent.position),
                    NextShipment::Leases(notes) => {
                        shipping.leases.join(&notes);
                        continue;
                    }
                    NextShipment::RestLogged => {
                        is_rest_logged = true;
                        (Vec::new(), shipping.position)
                    }
                    NextShipment::None if (shipping.sent + KEEPALIVE).has_passed(now) => {
                        (Vec::new(), shipping.position)
                    }
                    NextShipment::None => break,
                    NextShipment::Detached => {
                        ended.push(connection);
                        break;
                    }
                };
                (shipping.position, shipping.sent) = (position, now);
                let leases = Some(lease_notes::to_message(mem::take(&mut shipping.leases)));
                let frames = Some(Frames { bytes, position, level, leases, is_rest_logged });
                let message = FromLeader { frames, ..FromLeader::default() };
                self.outgoing.push(Message::ToStandby { connection, message });
            }
        }
        for connection in ended {
            self.wire.connections.remove(&connection);
            if let Some(Shipping { stage: ShippingStage::Following(id), .. }) =
                leader.standbys.remove(&connection)
            {
                leader.journal().followers().detach(id);
            }
        }
        self.flush();
    }

    /// Takes a message of a standby.
    pub(super) fn receive_from_standby(
        &mut self,
        index: usize,
        process: &mut Process,
        connection: u64,
        message: FromStandby,
    ) -> Result<(), String> {
        let (now, local) = (self.now, self.nodes[index].local(self.now));
        let Part::Leading(leader) = &mut process.part else {
            self.wire.connections.remove(&connection);
            return Ok(());
        };
        let is_valid = leads_in(&process.election, leader.view, local);
        self.outcome.late_attaches += u64::from(!is_valid && message.attach.is_some());
        let new = || Shipping {
            stage: ShippingStage::Open,
            heard: now,
            sent: now,
            position: 0,
            leases: LeaseNotes::default(),
        };
        let shipping = leader.standbys.entry(connection).or_insert_with(new);
        shipping.heard = now;
        let outcome = match (message, &shipping.stage) {
            (FromStandby { attach: Some(_), .. }, ShippingStage::Open)
                if !is_valid && !self.plan.has(Bug::FollowsEarlierView) =>
            {
                Err(Error::closed("the lease is over"))
            }
            (FromStandby { attach: Some(attach), .. }, ShippingStage::Open) => {
                self.attach(leader, connection, attach)
            }
            (
                FromStandby { confirm: Some(Confirm { next_frame, .. }), .. },
                ShippingStage::Snapshot(_),
            ) => match mem::replace(&mut shipping.stage, ShippingStage::Open) {
                ShippingStage::Snapshot(attach) if next_frame > 0 => {
                    self.catch_up(leader, connection, &attach, next_frame)
                }
                stage => {
                    shipping.stage = stage;
                    Ok(())
                }
            },
            (FromStandby { confirm: Some(confirm), .. }, ShippingStage::Following(id)) => {
                let Confirm { position, next_frame } = confirm;
                let id = *id;
                leader.journal().confirm_standby(id, StandbyProgress { position, next_frame });
                leader.confirmed_by_any = leader.confirmed_by_any.max(position);
                Ok(())
            }
            _ => Err(Error::internal("out of order")),
        };
        self.flush();
        if outcome.is_err() {
            // The standby attaches anew.
            self.wire.connections.remove(&connection);
        }
        Ok(())
    }

    fn attach(
        &mut self,
        leader: &mut Leader,
        connection: u64,
        attach: Attach,
    ) -> Result<(), Error> {
        let views: Vec<ViewStart> = leader.membership.views();
        let journal = leader.journal();
        let mut attached = answer_attach(journal, leader.view, &views, &attach)?;
        if self.plan.has(Bug::AttachesBlindly)
            && journal.catch_up(attach.next_frame).is_possible()?
        {
            attached.start = Start::Place.into();
        }
        let (start, number) = (attached.start(), attached.snapshot);
        let push = |sent: &mut Vec<Message>, message| {
            sent.push(Message::ToStandby { connection, message });
        };
        let message = FromLeader { attached: Some(attached), ..FromLeader::default() };
        push(&mut self.outgoing, message);
        match start {
            Start::Place => self.catch_up(leader, connection, &attach, attach.next_frame),
            Start::FirstFrame => self.catch_up(leader, connection, &attach, 1),
            Start::Snapshot => {
                for_each_part(journal, number, |_, message| {
                    push(&mut self.outgoing, message);
                    Ok(())
                })?;
                if let Some(shipping) = leader.standbys.get_mut(&connection) {
                    shipping.stage = ShippingStage::Snapshot(attach);
                }
                Ok(())
            }
        }
    }

    fn catch_up(
        &mut self,
        leader: &mut Leader,
        connection: u64,
        attach: &Attach,
        next_frame: u64,
    ) -> Result<(), Error> {
        let journal = leader.guarded.journal().expect("a log");
        let (level, mut source) = (journal.level().get().0, journal.catch_up(next_frame));
        loop {
            let missed = source.next(&Newcomer {
                member: &attach.member,
                address: &attach.address,
                level: RecordLevel(attach.level),
            })?;
            let position = missed.attached.map_or(0, |(_, position)| position);
            let bytes = missed.bytes;
            let frames = Some(Frames { bytes, position, level, ..Frames::default() });
            let message = FromLeader { frames, ..FromLeader::default() };
            self.outgoing.push(Message::ToStandby { connection, message });
            if let Some((id, position)) = missed.attached {
                source.end();
                if let Some(shipping) = leader.standbys.get_mut(&connection) {
                    (shipping.stage, shipping.position) = (ShippingStage::Following(id), position);
                }
                return Ok(());
            }
        }
    }

    /// Keeps the in-sync set right.
    fn supervise(&mut self, index: usize, process: &mut Process) {
        let (now, local) = (self.now, self.nodes[index].local(self.now));
        let boot = self.nodes[index].boots;
        let Part::Leading(leader) = &mut process.part else { return };
        let Some(required) = process.election.required_members(local) else { return };
        if leader.requires_at.is_some() {
            return;
        }
        if let Some(open) = &mut leader.change {
            if !open.until.has_passed(now) {
                return;
            }
            if !open.is_reading {
                (open.is_reading, open.until) = (true, now + TTL / 3);
                self.send(Message::ToService { from: index, boot, call: ServiceCall::Read });
                return;
            }
            leader.change = None;
            let failed = Err(Error::internal("the service does not answer"));
            let journal = leader.guarded.journal().expect("a member has a log");
            leader.supervision.end_change(&required, failed, journal, local);
            return;
        }
        if matches!(leader.handover, Some(Handover::Narrowing(_))) || !leader.takes_calls() {
            return;
        }
        let journal = leader.guarded.journal().expect("a member has a log");
        let mut next = leader.supervision.begin_change(&required, journal, local);
        if self.plan.has(Bug::JoinsEarly) {
            next = next.or_else(|| leader.with_newcomer(&required));
        }
        let Some(members) = next else { return };
        if self.plan.has(Bug::ShrinksFirst) {
            journal.require_standbys(&others(&leader.own, &members));
        }
        match process.election.begin_change(members, local) {
            Ok(change) => {
                let until = now + TTL / 3;
                let call = ServiceCall::Change(change.clone());
                leader.change = Some(OpenChange { change, until, is_reading: false });
                self.send(Message::ToService { from: index, boot, call });
            }
            Err(error) => {
                leader.supervision.end_change(&required, Err(error), journal, local);
            }
        }
    }

    /// Takes the answer to a call that is not of the election.
    pub(super) fn receive_outcome(
        &mut self,
        index: usize,
        process: &mut Process,
        answer: ServiceAnswer,
    ) {
        let (now, local) = (self.now, self.nodes[index].local(self.now));
        let Part::Leading(leader) = &mut process.part else { return };
        let election = &mut process.election;
        let outcome = match answer {
            ServiceAnswer::Announced(lease, hold) => {
                leader.is_announced |= hold == Hold::Held && lease.view == leader.view;
                return;
            }
            ServiceAnswer::Changed(change, hold) => {
                let is_awaited = |open: &&mut OpenChange| !open.is_reading && open.change == change;
                let Some(open) = leader.change.as_mut().filter(is_awaited) else { return };
                if hold == Hold::Lost {
                    // Asked for next.
                    open.until = now;
                    return;
                }
                election.end_change(&change);
                Ok(())
            }
            ServiceAnswer::Read(snapshot) => {
                let Some(open) = leader.change.as_ref().filter(|open| open.is_reading) else {
                    return;
                };
                election.observe(&snapshot, local);
                if snapshot.in_sync.as_ref() == Some(&open.change.to) {
                    Ok(())
                } else {
                    Err(Error::internal("the set is another one"))
                }
            }
            _ => return,
        };
        leader.change = None;
        let Some(required) = election.required_members(local) else { return };
        let journal = leader.guarded.journal().expect("a member has a log");
        leader.supervision.end_change(&required, outcome, journal, local);
    }

    /// Executes a call of a client. Its answer waits for the log.
    pub(super) fn execute(
        &mut self,
        index: usize,
        process: &mut Process,
        client: usize,
        number: u64,
        call: &Call,
    ) -> Result<(), String> {
        let (bug, local) = (self.plan.bug, self.nodes[index].local(self.now));
        let leader = match &mut process.part {
            Part::Leading(leader) if leader.takes_calls() => leader,
            _ => {
                self.send(Message::Reply { client, number, view: 0, reply: Reply::Refused });
                return Ok(());
            }
        };
        let was_valid = leads_in(&process.election, leader.view, local);
        if let Call::Announce { mark: Some(mark), .. } = call
            && leader.guarded.has_lost_log(mark)
        {
            leader.run(bug, |state| state.drop_recovered(local));
        }
        let appended = leader.journal().appended();
        let (reply, position) = leader.run(bug, |state| execute(state, local, client, call));
        let is_fence_recorded =
            matches!(call, Call::Locate { .. }) && leader.journal().appended() > appended;
        let starts_early = |is_prepared| {
            is_prepared || bug == Some(Bug::ReusesUnconfirmed) || bug == Some(Bug::StartsUnlogged)
        };
        self.outcome.prepared +=
            u64::from(matches!(reply, Reply::Started { is_prepared: true, .. }));
        let position = match reply {
            Reply::Started { is_prepared, .. } if starts_early(is_prepared) => 0,
            _ if !call.waits_for_log() => 0,
            _ => position,
        };
        leader.answers.push(Answer { client, number, position, reply, was_valid });
        if is_fence_recorded && self.happens(self.plan.faults.fence_isolation) {
            self.isolate(index);
        }
        Ok(())
    }

    /// Sends the answers that need not wait any more.
    fn answer(&mut self, index: usize, process: &mut Process) -> Result<(), String> {
        let (bug, local) = (self.plan.bug, self.nodes[index].local(self.now));
        let Part::Leading(leader) = &mut process.part else { return Ok(()) };
        let is_valid = leads_in(&process.election, leader.view, local);
        let view = leader.view.0;
        for answer in mem::take(&mut leader.answers) {
            let Answer { client, number, position, was_valid, .. } = answer;
            let Some(outcome) = leader.outcome(position, bug) else {
                leader.answers.push(answer);
                continue;
            };
            let is_checked_early = bug == Some(Bug::ChecksLeaseEarly);
            if !(is_valid || is_checked_early && was_valid) {
                continue;
            }
            let reply = match (outcome, answer.reply) {
                (Err(_), _) => Reply::Failed,
                (Ok(()), Reply::Announced { is_known, .. }) => {
                    let mark = leader.mark(bug);
                    mark.iter().for_each(|mark| self.history.record_mark(mark));
                    Reply::Announced { is_known, mark }
                }
                (Ok(()), reply) => reply,
            };
            if !matches!(reply, Reply::Failed) {
                self.history.record_answer(view)?;
            }
            self.outgoing.push(Message::Reply { client, number, view, reply });
        }
        self.flush();
        Ok(())
    }

    /// Sends what was collected.
    fn flush(&mut self) {
        for message in mem::take(&mut self.outgoing) {
            self.send(message);
        }
    }
}
