//! The calls about clients and the memory that they lend: register, heartbeat, unregister, mount,
//! unmount; and the connections that open and close.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use mooncake_base::{ClientId, Error, Moment, Result, SegmentId};
use mooncake_proto::{
    calls::Method,
    convert::Caller,
    v1::{self, request::Call},
};

use super::{
    Origin, VERSION, check_batch, check_name,
    client_log::ClientLog,
    connection::ConnectionEnd,
    millis,
    pending_owners::PendingOwners,
    session::{ConnectedClient, Sessions},
    shared_state::SharedState,
    wire::segment_from_wire,
};
use crate::state::{ExpiredClient, State};

/// The number of segments mounted before the lock on the state is released for other calls.
const MOUNT_SLICE: usize = 256;
/// The same for segments that are unmounted: each may hold much quarantined memory.
const UNMOUNT_SLICE: usize = 8;

/// The number of heartbeats within a client's time to live.
const HEARTBEATS_PER_TTL: u32 = 5;
/// The maximum heartbeat interval. It bounds how long a task waits for its client to fetch it.
const HEARTBEAT_MAX: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct ClientService {
    shared: Arc<SharedState>,
    sessions: Sessions,
    pending_owners: PendingOwners,
    log: ClientLog,
    client_ttl: Duration,
    heartbeat_interval: Duration,
}

impl ClientService {
    /// `is_recovering`: the log brought back segments, whose owners have not come back yet.
    pub(super) fn new(shared: Arc<SharedState>, is_recovering: bool) -> Self {
        let pending_owners = PendingOwners::new(is_recovering);
        let client_ttl = shared.lock().rules().client_ttl;
        Self {
            shared,
            sessions: Sessions::default(),
            pending_owners,
            log: ClientLog::default(),
            client_ttl,
            heartbeat_interval: HEARTBEAT_MAX.min(client_ttl / HEARTBEATS_PER_TTL),
        }
    }

    /// Opens the session of a new connection.
    pub(super) fn open_session(&self, is_local: bool) -> Origin {
        self.sessions.open(is_local)
    }

    /// Closes a session. The clients that have no other connection are suspect until they call
    /// again, unless the master closed the connection.
    pub(super) fn close_session(&self, origin: &Origin, end: ConnectionEnd) {
        let clients = self.sessions.close(origin);
        if clients.is_empty() || end == ConnectionEnd::ByMaster {
            return;
        }
        for &client in &clients {
            let client = self.sessions.name(client);
            tracing::info!(client, "a client lost its connection: its objects are hidden");
        }
        let now = self.shared.now();
        let mut state = self.shared.lock();
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
        self.pending_owners.add(state.is_recovering(now));
    }

    /// Records that a client calls, which shows that it lives: one that was suspect is alive again.
    pub(super) fn record_call(&self, call: Option<&Call>, origin: &Origin) {
        if !origin.has_session() {
            return;
        }
        let Some(caller) = call.and_then(Call::caller) else { return };
        let (shared, interval) = (&self.shared, self.heartbeat_interval);
        let Some(sign) = self.sessions.record_call(&caller.client, origin, shared.now(), interval)
        else {
            return;
        };
        if sign.is_reconnected {
            // It was suspect because its last connection had closed.
            let name = self.sessions.name(sign.client);
            tracing::info!(client = name, "a client has a connection again");
        }
        let now = shared.now();
        let mut state = shared.lock();
        state.heartbeat(now, sign.client);
        if sign.is_reconnected {
            self.pending_owners.wake(sign.client, state.is_recovering(now));
        }
    }

    /// Lets no client expire because of the time since `since`, in which the log kept the master from
    /// answering.
    pub(super) fn record_stall(&self, since: Moment) {
        self.shared.lock().clients().record_stall(since);
    }

    /// Returns the time without a heartbeat after which a client expires.
    pub(super) fn client_ttl(&self) -> Duration {
        self.client_ttl
    }

    /// Runs all timers that are due. Returns the latest time of the next call, if a timer is set.
    pub(super) fn advance(&self, now: Moment) -> Option<Moment> {
        let mut state = self.shared.lock();
        let due = state.advance(now);
        self.pending_owners.update(state.is_recovering(now));
        due
    }

    /// Waits for owners of the call's objects that may come back after a restart or a pause. Returns
    /// at once if there are none.
    ///
    /// Cancel-safe.
    pub(super) async fn wait_for_owners(&self, call: Option<&Call>) {
        self.pending_owners.wait_for(&self.shared, call).await;
    }

    /// Returns how many keys calls that wait for owners have looked at.
    #[cfg(test)]
    pub(super) fn looks(&self) -> u64 {
        self.pending_owners.looks()
    }

    /// Returns the registered clients, sorted by name.
    pub(super) fn list(&self) -> Vec<ConnectedClient> {
        self.sessions.list(self.shared.now())
    }

    /// Forgets clients that expired. Returns them with their names.
    pub(super) fn remove_expired(
        &self,
        expired: Vec<ExpiredClient>,
    ) -> Vec<(String, ExpiredClient)> {
        self.sessions.remove_expired(expired)
    }

    /// Counts and logs that a client was refused because of its token.
    pub(super) fn record_refusal(&self, error: &Error) {
        self.shared.refused_tokens().fetch_add(1, Ordering::Relaxed);
        self.log.refused(self.shared.now(), error);
    }

    /// Records that a connection ended for a newer one before its peer had shown that it may call.
    pub(super) fn record_displaced(&self) {
        self.log.displaced(self.shared.now());
    }

    /// Records that a client was refused because there are too many connections.
    pub(super) fn record_excess(&self) {
        self.log.too_many(self.shared.now());
    }

    pub(super) fn register(
        &self,
        r: &v1::RegisterRequest,
        origin: &Origin,
    ) -> Result<v1::RegisterResponse> {
        let shared = &self.shared;
        shared.op_metrics().count_one(Method::Register, || {
            let caller = Caller::try_from(r.caller.as_ref())?;
            check_name("name", &r.name)?;
            let now = shared.now();
            let has_lost = r.log_mark.as_ref().is_some_and(|heard| shared.has_lost_log(heard));
            let is_returning =
                r.log_mark.as_ref().is_some_and(|heard| shared.is_another_master(heard));
            let has_other_log =
                r.log_mark.as_ref().is_some_and(|heard| shared.has_other_log(heard));
            let (registration, is_new) = {
                let mut state = shared.lock();
                if has_lost {
                    drop_recovered(&mut state, now, &r.name);
                }
                let before = state.registration(caller.client);
                state.register(now, caller.client, &r.name)?;
                state.set_wants_offload(caller.client, r.wants_offload);
                if is_returning {
                    state.clients().record_returning_client(now);
                    self.pending_owners.add(state.is_recovering(now));
                }
                let registration = state.registration(caller.client);
                (registration, before != registration)
            };
            self.sessions.register(caller.client, &r.name, origin, now);
            tracing::info!(client = r.name, is_new, version = r.version, "a client registered");
            if has_other_log && is_new {
                self.log.other_log(now, &r.name);
            }
            Ok(v1::RegisterResponse {
                heartbeat_interval_ms: millis(self.heartbeat_interval).max(1),
                client_ttl_ms: millis(self.client_ttl),
                master: Bytes::copy_from_slice(shared.identity()),
                version: VERSION.to_owned(),
                timeline_id: shared.timeline_id(),
                registration,
                ignores_tenants: !shared.is_multi_tenant(),
            })
        })
    }

    pub(super) fn heartbeat(&self, r: &v1::HeartbeatRequest) -> Result<v1::HeartbeatResponse> {
        let shared = &self.shared;
        shared.op_metrics().count_one(Method::Heartbeat, || {
            let caller = Caller::try_from(r.caller.as_ref())?;
            let now = shared.now();
            let (is_known, has_tasks) = {
                let mut state = shared.lock();
                let is_known = state.heartbeat(now, caller.client)
                    && [0, state.registration(caller.client)].contains(&r.registration);
                (is_known, state.tasks().has_tasks(now, caller.client))
            };
            self.sessions.record_heartbeat(caller.client, now);
            let master = Bytes::copy_from_slice(shared.identity());
            let timeline_id = shared.timeline_id();
            let log_mark = shared.log_mark();
            Ok(v1::HeartbeatResponse { is_known, master, timeline_id, has_tasks, log_mark })
        })
    }

    /// Unregisters the caller. Returns its id.
    pub(super) fn unregister(&self, r: &v1::UnregisterRequest) -> Result<ClientId> {
        self.shared.op_metrics().count_one(Method::Unregister, || {
            let Caller { client, .. } = Caller::try_from(r.caller.as_ref())?;
            self.shared.lock().unregister(self.shared.now(), client);
            if let Some(name) = self.sessions.forget(client) {
                tracing::info!(client = name, "a client left");
            }
            Ok(client)
        })
    }

    pub(super) fn mount(&self, r: v1::MountRequest) -> Result<v1::MountResponse> {
        check_batch(r.segments.len())?;
        let shared = &self.shared;
        let caller = Caller::try_from(r.caller.as_ref())?;
        let now = shared.now();
        // Log lines are written while the state is not locked: nobody waits for the log's reader.
        tracing::info!(
            client = self.sessions.name(caller.client),
            segments = r.segments.len(),
            bytes = r.segments.iter().fold(0, |sum: u64, it| sum.saturating_add(it.length)),
            is_resumed = r.resume,
            "a client mounts memory"
        );
        let mut state = shared.lock();
        state.check_sequence(caller.client, r.sequence)?;
        if r.is_all {
            let ids = r.segments.iter().filter_map(|segment| SegmentId::from_bytes(&segment.id));
            state.retain_segments(caller.client, &ids.collect::<Vec<_>>());
        }
        drop(state);
        let mut segments = r.segments.into_iter();
        let mut results = Vec::with_capacity(segments.len());
        let is_recovering = loop {
            let mut state = shared.lock();
            let slice = segments.by_ref().take(MOUNT_SLICE);
            results.extend(shared.op_metrics().count_each(
                Method::Mount,
                slice.map(|segment| {
                    // A later message may have been processed between two slices.
                    state.check_sequence(caller.client, r.sequence)?;
                    let spec = segment_from_wire(segment)?;
                    if r.resume {
                        state.resume(caller.client, &spec)
                    } else {
                        state.mount(now, caller.client, spec)
                    }
                }),
            ));
            let is_recovering = state.is_recovering(now);
            state.unlock_fair();
            if segments.len() == 0 {
                break is_recovering;
            }
        };
        self.pending_owners.wake(caller.client, is_recovering);
        Ok(v1::MountResponse { results })
    }

    pub(super) fn unmount(&self, r: &v1::UnmountRequest) -> Result<v1::UnmountResponse> {
        check_batch(r.segments.len())?;
        let shared = &self.shared;
        let caller = Caller::try_from(r.caller.as_ref())?;
        let grace = Duration::from_millis(r.grace_period_ms);
        let now = shared.now();
        let client = self.sessions.name(caller.client);
        tracing::info!(client, segments = r.segments.len(), ?grace, "a client unmounts memory");
        shared.lock().check_sequence(caller.client, r.sequence)?;
        let mut results = Vec::with_capacity(r.segments.len());
        for slice in r.segments.chunks(UNMOUNT_SLICE) {
            let mut state = shared.lock();
            results.extend(shared.op_metrics().count_each(
                Method::Unmount,
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
}

/// Drops what the log brought back, after `client` has shown that the log lost its end.
fn drop_recovered(state: &mut State, now: Moment, client: &str) {
    let segments = state.drop_recovered(now);
    if segments > 0 {
        tracing::error!(
            client,
            segments,
            "the log lost changes that were on disk: the disk does not keep what it confirms, or \
             the state directory is an older copy; all recovered objects are dropped"
        );
    }
}
