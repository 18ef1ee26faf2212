//! What clients know: which values each key may have, which versions they wrote, and what the memory of
//! the pool holds.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_base::{Moment, TenantId, Version};
use mooncake_proto::v1::LogMark;

use super::{Simulation, client::CLIENTS, plan::Plan};
use crate::state::State;

/// Number of keys, of which the first ones are never evicted.
pub(super) const KEYS: usize = 12;
pub(super) const PINNED: usize = 3;

/// The value of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Value {
    Absent,
    Put(u32),
}

/// What is known from answers.
#[derive(Debug)]
pub(super) struct History {
    /// The values that a key may have; `None`: any, since all members that had it lost it.
    allowed: Vec<Option<BTreeSet<Value>>>,
    versions: BTreeMap<Version, u32>,
    /// Reads under way: by client, the key and what it may have had since the read began.
    reads: BTreeMap<usize, (usize, Option<BTreeSet<Value>>)>,
    page_bytes: u64,
    /// Clocks stand still, so that a former leader may answer reads. What holds then is that a client
    /// which has changed a key itself never reads what the key had before.
    pub(super) own_keys_only: bool,
    /// The put that wrote a page of the pool's memory last.
    memory: BTreeMap<u64, u32>,
    /// Where the bytes of each put were written.
    places: BTreeMap<u32, Vec<(u64, u64)>>,
    /// What clients were told of the log: all frames before are at every member of the set.
    mark: Option<LogMark>,
    puts: u32,
    /// The highest view in which a call was answered.
    view: u64,
    /// Members that have everything that was acknowledged.
    whole: BTreeSet<String>,
    /// The members of the last set that was not empty.
    last_set: BTreeSet<String>,
}

impl History {
    pub(super) fn new(plan: &Plan) -> Self {
        Self {
            allowed: vec![Some(BTreeSet::from([Value::Absent])); KEYS],
            versions: BTreeMap::new(),
            reads: BTreeMap::new(),
            page_bytes: plan.page_bytes,
            own_keys_only: plan.faults.clock_stop > 0,
            memory: BTreeMap::new(),
            places: BTreeMap::new(),
            mark: None,
            puts: 0,
            view: 0,
            whole: BTreeSet::new(),
            last_set: BTreeSet::new(),
        }
    }

    pub(super) const fn new_put(&mut self) -> u32 {
        self.puts += 1;
        self.puts
    }

    /// Records the version of a put, which the client knows from now on.
    pub(super) fn record_version(&mut self, version: Version, put: u32) -> Result<(), String> {
        match self.versions.insert(version, put) {
            Some(earlier) if earlier != put => {
                Err(format!("puts {earlier} and {put} have the same version {version:?}"))
            }
            _ => Ok(()),
        }
    }

    /// Records where a put writes.
    pub(super) fn record_places(&mut self, put: u32, places: &[(u64, u64)]) {
        self.places.insert(put, places.to_vec());
    }

    /// Records that a key may have a value from now on.
    pub(super) fn allow(&mut self, key: usize, value: Value) {
        if let Some(allowed) = &mut self.allowed[key] {
            allowed.insert(value);
        }
        self.extend_reads(key);
    }

    /// Records that a change was acknowledged.
    pub(super) fn acknowledge(&mut self, key: usize, value: Value) {
        let mut allowed = BTreeSet::from([value]);
        if key >= PINNED {
            // It may be evicted.
            allowed.insert(Value::Absent);
        }
        self.allowed[key] = Some(allowed);
        self.extend_reads(key);
    }

    fn extend_reads(&mut self, key: usize) {
        let Self { reads, allowed, .. } = self;
        for (_, seen) in reads.values_mut().filter(|(read, _)| *read == key) {
            match (seen.as_mut(), &allowed[key]) {
                (Some(seen), Some(allowed)) => seen.extend(allowed),
                _ => *seen = None,
            }
        }
    }

    pub(super) fn begin_read(&mut self, client: usize, key: usize) {
        self.reads.insert(client, (key, self.allowed[key].clone()));
    }

    /// Checks the answer to a read.
    pub(super) fn end_read(
        &mut self,
        client: usize,
        version: Option<Version>,
    ) -> Result<Value, String> {
        let Some((key, seen)) = self.reads.remove(&client) else { return Ok(Value::Absent) };
        let value = self.value_of(version)?;
        if !self.own_keys_only || key % CLIENTS == client {
            check(key, seen.as_ref(), value)?;
        }
        Ok(value)
    }

    fn value_of(&self, version: Option<Version>) -> Result<Value, String> {
        let Some(version) = version else { return Ok(Value::Absent) };
        let put = self.versions.get(&version);
        put.map(|put| Value::Put(*put)).ok_or_else(|| format!("nobody wrote version {version:?}"))
    }

    /// Writes the bytes of a put.
    pub(super) fn write(&mut self, places: &[(u64, u64)], put: u32) {
        for page in pages(places, self.page_bytes) {
            self.memory.insert(page, put);
        }
    }

    /// Checks the bytes of a value.
    pub(super) fn check_bytes(&self, places: &[(u64, u64)], value: Value) -> Result<(), String> {
        let Value::Put(put) = value else { return Ok(()) };
        // A former leader grants fences that no other knows of.
        if self.own_keys_only {
            return Ok(());
        }
        for page in pages(places, self.page_bytes) {
            let found = self.memory.get(&page);
            if found != Some(&put) {
                return Err(format!("wrong bytes: {found:?} was read for {put} at {page:#x}"));
            }
        }
        Ok(())
    }

    /// Records an answer. No answer of an earlier view comes after one of a later view.
    pub(super) fn record_answer(&mut self, view: u64) -> Result<(), String> {
        if view < self.view && !self.own_keys_only {
            return Err(format!("answered in view {view} after an answer in view {}", self.view));
        }
        self.view = self.view.max(view);
        Ok(())
    }

    /// Returns whether a view is above all in which a call was answered.
    pub(super) const fn is_new_view(&self, view: u64) -> bool {
        view > self.view
    }

    /// Begins anew with lower views, as an operator does with the clients, too.
    pub(super) fn restart_views(&mut self) {
        self.view = 0;
        self.forget();
    }

    /// Forgets everything: all members that had it are gone, or all clients' memory is.
    pub(super) fn forget(&mut self) {
        self.mark = None;
        for key in 0..KEYS {
            self.allowed[key] = None;
            self.extend_reads(key);
        }
    }

    /// Records what clients were told of the log.
    pub(super) fn record_mark(&mut self, mark: &LogMark) {
        let is_same = |known: &&LogMark| known.timeline == mark.timeline;
        let known = self.mark.as_ref().filter(is_same).map_or(0, |known| known.synced_frame);
        if known < mark.synced_frame {
            self.mark = Some(*mark);
        }
    }

    /// Checks that the log of a member that may lead has what clients were told of.
    pub(super) fn check_log(&self, timeline_id: [u8; 16], next_frame: u64) -> Result<(), String> {
        let timeline = u128::from_le_bytes(timeline_id) as u64;
        match &self.mark {
            Some(mark) if mark.timeline == timeline && next_frame < mark.synced_frame => {
                Err(format!("lacks frames from {next_frame} on, clients know {mark:?}"))
            }
            _ => Ok(()),
        }
    }

    /// Records that a member has everything that was acknowledged.
    pub(super) fn record_whole(&mut self, member: &str) {
        self.whole.insert(member.to_owned());
    }

    /// Records that a member lost what was not on its disk, or all of it.
    pub(super) fn record_damage(&mut self, member: &str) {
        self.whole.remove(member);
        self.check_set();
    }

    pub(super) fn record_set(&mut self, members: BTreeSet<String>) {
        if !members.is_empty() {
            self.last_set = members;
            self.check_set();
        }
    }

    /// Returns whether a member of the last set has everything that was acknowledged.
    pub(super) fn has_heir(&self) -> bool {
        !self.last_set.is_disjoint(&self.whole)
    }

    fn check_set(&mut self) {
        if !self.last_set.is_empty() && !self.has_heir() {
            self.forget();
        }
    }

    /// Compares the state of a leader with what was acknowledged, and with the memory of the pool.
    pub(super) fn check_state(&self, state: &State, now: Moment) -> Result<(), String> {
        for (key, allowed) in self.allowed.iter().enumerate() {
            let view = state.view_object(now, &TenantId::default(), key_name(key).as_bytes());
            let value = self.value_of(view.ok().and_then(|view| view.version))?;
            check(key, allowed.as_ref(), value).map_err(|why| format!("a leader: {why}"))?;
            if let Value::Put(put) = value
                && let Some(places) = self.places.get(&put)
            {
                self.check_bytes(places, value)?;
            }
        }
        Ok(())
    }
}

impl Simulation {
    /// Records the set that the service holds.
    pub(super) fn record_set(&mut self) {
        if let Some(set) = self.service.in_sync() {
            let members = set.members.iter().map(ToString::to_string).collect();
            self.history.record_set(members);
        }
    }
}

pub(super) fn key_name(key: usize) -> String {
    format!("key-{key}")
}

fn check(key: usize, allowed: Option<&BTreeSet<Value>>, value: Value) -> Result<(), String> {
    match allowed {
        Some(allowed) if !allowed.contains(&value) => {
            Err(format!("key {key} has {value:?}, and not one of {allowed:?}"))
        }
        _ => Ok(()),
    }
}

fn pages(places: &[(u64, u64)], page_bytes: u64) -> impl Iterator<Item = u64> {
    let step = page_bytes as usize;
    places.iter().flat_map(move |&(address, length)| (address..address + length).step_by(step))
}
