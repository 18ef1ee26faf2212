//! The service beside its log: made from it, waiting for it, and waiting for owners to come back.

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

/// How often a call that waits looks whether it still has to, whatever it is told.
const RECHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Owners of what the log knew, who may still come back.
#[derive(Debug, Default)]
pub(super) struct PendingOwners {
    is_any_pending: AtomicBool,
    changed: Notify,
}

impl Service {
    /// A service over what the log knows. All of it is dormant until its owners announce it.
    pub(crate) fn from_log(
        rules: Rules,
        clock: Arc<dyn Clock>,
        recovered: RecoveredJournal,
    ) -> (Self, Restored) {
        let (seed, _) = SegmentId::random().halves();
        // Writers that were given leave by what is lost may write for that long.
        let quiet = if recovered.may_lack_end { rules.write_end() } else { Duration::ZERO };
        let (state, restored) = State::restore(rules, seed, clock.now(), recovered.image, quiet);
        let mut service = Self::with_state(state, clock);
        service.pending_owners.is_any_pending = AtomicBool::new(restored.segments > 0);
        service.journal = Some(recovered.journal);
        // What became of conflicts is the first that is logged.
        drop(service.lock());
        (service, restored)
    }

    /// Answers one call as [`dispatch`](Self::dispatch) does, without blocking on a slow disk. A
    /// large one has a thread of its own: what keeps a thread of the runtime keeps the connections
    /// that wait for this one.
    ///
    /// Not cancel-safe: dropped half-way, the call may have been done or not.
    pub async fn answer(self: &Arc<Self>, request: v1::Request, origin: &Origin) -> v1::Response {
        if request.call.as_ref().is_some_and(admission::is_large) {
            let (service, origin) = (Arc::clone(self), origin.clone());
            let answered =
                tokio::task::spawn_blocking(move || service.dispatch(request, &origin)).await;
            return answered.unwrap_or_else(|source| {
                let error = Error::internal("the call did not end").caused_by(source);
                v1::Response { call: Some(response::Call::Failure((&error).into())) }
            });
        }
        let (response, position) = self.execute_logged(request, origin);
        match &self.journal {
            Some(journal) if position > 0 && journal.is_slow() => {
                let service = Arc::clone(self);
                let waited = tokio::task::spawn_blocking(move || service.wait_durable(position));
                if let Err(error) = waited.await {
                    tracing::error!(%error, "nobody waited for the log");
                }
            }
            Some(journal) if position > 0 => journal.wait_durable(position),
            _ => {}
        }
        response
    }

    /// How the log does; `None`: the master has none.
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

    /// Which history a restart would go on with; empty if there is none.
    pub(super) fn timeline_id(&self) -> bytes::Bytes {
        let timeline_id = self.journal.as_ref().and_then(Journal::timeline_id);
        timeline_id
            .map(|timeline_id| bytes::Bytes::copy_from_slice(&timeline_id))
            .unwrap_or_default()
    }

    /// Waits until the log has all up to there.
    pub(super) fn wait_durable(&self, position: u64) {
        if let Some(journal) = self.journal.as_ref().filter(|_| position > 0) {
            journal.wait_durable(position);
        }
    }

    /// Some memory was announced, or is not waited for any longer.
    pub(super) fn update_pending_owners(&self, dormant: u64) {
        if self.pending_owners.is_any_pending.load(Ordering::Relaxed) {
            self.pending_owners.is_any_pending.store(dormant > 0, Ordering::Relaxed);
            self.pending_owners.changed.notify_waiters();
        }
    }

    /// Waits for owners of what the call is about, who may come back after a restart; at once, if
    /// there are none.
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
        // A call that does not say whose it is will be refused, which needs no waiting.
        let Ok(tenant) = self.tenant(caller) else { return };
        // The same of one whose columns do not fit together.
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
            // Whether it was told or not, it looks again.
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
        // What was changed before is position: whoever holds the state does so before letting go.
        self.state.lock()
    }

    fn now(&self) -> Moment {
        self.clock.now()
    }
}

/// Runs a call and says where in the log its effects end.
pub(super) fn with_log_position<R>(call: impl FnOnce() -> R) -> (R, u64) {
    state_guard::reset_log_position();
    let result = call();
    (result, state_guard::log_position())
}
