//! What goes wrong: processes, machines, disks, the network and the lease service.

use std::time::Duration;

use mooncake_base::Moment;
use mooncake_election::View;

use super::{Simulation, node::Part, plan::Faults};

impl Simulation {
    /// Lets a fault happen now and then.
    pub(super) fn disturb(&mut self) -> Result<(), String> {
        let faults = self.plan.faults.clone();
        for index in 0..self.nodes.len() {
            if self.happens(faults.stop) {
                let longest = if self.chance(3) { 8000 } else { 3500 };
                self.nodes[index].stopped_until = self.now + self.milliseconds(longest);
            }
            if self.happens(faults.kill) {
                let pause = self.milliseconds(1500);
                self.kill(index, pause);
            }
            if self.happens(faults.shutdown) {
                let pause = self.milliseconds(1500);
                self.shut_down(index, pause);
            }
            if self.happens(faults.power_loss) {
                self.lose_power(index);
            }
            if self.happens(faults.wipe) {
                self.lose_disk(index);
            }
            if self.happens(faults.service_cut) {
                self.nodes[index].service_cut_until = self.now + self.milliseconds(2500);
            }
            if self.happens(faults.stale_reads) {
                self.begin_stale_reads(index);
            }
            if self.happens(faults.clock_stop) {
                let until = self.now + self.milliseconds(5000);
                self.nodes[index].stop_clock(self.now, until);
            }
            if self.happens(faults.isolation) {
                self.isolate(index);
            }
            for other in 0..index {
                if self.happens(faults.partition) {
                    let until = self.now + self.milliseconds(4000);
                    self.cut(index, other, until);
                }
            }
        }
        if self.happens(faults.leader_return) {
            self.let_leader_return();
        }
        if self.happens(faults.handover) {
            self.ask_for_handover();
        }
        if self.happens(faults.reset)
            && let Some(connection) = self.any_connection()
        {
            self.wire.connections.remove(&connection);
        }
        if self.happens(faults.service_away) {
            self.service_away_until = self.now + self.milliseconds(2500);
        }
        // Not while the cluster is founded: nobody could tell that there was a set.
        if self.happens(faults.service_emptied) && self.outcome.acknowledged > 10 {
            self.service.clear();
            self.views_may_fall = true;
        }
        self.tell_someone();
        Ok(())
    }

    /// Cuts a member off from the others and from the service, so that only clients reach it.
    pub(super) fn isolate(&mut self, index: usize) {
        let until = self.now + self.milliseconds(4000);
        self.nodes[index].service_cut_until = until;
        for other in (0..self.nodes.len()).filter(|other| *other != index) {
            self.cut(index, other, until);
        }
    }

    fn any_connection(&mut self) -> Option<u64> {
        let open = &self.wire.connections;
        let at = self.random.below(open.len().max(1));
        open.keys().nth(at).copied()
    }

    fn cut(&mut self, one: usize, other: usize, until: Moment) {
        self.nodes[one].cut_until[other] = until;
        self.nodes[other].cut_until[one] = until;
    }

    /// Ends all faults.
    pub(super) fn heal(&mut self) {
        self.service_away_until = Moment::default();
        self.plan.faults = Faults::default();
        for node in &mut self.nodes {
            node.stopped_until = Moment::default();
            node.starts_at = Moment::default();
            node.service_cut_until = Moment::default();
            node.stale_reads = None;
            node.clock_stands_until = Moment::default();
            node.cut_until = vec![Moment::default(); 3];
        }
    }

    /// A leader's key that ends with its lease is told by nothing but a watch.
    pub(super) fn tell_someone(&mut self) {
        if self.chance(5) {
            let to = self.random.below(self.nodes.len());
            self.tell(to);
        }
    }

    /// An operator names the master that is to lead, where the service has no set, or no member of it
    /// can lead.
    pub(super) fn force_if_needed(&mut self, healed: Moment) {
        let has_set = self.service.in_sync().is_some_and(|set| !set.members.is_empty());
        let can_elect = has_set && self.history.has_heir();
        if can_elect || self.outcome.forced > 0 || self.now < healed + Duration::from_secs(2) {
            return;
        }
        let place = |index: &usize| {
            let process = self.nodes[*index].process.as_ref()?;
            let Part::Following(standby) = &process.part else { return None };
            let membership = &standby.membership;
            let view = membership.views().last().map_or(0, |last| last.view);
            let is_heir = membership.is_complete();
            Some((view, is_heir, standby.log.place().1))
        };
        let Some(best) = (0..self.nodes.len()).max_by_key(place) else { return };
        if place(&best).is_none() || self.nodes.iter().any(|node| node.process.is_none()) {
            return;
        }
        self.outcome.forced += 1;
        let local = self.nodes[best].local(self.now);
        if let Some(process) = &mut self.nodes[best].process {
            process.election.force(View(0), local);
        }
    }

    fn lose_power(&mut self, index: usize) {
        let pause = self.milliseconds(1500);
        self.kill(index, pause);
        let random = &mut self.random;
        let mut below = |limit: u64| random.below(limit as usize) as u64;
        self.nodes[index].disk.lose_power(&mut below);
        self.outcome.power_losses += 1;
        if self.plan.sync != crate::journal::LogSync::Always {
            let member = self.nodes[index].member.clone();
            self.history.record_damage(&member);
        }
    }

    fn lose_disk(&mut self, index: usize) {
        let pause = self.milliseconds(1500);
        self.kill(index, pause);
        self.nodes[index].disk.wipe();
        let member = self.nodes[index].member.clone();
        self.history.record_damage(&member);
    }

    /// Returns whether a log is synced in this step.
    pub(super) fn syncs(&mut self) -> bool {
        self.plan.sync_steps().is_some_and(|steps| self.chance(steps))
    }

    pub(super) fn happens(&mut self, one_in: usize) -> bool {
        one_in > 0 && self.chance(one_in)
    }
}
