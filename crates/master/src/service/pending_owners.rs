//! Owners of recovered segments, and clients that hung up during a pause of the master, that have not
//! come back yet. Calls about their objects wait for them.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use mooncake_base::{Moment, TenantId};
use mooncake_proto::v1::request::Call;
use tokio::{sync::Notify, time::timeout};

use super::shared_state::SharedState;
use crate::state::RecoveryScope;

/// How often a waiting call checks again whether it still has to wait, even without a notification.
const RECHECK_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub(super) struct PendingOwners {
    is_any_pending: AtomicBool,
    changed: Notify,
}

impl PendingOwners {
    pub(super) fn new(is_any_pending: bool) -> Self {
        Self { is_any_pending: AtomicBool::new(is_any_pending), changed: Notify::new() }
    }

    /// Notifies waiting calls that segments were announced or given up.
    pub(super) fn update(&self, is_recovering: bool) {
        if self.is_any_pending.load(Ordering::Relaxed) {
            self.is_any_pending.store(is_recovering, Ordering::Relaxed);
            self.changed.notify_waiters();
        }
    }

    /// Lets calls wait for clients that hung up while the master made a pause.
    pub(super) fn add(&self, is_recovering: bool) {
        self.is_any_pending.fetch_or(is_recovering, Ordering::Relaxed);
    }

    /// Waits for owners of the call's objects. Returns at once if there are none.
    ///
    /// Cancel-safe.
    pub(super) async fn wait_for(&self, shared: &SharedState, call: Option<&Call>) {
        if self.is_any_pending.load(Ordering::Relaxed) {
            self.wait_for_key_owners(shared, call).await;
        }
    }

    async fn wait_for_key_owners(&self, shared: &SharedState, call: Option<&Call>) {
        let caller = call.and_then(Call::caller);
        // A call with an invalid tenant will be refused, which needs no waiting.
        let Ok(tenant) = shared.tenant(caller) else { return };
        // The same holds for a call whose columns do not match.
        let keys = match call {
            Some(Call::Locate(r)) => r.keys(),
            Some(Call::PutStart(r)) => r.keys(),
            Some(Call::Probe(r)) => Ok(r.keys.iter().map(|key| &key[..]).collect()),
            Some(Call::Remove(r)) => Ok(r.keys.iter().map(|key| &key[..]).collect()),
            Some(Call::Describe(r)) => Ok(r.keys.iter().map(|key| &key[..]).collect()),
            Some(Call::SetExpiry(r)) => Ok(r.keys.iter().map(|key| &key[..]).collect()),
            Some(Call::Verify(r)) => Ok(r.reads.iter().map(|read| &read.key[..]).collect()),
            Some(Call::ListObjects(_) | Call::RemoveMatching(_)) => Ok(Vec::new()),
            _ => return,
        };
        let Ok(keys) = keys else { return };
        let is_put = matches!(call, Some(Call::PutStart(_)));
        loop {
            let changed = self.changed.notified();
            let Some(until) = wait_end(shared, &tenant, &keys, is_put) else { return };
            let left = until.left(shared.now()).min(RECHECK_INTERVAL);
            // With or without a notification, the loop checks again.
            let _ = timeout(left, changed).await;
        }
    }
}

/// Returns until when a call waits; `None` if no owner of its objects is missing.
fn wait_end(
    shared: &SharedState,
    tenant: &TenantId,
    keys: &[&[u8]],
    is_put: bool,
) -> Option<Moment> {
    let now = shared.now();
    let state = shared.lock();
    let by_key = match keys {
        [] => state.recovery_wait(now, &RecoveryScope::All),
        keys => state.recovery_wait(now, &RecoveryScope::Keys(tenant, keys)),
    };
    let by_room = || state.recovery_wait(now, &RecoveryScope::Space);
    by_key.or_else(|| is_put.then(by_room).flatten())
}
