//! The RPC calls: one dispatch function for every protocol, and the connected clients.
//!
//! [`Service::dispatch`] is synchronous and short. It converts wire types into checked types, locks
//! the state for one slice of items at a time, and converts the result back. The protocol
//! front ends ([`listen`]: sniffing, `native`, `grpc`) only move bytes.

mod admission;
pub mod connection;
pub mod dedicated_thread;
mod durability;
mod encoding;
mod grpc;
pub mod listen;
mod native;
mod objects;
pub mod op_metrics;
mod put_start;
mod quotas;
mod repeated_calls;
mod session;
pub mod slow_log;
mod state_guard;
mod tasks;
mod traffic;
mod wire;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, Moment, Result, SegmentId, TenantId};
use mooncake_proto::{
    convert::Caller,
    v1::{self, request, response},
};

pub use self::{
    admission::Admission,
    durability::AnsweringThread,
    session::{ConnectedClient, Origin},
    tasks::WorkSummary,
    traffic::{SIZE_BOUNDS, TrafficCount},
};
use self::{
    connection::ConnectionEnd,
    durability::PendingOwners,
    op_metrics::{Op, OpMetrics},
    repeated_calls::RepeatedCalls,
    session::Sessions,
    slow_log::SlowLog,
    state_guard::StateGuard,
    traffic::Traffic,
    wire::{segment_from_wire, segment_status, segment_to_wire},
};
use crate::{
    addresses::Addresses,
    config::quota_file::QuotaFile,
    events::Events,
    journal::Journal,
    state::{Rules, State, Totals},
};

/// The maximum number of items in one call. The reply for that many items fits one frame.
pub const BATCH_ITEMS_MAX: usize = mooncake_proto::decode_limits::ITEMS_MAX;

/// The number of items handled before the lock on the state is released for other calls.
const SLICE_ITEMS: usize = 1024;

/// The number of segments mounted before the lock on the state is released for other calls.
const MOUNT_SLICE: usize = 256;
/// The same for segments that are unmounted: each may hold much quarantined memory.
const UNMOUNT_SLICE: usize = 8;

/// The maximum length of the name, endpoint or protocol of a client or segment.
const NAME_BYTES_MAX: usize = 1024;

/// The number of heartbeats within a client's time to live.
const HEARTBEATS_PER_TTL: u32 = 5;
/// The maximum heartbeat interval. It bounds how long a task waits for its client to fetch it.
const HEARTBEAT_MAX: Duration = Duration::from_secs(1);

/// The RPC service of the master, shared by all protocols.
#[derive(Debug)]
pub struct Service {
    identity: [u8; 16],
    clock: Arc<dyn Clock>,
    started: Moment,
    /// The default tenant. It is the only one unless `is_multi_tenant`.
    tenant: TenantId,
    is_multi_tenant: bool,
    /// Never locked while `sessions` is locked.
    state: Mutex<State>,
    sessions: Sessions,
    op_metrics: OpMetrics,
    slow_log: SlowLog,
    traffic: Traffic,
    addresses: OnceLock<Addresses>,
    events: OnceLock<Arc<Events>>,
    admission: OnceLock<Admission>,
    /// The quota file, if there is one. Locked before `state`.
    quota_file: Mutex<Option<QuotaFile>>,
    /// Never waited for while the state is locked.
    journal: Option<Journal>,
    pending_owners: PendingOwners,
    repeated_calls: RepeatedCalls,
}

impl Service {
    /// Creates a service over an empty pool.
    pub fn new(rules: Rules, clock: Arc<dyn Clock>) -> Self {
        let (seed, _) = SegmentId::random().halves();
        Self::with_state(State::new(rules, seed), clock)
    }

    fn with_state(state: State, clock: Arc<dyn Clock>) -> Self {
        // The identity and the seed of the state need not be secret. They only have to differ
        // between starts.
        let identity = SegmentId::random().to_bytes();
        Self {
            identity,
            started: clock.now(),
            clock,
            tenant: TenantId::default(),
            is_multi_tenant: state.rules().is_multi_tenant,
            state: Mutex::new(state),
            sessions: Sessions::default(),
            op_metrics: OpMetrics::default(),
            slow_log: SlowLog::default(),
            traffic: Traffic::default(),
            addresses: OnceLock::new(),
            events: OnceLock::new(),
            admission: OnceLock::new(),
            quota_file: Mutex::default(),
            journal: None,
            pending_owners: PendingOwners::default(),
            repeated_calls: RepeatedCalls::default(),
        }
    }

    /// Executes one call. Errors are per item where there are items; otherwise the response is a
    /// failure. If there is a log, all changes are in the log before this returns. Like
    /// [`answer`](Self::answer), does not wait for owners that have not come back after a restart.
    pub fn dispatch(&self, request: v1::Request, origin: &Origin) -> v1::Response {
        let (response, position) = self.execute_logged(request, origin);
        self.wait_durable(position);
        response
    }

    /// Executes one call. Returns the log position behind its effects, too.
    fn execute_logged(&self, request: v1::Request, origin: &Origin) -> (v1::Response, u64) {
        let execute = |request| durability::with_log_position(|| self.execute(request, origin));
        match request.call_number {
            0 => execute(request),
            _ => self.repeated_calls.execute_once(request, execute),
        }
    }

    fn execute(&self, request: v1::Request, origin: &Origin) -> v1::Response {
        use request::Call;
        if let Some(caller) = request.call.as_ref().and_then(Call::caller)
            && let Some(client) = self.sessions.record_call(&caller.client, origin)
        {
            // It was suspect because its last connection had closed.
            let now = self.clock.now();
            let mut state = self.lock();
            state.heartbeat(now, client);
            self.update_pending_owners(state.is_recovering(now));
        }
        if !request.released_fences.is_empty() {
            self.release_fences(&request.released_fences);
        }
        let pending = self.slow_log.begin(request.call.as_ref());
        let answer = match request.call {
            Some(Call::Register(r)) => self.register(&r, origin).map(response::Call::Register),
            Some(Call::Heartbeat(r)) => self.heartbeat(&r).map(response::Call::Heartbeat),
            Some(Call::Unregister(r)) => self.unregister(&r).map(response::Call::Unregister),
            Some(Call::Mount(r)) => self.mount(r).map(response::Call::Mount),
            Some(Call::Unmount(r)) => self.unmount(&r).map(response::Call::Unmount),
            Some(Call::PutStart(r)) => self.put_start(r).map(response::Call::PutStart),
            Some(Call::PutEnd(r)) => self.put_end(&r).map(response::Call::PutEnd),
            Some(Call::PutRevoke(r)) => self.put_revoke(&r).map(response::Call::PutRevoke),
            Some(Call::Locate(r)) => self.locate(&r).map(response::Call::Locate),
            Some(Call::Verify(r)) => self.verify(&r).map(response::Call::Verify),
            Some(Call::Probe(r)) => self.probe(&r).map(response::Call::Probe),
            Some(Call::Remove(r)) => self.remove(&r).map(response::Call::Remove),
            Some(Call::RemoveMatching(r)) => {
                self.remove_matching(&r).map(response::Call::RemoveMatching)
            }
            Some(Call::ListObjects(r)) => self.list_objects(&r).map(response::Call::ListObjects),
            Some(Call::ListSegments(r)) => self.list_segments(&r).map(response::Call::ListSegments),
            Some(Call::Status(r)) => self.status(&r).map(response::Call::Status),
            Some(call) => self.dispatch_task(call, request.call_number),
            None => Err(Error::invalid("the request has no call known to this master")),
        };
        let call = answer.unwrap_or_else(|error| response::Call::Failure((&error).into()));
        self.slow_log.end(pending, &call);
        v1::Response { call: Some(call) }
    }

    /// Executes the calls about tasks, drains and quotas.
    fn dispatch_task(&self, call: request::Call, number: u64) -> Result<response::Call> {
        use request::Call;
        use response::Call as Answer;
        match call {
            Call::CreateTasks(r) => self.create_tasks(&r, number).map(Answer::CreateTasks),
            Call::QueryTasks(r) => self.query_tasks(&r).map(Answer::QueryTasks),
            Call::FetchTasks(r) => self.fetch_tasks(&r).map(Answer::FetchTasks),
            Call::EndTasks(r) => self.end_tasks(&r).map(Answer::EndTasks),
            Call::ClearReplicas(r) => self.clear_replicas(&r).map(Answer::ClearReplicas),
            Call::CreateDrainJobs(r) => {
                self.create_drain_jobs(&r, number).map(Answer::CreateDrainJobs)
            }
            Call::QueryDrainJobs(r) => self.query_drain_jobs(&r).map(Answer::QueryDrainJobs),
            Call::CancelDrainJobs(r) => self.cancel_drain_jobs(&r).map(Answer::CancelDrainJobs),
            Call::QueryQuotas(r) => self.query_quotas(&r).map(Answer::QueryQuotas),
            Call::SetQuotas(r) => self.set_quotas(&r).map(Answer::SetQuotas),
            _ => Err(Error::internal("a call is missing from the dispatch")),
        }
    }

    /// Runs all timers that are due. Returns the latest time of the next call, if a timer is set.
    pub fn advance(&self) -> Option<Moment> {
        let now = self.clock.now();
        // Changes wait for the log to catch up with a slow disk. Nobody waits for those made here:
        // they are written with the next call or the next sync.
        if self.journal.as_ref().is_some_and(Journal::is_behind) {
            return Some(now);
        }
        let mut state = self.lock();
        let due = state.advance(now);
        self.update_pending_owners(state.is_recovering(now));
        due
    }

    /// Returns the totals of the pool.
    pub fn totals(&self) -> Totals {
        self.lock().totals()
    }

    /// Returns how many clients have expired since the start.
    pub(crate) fn clients_expired(&self) -> u64 {
        self.lock().log().counters().clients_expired
    }

    /// Returns the id of the master, which is new at every start.
    pub fn identity(&self) -> &[u8; 16] {
        &self.identity
    }

    /// Returns the call counters per operation.
    pub fn op_metrics(&self) -> &OpMetrics {
        &self.op_metrics
    }

    /// Returns the log of slow calls.
    pub fn slow_log(&self) -> &SlowLog {
        &self.slow_log
    }

    /// Returns the counters of reads and of value sizes.
    pub fn traffic(&self) -> TrafficCount {
        self.traffic.count()
    }

    /// Returns the bound addresses, if the master listens at all.
    pub fn addresses(&self) -> Option<&Addresses> {
        self.addresses.get()
    }

    /// Returns the registered clients, sorted by name.
    pub fn clients(&self) -> Vec<ConnectedClient> {
        self.sessions.list(self.clock.now())
    }

    /// Returns the present time of the service's clock.
    pub fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Returns when the service was created.
    pub fn started(&self) -> Moment {
        self.started
    }

    /// Returns every segment in its wire form.
    pub fn segments(&self) -> Vec<v1::SegmentSummary> {
        let state = self.lock();
        let summary = |view: &crate::state::SegmentView<'_>| v1::SegmentSummary {
            segment: Some(segment_to_wire(view.spec)),
            client: Bytes::copy_from_slice(&view.client.to_bytes()),
            status: segment_status(view.status).into(),
            used: view.used,
        };
        state.list_segments().iter().map(summary).collect()
    }

    /// Returns the names of clients that expired since the last call: no heartbeat within their
    /// time to live.
    pub(crate) fn take_expired_clients(&self) -> Vec<String> {
        let expired = self.lock().take_expired();
        self.repeated_calls.forget(&expired);
        self.sessions.remove_expired(&expired)
    }

    /// Publishes object events through `events` from now on.
    pub(crate) fn set_events(&self, events: Arc<Events>) {
        // Called once, by `start`, before any client can connect.
        let _ = self.events.set(events);
        self.lock().log_mut().enable_events();
    }

    /// Sets the admission control, so that metrics can show it.
    pub(crate) fn set_admission(&self, admission: Admission) {
        // Called once, by `start`.
        let _ = self.admission.set(admission);
    }

    /// Returns the admission control, if the master listens at all.
    pub fn admission(&self) -> Option<&Admission> {
        self.admission.get()
    }

    /// Returns the event publisher, if there is one.
    pub fn events(&self) -> Option<&Arc<Events>> {
        self.events.get()
    }

    pub(crate) fn set_addresses(&self, addresses: Addresses) {
        // Called once, by `start`. An in-process service without listeners has no addresses.
        let _ = self.addresses.set(addresses);
    }

    /// Opens the session of a new connection.
    pub(crate) fn open_session(&self, is_local: bool) -> Origin {
        self.sessions.open(is_local)
    }

    /// Closes a session. The clients that have no other connection are suspect until they call
    /// again, unless the master closed the connection because it was idle.
    pub(crate) fn close_session(&self, origin: &Origin, end: ConnectionEnd) {
        let clients = self.sessions.close(origin);
        if clients.is_empty() || end == ConnectionEnd::Idle {
            return;
        }
        let now = self.clock.now();
        let mut state = self.lock();
        for client in clients {
            state.suspect(now, client);
            if end == ConnectionEnd::ByPeer {
                state.record_disconnect(client);
            }
            // A new connection may have been recorded before the state was locked.
            if self.sessions.is_connected(client) {
                state.heartbeat(now, client);
            }
        }
        self.await_owners(state.is_recovering(now));
    }

    fn register(&self, r: &v1::RegisterRequest, origin: &Origin) -> Result<v1::RegisterResponse> {
        self.op_metrics.count_one(Op::Register, || {
            let caller = Caller::try_from(r.caller.as_ref())?;
            check_name("name", &r.name)?;
            let now = self.clock.now();
            let has_lost = r.log_mark.as_ref().is_some_and(|heard| self.has_lost_log(heard));
            let (ttl, registration) = {
                let mut state = self.lock();
                if has_lost {
                    durability::drop_recovered(&mut state, now, &r.name);
                }
                state.register(now, caller.client, &r.name)?;
                state.set_wants_offload(caller.client, r.wants_offload);
                (state.rules().client_ttl, state.registration(caller.client))
            };
            self.sessions.register(caller.client, &r.name, origin, now);
            Ok(v1::RegisterResponse {
                heartbeat_interval_ms: millis(HEARTBEAT_MAX.min(ttl / HEARTBEATS_PER_TTL)).max(1),
                client_ttl_ms: millis(ttl),
                master: Bytes::copy_from_slice(&self.identity),
                version: VERSION.to_owned(),
                timeline_id: self.timeline_id(),
                registration,
                ignores_tenants: !self.is_multi_tenant,
            })
        })
    }

    fn heartbeat(&self, r: &v1::HeartbeatRequest) -> Result<v1::HeartbeatResponse> {
        self.op_metrics.count_one(Op::Heartbeat, || {
            let caller = Caller::try_from(r.caller.as_ref())?;
            let now = self.clock.now();
            let (is_known, has_tasks) = {
                let mut state = self.lock();
                let is_known = state.heartbeat(now, caller.client)
                    && [0, state.registration(caller.client)].contains(&r.registration);
                (is_known, state.tasks().has_tasks(now, caller.client))
            };
            self.sessions.record_heartbeat(caller.client, now);
            let master = Bytes::copy_from_slice(&self.identity);
            let timeline_id = self.timeline_id();
            let log_mark = self.log_mark();
            Ok(v1::HeartbeatResponse { is_known, master, timeline_id, has_tasks, log_mark })
        })
    }

    fn unregister(&self, r: &v1::UnregisterRequest) -> Result<v1::UnregisterResponse> {
        self.op_metrics.count_one(Op::Unregister, || {
            let caller = Caller::try_from(r.caller.as_ref())?;
            let now = self.clock.now();
            self.lock().unregister(now, caller.client);
            self.sessions.forget(caller.client);
            self.repeated_calls.forget(&[caller.client]);
            Ok(v1::UnregisterResponse {})
        })
    }

    fn mount(&self, r: v1::MountRequest) -> Result<v1::MountResponse> {
        check_batch(r.segments.len())?;
        let caller = Caller::try_from(r.caller.as_ref())?;
        let now = self.clock.now();
        let mut state = self.lock();
        state.check_sequence(caller.client, r.sequence)?;
        if r.is_all {
            let ids = r.segments.iter().filter_map(|segment| SegmentId::from_bytes(&segment.id));
            state.retain_segments(caller.client, &ids.collect::<Vec<_>>());
        }
        drop(state);
        let mut segments = r.segments.into_iter();
        let mut results = Vec::with_capacity(segments.len());
        let is_recovering = loop {
            let mut state = self.lock();
            let slice = segments.by_ref().take(MOUNT_SLICE);
            results.extend(self.op_metrics.count_each(
                Op::Mount,
                slice.map(|segment| {
                    // A later message may have been processed between two slices.
                    state.check_sequence(caller.client, r.sequence)?;
                    let spec = segment_from_wire(segment)?;
                    match r.resume {
                        true => state.resume(caller.client, &spec),
                        false => state.mount(now, caller.client, spec),
                    }
                }),
            ));
            let is_recovering = state.is_recovering(now);
            state.unlock_fair();
            if segments.len() == 0 {
                break is_recovering;
            }
        };
        self.update_pending_owners(is_recovering);
        Ok(v1::MountResponse { results })
    }

    fn unmount(&self, r: &v1::UnmountRequest) -> Result<v1::UnmountResponse> {
        check_batch(r.segments.len())?;
        let caller = Caller::try_from(r.caller.as_ref())?;
        let grace = Duration::from_millis(r.grace_period_ms);
        let now = self.clock.now();
        self.lock().check_sequence(caller.client, r.sequence)?;
        let mut results = Vec::with_capacity(r.segments.len());
        for slice in r.segments.chunks(UNMOUNT_SLICE) {
            let mut state = self.lock();
            results.extend(self.op_metrics.count_each(
                Op::Unmount,
                slice.iter().map(|id| {
                    state.check_sequence(caller.client, r.sequence)?;
                    let id = SegmentId::from_bytes(id).ok_or_else(|| {
                        Error::invalid("a segment id has 16 bytes").with("bytes", id.len())
                    })?;
                    state.unmount(now, caller.client, id, grace)
                }),
            ));
            state.unlock_fair();
        }
        Ok(v1::UnmountResponse { results })
    }

    fn list_segments(&self, _: &v1::ListSegmentsRequest) -> Result<v1::ListSegmentsResponse> {
        self.op_metrics.count_one(Op::ListSegments, || {
            Ok(v1::ListSegmentsResponse { segments: self.segments() })
        })
    }

    fn status(&self, _: &v1::StatusRequest) -> Result<v1::StatusResponse> {
        self.op_metrics.count_one(Op::Status, || {
            let totals = self.totals();
            let addresses = self.addresses.get();
            let text = |address: Option<std::net::SocketAddr>| {
                address.map(|address| address.to_string()).unwrap_or_default()
            };
            Ok(v1::StatusResponse {
                version: VERSION.to_owned(),
                master: Bytes::copy_from_slice(&self.identity),
                uptime_ms: millis(self.clock.now().since(self.started)),
                keys: totals.keys,
                clients: totals.clients,
                capacity: totals.capacity,
                used: totals.used,
                fenced: totals.fenced,
                rpc_address: text(addresses.map(|a| a.rpc)),
                admin_address: text(addresses.and_then(|a| a.admin)),
                metadata_address: text(addresses.and_then(|a| a.metadata)),
            })
        })
    }

    fn lock(&self) -> StateGuard<'_> {
        let (events, journal) = (self.events.get(), self.journal.as_ref());
        let mut state = self.state.lock();
        if let Some(journal) = journal {
            state.confirm_synced(journal.synced_position());
            state.confirm_durable(journal.durable_position());
        }
        StateGuard { state: Some(state), events, journal }
    }
}

/// The version of the master.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

fn check_batch(items: usize) -> Result<()> {
    if items <= BATCH_ITEMS_MAX {
        return Ok(());
    }
    Err(Error::invalid("the batch has too many items; split it")
        .with("items", items)
        .with("limit", BATCH_ITEMS_MAX))
}

fn check_name(what: &'static str, name: &str) -> Result<()> {
    if name.len() <= NAME_BYTES_MAX && !name.contains(|c: char| c.is_control()) {
        return Ok(());
    }
    Err(Error::invalid("a name is at most 1024 bytes without control characters")
        .with("which", what)
        .with("bytes", name.len()))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
