//! Random runs of the rules with agents that answer late, die, fall silent and join; a failure
//! prints its seed.

use std::collections::{BTreeMap, VecDeque};

use super::*;
use crate::message::{Answer, Commit, Status};

const RANKS: u32 = 5;
const FOUNDERS: usize = 3;

/// A small generator, so that a seed gives the same run everywhere.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

#[derive(Default)]
struct Agent {
    is_alive: bool,
    attempt: u32,
    view: Option<Commit>,
    mail: VecDeque<Notice>,
    answers: Vec<Answer>,
}

struct World {
    rules: Membership,
    agents: BTreeMap<u32, Agent>,
    incarnations: u64,
}

impl World {
    fn new() -> Self {
        let mut world =
            Self { rules: Membership::default(), agents: BTreeMap::new(), incarnations: 0 };
        for rank in 0..3 {
            world.start(rank, false);
        }
        world
    }

    fn start(&mut self, rank: u32, is_extension: bool) {
        self.incarnations += 1;
        self.agents.insert(rank, Agent { is_alive: true, ..Agent::default() });
        let incarnation = self.incarnations;
        self.ask(rank, Request::Register { rank, incarnation, address: String::new() });
        self.ask(
            rank,
            Request::Attach(Attach {
                group: "g".to_owned(),
                slot: rank as usize,
                declared: FOUNDERS,
                capacity: RANKS as usize,
                is_extension,
                removes_lost: true,
            }),
        );
    }

    fn ask(&mut self, rank: u32, request: Request) {
        let notices = self.rules.handle(rank, request);
        self.post(notices);
    }

    fn post(&mut self, notices: Notices) {
        for (rank, notice) in notices {
            if let Some(agent) = self.agents.get_mut(&rank).filter(|agent| agent.is_alive) {
                agent.mail.push_back(notice);
            }
        }
    }

    fn kill(&mut self, rank: u32) {
        self.agents.insert(rank, Agent::default());
        let notices = self.rules.lose(rank, true);
        self.post(notices);
    }

    /// Lets an agent read one message.
    fn read(&mut self, rank: u32) {
        let Some(agent) = self.agents.get_mut(&rank) else { return };
        match agent.mail.pop_front() {
            Some(Notice::Prepare { group, attempt, .. }) => {
                assert!(attempt > agent.attempt, "attempts grow");
                agent.attempt = attempt;
                self.ask(rank, Request::Report { group, attempt, finished: 0 });
            }
            Some(Notice::Commit(commit)) => {
                if let Some(before) = &agent.view {
                    assert!(commit.attempt > before.attempt && commit.epoch >= before.epoch);
                    let is_same = commit.active == before.active;
                    assert!(is_same || commit.epoch > before.epoch, "the epoch stands still");
                }
                agent.view = Some(commit);
            }
            Some(Notice::Reply { answer, .. }) => agent.answers.push(answer),
            _ => {}
        }
    }

    fn read_all(&mut self) {
        while let Some(rank) = (0..RANKS)
            .find(|rank| self.agents.get(rank).is_some_and(|agent| !agent.mail.is_empty()))
        {
            self.read(rank);
        }
    }

    fn step(&mut self, random: &mut Random) {
        let rank = u32::try_from(random.below(RANKS as usize)).unwrap();
        let is_alive = self.agents.get(&rank).is_some_and(|agent| agent.is_alive);
        let group = || "g".to_owned();
        match random.below(12) {
            0 if is_alive && rank != 0 => self.kill(rank),
            1 if !is_alive => self.start(rank, true),
            2 if is_alive => self.ask(rank, Request::Join { group: group() }),
            3 if is_alive => {
                let slots = vec![random.below(RANKS as usize)];
                self.ask(rank, Request::Activate { group: group(), slots, id: 1 });
            }
            4 if is_alive && rank != 0 => {
                let notices = self.rules.silence(rank);
                self.post(notices);
            }
            5 if is_alive => self.ask(rank, Request::Ping),
            6 if is_alive => {
                let slots = vec![1 + random.below(RANKS as usize - 1)];
                self.ask(rank, Request::Deactivate { group: group(), slots, id: 2 });
            }
            _ => self.read(rank),
        }
    }

    /// With all mail read, the members agree, and are alive.
    fn check(&self) {
        let group = &self.rules.groups["g"];
        assert!(group.change.is_none(), "a change never ended");
        let active = group.active();
        for (number, slot) in &group.slots {
            assert!(
                slot.state != SlotState::Active || self.rules.processes.contains_key(&slot.rank)
            );
            if slot.state == SlotState::Active {
                let view = self.agents[&slot.rank].view.as_ref().expect("a member has a view");
                assert_eq!(view.active, active, "slot {number} has another view");
                assert_eq!(view.epoch, group.epoch);
                let members: Vec<_> = view.members.iter().map(|member| member.slot).collect();
                let wanted: Vec<_> = (0..active.len()).filter(|slot| active[*slot]).collect();
                assert_eq!(members, wanted);
            }
        }
    }
}

#[test]
fn members_agree_after_random_faults() {
    for seed in 0..2000 {
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new();
            world.read_all();
            world.check();
            let mut random = Random(seed);
            for _ in 0..60 {
                world.step(&mut random);
            }
            world.read_all();
            world.check();
        });
        assert!(run.is_ok(), "failed with seed {seed}");
    }
}

#[test]
fn death_while_the_group_is_made_is_told_to_the_others() {
    let mut world =
        World { rules: Membership::default(), agents: BTreeMap::new(), incarnations: 0 };
    world.start(0, false);
    world.start(1, false);
    world.kill(1);
    let mail = &world.agents[&0].mail;
    assert!(mail.iter().any(|notice| matches!(notice, Notice::Refused { .. })), "{mail:?}");
}

#[test]
fn only_a_rank_that_has_ended_is_refused_at_once() {
    let mut world = World::new();
    world.read_all();
    let status = |world: &mut World| {
        world.ask(0, Request::Activate { group: "g".to_owned(), slots: vec![3], id: 1 });
        world.read_all();
        world.agents.get_mut(&0).unwrap().answers.pop().unwrap()
    };
    assert_eq!(status(&mut world).status, Status::NotReady, "nobody has had the slot");
    world.start(3, true);
    assert_eq!(status(&mut world).status, Status::NotReady, "it has not called join");
    world.kill(3);
    let answer = status(&mut world);
    assert_eq!(answer.status, Status::Rejected);
    assert!(answer.reason.contains("rank=3; its process has ended"), "{}", answer.reason);
    world.start(3, true);
    assert_eq!(status(&mut world).status, Status::NotReady, "another process has the slot");
    world.ask(3, Request::Join { group: "g".to_owned() });
    assert_eq!(status(&mut world).status, Status::Applied);
}

#[test]
fn rank_that_dies_while_it_is_activated_is_named() {
    let mut world = World::new();
    world.read_all();
    world.start(3, true);
    world.ask(3, Request::Join { group: "g".to_owned() });
    world.ask(0, Request::Activate { group: "g".to_owned(), slots: vec![3], id: 1 });
    world.kill(3);
    world.read_all();
    let answer = &world.agents[&0].answers[0];
    assert_eq!((answer.status, &answer.dropped[..]), (Status::AppliedWithDropped, &[3][..]));
    assert_eq!(world.rules.groups["g"].active(), [true, true, true, false, false]);
}
