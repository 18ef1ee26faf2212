//! A member: its machine, its disk and its process, which follows or leads.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::{Clock, Moment, random::SplitMix64};
use mooncake_election::{
    Election, History as ElectionHistory, LeaderAddress, MemberId, Role, Snapshot, Timing,
    rules::{Answer, Step},
};

use super::{
    Simulation, TTL,
    bugs::Bug,
    handover::Abstaining,
    leader::Leader,
    leads_in,
    reads::StaleReads,
    standby::Standby,
    wire::{Inbox, Message, ServiceAnswer, ServiceCall},
};
use crate::{
    cluster::{member::Membership, own_log},
    journal::{Directory, SimulatedDisk},
};

/// The clock of a machine.
#[derive(Debug, Default)]
pub(super) struct NodeClock(AtomicU64);

impl Clock for NodeClock {
    fn now(&self) -> Moment {
        Moment::from_boot(Duration::from_nanos(self.0.load(Ordering::Relaxed)))
    }
}

/// A machine that runs a member.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) index: usize,
    pub(super) disk: SimulatedDisk,
    pub(super) clock: Arc<NodeClock>,
    offset: Duration,
    /// Since when the clock stands still.
    clock_stands_since: Option<Moment>,
    pub(super) clock_stands_until: Moment,
    /// Time that the clock has missed.
    clock_missed: Duration,
    /// Speed of the clock in thousandths.
    rate: u32,
    pub(super) process: Option<Box<Process>>,
    /// The id of the member that ran last.
    pub(super) member: String,
    /// Number of processes so far.
    pub(super) boots: u64,
    pub(super) starts_at: Moment,
    pub(super) stopped_until: Moment,
    /// The process hangs in a write of its log, and will be killed there.
    pub(super) hanging_write: Option<HangingWrite>,
    pub(super) service_cut_until: Moment,
    pub(super) stale_reads: Option<StaleReads>,
    /// Until when the members cannot reach each other.
    pub(super) cut_until: Vec<Moment>,
    pub(super) inbox: Inbox,
}

/// A write that a file never gets, though the standbys do.
#[derive(Debug)]
pub(super) struct HangingWrite {
    pub(super) file: String,
    /// The length of the file before.
    pub(super) length: u64,
    pub(super) killed_at: Moment,
}

/// A running member.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) member: String,
    pub(super) directory: Arc<Directory>,
    pub(super) election: Election,
    /// What the service held when it last told, and when it told of a leader before this one.
    pub(super) known: Snapshot,
    pub(super) known_before: Snapshot,
    pub(super) part: Part,
}

/// Whether a member follows or leads.
#[derive(Debug)]
pub(super) enum Part {
    Following(Box<Standby>),
    Leading(Box<Leader>),
    /// It has handed over.
    Abstaining(Box<Abstaining>),
    /// While it changes.
    None,
}

impl Node {
    pub(super) fn new(index: usize, random: &mut SplitMix64) -> Self {
        Self {
            index,
            disk: SimulatedDisk::default(),
            clock: Arc::default(),
            offset: Duration::from_millis(random.below(10_000) as u64),
            clock_stands_since: None,
            clock_stands_until: Moment::default(),
            clock_missed: Duration::ZERO,
            rate: 955 + random.below(91) as u32,
            process: None,
            member: String::new(),
            boots: 0,
            starts_at: Moment::default(),
            stopped_until: Moment::default(),
            hanging_write: None,
            service_cut_until: Moment::default(),
            stale_reads: None,
            cut_until: vec![Moment::default(); 3],
            inbox: Inbox::default(),
        }
    }

    /// The time of the machine.
    pub(super) fn local(&self, now: Moment) -> Moment {
        let shown = self.clock_stands_since.unwrap_or(now).since_boot() - self.clock_missed;
        Moment::from_boot(shown * self.rate / 1000 + self.offset)
    }

    /// Lets the clock of the machine stand still, as that of a virtual machine may.
    pub(super) fn stop_clock(&mut self, now: Moment, until: Moment) {
        self.clock_stands_since.get_or_insert(now);
        self.clock_stands_until = until;
    }

    /// Lets a clock that stood still go on.
    fn run_clock(&mut self, now: Moment) {
        if self.clock_stands_until.has_passed(now)
            && let Some(since) = self.clock_stands_since.take()
        {
            self.clock_missed += now.since(since);
        }
    }

    pub(super) fn role(&self, now: Moment) -> Option<Role> {
        self.process.as_ref().map(|process| process.election.role(self.local(now)))
    }

    /// Takes a message into the socket of the process, which reads it once it runs.
    pub(super) fn accept(&mut self, message: Message) {
        if self.process.is_some() {
            self.inbox.push_back(message);
        }
    }

    pub(super) fn summary(&self, now: Moment) -> String {
        let Some(process) = &self.process else { return format!("{}: down", self.index) };
        let part = match &process.part {
            Part::Following(standby) => format!("follows at {:?}", standby.log.place().1),
            Part::Leading(leader) => format!("leads at {}", leader.journal().end_frame()),
            Part::Abstaining(_) | Part::None => "changes".to_owned(),
        };
        let role = process.election.role(self.local(now));
        format!("{} {}: {part}, {role:?}", self.index, process.member)
    }
}

impl Process {
    /// Takes what the service has told. A read and a watch may tell in any order.
    fn learn(&mut self, snapshot: Snapshot) {
        let before = mem::replace(&mut self.known, snapshot);
        let served = leader_in(&before);
        if served.is_some() && served != leader_in(&self.known) {
            self.known_before = before;
        }
    }

    pub(super) fn set_complete(&mut self, is_complete: bool, bug: Option<Bug>, now: Moment) {
        let may_bid = is_complete || bug == Some(Bug::IncompleteBids);
        self.election.set_complete(may_bid, now);
    }
}

impl Simulation {
    /// Ends a process as an operator does: a leader gives its lease back.
    pub(super) fn shut_down(&mut self, index: usize, pause: Duration) {
        if let Some(mut process) = self.nodes[index].process.take() {
            process.election.resign();
            self.poll_election(index, &mut process);
        }
        self.kill(index, pause);
    }

    fn start_process(&mut self, index: usize) -> Result<(), String> {
        let seed = self.random.number();
        let node = &mut self.nodes[index];
        node.boots += 1;
        let local = node.local(self.now);
        let directory = Arc::new(Directory::on(Arc::new(node.disk.clone())));
        let failed = |error: mooncake_base::Error| format!("member {index} cannot start: {error}");
        let mut membership = Membership::open(Arc::clone(&directory)).map_err(failed)?;
        let member = membership.member().to_owned();
        let id = MemberId::new(&member).map_err(failed)?;
        let timing = Timing::new(TTL).map_err(failed)?;
        let election = Election::new(timing, id, membership.history(), seed, local);
        let log = own_log::open(Arc::clone(&directory), self.plan.sync, &mut membership);
        let log = log.map_err(failed)?;
        let is_complete = membership.is_complete();
        let part = Part::Following(Box::new(Standby::new(log, membership)));
        let known = Snapshot::default();
        node.member.clone_from(&member);
        let known_before = known.clone();
        let mut process = Process { member, directory, election, known, known_before, part };
        process.set_complete(is_complete, self.plan.bug, local);
        node.process = Some(Box::new(process));
        self.tell(index);
        Ok(())
    }

    /// Ends the process without a word.
    pub(super) fn kill(&mut self, index: usize, pause: Duration) {
        let node = &mut self.nodes[index];
        node.process = None;
        node.inbox.clear();
        node.boots += 1;
        node.stopped_until = Moment::default();
        node.hanging_write = None;
        node.starts_at = self.now + pause;
        let is_of = |standby: usize, leader: usize| standby == index || leader == index;
        self.wire.connections.retain(|_, found| !is_of(found.standby, found.leader));
    }

    /// Lets a process do what it does in a step.
    pub(super) fn step_node(&mut self, index: usize) -> Result<(), String> {
        let node = &mut self.nodes[index];
        node.run_clock(self.now);
        let local = node.local(self.now);
        node.clock.0.store(local.since_boot().as_nanos() as u64, Ordering::Relaxed);
        if node.process.is_none() {
            if !node.starts_at.has_passed(self.now) {
                return Ok(());
            }
            self.start_process(index)?;
        }
        let now = self.now;
        let node = &mut self.nodes[index];
        if let Some(write) = &node.hanging_write {
            if write.killed_at.has_passed(now) {
                let lose = |bytes: &mut Vec<u8>| bytes.truncate(write.length as usize);
                node.disk.damage(&write.file, lose).map_err(|error| error.to_string())?;
                self.outcome.hanging_writes += 1;
                let pause = self.milliseconds(1500);
                self.kill(index, pause);
            }
            return Ok(());
        }
        if !node.stopped_until.has_passed(now) {
            return Ok(());
        }
        let messages = mem::take(&mut node.inbox);
        let Some(mut process) = node.process.take() else { return Ok(()) };
        // Which thread comes first is not known.
        let role_is_first = self.chance(2);
        if role_is_first {
            self.follow_role(index, &mut process)?;
        }
        for message in messages {
            self.receive(index, &mut process, message)?;
        }
        self.poll_election(index, &mut process);
        match &process.part {
            Part::Following(_) => self.step_standby(index, &mut process)?,
            Part::Leading(_) => self.step_leader(index, &mut process)?,
            Part::Abstaining(_) => self.step_abstaining(index, &mut process)?,
            Part::None => {}
        }
        if !role_is_first {
            self.follow_role(index, &mut process)?;
        }
        self.nodes[index].process = Some(process);
        Ok(())
    }

    fn receive(
        &mut self,
        index: usize,
        process: &mut Process,
        message: Message,
    ) -> Result<(), String> {
        let local = self.nodes[index].local(self.now);
        match message {
            Message::FromService { answer, .. } => match answer {
                ServiceAnswer::Election(number, answer) => {
                    if let Answer::Snapshot(snapshot) = &answer {
                        process.learn(snapshot.clone());
                    }
                    process.election.answer(number, answer, local);
                }
                ServiceAnswer::Watched(snapshot) => {
                    process.election.observe(&snapshot, local);
                    process.learn(snapshot);
                }
                answer => self.receive_outcome(index, process, answer),
            },
            Message::ToLeader { connection, message } => {
                self.receive_from_standby(index, process, connection, message)?;
            }
            Message::ToStandby { connection, message } => {
                self.receive_from_leader(index, process, connection, message);
            }
            Message::Call { client, number, call, .. } => {
                self.execute(index, process, client, number, &call)?;
            }
            Message::ToService { .. } | Message::Reply { .. } | Message::Broken { .. } => {}
        }
        Ok(())
    }

    pub(super) fn poll_election(&mut self, index: usize, process: &mut Process) {
        let local = self.nodes[index].local(self.now);
        let boot = self.nodes[index].boots;
        while let Step::Call(call) = process.election.poll(local) {
            let call = ServiceCall::Election(call);
            self.send(Message::ToService { from: index, boot, call });
        }
    }

    /// Follows or leads as the election says.
    fn follow_role(&mut self, index: usize, process: &mut Process) -> Result<(), String> {
        let local = self.nodes[index].local(self.now);
        match (&process.part, process.election.role(local)) {
            (Part::Leading(leader), _) if !leads_in(&process.election, leader.view, local) => {
                self.end_term(index, process)?;
            }
            (Part::Following(_), Role::Leader { view, .. }) => {
                self.take_over(index, process, view)?;
            }
            (Part::Following(_), Role::Fenced { view }) => {
                process.election.restart(ElectionHistory::UpTo(view), local);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Returns the member that leads and serves.
pub(super) fn leader_in(snapshot: &Snapshot) -> Option<usize> {
    match &snapshot.leader.as_ref()?.address {
        LeaderAddress::Serving(address) => address.parse().ok(),
        LeaderAddress::Warming => None,
    }
}
