//! The audit: checkers that follow the run, and the invariants at its end.
//!
//! [`allocation_model`] knows which version owns which memory, [`history`] what readers may get,
//! [`log_record`] what a crash may lose, `holders` which copies can be read, [`disks`] which records
//! there are. At the end, without
//! faults, every object can be read, every accepted task has ended, and no memory leaks.

pub(crate) mod allocation_model;
pub(crate) mod disks;
pub(crate) mod history;
pub(crate) mod holders;
pub(crate) mod log_record;

use std::{collections::BTreeSet, time::Duration};

use mooncake_base::ClientId;
use mooncake_master::state::{JobStatus, TaskStatus};

use crate::{
    call::{Call, Reply, key_name},
    host::{
        calls::{Context, SliceEnd},
        running_call::Work,
    },
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
        drop(state);
        let mounted = self.processes.values().flat_map(|process| &process.segments);
        let mounted: BTreeSet<_> = mounted.map(|segment| segment.id).collect();
        if known != mounted {
            return Err(format!(
                "the master knows segments {known:?}, but mounted are {mounted:?}"
            ));
        }
        let client = self.processes.values().next().map(|process| process.client);
        let Some(client) = client else { return Ok(()) };
        for tenant in 0..self.plan.tenants {
            self.serve_at_once(client, &Call::RemoveAll { tenant, is_forced: true })?;
        }
        self.run_until(self.now + DRAIN_PERIOD)?;
        self.check_empty_disks()?;
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
                drop(state);
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
                drop(state);
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

    /// Executes a call without the network.
    fn serve_at_once(&mut self, client: ClientId, call: &Call) -> Result<Reply, String> {
        let tenant = self.tenant_of_call(call);
        let identity = self.host.identity();
        let context = Context {
            client,
            tenant: &tenant,
            identity,
            sequence: 0,
            number: 0,
            is_late: false,
            bug: None,
        };
        let mut work = Work::of(call, &tenant);
        loop {
            let now = self.now;
            let slice = self.host.run(|state| context.run(state, now, call, &mut work));
            let (turn, _) = self.appended(slice.ok_or("the master is down")?)?;
            if let SliceEnd::Done(reply) = turn {
                return Ok(reply);
            }
        }
    }

    fn audit_key(&mut self, key: u64) -> Result<(), String> {
        let Some(version) = self.history.current_version(key) else { return Ok(()) };
        self.audit_disk_copy(key, version)?;
        let holders = self.model.holders(&key_name(key));
        let disk = self.model.disk_of(&key_name(key)).and_then(|disk| self.reader_target(disk));
        if disk.is_none() && !holders.iter().any(|&holder| self.memories.exists(holder)) {
            return Ok(());
        }
        let Some(client) = self.processes.values().next().map(|process| process.client) else {
            return Ok(());
        };
        let reply = self.serve_at_once(client, &Call::Locate { key })?;
        let Reply::Located { version: found, length, places, .. } = reply else {
            return match self.history.current_version(key) {
                // It has expired since, or was evicted ahead of need.
                None => Ok(()),
                Some(_) => Err(format!("key {key}, version {version}, is lost: {reply:?}")),
            };
        };
        let copies = places.iter().filter(|place| self.memories.exists(place.segment));
        for place in copies {
            let words = self.words_at(place, 0..length);
            self.history.check_read(self.now, key, found, &words.unwrap_or_default())?;
            self.outcome.audited += 1;
        }
        Ok(())
    }
}
