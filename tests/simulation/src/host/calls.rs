//! Calls as the master executes them: arguments of the simulated wire in, calls of the state, and
//! replies out.

use std::{result, time::Duration};

use mooncake_base::{ClientId, Error, ErrorCode, KeyRef, Moment, Result, TenantId};
use mooncake_master::state::{
    CallItem, FenceTicket, LocateOptions, NewJob, NewTask, ObjectSlot, Pending, Put, PutOptions,
    PutProgress, PutRef, PutStep, SegmentStatus, SoftPin, State, Tags, TaskEnd,
};
use mooncake_store_client::protocol::{
    Announcement, GrantedFence, HeartbeatAnswer, MasterIdentity, Registered,
};

use crate::{
    call::{
        Call, FetchedTask, NewPut, Place, PutTerms, Reply, Start, Viewed, WrittenPut, item_request,
        key_name,
    },
    host::disk_calls::disk_place,
    host::running_call::{StartWork, Work},
    plan::{Bug, WORD_BYTES},
};

/// The longest interval between heartbeats.
const HEARTBEAT_MAX: Duration = Duration::from_secs(1);
/// The most tasks that one fetch returns.
const FETCHED_MAX: usize = 2;

/// The puts that one slice starts, renews, ends or revokes.
const PUTS_PER_SLICE: usize = 2;

/// The outcome of a slice of a call.
#[derive(Debug)]
pub(crate) enum SliceEnd {
    Done(Reply),
    /// Unlock the state and go on later; for a put, the reason.
    Again(Option<Pending>),
}

/// Who calls, and what goes with the call.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    pub(crate) client: ClientId,
    pub(crate) tenant: &'a TenantId,
    pub(crate) identity: MasterIdentity,
    /// Orders the calls of a client about its segments.
    pub(crate) sequence: u64,
    /// The number of the call; 0: none.
    pub(crate) number: u64,
    /// The call waits no longer for memory.
    pub(crate) is_late: bool,
    /// The planted bug.
    pub(crate) bug: Option<Bug>,
}

impl Context<'_> {
    /// Runs one slice of a call.
    pub(crate) fn run(
        &self,
        state: &mut State,
        now: Moment,
        call: &Call,
        work: &mut Work,
    ) -> SliceEnd {
        match self.step(state, now, call, work) {
            Ok(turn) => turn,
            Err(error) => SliceEnd::Done(Reply::Failed(error.code())),
        }
    }

    fn step(
        &self,
        state: &mut State,
        now: Moment,
        call: &Call,
        work: &mut Work,
    ) -> Result<SliceEnd> {
        if call.is_about_segments() {
            state.check_sequence(self.client, self.sequence)?;
        }
        let reply = match (call, work) {
            (_, Work::Start(work)) => return Ok(self.start_puts(state, now, call, work)),
            (_, Work::Close(closed)) => return Ok(self.close_puts(state, now, call, closed)),
            (Call::ReportRecords(report), Work::Report(work)) => {
                return self.report_records(state, now, report, work);
            }
            (_, Work::Removal(removal)) => {
                if !state.remove_matching(now, removal) {
                    removal.match_keys();
                    return Ok(SliceEnd::Again(None));
                }
                Reply::Done
            }
            (_, Work::Listing(listing)) => {
                if !state.list_objects(listing) {
                    listing.match_keys();
                    return Ok(SliceEnd::Again(None));
                }
                Reply::Done
            }
            (
                Call::Register | Call::Heartbeat(_) | Call::Announce { .. } | Call::Unmount { .. },
                _,
            ) => self.serve_session(state, now, call)?,
            (Call::Locate { .. } | Call::Verify { .. } | Call::View { .. } | Call::Overview, _) => {
                self.look(state, now, call)?
            }
            (Call::Remove { key, is_forced }, _) => {
                state.remove(now, self.tenant, &key_name(*key), *is_forced)?;
                Reply::Done
            }
            (Call::MountDisk { .. } | Call::UnmountDisk { .. } | Call::FetchOffloads { .. }, _) => {
                self.serve_disks(state, now, call)?
            }
            (call, _) => self.serve_tasks(state, now, call)?,
        };
        Ok(SliceEnd::Done(reply))
    }

    /// Starts the puts of one slice, up to the first one that has to wait for memory.
    fn start_puts(
        &self,
        state: &mut State,
        now: Moment,
        call: &Call,
        work: &mut StartWork,
    ) -> SliceEnd {
        let Call::PutStart { puts, request } = call else {
            return SliceEnd::Done(Reply::Failed(ErrorCode::INTERNAL_ERROR));
        };
        let end = puts.len().min(work.starts.len() + PUTS_PER_SLICE);
        while work.starts.len() < end {
            let item = work.starts.len();
            let request = item_request(*request, item);
            let start = match self.start_put(state, now, &puts[item], request, &mut work.progress) {
                Ok(PutStep::Started(started)) => {
                    let places = places(state, &started.places);
                    Start::Started { version: started.version, places }
                }
                Ok(PutStep::Pending(pending)) if !self.is_late => {
                    return SliceEnd::Again(Some(pending));
                }
                Ok(PutStep::Pending(_)) => Start::Failed(ErrorCode::NO_AVAILABLE_HANDLE),
                Err(error) => self.refused_start(state, now, puts[item].key, &error),
            };
            state.puts().cancel_put(std::mem::take(&mut work.progress));
            work.starts.push(start);
        }
        if end == puts.len() {
            SliceEnd::Done(Reply::Starts(std::mem::take(&mut work.starts)))
        } else {
            SliceEnd::Again(None)
        }
    }

    fn start_put(
        &self,
        state: &mut State,
        now: Moment,
        new: &NewPut,
        request: u64,
        progress: &mut PutProgress,
    ) -> Result<PutStep> {
        let &NewPut { key, length, terms } = new;
        let options = put_options(&terms)?;
        let name = key_name(key);
        let group = terms.group.map(|group| format!("group-{group}")).unwrap_or_default();
        let put = Put {
            key: KeyRef::new(&name)?,
            length: length * WORD_BYTES,
            group: group.as_bytes(),
            options: &options,
            is_replacing: terms.is_replacing,
            if_version: terms.if_version,
            request,
        };
        state.puts().put_step(now, self.client, self.tenant, &put, progress)
    }

    fn refused_start(&self, state: &mut State, now: Moment, key: u64, error: &Error) -> Start {
        if error.code() != ErrorCode::OBJECT_ALREADY_EXISTS {
            return Start::Failed(error.code());
        }
        let name = key_name(key);
        let own = state.unfinished_put(self.client, self.tenant, &name);
        let own = own.map(|own| (own.version, own.request));
        let value = state.view_object(now, self.tenant, &name).ok();
        Start::Existed { own, value: value.and_then(|view| view.version) }
    }

    /// Renews, ends or revokes the puts of one slice.
    fn close_puts(
        &self,
        state: &mut State,
        now: Moment,
        call: &Call,
        closed: &mut Vec<result::Result<(), ErrorCode>>,
    ) -> SliceEnd {
        let puts = call.written_puts();
        let end = puts.len().min(closed.len() + PUTS_PER_SLICE);
        for put in &puts[closed.len()..end] {
            let done = self.close_put(state, now, call, put);
            closed.push(done.map_err(|error| error.code()));
        }
        if end == puts.len() {
            SliceEnd::Done(Reply::Closed(std::mem::take(closed)))
        } else {
            SliceEnd::Again(None)
        }
    }

    fn close_put(
        &self,
        state: &mut State,
        now: Moment,
        call: &Call,
        written: &WrittenPut,
    ) -> Result<()> {
        let WrittenPut { key, version, failed, late, checksum } = written;
        let (name, failed_replicas) = (key_name(*key), &failed[..]);
        let put = |key, checksum| PutRef { key, version: *version, failed_replicas, checksum };
        let (client, tenant) = (self.client, self.tenant);
        match call {
            Call::PutRenew { .. } if self.bug == Some(Bug::ForgetsRenewals) => {
                state.unfinished_put(client, tenant, &name).map(drop).ok_or_else(|| {
                    Error::new(ErrorCode::OBJECT_NOT_FOUND, "the put is not there any more")
                })
            }
            Call::PutRenew { .. } => {
                state.puts().put_renew(now, client, tenant, PutRef::of(*version))
            }
            Call::PutEnd { has_keys, .. } => {
                let key: &[u8] = if *has_keys { &name } else { b"" };
                state.puts().put_end_late(now, client, tenant, put(key, *checksum), late)
            }
            _ => state.puts().put_revoke(now, client, tenant, put(b"", None)),
        }
    }

    fn look(&self, state: &mut State, now: Moment, call: &Call) -> Result<Reply> {
        match call {
            Call::Locate { key } => {
                let grant = LocateOptions { has_lease: true, has_fence: true };
                let mut located = state.locate(now, self.tenant, &[key_name(*key)], grant);
                let fence = located.fence;
                let object = located.objects.swap_remove(0)?;
                let mut places = places(state, &object.places);
                places.extend(object.disk.map(|disk| disk_place(state, &disk)));
                let granted = object.ticket.map(|ticket| GrantedFence {
                    fence: ticket.fence,
                    version: ticket.version,
                    object: ticket.object.number(),
                });
                let (version, length) = (object.version, object.length / WORD_BYTES);
                let checksum = object.checksum;
                Ok(Reply::Located { version, length, checksum, places, fence, granted })
            }
            Call::Verify { key, version, replica } => {
                let is_current = state.verify(self.tenant, &key_name(*key), *version, *replica);
                Ok(Reply::IsCurrent(is_current))
            }
            Call::View { key } => {
                let view = state.view_object(now, self.tenant, &key_name(*key))?;
                let gone = view.copies.iter().filter(|copy| copy.occupied == 0).count();
                let (version, length) = (view.version, view.length / WORD_BYTES);
                let has_tag = view.tags != Tags::default();
                Ok(Reply::Viewed(Box::new(Viewed { version, length, has_tag, gone })))
            }
            _ => {
                let (_, _) = (state.list_segments(), state.memory_use(now));
                let _ = (state.totals(), state.quotas());
                Ok(Reply::Done)
            }
        }
    }

    fn serve_session(&self, state: &mut State, now: Moment, call: &Call) -> Result<Reply> {
        let (client, identity) = (self.client, self.identity.clone());
        match call {
            Call::Register => {
                state.register(now, client, "host:1")?;
                let registration = state.registration(client);
                let heartbeat_interval = (state.rules().client_ttl / 5).min(HEARTBEAT_MAX);
                Ok(Reply::Registered(Registered {
                    identity,
                    registration,
                    heartbeat_interval,
                    ignores_tenants: false,
                }))
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
            Call::Unmount { segment, grace } => {
                state.unmount(now, client, *segment, *grace).map(|()| Reply::Done)
            }
            _ => Err(Error::internal("not a call about a session")),
        }
    }

    fn serve_tasks(&self, state: &mut State, now: Moment, call: &Call) -> Result<Reply> {
        let (client, tenant, number) = (self.client, self.tenant, self.number);
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
            Call::Drain { segment, may_evict } => {
                let segments = std::slice::from_ref(segment);
                let may_evict = *may_evict;
                let new = NewJob { segments, targets: &[], concurrency: 2, may_evict };
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
}

/// Releases fences that their readers hand back.
pub(crate) fn release_fences(state: &mut State, released: &[GrantedFence]) {
    for &GrantedFence { fence, version, object } in released {
        state.release_fence(FenceTicket { object: ObjectSlot::new(object), version, fence });
    }
}

/// Returns whether a segment accepts objects now, or has them for as long as its process lives.
pub(crate) fn is_staying(status: SegmentStatus) -> bool {
    !matches!(status, SegmentStatus::GracefullyUnmounting | SegmentStatus::Unmounting)
}

fn put_options(terms: &PutTerms) -> Result<PutOptions> {
    Ok(PutOptions {
        replicas: terms.replicas,
        soft_pin: if terms.is_soft_pinned { SoftPin::Enable(None) } else { SoftPin::Preserve },
        ttl: terms.ttl,
        tags: if terms.has_tag { Tags::new([("kind", "tagged")])? } else { Tags::default() },
        ..PutOptions::default()
    })
}

pub(super) fn places(state: &State, places: &[mooncake_master::state::Place]) -> Vec<Place> {
    let named = |place: &mooncake_master::state::Place| {
        let spec = state.segment(place.segment).spec;
        Place {
            segment: spec.id,
            endpoint: process_at(&spec.endpoint),
            address: spec.base + place.offset,
            replica: place.replica,
            is_on_disk: false,
        }
    };
    places.iter().map(named).collect()
}

/// Returns the process at an endpoint.
pub(super) fn process_at(endpoint: &str) -> u64 {
    endpoint
        .trim_start_matches("host-")
        .split(':')
        .next()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0)
}
