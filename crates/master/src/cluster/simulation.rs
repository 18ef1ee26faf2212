//! Several masters in one thread, with time that is moved by hand and seeded faults: the real election,
//! logs, views, supervision and state of two or three members, a model of the lease service, and clients
//! that remember what was acknowledged.
//!
//! Messages between members, clients and the service are late, lost, damaged or held up by partitions.
//! Processes are stopped, killed, ended in order and started again; leaders hand over; machines lose power,
//! and with it what was not synced; disks are lost; the lease service is away, emptied, or read from where
//! its values are late. In runs of their own, the clock of a machine stands still. Nothing waits: each step
//! asks whether a position is durable.
//!
//! In reading order: [`plan`], [`bugs`] (rules that a run leaves out), [`wire`], [`reads`], [`damage`],
//! [`node`], [`standby`], [`leader`], [`handover`], [`client`], [`history`] (what must hold), [`faults`].

mod bugs;
mod client;
mod damage;
mod faults;
mod handover;
mod history;
mod leader;
mod node;
mod plan;
mod reads;
mod standby;
mod tests;
mod wire;

use std::time::Duration;

use mooncake_base::{Moment, random::SplitMix64};
use mooncake_election::{Election, Role, SimulatedService};

use self::{
    client::Client,
    history::History,
    node::{Node, Part},
    plan::Plan,
    reads::Past,
    wire::Wire,
};

/// Time between two steps of a process.
const TICK: Duration = Duration::from_millis(20);

/// Duration of the leader's lease.
const TTL: Duration = Duration::from_secs(1);

/// Time in which faults happen.
const FAULTS: Duration = Duration::from_secs(10);

/// Time for which a run goes on after the last fault.
const CALM: Duration = Duration::from_secs(4);

/// Time after the last fault in which a leader must have served a client: where an operator has to name
/// it, memory that may have been granted by changes that are lost rests for some seconds.
const RECOVERY: Duration = Duration::from_secs(60);

/// What a run has seen.
#[derive(Debug, Default, Clone, Copy)]
struct Outcome {
    leaders: u64,
    set_changes: u64,
    acknowledged: u64,
    reads: u64,
    absent: u64,
    replaced_logs: u64,
    snapshots: u64,
    power_losses: u64,
    hanging_writes: u64,
    forced: u64,
    damaged: u64,
    earlier_leaders: u64,
    stale_reads: u64,
    late_attaches: u64,
    handovers: u64,
    failed_ends: u64,
    prepared: u64,
}

impl Outcome {
    fn add(&mut self, other: &Self) {
        let own = [
            &mut self.leaders,
            &mut self.set_changes,
            &mut self.acknowledged,
            &mut self.reads,
            &mut self.absent,
            &mut self.replaced_logs,
            &mut self.snapshots,
            &mut self.power_losses,
            &mut self.hanging_writes,
            &mut self.forced,
            &mut self.damaged,
            &mut self.earlier_leaders,
            &mut self.stale_reads,
            &mut self.late_attaches,
            &mut self.handovers,
            &mut self.failed_ends,
            &mut self.prepared,
        ];
        let others = [
            other.leaders,
            other.set_changes,
            other.acknowledged,
            other.reads,
            other.absent,
            other.replaced_logs,
            other.snapshots,
            other.power_losses,
            other.hanging_writes,
            other.forced,
            other.damaged,
            other.earlier_leaders,
            other.stale_reads,
            other.late_attaches,
            other.handovers,
            other.failed_ends,
            other.prepared,
        ];
        own.into_iter().zip(others).for_each(|(own, other)| *own += other);
    }
}

/// A cluster.
#[derive(Debug)]
struct Simulation {
    plan: Plan,
    random: SplitMix64,
    now: Moment,
    service: SimulatedService,
    past: Past,
    service_away_until: Moment,
    /// The service was emptied, so that it counts views from the start.
    views_may_fall: bool,
    wire: Wire,
    nodes: Vec<Node>,
    clients: Vec<Client>,
    history: History,
    outcome: Outcome,
    /// Messages to be sent at the end of a step.
    outgoing: Vec<wire::Message>,
    /// When a client was last served with a change.
    served: Moment,
}

impl Simulation {
    fn new(plan: Plan) -> Self {
        let mut random = SplitMix64::new(plan.seed);
        let nodes = (0..plan.members).map(|index| Node::new(index, &mut random)).collect();
        let clients = (0..client::CLIENTS).map(|_| Client::new()).collect();
        let history = History::new(&plan);
        Self {
            plan,
            random,
            now: Moment::from_boot(Duration::from_secs(1)),
            service: SimulatedService::new(TTL),
            past: Past::default(),
            service_away_until: Moment::default(),
            views_may_fall: false,
            wire: Wire::default(),
            nodes,
            clients,
            history,
            outcome: Outcome::default(),
            outgoing: Vec::new(),
            served: Moment::default(),
        }
    }

    /// Runs to the end, or until something is found that must not be.
    fn run(mut self) -> Result<Outcome, String> {
        let begin = self.now;
        let healed = begin + FAULTS;
        let mut is_healed = false;
        while self.now < healed + CALM || self.served < healed && self.now < healed + RECOVERY {
            self.now = self.now + TICK;
            self.record_past();
            if !healed.has_passed(self.now) {
                self.disturb()?;
            } else if !std::mem::replace(&mut is_healed, true) {
                self.heal();
            }
            self.deliver();
            for index in 0..self.nodes.len() {
                self.step_node(index).map_err(|why| self.at(&why))?;
            }
            for index in 0..self.clients.len() {
                self.step_client(index).map_err(|why| self.at(&why))?;
            }
            self.check_leaders().map_err(|why| self.at(&why))?;
            self.check_logs().map_err(|why| self.at(&why))?;
            if is_healed {
                self.force_if_needed(healed);
            }
        }
        if self.served < healed {
            return Err(self.at("no client was served after the last fault"));
        }
        Ok(self.outcome)
    }

    /// At any moment at most one master leads by its own clock.
    fn check_leaders(&self) -> Result<(), String> {
        let leads = |node: &&Node| node.role(self.now).is_some_and(is_leader);
        let leaders: Vec<_> = self.nodes.iter().filter(leads).map(|node| node.index).collect();
        // Leases rest on clocks that run.
        if leaders.len() > 1 && !self.history.own_keys_only {
            return Err(format!("members {leaders:?} lead at a time"));
        }
        Ok(())
    }

    /// At any moment each member that may win an election has what clients were told of.
    fn check_logs(&self) -> Result<(), String> {
        // The member that an operator named may lack changes.
        if self.outcome.forced > 0 {
            return Ok(());
        }
        let Some(set) = self.service.in_sync() else { return Ok(()) };
        let is_member = |name: &str| set.members.iter().any(|member| member.to_string() == name);
        for node in &self.nodes {
            if let Some(process) = &node.process
                && let Part::Following(standby) = &process.part
                && standby.membership.is_complete()
                && is_member(&process.member)
            {
                let (timeline_id, next_frame) = standby.log.place();
                self.history
                    .check_log(timeline_id, next_frame)
                    .map_err(|why| format!("member {}, which may lead, {why}", node.index))?;
            }
        }
        Ok(())
    }

    fn at(&self, why: &str) -> String {
        let parts: Vec<_> = self.nodes.iter().map(|node| node.summary(self.now)).collect();
        format!("{:?}: {why}; {}; {:?}", self.now, parts.join(", "), self.service.in_sync())
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.random.below(one_in) == 0
    }

    fn milliseconds(&mut self, limit: usize) -> Duration {
        Duration::from_millis(self.random.below(limit) as u64)
    }
}

const fn is_leader(role: Role) -> bool {
    matches!(role, Role::Leader { .. })
}

/// Returns whether an election says that its member leads in a view.
fn leads_in(election: &Election, view: mooncake_election::View, now: Moment) -> bool {
    matches!(election.role(now), Role::Leader { view: present, .. } if present == view)
}
