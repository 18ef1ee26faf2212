//! Invariants at the end of a run, without faults: every object can be read, every accepted task has
//! ended, and no memory leaks.

use std::{collections::BTreeSet, time::Duration};

use mooncake_master::state::{JobStatus, TaskStatus};

use crate::{
    call::{Call, Reply, key_name},
    simulator::Simulator,
};

/// The time in which accepted tasks must end once there are no faults.
const TASKS_PERIOD: Duration = Duration::from_secs(90);
/// The time after which no memory may be held once everything is removed.
const DRAIN_PERIOD: Duration = Duration::from_secs(75);

impl Simulator {
    /// Checks that every object can be read, and that removing everything frees all memory.
    pub(crate) fn audit(&mut self) -> Result<(), String> {
        self.audit_tasks()?;
        for key in 0..self.plan.keys {
            self.audit_key(key)?;
        }
        let Some(state) = self.host.state() else { return Err("the master is down".to_owned()) };
        let known: BTreeSet<_> = state.list_segments().iter().map(|view| view.spec.id).collect();
        let mounted = self.processes.values().flat_map(|process| &process.segments);
        let mounted: BTreeSet<_> = mounted.map(|segment| segment.id).collect();
        if known != mounted {
            return Err(format!(
                "the master knows segments {known:?}, but mounted are {mounted:?}"
            ));
        }
        let client = self.processes.values().next().map(|process| process.client);
        let Some(client) = client else { return Ok(()) };
        self.host.serve(self.now, client, (0, 0), &Call::RemoveAll { is_forced: true });
        self.flush_log()?;
        self.run_until(self.now + DRAIN_PERIOD)?;
        let Some(state) = self.host.state() else { return Err("the master is down".to_owned()) };
        let totals = state.totals();
        if (totals.keys, totals.used, totals.writing, totals.fenced) != (0, 0, 0, 0) {
            return Err(format!("memory leaked: {totals:?}"));
        }
        Ok(())
    }

    /// Checks that every accepted task and drain has succeeded, or failed with a message.
    fn audit_tasks(&mut self) -> Result<(), String> {
        let end = self.now + TASKS_PERIOD;
        let (tasks, jobs) = (self.accepted.tasks.clone(), self.accepted.jobs.clone());
        for id in tasks {
            loop {
                let Some(state) = self.host.state() else { return Err("it is down".to_owned()) };
                let view = state.task(id).map_err(|error| format!("a task is lost: {error}"))?;
                match view.status {
                    TaskStatus::Success => self.outcome.succeeded += 1,
                    TaskStatus::Failed if !view.message.is_empty() => {}
                    _ if self.now > end => return Err(format!("a task does not end: {view:?}")),
                    _ => {
                        self.run_until(self.now + Duration::from_secs(1))?;
                        continue;
                    }
                }
                break;
            }
        }
        for id in jobs {
            loop {
                let Some(state) = self.host.state() else { return Err("it is down".to_owned()) };
                let view = state.job(id).map_err(|error| format!("a drain is lost: {error}"))?;
                match view.status {
                    JobStatus::Succeeded => self.outcome.drained += 1,
                    JobStatus::Failed | JobStatus::Canceled if !view.message.is_empty() => {}
                    _ if self.now > end => return Err(format!("a drain does not end: {view:?}")),
                    _ => {
                        self.run_until(self.now + Duration::from_secs(1))?;
                        continue;
                    }
                }
                break;
            }
        }
        Ok(())
    }

    fn audit_key(&mut self, key: u64) -> Result<(), String> {
        let Some(version) = self.history.current_version(key) else { return Ok(()) };
        let holders = self.model.holders(&key_name(key));
        if !holders.iter().any(|&holder| self.memories.exists(holder)) {
            return Ok(());
        }
        let Some(client) = self.processes.values().next().map(|process| process.client) else {
            return Ok(());
        };
        let reply = self.host.serve(self.now, client, (0, 0), &Call::Locate { key });
        let Reply::Located { version: found, length, places, .. } = reply else {
            return Err(format!("key {key}, version {version}, is lost: {reply:?}"));
        };
        let copies = places.iter().filter(|place| self.memories.exists(place.segment));
        for place in copies {
            let at = |index| self.memories.read(place.segment, place.offset + index);
            let words: Option<Vec<u64>> = (0..length).map(at).collect();
            self.history.check_read(self.now, key, found, &words.unwrap_or_default())?;
            self.outcome.audited += 1;
        }
        Ok(())
    }
}
