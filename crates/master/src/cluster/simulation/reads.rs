//! Late reads of the lease service: they show what it held earlier, as those of a member of etcd do that is
//! cut off from the others, or of a replica of Redis. Transactions are always carried out on present values.

use std::{collections::VecDeque, time::Duration};

use mooncake_base::Moment;
use mooncake_election::Snapshot;

use super::{
    Simulation,
    node::{Node, Part, Process, leader_in},
    plan::Faults,
};

/// Maximum age of what a read shows when it begins to be late.
const AGE_MAX: Duration = Duration::from_secs(8);

/// Maximum time for which the reads of a member show the same.
const TIME_MAX: Duration = Duration::from_secs(3);

/// Time for which a leader is stopped that is to return.
const STOP: Duration = Duration::from_secs(8);

/// Time in which standbys attach to a former leader before it goes on.
const RETURN_MIN: Duration = Duration::from_millis(400);

/// What the service held in the last seconds, with the moment since when.
#[derive(Debug, Default)]
pub(super) struct Past(VecDeque<(Moment, Snapshot)>);

impl Past {
    fn record(&mut self, snapshot: Snapshot, now: Moment) {
        if self.0.back().is_none_or(|(_, last)| *last != snapshot) {
            self.0.push_back((now, snapshot));
        }
        let is_early = |since: Moment| (since + AGE_MAX).has_passed(now);
        while self.0.get(1).is_some_and(|(since, _)| is_early(*since)) {
            self.0.pop_front();
        }
    }

    /// Returns what the service held some time ago.
    fn before(&self, age: Duration, now: Moment) -> Option<&Snapshot> {
        let is_early = |(since, _): &&(Moment, Snapshot)| (*since + age).has_passed(now);
        self.0.iter().rev().find(is_early).map(|(_, snapshot)| snapshot)
    }

    /// Returns what the service held last while a member led.
    fn led_by(&self, member: usize) -> Option<&Snapshot> {
        let snapshots = self.0.iter().rev().map(|(_, snapshot)| snapshot);
        { snapshots }.find(|snapshot| leader_in(snapshot) == Some(member))
    }
}

/// Reads of a member that are late.
#[derive(Debug)]
pub(super) struct StaleReads {
    shown: Snapshot,
    until: Moment,
}

impl Simulation {
    /// Records what the service holds, for late reads.
    pub(super) fn record_past(&mut self) {
        let Faults { stale_reads, leader_return, .. } = self.plan.faults;
        if stale_reads > 0 || leader_return > 0 {
            self.past.record(self.service.snapshot(self.now), self.now);
        }
    }

    /// Lets the reads of a member show what the service held earlier.
    pub(super) fn begin_stale_reads(&mut self, index: usize) {
        let age = self.milliseconds(AGE_MAX.as_millis() as usize);
        let until = self.now + self.milliseconds(TIME_MAX.as_millis() as usize);
        let shown = self.past.before(age, self.now).cloned().unwrap_or_default();
        self.nodes[index].stale_reads = Some(StaleReads { shown, until });
        self.tell(index);
    }

    /// Stops the leader. If it is stopped already and another one leads, kills that one and lets the former
    /// leader go on, while the others read that it leads.
    pub(super) fn let_leader_return(&mut self) {
        let is_stopped = |node: &&Node| {
            let leads = |process: &Process| matches!(process.part, Part::Leading(_));
            !node.stopped_until.has_passed(self.now) && node.process.as_deref().is_some_and(leads)
        };
        let former = self.nodes.iter().find(is_stopped).map(|node| node.index);
        let Some(leader) = leader_in(&self.service.snapshot(self.now)) else { return };
        let Some(former) = former else {
            self.nodes[leader].stopped_until = self.now + STOP;
            return;
        };
        let Some(shown) = self.past.led_by(former).cloned() else { return };
        if former == leader {
            return;
        }
        let pause = self.milliseconds(1500);
        self.kill(leader, pause);
        self.nodes[former].stopped_until = self.now + RETURN_MIN + self.milliseconds(1000);
        for index in (0..self.nodes.len()).filter(|index| *index != former) {
            let until = self.now + self.milliseconds(TIME_MAX.as_millis() as usize);
            self.nodes[index].stale_reads = Some(StaleReads { shown: shown.clone(), until });
            self.tell(index);
        }
    }

    /// Returns what a member reads, or a watch tells it.
    pub(super) fn read_service(&mut self, index: usize) -> Snapshot {
        match &self.nodes[index].stale_reads {
            Some(stale) if !stale.until.has_passed(self.now) => {
                self.outcome.stale_reads += 1;
                stale.shown.clone()
            }
            _ => self.service.snapshot(self.now),
        }
    }
}
