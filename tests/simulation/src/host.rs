//! The machine of the master: the running state machine, and the log that survives a crash.

use mooncake_base::{ClientId, Error, KeyRef, Moment, Result, TenantId};
use mooncake_master::state::{
    Effect, Image, LocateOptions, NewJob, NewTask, Put, PutOptions, PutRef, RecoveryScope, Removal,
    Rules, Selector, SnapshotCursor, State, TaskEnd,
};

use crate::{
    call::{Call, FetchedTask, Place, Reply, key_name},
    plan::WORD_BYTES,
};

/// The number of objects in a slice of a snapshot.
const SLICE: u32 = 3;
/// The most tasks that one fetch returns.
const FETCHED_MAX: usize = 2;

/// A master and its durable log.
#[derive(Debug)]
pub(crate) struct Host {
    rules: Rules,
    tenant: TenantId,
    /// `None` while the master is down.
    running: Option<State>,
    /// Counts the starts of the master, from 1.
    pub(crate) starts: u64,
    /// The newest complete snapshot; `log` holds the effects since that snapshot began.
    base: Vec<u8>,
    log: Vec<Vec<u8>>,
    snapshot: Option<Snapshot>,
}

/// A snapshot in progress.
#[derive(Debug)]
struct Snapshot {
    cursor: SnapshotCursor,
    bytes: Vec<u8>,
    /// The length of the log when the snapshot began.
    log_from: usize,
}

impl Host {
    pub(crate) fn new(rules: Rules, seed: u64) -> Self {
        let mut state = State::new(rules.clone(), seed);
        state.record_effects();
        Self {
            rules,
            tenant: TenantId::default(),
            running: Some(state),
            starts: 1,
            base: Vec::new(),
            log: Vec::new(),
            snapshot: None,
        }
    }

    pub(crate) fn state(&mut self) -> Option<&mut State> {
        self.running.as_mut()
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Kills the process. Effects that are not in the log are lost.
    pub(crate) fn kill(&mut self) {
        (self.running, self.snapshot) = (None, None);
    }

    /// Loses the log, as with the disk.
    pub(crate) fn lose_log(&mut self) {
        self.base.clear();
        self.log.clear();
    }

    /// Starts the master again from its log. Effects that `filter` rejects are ignored.
    ///
    /// # Errors
    /// The log cannot be decoded, or contradicts itself.
    pub(crate) fn restart(
        &mut self,
        now: Moment,
        seed: u64,
        filter: impl Fn(&Effect<'_>) -> bool,
    ) -> Result<(), String> {
        let mut image = Image::default();
        for bytes in std::iter::once(&self.base).chain(&self.log) {
            let mut kept = Vec::new();
            let decoded = Effect::decode_all(bytes, |effect| {
                if filter(&effect) {
                    effect.encode(&mut kept);
                }
            });
            decoded.map_err(|error| format!("cannot decode the log: {error:?}"))?;
            image.replay(&kept).map_err(|error| format!("cannot replay the log: {error:?}"))?;
        }
        self.starts += 1;
        if self.base.is_empty() && self.log.is_empty() {
            let mut state = State::new(self.rules.clone(), seed);
            state.record_effects();
            self.running = Some(state);
            return Ok(());
        }
        let rules = self.rules.clone();
        let (state, restored) = State::restore(rules, seed, now, image, std::time::Duration::ZERO);
        self.running = Some(state);
        match restored.conflicts {
            0 => Ok(()),
            _ => Err(format!("the log allocates memory twice: {restored:?}")),
        }
    }

    /// Takes the effects recorded since the previous call.
    pub(crate) fn take_effects(&mut self) -> Vec<u8> {
        let mut effects = Vec::new();
        if let Some(state) = &mut self.running {
            state.take_effects(&mut effects);
        }
        effects
    }

    /// Appends effects to the log.
    pub(crate) fn append_log(&mut self, effects: Vec<u8>) {
        if !effects.is_empty() {
            self.log.push(effects);
        }
    }

    /// Starts a snapshot or continues it. A complete snapshot replaces the log before it.
    pub(crate) fn snapshot(&mut self, now: Moment) {
        let Some(state) = &mut self.running else { return };
        let log_from = self.log.len();
        let snapshot = self.snapshot.get_or_insert_with(|| {
            let mut bytes = Vec::new();
            let cursor = state.begin_snapshot(now, &mut bytes);
            Snapshot { cursor, bytes, log_from }
        });
        if state.snapshot_slice(&mut snapshot.cursor, SLICE, &mut snapshot.bytes)
            && let Some(done) = self.snapshot.take()
        {
            self.base = done.bytes;
            self.log.drain(..done.log_from);
        }
    }

    pub(crate) fn is_snapshotting(&self) -> bool {
        self.snapshot.is_some()
    }

    /// Returns the time until which the call waits for owners to resume their segments, if it must.
    pub(crate) fn recovery_deadline(&self, now: Moment, call: &Call) -> Option<Moment> {
        let key = match call {
            Call::PutStart { key, .. } | Call::Locate { key } | Call::Remove { key, .. } => *key,
            Call::RemoveAll { .. } => {
                return self.running.as_ref()?.recovery_wait(now, &RecoveryScope::All);
            }
            _ => return None,
        };
        let name = key_name(key);
        self.running.as_ref()?.recovery_wait(now, &RecoveryScope::Keys(&self.tenant, &[&name]))
    }

    /// Handles a call.
    pub(crate) fn serve(
        &mut self,
        now: Moment,
        client: ClientId,
        sequence: u64,
        call: &Call,
    ) -> Reply {
        match self.try_serve(now, client, sequence, call) {
            Ok(reply) => reply,
            Err(error) => Reply::Failed(error.code()),
        }
    }

    fn try_serve(
        &mut self,
        now: Moment,
        client: ClientId,
        sequence: u64,
        call: &Call,
    ) -> Result<Reply> {
        let (master, tenant) = (self.starts, &self.tenant);
        let Some(state) = &mut self.running else {
            return Err(Error::internal("the master is down"));
        };
        if call.is_about_segments() {
            state.check_sequence(client, sequence)?;
        }
        match call {
            Call::Register => {
                state.register(now, client, "host:1")?;
                let registration = state.registration(client);
                Ok(Reply::Session { master, is_known: true, registration })
            }
            &Call::Heartbeat(known_by) => {
                let registration = state.registration(client);
                let is_known = state.heartbeat(now, client) && registration == known_by;
                Ok(Reply::Session { master, is_known, registration })
            }
            Call::Resume(spec) => state.resume(client, spec).map(|()| Reply::Done),
            Call::Mount(spec) => state.mount(now, client, spec.clone()).map(|()| Reply::Done),
            Call::RetainSegments(ids) => {
                state.retain_segments(client, ids);
                Ok(Reply::Done)
            }
            Call::Unmount(id) => {
                let no_grace = std::time::Duration::ZERO;
                state.unmount(now, client, *id, no_grace).map(|()| Reply::Done)
            }
            &Call::PutStart { key, length, replicas, is_replacing, request } => {
                let options = PutOptions { replicas, ..PutOptions::default() };
                let name = key_name(key);
                let (key, group) = (KeyRef::new(&name)?, &b""[..]);
                let length = length * WORD_BYTES;
                let put = Put { key, length, group, options: &options, is_replacing, request };
                let started = state.put_start(now, client, tenant, put)?;
                let places = places(state, &started.places);
                Ok(Reply::Started { version: started.version, places })
            }
            Call::PutEnd { version, failed } | Call::PutRevoke { version, failed } => {
                let failed_replicas = &failed[..];
                let put = PutRef { key: b"", version: *version, failed_replicas, checksum: None };
                match call {
                    Call::PutEnd { .. } => state.put_end(now, client, tenant, put)?,
                    _ => state.put_revoke(now, client, tenant, put)?,
                }
                Ok(Reply::Done)
            }
            Call::Locate { key } => {
                let grant = LocateOptions { has_lease: true, has_fence: true };
                let mut located = state.locate(now, tenant, &[key_name(*key)], grant);
                let fence = located.fence;
                let object = located.objects.swap_remove(0)?;
                let places = places(state, &object.places);
                let length = object.length / WORD_BYTES;
                Ok(Reply::Located { version: object.version, length, places, fence })
            }
            Call::Verify { key, version, replica } => {
                let is_current = state.verify(tenant, &key_name(*key), *version, *replica);
                Ok(Reply::IsCurrent(is_current))
            }
            Call::Remove { key, is_forced } => {
                state.remove(now, tenant, &key_name(*key), *is_forced).map(|()| Reply::Done)
            }
            Call::RemoveAll { is_forced } => {
                let mut removal = Removal::new(tenant.clone(), Selector::All, *is_forced);
                while !state.remove_matching(now, &mut removal) {}
                Ok(Reply::Done)
            }
            call => serve_tasks(state, now, (client, tenant), call),
        }
    }
}

fn serve_tasks(
    state: &mut State,
    now: Moment,
    (client, tenant): (ClientId, &TenantId),
    call: &Call,
) -> Result<Reply> {
    match call {
        Call::Copy { key, target } => {
            let (key, targets) = (&key_name(*key)[..], std::slice::from_ref(target));
            state.create_task(now, tenant, NewTask::Copy { key, targets }).map(Reply::Task)
        }
        Call::Move { key, source, target } => {
            let new = NewTask::Move { key: &key_name(*key), source, target };
            state.create_task(now, tenant, new).map(Reply::Task)
        }
        Call::Drain { segment } => {
            let segments = std::slice::from_ref(segment);
            let new = NewJob { segments, targets: &[], concurrency: 2 };
            state.create_job(now, new).map(Reply::Job)
        }
        Call::CancelDrain { job } => state.cancel_job(now, *job).map(|()| Reply::Done),
        Call::FetchTasks => {
            let work = state.fetch_tasks(now, client, FETCHED_MAX, u64::MAX)?;
            let work = work.into_iter().map(|work| FetchedTask {
                id: work.id,
                attempt: work.attempt,
                length: work.length / WORD_BYTES,
                source: places(state, &[work.source])[0],
                targets: places(state, &work.targets),
            });
            Ok(Reply::FetchedTask(work.collect()))
        }
        Call::EndTask { id, attempt, failed } => {
            let (id, attempt, why) = (*id, *attempt, "a replica is unreachable");
            let end = TaskEnd { id, attempt, failed_replicas: failed, why };
            state.end_task(now, client, end).map(|()| Reply::Done)
        }
        _ => Err(Error::internal("not a call about tasks")),
    }
}

fn places(state: &State, places: &[mooncake_master::state::Place]) -> Vec<Place> {
    let named = |place: &mooncake_master::state::Place| Place {
        segment: state.segment(place.segment).spec.id,
        offset: place.offset / WORD_BYTES,
        replica: place.replica,
    };
    places.iter().map(named).collect()
}
