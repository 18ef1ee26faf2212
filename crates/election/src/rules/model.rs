//! A cluster of elections under a model of the lease service, with one seed for everything that
//! happens: calls and answers that are lost, late or repeated, clocks that drift, processes that are
//! paused, partitions.

use std::{collections::BTreeSet, time::Duration};

use mooncake_base::{Moment, random::SplitMix64};

use super::{Answer, Call, Election, History, Role, Step, Timing};
use crate::{
    in_sync::MemberId,
    service::{Change, Hold, Snapshot},
    simulated_service::SimulatedService,
};

const NODES: usize = 3;
const TICK: Duration = Duration::from_millis(10);

/// A rule that a run leaves out, to see that its absence is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The leader stops only when the lease ends in the service.
    NoMargin,
    /// The leader acknowledges without a silent member before the set has changed.
    AcknowledgesBeforeChange,
    /// The leader acknowledges when the members of the last known set have a change, although another
    /// set may have replaced it.
    IgnoresUnknownChanges,
}

/// What a run has seen.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) leaders: usize,
    pub(super) acknowledged: usize,
    pub(super) set_changes: usize,
    pub(super) violation: Option<String>,
}

#[derive(Debug, Clone)]
enum Message {
    Call(Call),
    Change(Change),
    Answer(u64, Answer),
    Changed(Change, Hold),
    Observation(Snapshot),
}

#[derive(Debug)]
struct Node {
    election: Election,
    id: MemberId,
    offset: Duration,
    /// Speed of the clock in thousandths.
    rate: u32,
    paused_until: Moment,
    cut_off_until: Moment,
    /// The changes of data that the node has.
    log: Vec<u64>,
    was_leader: bool,
    has_open_change: Option<Moment>,
}

pub(super) struct Cluster {
    random: SplitMix64,
    fault: Fault,
    now: Moment,
    service: SimulatedService,
    nodes: Vec<Node>,
    /// Messages on their way: when, from or to which node, and whether to the service.
    messages: Vec<(Moment, usize, Message)>,
    acknowledged: Vec<u64>,
    written: u64,
    outcome: Outcome,
}

impl Node {
    fn local(&self, now: Moment) -> Moment {
        Moment::from_boot(now.since_boot() * self.rate / 1000 + self.offset)
    }
}

impl Cluster {
    pub(super) fn new(seed: u64, fault: Fault) -> Self {
        let mut random = SplitMix64::new(seed);
        let mut timing = Timing::new(Duration::from_secs(1)).unwrap();
        if fault == Fault::NoMargin {
            timing.margin = Duration::ZERO;
        }
        let nodes: Vec<Node> = (0..NODES)
            .map(|index| {
                let id = MemberId::new(&format!("m{index}")).unwrap();
                let offset = Duration::from_millis(random.below(10_000) as u64);
                let start = Moment::from_boot(offset);
                Node {
                    election: Election::new(
                        timing,
                        id.clone(),
                        History::None,
                        random.number(),
                        start,
                    ),
                    id,
                    offset,
                    rate: 920 + random.below(161) as u32,
                    paused_until: Moment::default(),
                    cut_off_until: Moment::default(),
                    log: Vec::new(),
                    was_leader: false,
                    has_open_change: None,
                }
            })
            .collect();
        Self {
            random,
            fault,
            now: Moment::default(),
            service: SimulatedService::new(timing.ttl),
            nodes,
            messages: Vec::new(),
            acknowledged: Vec::new(),
            written: 0,
            outcome: Outcome::default(),
        }
    }

    pub(super) fn run(mut self, ticks: usize) -> Outcome {
        for _ in 0..ticks {
            self.now = self.now + TICK;
            self.disturb();
            self.deliver();
            for index in 0..NODES {
                if self.nodes[index].paused_until.has_passed(self.now) {
                    self.step(index);
                }
            }
            self.check();
            if self.outcome.violation.is_some() {
                break;
            }
        }
        self.outcome
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.random.below(one_in) == 0
    }

    fn milliseconds(&mut self, limit: usize) -> Duration {
        Duration::from_millis(self.random.below(limit) as u64)
    }

    fn disturb(&mut self) {
        for index in 0..NODES {
            if self.chance(400) {
                self.nodes[index].paused_until = self.now + self.milliseconds(2500);
            }
            if self.chance(400) {
                self.nodes[index].cut_off_until = self.now + self.milliseconds(2500);
            }
        }
        let index = self.random.below(NODES);
        if self.chance(5) {
            let observation = Message::Observation(self.service.snapshot(self.now));
            self.send(index, observation);
        }
    }

    /// Sends a message between a node and the service, perhaps late, twice or not at all.
    fn send(&mut self, node: usize, message: Message) {
        if self.chance(10) || !self.nodes[node].cut_off_until.has_passed(self.now) {
            return;
        }
        let copies = if self.chance(20) { 2 } else { 1 };
        for _ in 0..copies {
            let late = if self.chance(10) { 3000 } else { 20 };
            let at = self.now + self.milliseconds(late);
            self.messages.push((at, node, message.clone()));
        }
    }

    fn deliver(&mut self) {
        let now = self.now;
        let is_due = |at: Moment, node: &Node, message: &Message| {
            // A paused process reads its socket when it goes on.
            let is_to_service = matches!(message, Message::Call(_) | Message::Change(_));
            at.has_passed(now) && (is_to_service || node.paused_until.has_passed(now))
        };
        let (due, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.messages)
            .into_iter()
            .partition(|(at, node, message)| is_due(*at, &self.nodes[*node], message));
        self.messages = rest;
        for (_, index, message) in due {
            let local = self.nodes[index].local(now);
            match message {
                Message::Call(call) => {
                    let answer = self.service.carry_out(&call.request, now);
                    self.send(index, Message::Answer(call.number, answer));
                }
                Message::Change(change) => {
                    let hold = self.service.change(&change, now);
                    self.outcome.set_changes += usize::from(hold == Hold::Held);
                    self.send(index, Message::Changed(change, hold));
                }
                Message::Answer(number, answer) => {
                    self.nodes[index].election.answer(number, answer, local);
                }
                Message::Changed(change, hold) => {
                    self.nodes[index].has_open_change = None;
                    if hold == Hold::Held {
                        self.nodes[index].election.end_change(&change);
                    }
                }
                Message::Observation(snapshot) => {
                    self.nodes[index].election.observe(&snapshot, local);
                }
            }
        }
    }

    fn step(&mut self, index: usize) {
        let local = self.nodes[index].local(self.now);
        if let Step::Call(call) = self.nodes[index].election.poll(local) {
            self.send(index, Message::Call(call));
        }
        match self.nodes[index].election.role(local) {
            Role::Leader { .. } => self.lead(index, local),
            Role::Fenced { .. } => {
                self.nodes[index].was_leader = false;
                let history = History::UpTo(crate::View(0));
                self.nodes[index].election.restart(history, local);
            }
            Role::Follower(_) | Role::Candidate => self.nodes[index].was_leader = false,
        }
    }

    /// Writes a change of data, and changes the set where a member does not take it.
    fn lead(&mut self, index: usize, local: Moment) {
        if !self.nodes[index].was_leader {
            self.nodes[index].was_leader = true;
            self.outcome.leaders += 1;
            if !self.nodes[index].log.starts_with(&self.acknowledged) {
                self.outcome.violation =
                    Some(format!("m{index} leads without acknowledged changes"));
                return;
            }
        }
        self.written += 1;
        let entry = self.written;
        self.nodes[index].log.push(entry);
        let log = self.nodes[index].log.clone();
        let election = &self.nodes[index].election;
        let mut required = election.required_members(local).unwrap();
        if self.fault == Fault::IgnoresUnknownChanges {
            required = match &election.phase {
                super::Phase::Leading { sets, .. } => sets.current_members().clone(),
                _ => unreachable!("the node leads"),
            };
        }
        let mut reached = BTreeSet::from([self.nodes[index].id.clone()]);
        let is_cut_off = |node: &Node| {
            !node.cut_off_until.has_passed(self.now) || !node.paused_until.has_passed(self.now)
        };
        let own_is_cut_off = is_cut_off(&self.nodes[index]);
        for other in 0..NODES {
            let is_reached = other != index && !own_is_cut_off && !is_cut_off(&self.nodes[other]);
            if is_reached && self.random.below(30) != 0 {
                self.nodes[other].log.clone_from(&log);
                reached.insert(self.nodes[other].id.clone());
            }
        }
        let is_complete = required.is_subset(&reached);
        let wants_change = required != reached;
        if is_complete || self.fault == Fault::AcknowledgesBeforeChange {
            self.acknowledged = log;
            self.outcome.acknowledged += 1;
        }
        let waits = self.nodes[index].has_open_change.is_some_and(|until| !until.has_passed(local));
        if wants_change
            && !waits
            && self.chance(3)
            && let Ok(change) = self.nodes[index].election.begin_change(reached, local)
        {
            self.nodes[index].has_open_change = Some(local + Duration::from_millis(100));
            self.send(index, Message::Change(change));
        }
    }

    fn check(&mut self) {
        let leading =
            |node: &&Node| matches!(node.election.role(node.local(self.now)), Role::Leader { .. });
        let leaders: Vec<_> = self.nodes.iter().filter(leading).map(|node| &node.id).collect();
        if leaders.len() > 1 {
            self.outcome.violation = Some(format!("{leaders:?} lead at a time"));
        }
    }
}
