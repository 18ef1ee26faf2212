//! Owners of recovered segments, and clients that hung up during a pause of the master, that have not
//! come back yet. Calls about their objects wait for them.
//!
//! A call looks at each of its keys once, in order: it waits for the owner of the first one that is
//! missing, and goes on from there when that owner is back. A client that comes back wakes only the
//! calls that wait for it.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{ClientId, Moment, TenantId};
use mooncake_proto::v1::request::Call;
use rustc_hash::FxHashMap;
use tokio::{sync::Notify, time::timeout};

use super::shared_state::SharedState;
use crate::state::RecoveryScope;

/// How often a waiting call checks again whether it still has to wait, even without a notification.
const RECHECK_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub(super) struct PendingOwners {
    is_any_pending: AtomicBool,
    /// Calls that wait for a client.
    by_client: Mutex<FxHashMap<ClientId, Arc<Notify>>>,
    /// Calls that wait for any memory, or for the end of the recovery.
    others: Arc<Notify>,
    #[cfg(test)]
    looks: std::sync::atomic::AtomicU64,
}

/// What a call waits for.
#[derive(Debug, Clone, Copy)]
struct Wait {
    /// The client whose return ends it, if it is one.
    client: Option<ClientId>,
    until: Moment,
}

/// The progress of a call through what it needs.
#[derive(Debug)]
struct Needs<'a> {
    tenant: &'a TenantId,
    keys: &'a [&'a [u8]],
    /// All keys before this one have their owners.
    next: usize,
    has_keys: bool,
    needs_room: bool,
}

impl PendingOwners {
    pub(super) fn new(is_any_pending: bool) -> Self {
        Self { is_any_pending: AtomicBool::new(is_any_pending), ..Self::default() }
    }

    /// Notifies the calls that wait for a client: it has come back, or announced a segment.
    pub(super) fn wake(&self, client: ClientId, is_recovering: bool) {
        if !self.is_any_pending.load(Ordering::Relaxed) {
            return;
        }
        let waiting = self.by_client.lock().remove(&client);
        if let Some(waiting) = waiting {
            waiting.notify_waiters();
        }
        self.others.notify_waiters();
        self.update(is_recovering);
    }

    /// Notifies all waiting calls if no owner is missing any more.
    pub(super) fn update(&self, is_recovering: bool) {
        if !is_recovering && self.is_any_pending.swap(false, Ordering::Relaxed) {
            self.others.notify_waiters();
            let waiting = std::mem::take(&mut *self.by_client.lock());
            waiting.values().for_each(|calls| calls.notify_waiters());
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
        let Some(call) = call else { return };
        // A call with an invalid tenant will be refused, which needs no waiting.
        let Ok(tenant) = shared.tenant(call.caller()) else { return };
        let looks_at_all = matches!(call, Call::ListObjects(_) | Call::RemoveMatching(_));
        let keys = match call.keys() {
            Ok(Some(keys)) => keys,
            Ok(None) if looks_at_all => Vec::new(),
            // A call whose columns do not match is refused, too.
            Ok(None) | Err(_) => return,
        };
        let mut needs = Needs {
            tenant: &tenant,
            keys: &keys,
            next: 0,
            has_keys: !keys.is_empty(),
            needs_room: matches!(call, Call::PutStart(_)),
        };
        let mut wait = self.next_wait(shared, &mut needs);
        while let Some(awaited) = wait {
            let returned = self.calls_for(awaited.client);
            let mut returned = pin!(returned.notified());
            // A return from here on is noticed.
            returned.as_mut().enable();
            wait = self.next_wait(shared, &mut needs);
            let Some(Wait { client, until }) = wait else { return };
            if client == awaited.client {
                let left = until.left(shared.now()).min(RECHECK_INTERVAL);
                // With or without a notification, the loop checks again.
                let _ = timeout(left, returned).await;
                wait = self.next_wait(shared, &mut needs);
            }
        }
    }

    /// Returns the notification of the calls that wait for the client.
    fn calls_for(&self, client: Option<ClientId>) -> Arc<Notify> {
        match client {
            Some(client) => Arc::clone(self.by_client.lock().entry(client).or_default()),
            None => Arc::clone(&self.others),
        }
    }

    /// Returns what the call waits for; `None` if nothing is missing.
    fn next_wait(&self, shared: &SharedState, needs: &mut Needs<'_>) -> Option<Wait> {
        let now = shared.now();
        let mut state = shared.lock();
        let without_client = |until| Wait { client: None, until };
        if !needs.has_keys {
            return state.recovery_wait(now, &RecoveryScope::All).map(without_client);
        }
        let rest = &needs.keys[needs.next..];
        let missing = state.clients().awaited_owner(now, needs.tenant, rest);
        #[cfg(test)]
        self.count_looks(missing.map_or(rest.len(), |missing| missing.key + 1));
        match missing {
            Some(missing) => {
                needs.next += missing.key;
                Some(Wait { client: missing.client, until: missing.until })
            }
            None => {
                needs.next = needs.keys.len();
                let room = needs.needs_room.then_some(RecoveryScope::Space);
                room.and_then(|room| state.recovery_wait(now, &room)).map(without_client)
            }
        }
    }

    #[cfg(test)]
    fn count_looks(&self, keys: usize) {
        self.looks.fetch_add(keys as u64, Ordering::Relaxed);
    }

    /// Returns how many keys were looked at since the start.
    #[cfg(test)]
    pub(super) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }
}
