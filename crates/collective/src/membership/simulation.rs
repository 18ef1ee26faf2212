//! A simulated coordinator with its agents, in one thread: a hand-moved clock, heartbeats, two groups,
//! and seeded faults. Processes die, are stopped and continued, are replaced, join and leave, and the
//! coordinator's own process is stopped. A failure prints its seed.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use mooncake_base::Moment;

use super::{tests::Random, *};
use crate::{
    heartbeats::{Heartbeats, TICK},
    message::Commit,
};

const SEEDS: u64 = 500;
const STEPS: usize = 400;
const RANKS: u32 = 5;
const LIMIT: Duration = Duration::from_secs(10);
const PING: Duration = Duration::from_secs(1);
/// A rank that is stopped for less is never taken out.
const NEVER_SILENT: Duration = Duration::from_secs(8);
/// The name of a group, its ranks by slot, and how many of them found it.
const GROUPS: [(&str, &[u32], usize); 2] = [("all", &[0, 1, 2, 3, 4], 3), ("pair", &[1, 2], 2)];

#[derive(Default)]
struct Agent {
    is_alive: bool,
    is_stopped: bool,
    /// When it was stopped, in running time of the coordinator, if it has sent nothing since.
    silent_since: Option<Duration>,
    pinged: Moment,
    mail: VecDeque<Notice>,
    views: BTreeMap<String, Commit>,
}

impl Agent {
    fn is_running(&self) -> bool {
        self.is_alive && !self.is_stopped
    }
}

struct World {
    now: Moment,
    /// For how long the coordinator has run.
    running: Duration,
    rules: Membership,
    heartbeats: Heartbeats,
    agents: BTreeMap<u32, Agent>,
    incarnations: u64,
    removes_lost: bool,
}

impl World {
    fn new(removes_lost: bool) -> Self {
        let mut world = Self {
            now: Moment::default(),
            running: Duration::ZERO,
            rules: Membership::default(),
            heartbeats: Heartbeats::new(LIMIT, Moment::default()),
            agents: BTreeMap::new(),
            incarnations: 0,
            removes_lost,
        };
        for rank in 0..3 {
            world.start(rank, false);
        }
        world.read_all();
        world
    }

    fn start(&mut self, rank: u32, is_extension: bool) {
        self.incarnations += 1;
        let agent = Agent { is_alive: true, pinged: self.now, ..Agent::default() };
        self.agents.insert(rank, agent);
        let incarnation = self.incarnations;
        self.ask(rank, Request::Register { rank, incarnation, address: String::new() });
        for (group, ranks, declared) in GROUPS {
            let Some(slot) = ranks.iter().position(|it| *it == rank) else { continue };
            let (group, capacity) = (group.to_owned(), ranks.len());
            let removes_lost = self.removes_lost;
            let attach = Attach { group, slot, declared, capacity, is_extension, removes_lost };
            self.ask(rank, Request::Attach(attach));
        }
    }

    fn ask(&mut self, rank: u32, request: Request) {
        self.heartbeats.record(rank, self.now);
        self.agents.entry(rank).or_default().silent_since = None;
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
        self.heartbeats.forget(rank);
        let notices = self.rules.lose(rank, true);
        self.post(notices);
    }

    /// Lets time pass while the coordinator runs.
    fn run(&mut self, time: Duration) {
        let end = self.running + time;
        while self.running < end {
            self.now = self.now + TICK;
            self.running += TICK;
            self.ping();
            self.tick();
        }
    }

    /// Lets time pass while the coordinator is stopped: what the ranks send arrives after it.
    fn pause(&mut self, time: Duration) {
        self.now = self.now + time;
        // A short pause is not told from a late tick.
        self.running += if time <= 2 * TICK { time } else { TICK };
        self.tick();
        self.ping();
    }

    fn ping(&mut self) {
        for rank in 0..RANKS {
            let now = self.now;
            let agent = self.agents.get_mut(&rank).filter(|agent| agent.is_running());
            let Some(agent) = agent.filter(|agent| now.since(agent.pinged) >= PING) else {
                continue;
            };
            agent.pinged = now;
            self.ask(rank, Request::Ping);
        }
    }

    fn tick(&mut self) {
        for rank in self.heartbeats.silent(self.now) {
            let silent = self.agents[&rank].silent_since.map(|since| self.running - since);
            assert!(
                silent.is_some_and(|silent| silent >= NEVER_SILENT),
                "rank {rank} is taken out, though silent for {silent:?}"
            );
            let notices = self.rules.silence(rank);
            self.post(notices);
        }
        for (rank, agent) in self.agents.iter().filter(|(_, agent)| agent.is_alive) {
            let silent = agent.silent_since.map_or(Duration::ZERO, |since| self.running - since);
            let must_be_out = silent > LIMIT + 2 * TICK;
            assert!(!must_be_out || !self.rules.is_online(*rank), "rank {rank} stays, silent");
        }
    }

    /// Lets an agent read one message.
    fn read(&mut self, rank: u32) {
        let agent = self.agents.get_mut(&rank).filter(|agent| agent.is_running());
        match agent.and_then(|agent| agent.mail.pop_front()) {
            Some(Notice::Prepare { group, attempt, .. }) => {
                self.ask(rank, Request::Report { group, attempt, finished: 0 });
            }
            Some(Notice::Commit(commit)) => {
                let views = &mut self.agents.get_mut(&rank).expect("it has read").views;
                let before = views.insert(commit.group.clone(), commit.clone());
                let is_newer = |before: Commit| commit.attempt > before.attempt;
                assert!(before.is_none_or(is_newer), "views only grow");
            }
            _ => {}
        }
    }

    fn read_all(&mut self) {
        let has_mail = |agent: &Agent| agent.is_running() && !agent.mail.is_empty();
        while let Some(rank) =
            self.agents.iter().find(|(_, agent)| has_mail(agent)).map(|(rank, _)| *rank)
        {
            self.read(rank);
        }
    }

    fn step(&mut self, random: &mut Random) {
        let rank = u32::try_from(random.below(RANKS as usize)).unwrap_or(0);
        let agent = self.agents.entry(rank).or_default();
        let (is_alive, is_running) = (agent.is_alive, agent.is_running());
        let (group, ranks, _) = GROUPS[random.below(GROUPS.len())];
        let is_member = ranks.contains(&rank);
        let (group, slots) = (group.to_owned(), vec![random.below(ranks.len())]);
        match random.below(24) {
            0 if is_alive && rank != 0 => self.kill(rank),
            1 | 2 if !is_alive => self.start(rank, true),
            3 if is_running && rank != 0 => {
                let agent = self.agents.entry(rank).or_default();
                agent.is_stopped = true;
                agent.silent_since.get_or_insert(self.running);
            }
            4 => self.agents.entry(rank).or_default().is_stopped = false,
            5 | 6 if is_running && is_member => self.ask(rank, Request::Join { group }),
            7 | 8 if is_running && is_member => {
                self.ask(rank, Request::Activate { group, slots, id: 1 });
            }
            9 if is_running && is_member => {
                self.ask(rank, Request::Deactivate { group, slots, id: 2 });
            }
            10 if is_running && is_member && rank != 0 => self.ask(rank, Request::Leave { group }),
            11 => self.pause(Duration::from_millis(random.below(30_000) as u64)),
            12..=14 => self.run(Duration::from_millis(random.below(6_000) as u64)),
            _ => self.read(rank),
        }
    }

    /// With all processes running and all mail read, the members of each group agree.
    fn check(&mut self) {
        self.agents.values_mut().for_each(|agent| agent.is_stopped = false);
        for _ in 0..8 {
            self.run(PING);
            self.read_all();
        }
        assert!(self.rules.is_settled(), "a change never ended");
        for (name, group) in &self.rules.groups {
            for (number, slot) in &group.slots {
                if slot.state != SlotState::Active || !group.is_founded {
                    continue;
                }
                let view = &self.agents[&slot.rank].views[name];
                assert_eq!(view.active, group.shown, "slot {number} of {name} has another view");
                assert_eq!(view.epoch, group.epoch);
            }
        }
    }
}

#[test]
fn groups_survive_simulated_faults_and_agree() {
    for seed in 0..SEEDS {
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(seed % 4 > 0);
            let mut random = Random(seed);
            for step in 0..STEPS {
                world.step(&mut random);
                if step % 100 == 99 {
                    world.check();
                }
            }
            world.check();
        });
        assert!(run.is_ok(), "failed with seed {seed}");
    }
}
