//! The audit of a world in which nothing breaks any more: what stands can be read, what was promised
//! is done, and nothing is held for nothing.

use std::{collections::BTreeSet, time::Duration};

use mooncake_master::state::{JobStatus, TaskStatus};

use crate::{
    call::{Call, Reply, key_name},
    world::World,
};

/// How long what was promised may take when nothing breaks any more.
const LAST_TASKS: Duration = Duration::from_secs(90);
/// How long after everything was removed no memory may be held any more.
const DREGS: Duration = Duration::from_secs(75);

impl World {
    /// Everything that stands can be read, and everything that is removed leaves nothing behind.
    pub(crate) fn audit(&mut self) -> Result<(), String> {
        self.audit_promises()?;
        for key in 0..self.plan.keys {
            self.audit_key(key)?;
        }
        let Some(state) = self.host.state() else { return Err("the master is down".to_owned()) };
        let known: BTreeSet<_> = state.list_segments().iter().map(|view| view.spec.id).collect();
        let lent = self.processes.values().flat_map(|process| &process.segments);
        let lent: BTreeSet<_> = lent.map(|segment| segment.id).collect();
        if known != lent {
            return Err(format!("the master knows segments {known:?}, lent are {lent:?}"));
        }
        let client = self.processes.values().next().map(|process| process.client);
        let Some(client) = client else { return Ok(()) };
        self.host.serve(self.now, client, 0, &Call::RemoveAll { is_forced: true });
        self.log()?;
        self.run_until(self.now + DREGS)?;
        let Some(state) = self.host.state() else { return Err("the master is down".to_owned()) };
        let totals = state.totals();
        if (totals.keys, totals.used, totals.writing, totals.fenced) != (0, 0, 0, 0) {
            return Err(format!("memory is held for nothing: {totals:?}"));
        }
        Ok(())
    }

    /// Everything that the master promised to do is done, or it says why not.
    fn audit_promises(&mut self) -> Result<(), String> {
        let end = self.now + LAST_TASKS;
        let (tasks, jobs) = (self.promises.tasks.clone(), self.promises.jobs.clone());
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
        let Some(version) = self.truth.standing(key) else { return Ok(()) };
        let holders = self.ledger.holders(&key_name(key));
        if !holders.iter().any(|&holder| self.memories.is_lent(holder)) {
            return Ok(());
        }
        let Some(client) = self.processes.values().next().map(|process| process.client) else {
            return Ok(());
        };
        let reply = self.host.serve(self.now, client, 0, &Call::Locate { key });
        let Reply::Located { version: found, length, places, .. } = reply else {
            return Err(format!("key {key}, version {version}, is lost: {reply:?}"));
        };
        let copies = places.iter().filter(|place| self.memories.is_lent(place.segment));
        for place in copies {
            let at = |index| self.memories.read(place.segment, place.offset + index);
            let words: Option<Vec<u64>> = (0..length).map(at).collect();
            self.truth.judge(self.now, key, found, &words.unwrap_or_default())?;
            self.outcome.audited += 1;
        }
        Ok(())
    }
}
