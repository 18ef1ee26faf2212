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

use super::{Origin, Service, load, locked};
use crate::{
    journal::{Found, Journal, JournalStatus, Owner},
    state::{Awaited, Restored, Rules, State},
};

/// How often a call that waits looks whether it still has to, whatever it is told.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Owners of what the log knew, who may still come back.
#[derive(Debug, Default)]
pub(super) struct Owners {
    are_awaited: AtomicBool,
    changed: Notify,
}

impl Service {
    /// A service over what the log knows. All of it is dormant until its owners announce it.
    pub(crate) fn from_log(rules: Rules, clock: Arc<dyn Clock>, found: Found) -> (Self, Restored) {
        let (seed, _) = SegmentId::random().halves();
        // Writers that were given leave by what is lost may write for that long.
        let quiet = if found.may_lack_end { rules.write_end() } else { Duration::ZERO };
        let (state, restored) = State::restore(rules, seed, clock.now(), found.image, quiet);
        let mut service = Self::over(state, clock);
        service.owners.are_awaited = AtomicBool::new(restored.segments > 0);
        service.journal = Some(found.journal);
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
        if request.call.as_ref().is_some_and(load::is_large) {
            let (service, origin) = (Arc::clone(self), origin.clone());
            let answered =
                tokio::task::spawn_blocking(move || service.dispatch(request, &origin)).await;
            return answered.unwrap_or_else(|source| {
                let error = Error::internal("the call did not end").caused_by(source);
                v1::Response { call: Some(response::Call::Failure((&error).into())) }
            });
        }
        let (response, appended) = self.run(request, origin);
        match &self.journal {
            Some(journal) if appended > 0 && journal.is_slow() => {
                let service = Arc::clone(self);
                let settled = tokio::task::spawn_blocking(move || service.settle(appended));
                if let Err(error) = settled.await {
                    tracing::error!(%error, "nobody waited for the log");
                }
            }
            Some(journal) if appended > 0 => journal.settle(appended),
            _ => {}
        }
        response
    }

    /// How the log does; `None`: the master has none.
    pub fn journal_status(&self) -> Option<JournalStatus> {
        self.journal.as_ref().map(Journal::status)
    }

    pub(crate) fn recovered_in(&self, time: Duration) {
        if let Some(journal) = &self.journal {
            journal.recovered_in(time);
        }
    }

    pub(crate) fn has_journal(&self) -> bool {
        self.journal.is_some()
    }

    /// Which history a restart would go on with; empty if there is none.
    pub(super) fn lineage(&self) -> bytes::Bytes {
        let lineage = self.journal.as_ref().and_then(Journal::lineage);
        lineage.map(|lineage| bytes::Bytes::copy_from_slice(&lineage)).unwrap_or_default()
    }

    /// Waits until the log has all up to there.
    pub(super) fn settle(&self, appended: u64) {
        if let Some(journal) = self.journal.as_ref().filter(|_| appended > 0) {
            journal.settle(appended);
        }
    }

    /// Some memory was announced, or is not waited for any longer.
    pub(super) fn owners_changed(&self, dormant: u64) {
        if self.owners.are_awaited.load(Ordering::Relaxed) {
            self.owners.are_awaited.store(dormant > 0, Ordering::Relaxed);
            self.owners.changed.notify_waiters();
        }
    }

    /// Waits for owners of what the call is about, who may come back after a restart; at once, if
    /// there are none.
    ///
    /// Cancel-safe.
    pub(super) async fn wait_for_owners(&self, call: Option<&Call>) {
        if self.owners.are_awaited.load(Ordering::Relaxed) {
            self.wait_until_awake(call).await;
        }
    }

    async fn wait_until_awake(&self, call: Option<&Call>) {
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
            let changed = self.owners.changed.notified();
            let Some(until) = self.awaits(&tenant, &keys, is_put) else { return };
            let left = until.left(self.clock.now()).min(LOOK_AGAIN);
            // Whether it was told or not, it looks again.
            let _ = timeout(left, changed).await;
        }
    }

    fn awaits(&self, tenant: &TenantId, keys: &[&[u8]], is_put: bool) -> Option<Moment> {
        let now = self.clock.now();
        let state = self.lock();
        let by_key = match keys {
            [] => state.awaits(now, &Awaited::All),
            keys => state.awaits(now, &Awaited::Keys(tenant, keys)),
        };
        let by_room = || state.awaits(now, &Awaited::Room);
        by_key.or_else(|| is_put.then(by_room).flatten())
    }
}

impl Owner for Service {
    fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    fn hold(&self) -> MutexGuard<'_, State> {
        // What was changed before is appended: whoever holds the state does so before letting go.
        self.state.lock()
    }

    fn now(&self) -> Moment {
        self.clock.now()
    }
}

/// Runs a call and says where in the log its effects end.
pub(super) fn watched<R>(call: impl FnOnce() -> R) -> (R, u64) {
    locked::forget_appended();
    let result = call();
    (result, locked::appended())
}
