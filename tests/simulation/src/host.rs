//! The machine of the master: the running state machine, and its log on a disk that survives a crash
//! as far as it was synced. The log and its recovery are the real ones.

use std::{result, time::Duration};

use mooncake_base::{ClientId, Error, ErrorCode, KeyRef, Moment, Result, TenantId};
use mooncake_master::{
    Journal, LogSync, Snapshot,
    state::{
        Answers, CallItem, Effect, FenceTicket, LocateOptions, NewJob, NewTask, ObjectSlot, Put,
        PutOptions, PutRef, RecoveryScope, Removal, Rules, Selector, State, TaskEnd,
    },
};
use mooncake_store_client::protocol::{
    Announcement, GrantedFence, HeartbeatAnswer, MasterIdentity, Registered,
};

use crate::{
    call::{Call, FetchedTask, Place, Reply, ReplyMessage, key_name},
    disk::Disk,
    plan::{Bug, Plan, WORD_BYTES},
    random::Random,
};

/// The number of objects in a slice of a snapshot.
const SLICE: u32 = 3;
/// The longest interval between heartbeats.
const HEARTBEAT_MAX: Duration = Duration::from_secs(1);
/// The most tasks that one fetch returns.
const FETCHED_MAX: usize = 2;

/// A master and its durable log.
#[derive(Debug)]
pub(crate) struct Host {
    rules: Rules,
    tenant: TenantId,
    /// `None` while the master is down.
    running: Option<State>,
    /// `None` while the master is down.
    journal: Option<Journal>,
    /// Counts the starts of the master, from 1.
    pub(crate) starts: u64,
    disk: Disk,
    log_sync: LogSync,
    /// Freed memory is given away before the record of its release is on disk.
    reuses_unsynced_memory: bool,
    snapshot: Option<Snapshot>,
    /// The answers to numbered calls; not in the log.
    pub(crate) answers: Answers<ReplyMessage>,
}

impl Host {
    /// Starts a master with an empty disk.
    ///
    /// # Errors
    /// The log cannot be started.
    pub(crate) fn start(plan: &Plan, now: Moment, seed: u64) -> result::Result<Self, String> {
        let mut host = Self {
            rules: plan.rules.clone(),
            tenant: TenantId::default(),
            running: None,
            journal: None,
            starts: 0,
            disk: Disk::new(plan.bug),
            log_sync: plan.log_sync,
            reuses_unsynced_memory: plan.has(Bug::ReusesUnsyncedMemory),
            snapshot: None,
            answers: Answers::default(),
        };
        host.restart(now, seed, |_| true)?;
        Ok(host)
    }

    /// Returns the state, which knows how much of the log is on disk.
    pub(crate) fn state(&mut self) -> Option<&mut State> {
        let (state, journal) = (self.running.as_mut()?, self.journal.as_ref()?);
        state.confirm_synced(match self.reuses_unsynced_memory {
            true => u64::MAX,
            false => journal.synced_position(),
        });
        state.confirm_durable(journal.durable_position());
        Some(state)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Kills the process. Effects that are not in the log are lost.
    pub(crate) fn kill(&mut self) {
        (self.running, self.journal, self.snapshot) = (None, None, None);
        self.answers = Answers::default();
    }

    /// Loses the log, as with the disk.
    pub(crate) fn lose_log(&mut self) {
        self.disk.wipe();
    }

    /// Crashes the machine: what was not synced is lost in part.
    pub(crate) fn lose_power(&mut self, random: &mut Random) {
        self.kill();
        self.disk.lose_power(random);
    }

    /// Damages the end of an older log. Returns whether there was one.
    pub(crate) fn damage_older_log(&mut self) -> bool {
        self.disk.damage_older_log()
    }

    /// Starts the master again from its log. Effects that `filter` rejects are ignored. Returns the
    /// number of the first frame that was not found.
    ///
    /// # Errors
    /// The log cannot be decoded, or contradicts itself.
    pub(crate) fn restart(
        &mut self,
        now: Moment,
        seed: u64,
        filter: impl Fn(&Effect<'_>) -> bool,
    ) -> result::Result<u64, String> {
        let opened =
            Journal::open_with(self.disk.directory(), self.log_sync, &mut |image, effects| {
                let mut kept = Vec::new();
                Effect::decode_all(effects, |effect| {
                    if filter(&effect) {
                        effect.encode(&mut kept);
                    }
                })?;
                image.replay(&kept)
            });
        let found = opened.map_err(|error| format!("cannot read the log: {error}"))?;
        self.starts += 1;
        // The master lets memory rest that may have been granted by what is missing.
        let quiet = match found.may_lack_end {
            true => self.rules.write_end(),
            false => Duration::ZERO,
        };
        let (state, restored) = State::restore(self.rules.clone(), seed, now, found.image, quiet);
        self.running = Some(state);
        // A log that is synced begins with a frame of its own.
        let own = u64::from(self.log_sync != LogSync::Never);
        let next_frame = found.journal.next_frame() - own;
        self.journal = Some(found.journal);
        match restored.conflicts {
            0 => Ok(next_frame),
            _ => Err(format!("the log allocates memory twice: {restored:?}")),
        }
    }

    /// Takes the effects recorded since the previous call.
    pub(crate) fn take_effects(&mut self) -> Vec<u8> {
        let mut effects = Vec::new();
        if let Some(state) = &mut self.running {
            state.log_mut().take_effects(&mut effects);
        }
        effects
    }

    /// Appends effects to the log, durably unless the process `is_killed` before. Returns the number
    /// of the next frame.
    pub(crate) fn append_log(&mut self, effects: &[u8], is_killed: bool) -> u64 {
        let Some(journal) = &self.journal else { return 0 };
        if !effects.is_empty() {
            let position = journal.append(|into| {
                into.extend_from_slice(effects);
                1
            });
            match is_killed {
                true => journal.write_only(),
                false => journal.wait_durable(position),
            }
        }
        // A put that found no memory is tried again when this is on disk.
        if self.running.as_mut().is_some_and(State::take_sync_request) && !is_killed {
            journal.sync_now();
        }
        journal.next_frame()
    }

    /// Syncs the log, as the master does at its interval.
    pub(crate) fn sync_log(&mut self) {
        if let Some(journal) = &self.journal {
            journal.sync_now();
        }
    }

    /// Starts a snapshot or continues it. A complete snapshot replaces the log before it. All effects
    /// must be in the log.
    ///
    /// # Errors
    /// The snapshot failed.
    pub(crate) fn snapshot(&mut self, now: Moment) -> result::Result<(), String> {
        let (Some(state), Some(journal)) = (&self.running, &self.journal) else { return Ok(()) };
        let mut step = || -> Result<()> {
            let Some(snapshot) = &mut self.snapshot else {
                let mut snapshot = Snapshot::prepare(journal, None)?;
                snapshot.begin(journal, state, now);
                snapshot.write(journal)?;
                self.snapshot = Some(snapshot);
                return Ok(());
            };
            let is_last = snapshot.slice(state, SLICE);
            snapshot.write(journal)?;
            match self.snapshot.take() {
                Some(snapshot) if is_last => snapshot.finish(journal, now),
                unfinished => {
                    self.snapshot = unfinished;
                    Ok(())
                }
            }
        };
        step().map_err(|error| format!("the snapshot failed: {error}"))
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

    /// Releases fences that their readers hand back.
    pub(crate) fn release_fences(&mut self, released: &[GrantedFence]) {
        let Some(state) = self.state() else { return };
        for &GrantedFence { fence, version, object } in released {
            state.release_fence(FenceTicket { object: ObjectSlot::new(object), version, fence });
        }
    }

    /// Handles a call with its sequence number and its number.
    pub(crate) fn serve(
        &mut self,
        now: Moment,
        client: ClientId,
        numbers: (u64, u64),
        call: &Call,
    ) -> Reply {
        match self.try_serve(now, client, numbers, call) {
            Ok(reply) => reply,
            Err(error) => Reply::Failed(error.code()),
        }
    }

    fn identity(&self) -> MasterIdentity {
        let timeline = self.journal.as_ref().and_then(Journal::timeline_id);
        MasterIdentity {
            master: self.starts.to_be_bytes().to_vec().into(),
            timeline: timeline.map(|id| id.to_vec().into()).unwrap_or_default(),
        }
    }

    fn try_serve(
        &mut self,
        now: Moment,
        client: ClientId,
        (sequence, number): (u64, u64),
        call: &Call,
    ) -> Result<Reply> {
        let (identity, tenant) = (self.identity(), &self.tenant.clone());
        let Some(state) = self.state() else {
            return Err(Error::internal("the master is down"));
        };
        if call.is_about_segments() {
            state.check_sequence(client, sequence)?;
        }
        match call {
            Call::Register | Call::Heartbeat(_) | Call::Announce { .. } | Call::Unmount(_) => {
                serve_session(state, now, (client, identity), call)
            }
            Call::PutStart { .. } | Call::PutEnd { .. } | Call::PutRevoke { .. } => {
                serve_puts(state, now, (client, tenant), call)
            }
            Call::Locate { key } => {
                let grant = LocateOptions { has_lease: true, has_fence: true };
                let mut located = state.locate(now, tenant, &[key_name(*key)], grant);
                let fence = located.fence;
                let object = located.objects.swap_remove(0)?;
                let places = places(state, &object.places);
                let length = object.length / WORD_BYTES;
                let granted = object.ticket.map(|ticket| GrantedFence {
                    fence: ticket.fence,
                    version: ticket.version,
                    object: ticket.object.number(),
                });
                Ok(Reply::Located { version: object.version, length, places, fence, granted })
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
            call => serve_tasks(state, now, (client, tenant), (call, number)),
        }
    }
}

fn serve_session(
    state: &mut State,
    now: Moment,
    (client, identity): (ClientId, MasterIdentity),
    call: &Call,
) -> Result<Reply> {
    match call {
        Call::Register => {
            state.register(now, client, "host:1")?;
            let registration = state.registration(client);
            let heartbeat_interval = (state.rules().client_ttl / 5).min(HEARTBEAT_MAX);
            let ignores_tenants = false;
            let answer = Registered { identity, registration, heartbeat_interval, ignores_tenants };
            Ok(Reply::Registered(answer))
        }
        &Call::Heartbeat(known_by) => {
            let registration = state.registration(client);
            let is_known = state.heartbeat(now, client) && registration == known_by;
            let has_tasks = state.tasks().has_tasks(now, client);
            let answer = HeartbeatAnswer { identity, is_known, log_mark: None };
            Ok(Reply::Heartbeat { answer, has_tasks })
        }
        Call::Announce { segments, kind } => {
            if *kind == Announcement::All {
                let ids: Vec<_> = segments.iter().map(|spec| spec.id).collect();
                state.retain_segments(client, &ids);
            }
            let results = segments.iter().map(|spec| {
                let announced = match kind {
                    Announcement::Resume => state.resume(client, spec),
                    Announcement::Mount | Announcement::All => {
                        state.mount(now, client, spec.clone())
                    }
                };
                announced.map_err(|error| error.code())
            });
            Ok(Reply::Announced(results.collect()))
        }
        Call::Unmount(id) => {
            let no_grace = Duration::ZERO;
            state.unmount(now, client, *id, no_grace).map(|()| Reply::Done)
        }
        _ => Err(Error::internal("not a call about a session")),
    }
}

fn serve_puts(
    state: &mut State,
    now: Moment,
    (client, tenant): (ClientId, &TenantId),
    call: &Call,
) -> Result<Reply> {
    match call {
        &Call::PutStart { key, length, replicas, is_replacing, request } => {
            let options = PutOptions { replicas, ..PutOptions::default() };
            let name = key_name(key);
            let (key, group) = (KeyRef::new(&name)?, &b""[..]);
            let length = length * WORD_BYTES;
            let put = Put {
                key,
                length,
                group,
                options: &options,
                is_replacing,
                if_version: None,
                request,
            };
            match state.puts().put_start(now, client, tenant, put) {
                Ok(started) => {
                    let places = places(state, &started.places);
                    Ok(Reply::Started { version: started.version, places })
                }
                Err(error) if error.code() == ErrorCode::OBJECT_ALREADY_EXISTS => {
                    let own = state.unfinished_put(client, tenant, &name);
                    Ok(Reply::Existed { own: own.map(|own| (own.version, own.request)) })
                }
                Err(error) => Err(error),
            }
        }
        Call::PutEnd { version, failed, .. } | Call::PutRevoke { version, failed } => {
            let key = match call {
                Call::PutEnd { key: Some(key), .. } => key.clone(),
                _ => Vec::new(),
            };
            let (version, failed_replicas) = (*version, &failed[..]);
            let put = PutRef { key: &key, version, failed_replicas, checksum: None };
            match call {
                Call::PutEnd { .. } => state.puts().put_end(now, client, tenant, put)?,
                _ => state.puts().put_revoke(now, client, tenant, put)?,
            }
            Ok(Reply::Done)
        }
        _ => Err(Error::internal("not a call about puts")),
    }
}

fn serve_tasks(
    state: &mut State,
    now: Moment,
    (client, tenant): (ClientId, &TenantId),
    (call, number): (&Call, u64),
) -> Result<Reply> {
    // Each call has one item.
    let item = (number > 0).then_some(CallItem { client, number });
    match call {
        Call::Copy { key, target } => {
            let (key, targets) = (&key_name(*key)[..], std::slice::from_ref(target));
            let new = NewTask::Copy { key, targets };
            state.tasks().create_task_once(now, tenant, new, item).map(Reply::Task)
        }
        Call::Move { key, source, target } => {
            let new = NewTask::Move { key: &key_name(*key), source, target };
            state.tasks().create_task_once(now, tenant, new, item).map(Reply::Task)
        }
        Call::Drain { segment } => {
            let segments = std::slice::from_ref(segment);
            let new = NewJob { segments, targets: &[], concurrency: 2, may_evict: false };
            state.tasks().create_job_once(now, new, item).map(Reply::Job)
        }
        Call::CancelDrain { job } => state.tasks().cancel_job(now, *job).map(|()| Reply::Done),
        Call::FetchTasks => {
            let work = state.tasks().fetch_tasks(now, client, FETCHED_MAX, u64::MAX)?;
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
            state.tasks().end_task(now, client, end).map(|()| Reply::Done)
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
