//! The service and its log: recovery from the log, waiting for durability, and waiting for owners
//! that come back after a restart.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::MutexGuard;
use mooncake_base::{Clock, Error, Moment, SegmentId, TenantId};
use mooncake_proto::v1::{self, request::Call, response};
use tokio::{sync::Notify, time::timeout};

use super::{Origin, Service, admission, state_guard};
use crate::{
    journal::{Journal, JournalStatus, RecoveredJournal, StateOwner},
    state::{RecoveryScope, Restored, Rules, State},
};

/// How often a waiting call checks again whether it still has to wait, even without a notification.
const RECHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Owners of recovered segments, and clients that hung up during a pause, that have not come back
/// yet.
#[derive(Debug, Default)]
pub(super) struct PendingOwners {
    is_any_pending: AtomicBool,
    changed: Notify,
}

/// The thread on which a call is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnsweringThread {
    /// A thread of the runtime, which must not wait for the disk.
    Runtime,
    /// The dedicated thread of a connection.
    Dedicated,
}

impl Service {
    /// Creates a service over the state recovered from the log. All recovered segments are
    /// unclaimed until their owners announce them.
    pub(crate) fn from_log(
        rules: Rules,
        clock: Arc<dyn Clock>,
        recovered: RecoveredJournal,
    ) -> (Self, Restored) {
        let (seed, _) = SegmentId::random().halves();
        // Writers that got memory through changes missing from the log may continue writing for
        // this long.
        let quiet = if recovered.may_lack_end { rules.write_end() } else { Duration::ZERO };
        let (state, restored) = State::restore(rules, seed, clock.now(), recovered.image, quiet);
        let mut service = Self::with_state(state, clock);
        service.pending_owners.is_any_pending = AtomicBool::new(restored.segments > 0);
        service.journal = Some(recovered.journal);
        // Dropping the guard logs the objects that were dropped because of conflicts, before
        // anything else.
        drop(service.lock());
        (service, restored)
    }

    /// Executes one call as [`dispatch`](Self::dispatch) does, without blocking the runtime on a
    /// slow disk. A large call runs on its own thread, because a blocked runtime thread blocks all
    /// connections that wait for the thread. `permit` is dropped when the call has been executed,
    /// before the wait for the log: a disk that hangs takes no permit from calls that need no disk.
    ///
    /// Not cancel-safe: if the future is dropped, the call may or may not have been executed.
    pub async fn answer(
        self: &Arc<Self>,
        request: v1::Request,
        origin: &Origin,
        permit: impl Sized,
        thread: AnsweringThread,
    ) -> v1::Response {
        let (response, position) = if request.call.as_ref().is_some_and(admission::is_large) {
            let (service, origin) = (Arc::clone(self), origin.clone());
            let executed =
                tokio::task::spawn_blocking(move || service.execute_logged(request, &origin)).await;
            executed.unwrap_or_else(|source| {
                let error = Error::internal("the call panicked").caused_by(source);
                (v1::Response { call: Some(response::Call::Failure((&error).into())) }, 0)
            })
        } else if matches!(request.call, Some(Call::PutStart(_))) {
            self.answer_put_start(request).await
        } else {
            self.execute_logged(request, origin)
        };
        drop(permit);
        match (&self.journal, thread) {
            (None, _) => {}
            (Some(journal), AnsweringThread::Runtime) => journal.durable(position).await,
            // Writes the log itself, which is faster than to wake another thread for it.
            (Some(journal), AnsweringThread::Dedicated) => journal.wait_durable(position),
        }
        response
    }

    /// Returns the status of the log; `None` without a log.
    pub fn journal_status(&self) -> Option<JournalStatus> {
        self.journal.as_ref().map(Journal::status)
    }

    pub(crate) fn set_recovery_time(&self, time: Duration) {
        if let Some(journal) = &self.journal {
            journal.set_recovery_time(time);
        }
    }

    pub(crate) fn has_journal(&self) -> bool {
        self.journal.is_some()
    }

    /// Returns the timeline id under which a restart would resume; empty without a healthy log.
    pub(super) fn timeline_id(&self) -> bytes::Bytes {
        let timeline_id = self.journal.as_ref().and_then(Journal::timeline_id);
        timeline_id
            .map(|timeline_id| bytes::Bytes::copy_from_slice(&timeline_id))
            .unwrap_or_default()
    }

    /// Waits until the log is durable up to `position`.
    pub(super) fn wait_durable(&self, position: u64) {
        if let Some(journal) = &self.journal {
            journal.wait_durable(position);
        }
    }

    /// Waits for the log if much is queued, so that a sweep over many objects cannot fill memory
    /// while the disk is slow.
    pub(super) fn wait_if_behind(&self) {
        if let Some(journal) = self.journal.as_ref().filter(|journal| journal.is_behind()) {
            journal.wait_durable(state_guard::log_position());
        }
    }

    /// Returns how much of the log is on disk, for clients to report to a later master.
    pub(super) fn log_mark(&self) -> Option<v1::LogMark> {
        let (timeline_id, synced_frame) = self.journal.as_ref()?.synced()?;
        let (master, timeline) = (first_bytes(self.identity), first_bytes(timeline_id));
        Some(v1::LogMark { master, timeline, synced_frame })
    }

    /// Returns whether an earlier master of this timeline had more of the log on disk than was
    /// recovered: the disk lost it, or an older copy of the files was put in place.
    pub(super) fn has_lost_log(&self, heard: &v1::LogMark) -> bool {
        let Some(journal) = &self.journal else { return false };
        heard.master != first_bytes(self.identity)
            && heard.synced_frame > journal.recovered_end()
            && journal.timeline_id().is_some_and(|id| first_bytes(id) == heard.timeline)
    }

    /// Notifies waiting calls that segments were announced or given up.
    pub(super) fn update_pending_owners(&self, is_recovering: bool) {
        if self.pending_owners.is_any_pending.load(Ordering::Relaxed) {
            self.pending_owners.is_any_pending.store(is_recovering, Ordering::Relaxed);
            self.pending_owners.changed.notify_waiters();
        }
    }

    /// Lets calls wait for clients that hung up while the master made a pause.
    pub(super) fn await_owners(&self, is_recovering: bool) {
        self.pending_owners.is_any_pending.fetch_or(is_recovering, Ordering::Relaxed);
    }

    /// Waits for owners of the call's objects that may come back after a restart or a pause. Returns
    /// at once if there are none.
    ///
    /// Cancel-safe.
    pub(super) async fn wait_for_owners(&self, call: Option<&Call>) {
        if self.pending_owners.is_any_pending.load(Ordering::Relaxed) {
            self.wait_for_key_owners(call).await;
        }
    }

    async fn wait_for_key_owners(&self, call: Option<&Call>) {
        let caller = match call {
            Some(Call::Locate(r)) => r.caller.as_ref(),
            Some(Call::Probe(r)) => r.caller.as_ref(),
            Some(Call::Remove(r)) => r.caller.as_ref(),
            Some(Call::Verify(r)) => r.caller.as_ref(),
            Some(Call::PutStart(r)) => r.caller.as_ref(),
            _ => None,
        };
        // A call with an invalid tenant will be refused, which needs no waiting.
        let Ok(tenant) = self.tenant(caller) else { return };
        // The same holds for a call whose columns do not match.
        let in_either_form = match call {
            Some(Call::Locate(r)) => r.keys(),
            Some(Call::PutStart(r)) => r.keys(),
            _ => Ok(Vec::new()),
        };
        let Ok(in_either_form) = in_either_form else { return };
        let keys: Vec<&[u8]> = match call {
            Some(Call::Probe(r)) => r.keys.iter().map(|key| &key[..]).collect(),
            Some(Call::Remove(r)) => r.keys.iter().map(|key| &key[..]).collect(),
            Some(Call::Verify(r)) => r.reads.iter().map(|read| &read.key[..]).collect(),
            Some(Call::Locate(_) | Call::PutStart(_)) => in_either_form,
            Some(Call::ListObjects(_) | Call::RemoveMatching(_)) => Vec::new(),
            _ => return,
        };
        let is_put = matches!(call, Some(Call::PutStart(_)));
        loop {
            let changed = self.pending_owners.changed.notified();
            let Some(until) = self.awaits(&tenant, &keys, is_put) else { return };
            let left = until.left(self.clock.now()).min(RECHECK_INTERVAL);
            // With or without a notification, the loop checks again.
            let _ = timeout(left, changed).await;
        }
    }

    fn awaits(&self, tenant: &TenantId, keys: &[&[u8]], is_put: bool) -> Option<Moment> {
        let now = self.clock.now();
        let state = self.lock();
        let by_key = match keys {
            [] => state.recovery_wait(now, &RecoveryScope::All),
            keys => state.recovery_wait(now, &RecoveryScope::Keys(tenant, keys)),
        };
        let by_room = || state.recovery_wait(now, &RecoveryScope::Space);
        by_key.or_else(|| is_put.then(by_room).flatten())
    }
}

impl StateOwner for Service {
    fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    fn lock_state(&self) -> MutexGuard<'_, State> {
        // All earlier changes are appended already: each guard appends before it unlocks the state.
        self.state.lock()
    }

    fn now(&self) -> Moment {
        self.clock.now()
    }
}

/// Drops what the log brought back, after `client` has shown that the log lost its end.
pub(super) fn drop_recovered(state: &mut State, now: Moment, client: &str) {
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

fn first_bytes(id: [u8; 16]) -> u64 {
    u128::from_le_bytes(id) as u64
}

/// Runs a call. Returns the log position behind its effects, too.
pub(super) fn with_log_position<R>(call: impl FnOnce() -> R) -> (R, u64) {
    state_guard::reset_log_position();
    let result = call();
    (result, state_guard::log_position())
}
