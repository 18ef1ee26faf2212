//! The RPC calls: one dispatch function for every protocol, and the connected clients.
//!
//! [`Service::dispatch`] is synchronous and short. It passes each call to the part that answers it:
//! `objects`, `clients`, `tasks` or `quotas`. A part converts wire types into checked types, locks
//! the `shared_state` for one slice of items at a time, and converts the result back. The protocol
//! front ends ([`listen`]: sniffing, `native`, `grpc`) only move bytes.

mod admission;
pub mod call_times;
mod client_log;
mod clients;
pub mod connection;
pub mod dedicated_thread;
mod disk_progress;
mod disks;
mod durability;
mod encoding;
pub(crate) mod grpc;
#[cfg(any(test, feature = "test-util"))]
mod guarded_state;
mod leadership;
pub mod listen;
mod native;
mod objects;
pub mod op_metrics;
mod pending_owners;
mod quotas;
mod repeated_calls;
mod reply_size;
mod session;
mod shared_state;
pub mod slow_log;
mod state_guard;
mod tasks;
mod traffic;
pub mod unproven;
mod wire;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use mooncake_base::{Clock, Error, Moment, Result, SegmentId};
use mooncake_proto::{
    calls::Method,
    v1::{self, request, response},
};

#[cfg(any(test, feature = "test-util"))]
pub use self::guarded_state::{GuardedState, Slice};
pub(crate) use self::leadership::Leadership;
pub use self::{
    admission::Admission,
    disks::DiskSummary,
    durability::AnsweringThread,
    session::{ConnectedClient, Origin},
    tasks::WorkSummary,
    traffic::{SIZE_BOUNDS, TrafficCount},
};
use self::{
    call_times::CallTimes,
    clients::ClientService,
    connection::ConnectionEnd,
    disks::DiskService,
    durability::{Executed, NO_POSITION},
    objects::ObjectService,
    op_metrics::OpMetrics,
    quotas::QuotaService,
    repeated_calls::RepeatedCalls,
    shared_state::SharedState,
    slow_log::{PendingCall, SlowLog},
    tasks::TaskService,
    wire::{segment_status, segment_to_wire},
};
use crate::{
    addresses::Addresses,
    events::Events,
    journal::Journal,
    state::{
        DiskView, ExpiredClient, MemoryUse, ObjectView, Rules, SegmentView, State, TenantQuota,
        Totals,
    },
};

/// The maximum number of items in one call. The reply for that many items fits one frame.
pub const BATCH_ITEMS_MAX: usize = mooncake_proto::decode_limits::ITEMS_MAX;

/// The number of items handled before the lock on the state is released for other calls.
const SLICE_ITEMS: usize = 1024;

/// The number of steps of the state after which the lock is released for other calls, before the
/// slice has that many items; about a millisecond.
const STEPS_PER_SLICE: u64 = 4096;

/// The maximum length of the name, endpoint or protocol of a client or segment.
const NAME_BYTES_MAX: usize = 1024;

/// The RPC service of the master, shared by all protocols.
#[derive(Debug)]
pub struct Service {
    started: Moment,
    shared: Arc<SharedState>,
    clients: ClientService,
    objects: Arc<ObjectService>,
    tasks: TaskService,
    disks: DiskService,
    quotas: QuotaService,
    repeated_calls: RepeatedCalls,
    slow_log: SlowLog,
    call_times: CallTimes,
    addresses: OnceLock<Addresses>,
    admission: OnceLock<Admission>,
}

impl Service {
    /// Creates a service over an empty pool.
    pub fn new(rules: Rules, clock: Arc<dyn Clock>) -> Self {
        // The seed need not be secret. It only has to differ between starts.
        let (seed, _) = SegmentId::random().halves();
        Self::with_state(State::new(rules, seed), clock, None, false)
    }

    fn with_state(
        state: State,
        clock: Arc<dyn Clock>,
        journal: Option<Journal>,
        is_recovering: bool,
    ) -> Self {
        let shared = Arc::new(SharedState::new(state, clock, journal));
        Self {
            started: shared.now(),
            clients: ClientService::new(shared.clone(), is_recovering),
            objects: Arc::new(ObjectService::new(shared.clone())),
            tasks: TaskService::new(shared.clone()),
            disks: DiskService::new(shared.clone()),
            quotas: QuotaService::new(shared.clone()),
            shared,
            repeated_calls: RepeatedCalls::default(),
            slow_log: SlowLog::default(),
            call_times: CallTimes::default(),
            addresses: OnceLock::new(),
            admission: OnceLock::new(),
        }
    }

    /// Executes one call. Errors are per item where there are items; otherwise the response is a
    /// failure. If there is a log, all changes are in the log before this returns. Like
    /// [`answer`](Self::answer), waits for objects that are to be written to a disk, as long as the
    /// call says; does not wait for owners that have not come back after a restart.
    pub fn dispatch(&self, request: v1::Request, origin: &Origin) -> v1::Response {
        self.record_arrival(request.call.as_ref(), origin);
        let executed = match (&request.call, self.shared.fatal().get()) {
            (Some(request::Call::FetchOffloads(r)), None) => {
                let (answer, position) = self.disks.fetch_offloads_in_thread(r);
                let response = self.end_call(None, answer.map(response::Call::FetchOffloads));
                Executed { response, position }
            }
            _ => self.execute_logged(request, origin),
        };
        let log = self.shared.journal();
        let outcome = log.map_or_else(|| Ok(()), |log| log.wait_durable(executed.position));
        self.finished(executed.response, outcome)
    }

    /// Executes one call.
    fn execute_logged(&self, request: v1::Request, origin: &Origin) -> Executed {
        if let Some(error) = self.shared.fatal().refusal() {
            return durability::refusal(&error).into();
        }
        let starts_unlogged =
            self.shared.journal().is_some_and(|log| log.answerable_position().is_some());
        let waits = |call| durability::waits_for_log(call, starts_unlogged);
        let waits = request.call.as_ref().is_some_and(waits);
        let execute = |request| {
            let (response, position) =
                durability::with_log_position(|| Ok(self.execute(request, origin)));
            let response = response.unwrap_or_else(|error| durability::refusal(&error));
            Executed { response, position: if waits { position } else { NO_POSITION } }
        };
        match request.call_number {
            0 => execute(request),
            _ => self.repeated_calls.execute_once(request, execute),
        }
    }

    fn execute(&self, request: v1::Request, origin: &Origin) -> v1::Response {
        let pending = self.begin_call(&request);
        let none = || Error::invalid("the request has no call known to this master");
        let call = request.call.ok_or_else(none);
        let answer = call.and_then(|call| self.execute_call(call, request.call_number, origin));
        self.end_call(pending, answer)
    }

    fn execute_call(
        &self,
        call: request::Call,
        number: u64,
        origin: &Origin,
    ) -> Result<response::Call> {
        use request::Call;
        use response::Call as Answer;
        let Self { clients, objects, tasks, disks, quotas, .. } = self;
        match call {
            Call::Register(r) => clients.register(&r, origin).map(Answer::Register),
            Call::Heartbeat(r) => clients.heartbeat(&r).map(Answer::Heartbeat),
            Call::Unregister(r) => self.unregister(&r).map(Answer::Unregister),
            Call::Mount(r) => clients.mount(r).map(Answer::Mount),
            Call::Unmount(r) => clients.unmount(&r).map(Answer::Unmount),
            Call::PutStart(r) => objects.put_start(r).map(Answer::PutStart),
            Call::PutRenew(r) => objects.put_renew(&r).map(Answer::PutRenew),
            Call::PutEnd(r) => objects.put_end(&r).map(Answer::PutEnd),
            Call::PutRevoke(r) => objects.put_revoke(&r).map(Answer::PutRevoke),
            Call::Locate(r) => objects.locate(&r).map(Answer::Locate),
            Call::Verify(r) => objects.verify(&r).map(Answer::Verify),
            Call::Probe(r) => objects.probe(&r).map(Answer::Probe),
            Call::Describe(r) => objects.describe(&r).map(Answer::Describe),
            Call::SetExpiry(r) => objects.set_expiry(&r).map(Answer::SetExpiry),
            Call::Remove(r) => objects.remove(&r).map(Answer::Remove),
            Call::RemoveMatching(r) => objects.remove_matching(&r).map(Answer::RemoveMatching),
            Call::ListObjects(r) => objects.list_objects(&r).map(Answer::ListObjects),
            Call::ListSegments(_) => Ok(Answer::ListSegments(self.list_segments())),
            Call::Status(_) => Ok(Answer::Status(self.status())),
            Call::CreateTasks(r) => tasks.create_tasks(&r, number).map(Answer::CreateTasks),
            Call::QueryTasks(r) => tasks.query_tasks(&r).map(Answer::QueryTasks),
            Call::FetchTasks(r) => tasks.fetch_tasks(&r).map(Answer::FetchTasks),
            Call::EndTasks(r) => tasks.end_tasks(&r).map(Answer::EndTasks),
            Call::ClearReplicas(r) => tasks.clear_replicas(&r).map(Answer::ClearReplicas),
            Call::MountDisk(r) => disks.mount_disk(&r).map(Answer::MountDisk),
            Call::UnmountDisk(r) => disks.unmount_disk(&r).map(Answer::UnmountDisk),
            Call::FetchOffloads(r) => disks.fetch_offloads(&r).map(Answer::FetchOffloads),
            Call::ReportRecords(r) => disks.report_records(&r).map(Answer::ReportRecords),
            Call::CreateDrainJobs(r) => {
                tasks.create_drain_jobs(&r, number).map(Answer::CreateDrainJobs)
            }
            Call::QueryDrainJobs(r) => tasks.query_drain_jobs(&r).map(Answer::QueryDrainJobs),
            Call::CancelDrainJobs(r) => tasks.cancel_drain_jobs(&r).map(Answer::CancelDrainJobs),
            Call::QueryQuotas(r) => quotas.query_quotas(&r).map(Answer::QueryQuotas),
            Call::SetQuotas(r) => quotas.set_quotas(&r).map(Answer::SetQuotas),
        }
    }

    /// Does what precedes every call: the fences that it returns are released, and its time is taken.
    fn begin_call(&self, request: &v1::Request) -> Option<PendingCall> {
        if !request.released_fences.is_empty() {
            self.objects.release_fences(&request.released_fences);
        }
        self.slow_log.begin(request.call.as_ref())
    }

    fn end_call(
        &self,
        pending: Option<PendingCall>,
        answer: Result<response::Call>,
    ) -> v1::Response {
        let mut call = answer.unwrap_or_else(|error| response::Call::Failure((&error).into()));
        reply_size::shorten(&mut call);
        if let Some(pending) = pending {
            let took = pending.began.elapsed();
            self.call_times.record(pending.method, took);
            self.slow_log.end(pending, took, &call);
        }
        v1::Response { call: Some(call), ..v1::Response::default() }
    }

    fn unregister(&self, r: &v1::UnregisterRequest) -> Result<v1::UnregisterResponse> {
        let client = self.clients.unregister(r)?;
        self.repeated_calls.forget(&[client]);
        Ok(v1::UnregisterResponse {})
    }

    fn list_segments(&self) -> v1::ListSegmentsResponse {
        self.op_metrics().count_batch(Method::ListSegments, 1, 0);
        v1::ListSegmentsResponse { segments: self.segments() }
    }

    fn status(&self) -> v1::StatusResponse {
        self.op_metrics().count_batch(Method::Status, 1, 0);
        let totals = self.totals();
        let addresses = self.addresses.get();
        let text = |address: Option<std::net::SocketAddr>| {
            address.map(|address| address.to_string()).unwrap_or_default()
        };
        v1::StatusResponse {
            version: VERSION.to_owned(),
            master: Bytes::copy_from_slice(self.identity()),
            uptime_ms: millis(self.now().since(self.started)),
            keys: totals.keys,
            clients: totals.clients,
            capacity: totals.capacity,
            used: totals.used,
            fenced: totals.fenced,
            rpc_address: text(addresses.map(|a| a.rpc)),
            admin_address: text(addresses.and_then(|a| a.admin)),
            metadata_address: text(addresses.and_then(|a| a.metadata)),
        }
    }

    /// Waits while the first execution of a repeated call runs, and for owners of the call's objects
    /// that may come back after a restart or a pause.
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// `RPC_TIMEOUT`: the first execution takes too long.
    pub(crate) async fn wait_before(&self, request: &v1::Request, origin: &Origin) -> Result<()> {
        self.record_arrival(request.call.as_ref(), origin);
        self.repeated_calls.wait_for_first(request).await?;
        self.wait_for_owners(request.call.as_ref()).await;
        Ok(())
    }

    /// Records that a client calls: once for each call, before the call waits for anything.
    pub(crate) fn record_arrival(&self, call: Option<&request::Call>, origin: &Origin) {
        self.clients.record_call(call, origin);
    }

    /// Waits for owners of the call's objects that may come back after a restart or a pause.
    ///
    /// Cancel-safe.
    pub(crate) async fn wait_for_owners(&self, call: Option<&request::Call>) {
        self.clients.wait_for_owners(call).await;
    }

    /// Applies the quotas of the file, and writes later changes back to it.
    ///
    /// # Errors
    /// The file cannot be read or parsed, or a quota is invalid.
    pub fn load_quota_file(&self, path: &str) -> Result<()> {
        self.quotas.load_file(path)
    }

    /// Writes the quotas of the log to the file, and later changes, too.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write_quota_file(&self, path: &str) -> Result<()> {
        self.quotas.write_file(path)
    }

    /// Runs all timers that are due. Returns the latest time of the next call, if a timer is set.
    pub fn advance(&self) -> Option<Moment> {
        let now = self.now();
        if self.shared.fatal().is_raised() {
            return None;
        }
        // Changes wait for the log to catch up with a slow disk. Nobody waits for those made here:
        // they are written with the next call or the next sync.
        if self.shared.journal().is_some_and(Journal::is_behind) || self.is_stalled(now) {
            return Some(now);
        }
        self.clients.advance(now)
    }

    /// Returns whether calls have waited for the log for so long that clients may seem dead which
    /// wait for the master. Their time stands still until the log goes on.
    fn is_stalled(&self, now: Moment) -> bool {
        let waiting = self.shared.journal().and_then(|journal| journal.waiting_since(now));
        let Some(since) = waiting else { return false };
        let is_stalled = (since + self.clients.client_ttl() / 2).has_passed(now);
        if is_stalled {
            self.clients.record_stall(since);
        }
        is_stalled
    }

    /// Returns the clients that expired since the last call, by name: no heartbeat within their
    /// time to live.
    pub(crate) fn take_expired_clients(&self) -> Vec<(String, ExpiredClient)> {
        let expired = self.shared.lock().take_expired();
        let ids: Vec<_> = expired.iter().map(|client| client.id).collect();
        if ids.is_empty() {
            return Vec::new();
        }
        self.repeated_calls.forget(&ids);
        self.clients.remove_expired(expired)
    }

    /// Records that a client was refused because of its token.
    pub(crate) fn record_refusal(&self, error: &Error) {
        self.clients.record_refusal(error);
    }

    /// Records that a connection ended for a newer one before its peer had shown that it may call.
    pub(crate) fn record_displaced(&self) {
        self.clients.record_displaced();
    }

    /// Records that a client was refused because there are too many connections.
    pub(crate) fn record_excess(&self) {
        self.clients.record_excess();
    }

    /// Opens the session of a new connection.
    pub(crate) fn open_session(&self, is_local: bool) -> Origin {
        self.clients.open_session(is_local)
    }

    /// Closes a session. The clients that have no other connection are suspect until they call
    /// again, unless the master closed the connection.
    pub(crate) fn close_session(&self, origin: &Origin, end: ConnectionEnd) {
        if !self.shared.fatal().is_raised() {
            self.clients.close_session(origin, end);
        }
    }

    /// Publishes object events through `events` from now on.
    pub(crate) fn set_events(&self, events: Arc<Events>) {
        // Called once, by `start`, before any client can connect.
        self.shared.set_events(events);
    }

    /// Sets the admission control, so that metrics can show it.
    pub(crate) fn set_admission(&self, admission: Admission) {
        // Called once, by `start`.
        let _ = self.admission.set(admission);
    }

    pub(crate) fn set_addresses(&self, addresses: Addresses) {
        // Called once, by `start`. An in-process service without listeners has no addresses.
        let _ = self.addresses.set(addresses);
    }
}

/// What metrics and pages show.
impl Service {
    /// Returns the id of the master, which is new at every start.
    pub fn identity(&self) -> &[u8; 16] {
        self.shared.identity()
    }

    /// Returns the present time of the service's clock.
    pub fn now(&self) -> Moment {
        self.shared.now()
    }

    /// Returns when the service was created.
    pub fn started(&self) -> Moment {
        self.started
    }

    /// Returns the bound addresses, if the master listens at all.
    pub fn addresses(&self) -> Option<&Addresses> {
        self.addresses.get()
    }

    /// Returns the totals of the pool.
    pub fn totals(&self) -> Totals {
        self.shared.lock().totals()
    }

    /// Returns every segment in its wire form.
    pub fn segments(&self) -> Vec<v1::SegmentSummary> {
        let summary = |view: SegmentView<'_>| v1::SegmentSummary {
            segment: Some(segment_to_wire(view.spec)),
            client: Bytes::copy_from_slice(&view.client.to_bytes()),
            status: segment_status(view.status).into(),
            used: view.used,
            is_lost: view.is_suspect,
        };
        let mut segments: Vec<v1::SegmentSummary> = Vec::new();
        for from in (0..).step_by(SLICE_ITEMS) {
            let mut state = self.shared.lock();
            let (slice, has_more) = state.clients().segments_in(from, SLICE_ITEMS);
            segments.extend(slice.map(summary));
            if !has_more {
                break;
            }
            state.unlock_fair();
        }
        fn order(summary: &v1::SegmentSummary) -> Option<(&str, &[u8])> {
            summary.segment.as_ref().map(|segment| (segment.name.as_str(), &segment.id[..]))
        }
        segments.sort_by(|a, b| order(a).cmp(&order(b)));
        // A segment that was mounted again between two slices may be found in two slots.
        segments.dedup_by(|a, b| order(a) == order(b));
        segments
    }

    /// Returns every disk, sorted by name.
    pub fn disks(&self) -> Vec<DiskSummary> {
        let summary = |view: DiskView<'_>| DiskSummary {
            spec: view.spec.clone(),
            client: view.client,
            used: view.used,
            objects: view.objects,
            waiting: view.waiting,
            is_readable: view.is_readable,
        };
        self.shared.lock().disks().list().into_iter().map(summary).collect()
    }

    /// Returns the registered clients, sorted by name.
    pub fn clients(&self) -> Vec<ConnectedClient> {
        self.clients.list()
    }

    /// Returns the copies, moves and drains, with at most `tasks_max` tasks.
    pub fn work(&self, tasks_max: usize) -> WorkSummary {
        self.tasks.work(tasks_max)
    }

    /// Returns whether each tenant has its own keys and quota.
    pub fn is_multi_tenant(&self) -> bool {
        self.shared.is_multi_tenant()
    }

    /// Returns the quota of every tenant; empty without multi-tenancy.
    pub fn quotas(&self) -> Vec<TenantQuota> {
        self.quotas.list()
    }

    /// Walks over one slice of the complete objects, in no particular order, and passes key and
    /// length to `visit`. Returns the position to resume from, if there is more. An object that
    /// exists during the whole walk is visited once.
    pub(crate) fn walk(&self, from: u32, visit: &mut dyn FnMut(&[u8], u64)) -> Option<u32> {
        self.shared.lock().walk(self.shared.default_tenant(), from, visit)
    }

    /// Returns an object with its copies, leases and pins. Grants no lease.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `INVALID_PARAMS`: the name of the tenant is invalid.
    pub(crate) fn view_object(&self, tenant: &str, key: &[u8]) -> Result<ObjectView> {
        let caller = v1::Caller { tenant: tenant.to_owned(), ..Default::default() };
        let tenant = self.shared.tenant(Some(&caller))?;
        self.shared.lock().view_object(self.now(), &tenant, key)
    }

    /// Returns the bytes of the pool by the reason that holds them.
    pub(crate) fn memory_use(&self) -> MemoryUse {
        self.shared.lock().memory_use(self.now())
    }

    /// Returns the call counters per operation.
    pub fn op_metrics(&self) -> &OpMetrics {
        self.shared.op_metrics()
    }

    /// Returns the counters of reads and of value sizes.
    pub fn traffic(&self) -> TrafficCount {
        self.objects.traffic()
    }

    /// Returns the durations of calls.
    pub fn call_times(&self) -> &CallTimes {
        &self.call_times
    }

    /// Returns the log of slow calls.
    pub fn slow_log(&self) -> &SlowLog {
        &self.slow_log
    }

    /// Returns the admission control, if the master listens at all.
    pub fn admission(&self) -> Option<&Admission> {
        self.admission.get()
    }

    /// Returns the event publisher, if there is one.
    pub fn events(&self) -> Option<&Arc<Events>> {
        self.shared.events()
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
