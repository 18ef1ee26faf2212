//! Visits every state of small groups: the coordinator's rules, the members' progress, and the
//! messages between them, in every order.
//!
//! A message waits until a step delivers it, so that any message may be late. How often ranks die,
//! fall silent and so on is bounded; when they do is not.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet, VecDeque},
    hash::{Hash, Hasher},
};

use rustc_hash::{FxBuildHasher, FxHasher};

use super::*;
use crate::{
    message::Member,
    progress::{Progress, RunningState, View},
};

const RANKS: u32 = 3;
const GROUP: &str = "g";

/// How often each event may still happen.
#[derive(Debug, Clone, Copy, Default, Hash)]
struct Bounds {
    /// Number of ranks that make the group.
    founders: u32,
    /// Operations that each process calls.
    calls: u8,
    kills: u8,
    silences: u8,
    broken_links: u8,
    restarts: u8,
    activations: u8,
    deactivations: u8,
}

/// The slots, with the processes in them, whose bytes are in a result.
type Sources = BTreeSet<(usize, u64)>;

#[derive(Debug, Clone, Default, Hash)]
struct Agent {
    is_alive: bool,
    incarnation: u64,
    calls: u8,
    progress: Progress,
    /// The attempt of the operation in progress, and what it has.
    attempt: Option<u32>,
    generation: u32,
    data: Option<Sources>,
    mail: VecDeque<Notice>,
    reports: VecDeque<Request>,
    /// Processes whose connections have ended here.
    lost: BTreeSet<(u32, u64)>,
}

#[derive(Debug, Clone, Hash)]
struct World {
    rules: Membership,
    agents: [Agent; RANKS as usize],
    bounds: Bounds,
    incarnations: u64,
    /// Bytes of operations, and ends of attempts: attempt, sequence, slot and process.
    sent: BTreeSet<(u32, u64, usize, u64)>,
    done: BTreeSet<(u32, u64, usize)>,
    /// What each operation gave, by generation and sequence.
    results: BTreeMap<(u32, u64), Sources>,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Call(u32),
    TakeData(u32),
    Finish(u32),
    Read(u32),
    Resume(u32),
    Report(u32),
    Kill(u32),
    Close(u32),
    Suspect(u32, u32),
    BreakLink(u32, u32),
    Silence(u32),
    Ping(u32),
    Restart(u32),
    Join(u32),
    Activate(u32, u32),
    Deactivate(u32, u32),
}

fn index(rank: u32) -> usize {
    rank as usize
}

impl World {
    fn new(bounds: Bounds) -> Self {
        let mut world = Self {
            rules: Membership::default(),
            agents: Default::default(),
            bounds,
            incarnations: 0,
            sent: BTreeSet::new(),
            done: BTreeSet::new(),
            results: BTreeMap::new(),
        };
        for rank in 0..bounds.founders {
            world.start(rank, false);
        }
        // The group is made before the faults begin.
        for rank in 0..bounds.founders {
            world.carry_out(Step::Read(rank));
            world.carry_out(Step::Report(rank));
        }
        for rank in 0..bounds.founders {
            world.carry_out(Step::Read(rank));
        }
        for rank in bounds.founders..RANKS {
            world.start(rank, true);
        }
        world
    }

    fn start(&mut self, rank: u32, is_extension: bool) {
        self.incarnations += 1;
        let incarnation = self.incarnations;
        let slot = index(rank);
        let own = Member { slot, rank, incarnation, address: String::new() };
        let view = View { members: vec![own], is_isolated: is_extension, ..View::default() };
        self.agents[slot] = Agent {
            is_alive: true,
            incarnation,
            calls: self.bounds.calls,
            progress: Progress { slot, view, ..Progress::default() },
            ..Agent::default()
        };
        self.ask(rank, Request::Register { rank, incarnation, address: String::new() });
        let attach = Attach {
            group: GROUP.to_owned(),
            slot,
            declared: index(self.bounds.founders),
            capacity: index(RANKS),
            is_extension,
            removes_lost: true,
        };
        self.ask(rank, Request::Attach(attach));
    }

    fn ask(&mut self, rank: u32, request: Request) {
        let notices = self.rules.handle(rank, request);
        self.post(notices);
    }

    fn post(&mut self, notices: Notices) {
        for (rank, notice) in notices {
            let agent = &mut self.agents[index(rank)];
            if agent.is_alive && matches!(notice, Notice::Prepare { .. } | Notice::Commit(_)) {
                agent.mail.push_back(notice);
            }
        }
    }

    fn group(&self) -> &GroupMembers {
        &self.rules.groups[GROUP]
    }

    fn state_of(&self, rank: u32) -> Option<SlotState> {
        self.group().slots.get(&index(rank)).map(|slot| slot.state)
    }

    /// Returns the steps that may happen next; those that the bounds count come last.
    fn steps(&self) -> (Vec<Step>, Vec<Step>) {
        let (mut free, mut bounded) = (Vec::new(), Vec::new());
        for rank in 0..RANKS {
            let agent = &self.agents[index(rank)];
            if !agent.is_alive {
                if self.rules.processes.get(&rank).is_some_and(|it| self.is_current(rank, it)) {
                    free.push(Step::Close(rank));
                }
                if !agent.reports.is_empty() {
                    free.push(Step::Report(rank));
                }
                if self.bounds.restarts > 0 {
                    bounded.push(Step::Restart(rank));
                }
                continue;
            }
            self.add_own_steps(rank, agent, &mut free);
            self.add_faults(rank, agent, &mut bounded);
            for other in (0..RANKS).filter(|other| *other != rank) {
                self.add_steps_with(rank, other, &mut free, &mut bounded);
            }
        }
        (free, bounded)
    }

    fn add_own_steps(&self, rank: u32, agent: &Agent, free: &mut Vec<Step>) {
        let progress = &agent.progress;
        match agent.attempt {
            None if agent.calls > 0 && progress.has_joined() && progress.stopped.is_none() => {
                free.push(Step::Call(rank));
            }
            Some(attempt) if progress.is_interrupted(attempt) => {
                free.extend(progress.state_after(attempt).map(|_| Step::Resume(rank)));
            }
            Some(attempt) => {
                let sequence = progress.running.expect("an operation runs").sequence;
                let members = &progress.view.members;
                if agent.data.is_some() {
                    let is_done =
                        |member: &Member| self.done.contains(&(attempt, sequence, member.slot));
                    if members.iter().all(is_done) {
                        free.push(Step::Finish(rank));
                    }
                } else if members.iter().all(|member| {
                    let first = (attempt, sequence, member.slot, 0);
                    self.sent
                        .range(first..)
                        .next()
                        .is_some_and(|it| (it.0, it.1, it.2) == (first.0, first.1, first.2))
                }) {
                    free.push(Step::TakeData(rank));
                }
            }
            None => {}
        }
        if !agent.mail.is_empty() {
            free.push(Step::Read(rank));
        }
        if !agent.reports.is_empty() {
            free.push(Step::Report(rank));
        }
        if self.rules.processes.get(&rank).is_some_and(|process| !process.is_online) {
            free.push(Step::Ping(rank));
        }
        if !progress.has_joined() && self.state_of(rank) == Some(SlotState::Inactive) {
            free.push(Step::Join(rank));
        }
    }

    fn add_faults(&self, rank: u32, agent: &Agent, bounded: &mut Vec<Step>) {
        // Global rank 0 has the coordinator: without it nothing goes on.
        if rank == 0 {
            return;
        }
        if self.bounds.kills > 0 {
            bounded.push(Step::Kill(rank));
        }
        if self.bounds.silences > 0 && agent.progress.has_joined() {
            bounded.push(Step::Silence(rank));
        }
    }

    fn add_steps_with(&self, rank: u32, other: u32, free: &mut Vec<Step>, bounded: &mut Vec<Step>) {
        let (agent, peer) = (&self.agents[index(rank)], &self.agents[index(other)]);
        let member = agent.progress.view.members.iter().find(|member| member.rank == other);
        if let Some(member) = member
            && agent.progress.has_joined()
        {
            let is_known = agent.lost.contains(&(other, member.incarnation));
            let is_dead = !peer.is_alive || peer.incarnation != member.incarnation;
            if is_dead && !is_known {
                free.push(Step::Suspect(rank, other));
            } else if self.bounds.broken_links > 0 && !is_known && rank < other {
                bounded.push(Step::BreakLink(rank, other));
            }
        }
        let is_active = self.state_of(rank) == Some(SlotState::Active);
        // The lowest active rank asks for changes: who asks makes no difference.
        if !is_active || (0..rank).any(|lower| self.state_of(lower) == Some(SlotState::Active)) {
            return;
        }
        if self.bounds.activations > 0 && self.state_of(other) == Some(SlotState::Awaiting) {
            bounded.push(Step::Activate(rank, other));
        }
        if self.bounds.deactivations > 0 && self.state_of(other) == Some(SlotState::Active) {
            bounded.push(Step::Deactivate(rank, other));
        }
    }

    fn is_current(&self, rank: u32, process: &Process) -> bool {
        self.agents[index(rank)].incarnation == process.incarnation
    }

    fn carry_out(&mut self, step: Step) {
        let group = GROUP.to_owned();
        match step {
            Step::Call(rank) => {
                self.agents[index(rank)].calls -= 1;
                self.begin(rank, false);
            }
            Step::TakeData(rank) => self.take_data(rank),
            Step::Finish(rank) => self.finish(rank),
            Step::Read(rank) => self.read(rank),
            Step::Resume(rank) => self.resume(rank),
            Step::Report(rank) => {
                if let Some(report) = self.agents[index(rank)].reports.pop_front() {
                    self.ask(rank, report);
                }
            }
            Step::Kill(rank) => {
                self.bounds.kills -= 1;
                let agent = &mut self.agents[index(rank)];
                agent.is_alive = false;
                agent.mail.clear();
            }
            Step::Close(rank) => {
                self.agents[index(rank)].reports.clear();
                let notices = self.rules.lose(rank, true);
                self.post(notices);
            }
            Step::Suspect(rank, other) => self.suspect(rank, other),
            Step::BreakLink(rank, other) => {
                self.bounds.broken_links -= 1;
                self.suspect(rank, other);
            }
            Step::Silence(rank) => {
                self.bounds.silences -= 1;
                let notices = self.rules.silence(rank);
                self.post(notices);
            }
            Step::Ping(rank) => self.ask(rank, Request::Ping),
            Step::Restart(rank) => {
                self.bounds.restarts -= 1;
                self.start(rank, true);
            }
            Step::Join(rank) => self.ask(rank, Request::Join { group }),
            Step::Activate(rank, other) => {
                self.bounds.activations -= 1;
                self.ask(rank, Request::Activate { group, slots: vec![index(other)], id: 1 });
            }
            Step::Deactivate(rank, other) => {
                self.bounds.deactivations -= 1;
                self.ask(rank, Request::Deactivate { group, slots: vec![index(other)], id: 2 });
            }
        }
    }

    fn suspect(&mut self, rank: u32, other: u32) {
        let members = &self.agents[index(rank)].progress.view.members;
        let member = members.iter().find(|member| member.rank == other);
        let Some(incarnation) = member.map(|member| member.incarnation) else { return };
        self.agents[index(rank)].lost.insert((other, incarnation));
        self.ask(rank, Request::Suspect { rank: other, incarnation });
    }

    /// Begins an operation, or begins it again: its bytes are on their way.
    fn begin(&mut self, rank: u32, is_again: bool) {
        let agent = &mut self.agents[index(rank)];
        let sequence = agent.progress.begin(is_again);
        let attempt = agent.progress.view.attempt;
        agent.attempt = Some(attempt);
        agent.generation = agent.progress.view.generation;
        agent.data = None;
        self.sent.insert((attempt, sequence, index(rank), agent.incarnation));
    }

    fn take_data(&mut self, rank: u32) {
        let agent = &mut self.agents[index(rank)];
        let attempt = agent.progress.view.attempt;
        let sequence = agent.progress.running.expect("an operation runs").sequence;
        let mut data = Sources::new();
        for member in &agent.progress.view.members {
            let found = self
                .sent
                .iter()
                .filter(|it| (it.0, it.1, it.2) == (attempt, sequence, member.slot));
            for (.., incarnation) in found {
                assert_eq!(*incarnation, member.incarnation, "bytes of an earlier process");
            }
            data.insert((member.slot, member.incarnation));
        }
        agent.data = Some(data);
        agent.progress.record_data();
        self.done.insert((attempt, sequence, index(rank)));
    }

    fn finish(&mut self, rank: u32) {
        let agent = &mut self.agents[index(rank)];
        let sequence = agent.progress.running.expect("an operation runs").sequence;
        let data = agent.data.take().expect("a finished operation has its data");
        agent.attempt = None;
        agent.progress.end();
        let generation = agent.generation;
        for (key, result) in self.results.range((generation, 0)..=(generation, u64::MAX)) {
            match key.1.cmp(&sequence) {
                std::cmp::Ordering::Less => assert!(data.is_subset(result), "a rank came back"),
                std::cmp::Ordering::Equal => assert_eq!(data, *result, "a torn result"),
                std::cmp::Ordering::Greater => assert!(result.is_subset(&data), "a rank came back"),
            }
        }
        self.results.insert((generation, sequence), data);
    }

    fn read(&mut self, rank: u32) {
        let agent = &mut self.agents[index(rank)];
        match agent.mail.pop_front() {
            Some(Notice::Prepare { group, attempt, .. }) => {
                let is_new = agent.progress.stopped.is_none_or(|stopped| stopped < attempt);
                assert!(is_new && attempt > agent.progress.view.attempt, "attempts grow");
                let finished = agent.progress.prepare(attempt);
                agent.reports.push_back(Request::Report { group, attempt, finished });
            }
            Some(Notice::Commit(commit)) => {
                let before = agent.progress.view.clone();
                if agent.progress.commit(&commit) && !before.is_isolated {
                    assert!(commit.attempt > before.attempt && commit.epoch >= before.epoch);
                    let is_same = commit.active == before.active;
                    assert!(is_same || commit.epoch > before.epoch, "the epoch stands still");
                }
            }
            _ => {}
        }
    }

    fn resume(&mut self, rank: u32) {
        let agent = &mut self.agents[index(rank)];
        let Some(attempt) = agent.attempt else { return };
        match agent.progress.state_after(attempt) {
            Some(RunningState::Finished) => self.finish(rank),
            Some(RunningState::Open) if agent.progress.has_joined() => self.begin(rank, true),
            // The caller gets an error.
            _ => {
                agent.attempt = None;
                agent.data = None;
                agent.progress.end();
            }
        }
    }

    /// With nothing left to happen, the members agree, and no operation waits for nobody.
    fn check_rest(&self) {
        let group = self.group();
        assert!(group.change.is_none(), "a change never ended");
        let active = group.active();
        let members: Vec<_> = (0..RANKS).filter(|rank| active[index(*rank)]).collect();
        let agents: Vec<_> = members.iter().map(|rank| &self.agents[index(*rank)]).collect();
        for agent in &agents {
            assert!(agent.is_alive, "a dead rank is a member");
            assert!(agent.progress.has_joined() && agent.progress.stopped.is_none());
            assert_eq!(agent.progress.view.active, active, "members disagree");
            assert_eq!(agent.progress.view.epoch, group.epoch);
            if let Some(running) = agent.progress.running {
                let waits_for = |other: &&Agent| {
                    other.progress.running.is_none() && other.progress.next <= running.sequence
                };
                assert!(agents.iter().any(waits_for), "an operation hangs");
            }
        }
    }

    /// Drops what no step can look at any more, so that equal worlds are the same state.
    fn forget(&mut self) {
        let oldest = self.agents.iter().filter(|agent| agent.is_alive);
        let oldest = oldest.map(|agent| agent.progress.view.attempt).min().unwrap_or(0);
        self.sent.retain(|it| it.0 >= oldest);
        self.done.retain(|it| it.0 >= oldest);
    }
}

/// Visits every state, and returns how many there are.
fn visit_all(bounds: Bounds) -> usize {
    let mut seen: HashSet<u64, FxBuildHasher> = HashSet::default();
    let mut open = vec![(World::new(bounds), Vec::<Step>::new())];
    while let Some((world, path)) = open.pop() {
        let run = std::panic::AssertUnwindSafe(|| {
            let (free, bounded) = world.steps();
            if free.is_empty() {
                world.check_rest();
            }
            let mut next = Vec::new();
            for step in free.into_iter().chain(bounded) {
                let mut world = world.clone();
                world.carry_out(step);
                world.forget();
                next.push((world, step));
            }
            next
        });
        let next = std::panic::catch_unwind(run);
        let Ok(next) = next else { panic!("after {path:?} of {bounds:?}") };
        for (world, step) in next {
            let mut hasher = FxHasher::default();
            world.hash(&mut hasher);
            if seen.insert(hasher.finish()) {
                let path = path.iter().copied().chain([step]).collect();
                open.push((world, path));
            }
        }
    }
    seen.len()
}

fn check(bounds: Bounds) {
    let states = visit_all(bounds);
    println!("{states} states of {bounds:?}");
    assert!(states > 100, "the bounds leave nothing to visit: states={states}");
}

#[test]
fn every_order_of_a_death_keeps_results_whole() {
    check(Bounds { founders: 3, calls: 2, kills: 1, ..Bounds::default() });
}

#[test]
fn every_order_of_two_deaths_keeps_results_whole() {
    check(Bounds { founders: 3, calls: 1, kills: 2, ..Bounds::default() });
}

#[test]
fn every_order_of_silence_and_return_keeps_results_whole() {
    check(Bounds { founders: 3, calls: 2, silences: 1, activations: 1, ..Bounds::default() });
}

#[test]
fn every_order_of_death_and_replacement_keeps_results_whole() {
    let bounds = Bounds { founders: 2, calls: 2, kills: 1, restarts: 1, ..Bounds::default() };
    check(Bounds { activations: 1, ..bounds });
}

#[test]
fn every_order_of_growth_and_removal_keeps_results_whole() {
    let bounds = Bounds { founders: 2, calls: 2, activations: 1, ..Bounds::default() };
    check(Bounds { deactivations: 1, ..bounds });
    check(Bounds { broken_links: 1, ..bounds });
}

#[test]
fn every_order_of_growth_and_death_keeps_results_whole() {
    check(Bounds { founders: 2, calls: 2, activations: 1, kills: 1, ..Bounds::default() });
}
