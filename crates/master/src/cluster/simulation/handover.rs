//! Planned hand-overs: the leader leaves the set to itself and the next one, lets its calls end, brings
//! into the log which memory must rest, and gives its lease back.

use std::{collections::BTreeSet, time::Duration};

use mooncake_base::Moment;
use mooncake_election::{LeaderAddress, MemberId, View};

use super::{
    Simulation, TTL,
    bugs::Bug,
    client::Reply,
    leader::{Leader, OpenChange},
    node::{Part, Process},
    wire::{Message, ServiceCall},
};
use crate::{
    cluster::{member::Membership, supervision::can_take_over},
    journal::{FollowerStatus, shipping::tell_rest_logged},
    state::log_rest,
};

/// Time in which the calls under way must end.
const DRAIN_MAX: Duration = Duration::from_millis(300);

/// Time in which the records of resting memory must be at the standbys.
const REST_MAX: Duration = Duration::from_millis(300);

/// Time in which another master must lead.
const SUCCESSOR_MAX: Duration = Duration::from_secs(10);

/// How far a hand-over is.
#[derive(Debug)]
pub(super) enum Handover {
    /// An operator has asked for it.
    Requested,
    /// The set is to become that of the leader and the next one.
    Narrowing(BTreeSet<MemberId>),
    /// Calls are refused, and those under way end.
    Draining { until: Moment },
    /// The records of resting memory are on their way.
    MemoryRests { position: u64, until: Moment },
    /// The standbys are told of it.
    Telling,
}

/// A former leader that takes no part in the election until another one leads.
#[derive(Debug)]
pub(super) struct Abstaining {
    pub(super) membership: Membership,
    view: View,
    until: Moment,
}

impl Leader {
    /// Returns whether calls are executed.
    pub(super) const fn takes_calls(&self) -> bool {
        matches!(self.handover, None | Some(Handover::Requested | Handover::Narrowing(_)))
    }
}

impl Simulation {
    /// Lets an operator ask the leader to hand over.
    pub(super) fn ask_for_handover(&mut self) {
        for node in &mut self.nodes {
            if let Some(process) = &mut node.process
                && let Part::Leading(leader) = &mut process.part
            {
                leader.handover.get_or_insert(Handover::Requested);
            }
        }
    }

    /// Goes on with a hand-over.
    pub(super) fn step_handover(
        &mut self,
        index: usize,
        process: &mut Process,
    ) -> Result<(), String> {
        let (now, local) = (self.now, self.nodes[index].local(self.now));
        let Part::Leading(leader) = &mut process.part else { return Ok(()) };
        let Some(handover) = leader.handover.take() else { return Ok(()) };
        let Some(required) = process.election.required_members(local) else { return Ok(()) };
        let drains = Handover::Draining { until: now + DRAIN_MAX };
        leader.handover = match handover {
            Handover::Requested if leader.change.is_some() => Some(handover),
            Handover::Requested => match self.successor(leader, &required) {
                Some(members) if members == required => Some(drains),
                Some(members) => {
                    let Ok(change) = process.election.begin_change(members.clone(), local) else {
                        return Ok(());
                    };
                    let call = ServiceCall::Change(change.clone());
                    leader.change =
                        Some(OpenChange { change, until: now + TTL / 3, is_reading: false });
                    let boot = self.nodes[index].boots;
                    self.send(Message::ToService { from: index, boot, call });
                    Some(Handover::Narrowing(members))
                }
                None => None,
            },
            Handover::Narrowing(members) if members == required => Some(drains),
            // If the service did not change the set, the leader goes on.
            Handover::Narrowing(_) => leader.change.is_some().then_some(handover),
            Handover::Draining { until } if !leader.owes_any() || until.has_passed(now) => {
                leader.tell_leases();
                let (is_logged, position) =
                    leader.run(self.plan.bug, |state| log_rest(state, local));
                let until = now + REST_MAX;
                Some(if is_logged {
                    Handover::MemoryRests { position, until }
                } else {
                    Handover::Telling
                })
            }
            Handover::MemoryRests { position, .. }
                if leader.journal().synced_position() >= position =>
            {
                tell_rest_logged(leader.journal(), Duration::ZERO);
                Some(Handover::Telling)
            }
            Handover::MemoryRests { until, .. } if until.has_passed(now) => Some(Handover::Telling),
            Handover::Draining { .. } | Handover::MemoryRests { .. } => Some(handover),
            Handover::Telling => return self.give_lead_back(index, process),
        };
        Ok(())
    }

    /// Returns the members of a set with which a standby can take over.
    fn successor(&self, leader: &Leader, set: &BTreeSet<MemberId>) -> Option<BTreeSet<MemberId>> {
        let standbys = leader.journal().followers().status();
        let hands_over_early = self.plan.has(Bug::HandsOverEarly);
        let can_lead = |standby: &&FollowerStatus| {
            can_take_over(standby, set) || hands_over_early && standby.is_attached
        };
        // Any of them.
        let next = standbys.iter().rev().find(can_lead)?;
        Some([leader.own.clone(), MemberId::new(&next.member).ok()?].into())
    }

    fn give_lead_back(&mut self, index: usize, process: &mut Process) -> Result<(), String> {
        let Part::Leading(leader) = &mut process.part else { return Ok(()) };
        let (view, answers) = (leader.view, leader.take_answers());
        for (client, number) in answers {
            self.send(Message::Reply { client, number, view: 0, reply: Reply::Refused });
        }
        let Some(membership) = self.close_term(process) else { return Ok(()) };
        self.outcome.handovers += 1;
        let until = self.now + SUCCESSOR_MAX;
        process.part = Part::Abstaining(Box::new(Abstaining { membership, view, until }));
        self.poll_election(index, process);
        Ok(())
    }

    /// Lets a former leader follow once another one leads.
    pub(super) fn step_abstaining(
        &mut self,
        index: usize,
        process: &mut Process,
    ) -> Result<(), String> {
        let Part::Abstaining(abstaining) = &process.part else { return Ok(()) };
        let is_followed = process.known.leader.as_ref().is_some_and(|leader| {
            leader.view > abstaining.view && matches!(leader.address, LeaderAddress::Serving(_))
        });
        if !is_followed && !abstaining.until.has_passed(self.now) {
            return Ok(());
        }
        let Part::Abstaining(abstaining) = std::mem::replace(&mut process.part, Part::None) else {
            return Ok(());
        };
        self.follow_again(index, process, abstaining.membership)
    }
}
