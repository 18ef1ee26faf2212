//! The machine of the master: the running state machine behind its guard, and its log on a disk that
//! survives a crash as far as it was synced. State, guard, log and recovery are the real ones.

pub(crate) mod calls;
pub(crate) mod disk;
mod disk_calls;
pub(crate) mod execution;
pub(crate) mod log;
pub(crate) mod running_call;
pub(crate) mod waiting_answers;

use std::{
    collections::{BTreeMap, VecDeque},
    result,
    time::Duration,
};

use mooncake_base::{Moment, Result, SegmentId, sync::MutexGuard};
use mooncake_master::{
    GuardedState, Journal, LogSync, OnLogFailure, Slice, Snapshot,
    state::{Answers, Effect, RecoveryScope, Rules, State, limit_sweeps},
};
use mooncake_store_client::protocol::MasterIdentity;

use crate::{
    call::{Call, CallMessage, ReplyMessage, key_name, tenant_name},
    host::{disk::Disk, running_call::RunningCall},
    plan::{Bug, Plan},
    random::Random,
};

/// The number of objects in a slice of a snapshot, and of a sweep.
const SLICE: u32 = 3;

/// A master and its durable log.
#[derive(Debug)]
pub(crate) struct Host {
    rules: Rules,
    tenants: u64,
    /// `None` while the master is down.
    running: Option<GuardedState>,
    /// Counts the starts of the master, from 1.
    pub(crate) starts: u64,
    pub(crate) disk: Disk,
    log_sync: LogSync,
    on_log_failure: OnLogFailure,
    /// Freed memory is given away before the record of its release is on disk.
    reuses_unsynced_memory: bool,
    snapshot: Option<Snapshot>,
    /// The answers to numbered calls; not in the log.
    pub(crate) answers: Answers<ReplyMessage>,
    /// The calls that are being executed in slices.
    pub(crate) calls: BTreeMap<u64, RunningCall>,
    /// Large calls that wait for the permit of another.
    pub(crate) queue: VecDeque<CallMessage>,
}

impl Host {
    /// Starts a master with an empty disk.
    ///
    /// # Errors
    /// The log cannot be started.
    pub(crate) fn start(plan: &Plan, now: Moment, seed: u64) -> result::Result<Self, String> {
        let mut host = Self {
            rules: plan.rules_of_master(),
            tenants: plan.tenants,
            running: None,
            starts: 0,
            disk: Disk::new(plan.bug),
            log_sync: plan.log_sync,
            on_log_failure: plan.on_log_failure,
            reuses_unsynced_memory: plan.has(Bug::ReusesUnsyncedMemory),
            snapshot: None,
            answers: Answers::default(),
            calls: BTreeMap::new(),
            queue: VecDeque::new(),
        };
        host.restart(now, seed, |effect, kept| effect.encode(kept))?;
        Ok(host)
    }

    /// Runs a slice of a call, whose effects are appended to the log. `None`: the master is down.
    pub(crate) fn run<R>(&self, slice: impl FnOnce(&mut State) -> R) -> Option<Slice<R>> {
        let reuses_unsynced_memory = self.reuses_unsynced_memory;
        let running = self.running.as_ref()?;
        Some(running.run(|state| {
            if reuses_unsynced_memory {
                state.confirm_synced(u64::MAX);
            }
            slice(state)
        }))
    }

    /// Runs a slice of a read.
    pub(crate) fn read<R>(&self, slice: impl FnOnce(&mut State) -> R) -> Option<Slice<R>> {
        Some(self.running.as_ref()?.read(slice))
    }

    /// Lets no client expire because of the time since `since`.
    pub(crate) fn record_stall(&self, since: Moment) {
        if let Some(running) = &self.running {
            running.record_stall(since);
        }
    }

    /// Returns the state for a look at it.
    pub(crate) fn state(&self) -> Option<MutexGuard<'_, State>> {
        self.running.as_ref().map(GuardedState::look)
    }

    /// Returns the log.
    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.running.as_ref()?.journal()
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Kills the process. Effects that are not written are lost.
    pub(crate) fn kill(&mut self) {
        (self.running, self.snapshot) = (None, None);
        self.answers = Answers::default();
        self.calls.clear();
        self.queue.clear();
    }

    /// Crashes the machine: what was not synced is lost in part.
    pub(crate) fn lose_power(&mut self, random: &mut Random) {
        self.kill();
        self.disk.lose_power(random);
    }

    /// Starts the master again from its log. `edit` keeps the effects that are replayed. Returns the
    /// number of the first frame that was not found.
    ///
    /// # Errors
    /// The log cannot be decoded, or contradicts itself.
    pub(crate) fn restart(
        &mut self,
        now: Moment,
        seed: u64,
        mut edit: impl FnMut(Effect<'_>, &mut Vec<u8>),
    ) -> result::Result<u64, String> {
        let opened =
            Journal::open_with(self.disk.directory(), self.log_sync, &mut |image, effects| {
                let mut kept = Vec::new();
                Effect::decode_all(effects, |effect| edit(effect, &mut kept))?;
                image.replay(&kept)
            });
        let found = opened.map_err(|error| format!("cannot read the log: {error}"))?;
        self.starts += 1;
        // The master lets memory rest that may have been granted by what is missing.
        let quiet = if found.may_lack_end { self.rules.late_end() } else { Duration::ZERO };
        let (mut state, restored) =
            State::restore(self.rules.clone(), seed, now, found.image, quiet);
        limit_sweeps(&mut state, SLICE);
        // A log that is synced begins with a frame of its own.
        let own = u64::from(self.log_sync != LogSync::Never);
        let next_frame = found.journal.next_frame() - own;
        let journal = found.journal.with_failure_policy(self.on_log_failure);
        self.running = Some(GuardedState::new(state, journal));
        match restored.conflicts {
            0 => Ok(next_frame),
            _ => Err(format!("the log allocates memory twice: {restored:?}")),
        }
    }

    /// Moves the wall clock of the machine. The next master counts expiry from it.
    pub(crate) fn set_wall_clock(&mut self, booted: Duration) {
        self.rules.booted = booted;
    }

    /// Starts a snapshot or continues it. A complete snapshot replaces the log before it. With
    /// `is_restart`, the log starts on another timeline. Returns whether the snapshot is complete.
    ///
    /// # Errors
    /// The snapshot failed.
    pub(crate) fn snapshot(
        &mut self,
        now: Moment,
        is_restart: bool,
    ) -> result::Result<bool, String> {
        let Some(running) = &self.running else { return Ok(true) };
        let Some(journal) = running.journal() else { return Ok(true) };
        let mut step = || -> Result<bool> {
            let state = &*running.look();
            let Some(snapshot) = &mut self.snapshot else {
                let timeline = is_restart.then(|| SegmentId::random().to_bytes());
                let mut snapshot = Snapshot::prepare(journal, timeline)?;
                snapshot.begin(journal, state, now);
                snapshot.write(journal)?;
                self.snapshot = Some(snapshot);
                return Ok(false);
            };
            let is_last = snapshot.slice(state, SLICE);
            snapshot.write(journal)?;
            match self.snapshot.take() {
                Some(snapshot) if is_last => snapshot.finish(journal, now).map(|()| true),
                unfinished => {
                    self.snapshot = unfinished;
                    Ok(false)
                }
            }
        };
        let done = step();
        if done.is_err() {
            self.snapshot = None;
            Snapshot::give_up(journal);
        }
        done.map_err(|error| format!("the snapshot failed: {error}"))
    }

    pub(crate) fn is_snapshotting(&self) -> bool {
        self.snapshot.is_some()
    }

    /// Returns the time until which the call waits for owners to resume their segments, if it must.
    pub(crate) fn recovery_deadline(&self, now: Moment, call: &Call) -> Option<Moment> {
        let state = self.state()?;
        let named = if matches!(call, Call::RemovePrefix { .. }) { None } else { call.key() };
        let keys: Vec<u64> = named.into_iter().chain(call.started_keys()).collect();
        let Some(&first) = keys.first() else {
            return if call.is_large() {
                state.recovery_wait(now, &RecoveryScope::All)
            } else {
                None
            };
        };
        let names: Vec<Vec<u8>> = keys.iter().map(|&key| key_name(key)).collect();
        let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let scope = RecoveryScope::Keys(&self.tenant_of(first), &names);
        let by_key = state.recovery_wait(now, &scope);
        let by_room = || match call {
            Call::PutStart { .. } => state.recovery_wait(now, &RecoveryScope::Space),
            _ => None,
        };
        by_key.or_else(by_room)
    }

    /// Returns the tenant of a key.
    pub(crate) fn tenant_of(&self, key: u64) -> mooncake_base::TenantId {
        tenant_name(key / 4 % self.tenants)
    }

    pub(crate) fn identity(&self) -> MasterIdentity {
        let timeline = self.journal().and_then(Journal::timeline_id);
        MasterIdentity {
            master: self.starts.to_be_bytes().to_vec().into(),
            timeline: timeline.map(|id| id.to_vec().into()).unwrap_or_default(),
        }
    }
}
