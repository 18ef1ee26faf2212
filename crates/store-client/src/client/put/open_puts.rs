//! The client's puts that are not closed, shared by its threads; see
//! [`OwnPuts`](crate::protocol::OwnPuts).

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use mooncake_base::sync::{Mutex, MutexGuard};
use mooncake_base::{KeyRef, ObjectKey, ReplicaId, Version};
use smallvec::SmallVec;

use crate::protocol::{OwnPuts, UnconfirmedPut};

/// The open puts of one client.
#[derive(Debug, Default)]
pub(in crate::client) struct OpenPuts {
    state: Mutex<OwnPuts>,
    /// The number of unconfirmed puts, so that a put without trouble need not look for them.
    unconfirmed: AtomicUsize,
    last_request: AtomicU64,
}

/// A put that lives as long as its reservation. If it was not closed by then, it is revoked later.
#[derive(Debug)]
pub(in crate::client) struct ReservedPut {
    puts: Arc<OpenPuts>,
    request: u64,
    /// All replicas count as failed, since a write may still be in flight on each.
    put: UnconfirmedPut,
}

impl OpenPuts {
    /// Returns the number of a start that is about to be sent.
    pub(in crate::client) fn begin_start(&self) -> u64 {
        let request = self.last_request.fetch_add(1, Ordering::Relaxed) + 1;
        self.state.lock().begin_start(request);
        request
    }

    /// Records the versions that a start has started.
    pub(in crate::client) fn end_start(&self, request: u64, versions: SmallVec<[u64; 1]>) {
        self.state.lock().end_start(request, versions);
    }

    /// Records that none of the puts of these starts is being written any more.
    pub(in crate::client) fn release(&self, mut requests: impl Iterator<Item = u64>) {
        let mut last = requests.next();
        let Some(first) = last else { return };
        let mut state = self.state.lock();
        state.release_all(first);
        for request in requests {
            if last != Some(request) {
                state.release_all(request);
                last = Some(request);
            }
        }
    }

    /// Returns whether an unfinished put of this client is still being written.
    pub(in crate::client) fn is_live(
        &self,
        key: KeyRef<'_>,
        request: u64,
        version: Version,
    ) -> bool {
        self.state.lock().is_live(key.as_bytes(), request, version)
    }

    /// Adds puts of which it is unknown whether the master has closed them.
    pub(in crate::client) fn add_unconfirmed(&self, puts: impl Iterator<Item = UnconfirmedPut>) {
        let mut state = self.state.lock();
        puts.for_each(|put| state.add_unconfirmed(put));
        self.update_count(&state);
    }

    /// Removes puts that the master does not hold any more.
    pub(in crate::client) fn confirm<'a>(&self, puts: impl Iterator<Item = &'a UnconfirmedPut>) {
        let mut state = self.state.lock();
        puts.for_each(|put| state.confirm(put));
        self.update_count(&state);
    }

    /// Returns the number of unconfirmed puts.
    pub(in crate::client) fn unconfirmed_count(&self) -> usize {
        self.unconfirmed.load(Ordering::Acquire)
    }

    /// Returns the unconfirmed puts of the keys, with the numbers of the keys.
    pub(in crate::client) fn unconfirmed_of<'a>(
        &self,
        keys: impl Iterator<Item = KeyRef<'a>>,
    ) -> Vec<(usize, UnconfirmedPut)> {
        if self.unconfirmed_count() == 0 {
            return Vec::new();
        }
        let state = self.state.lock();
        let of_key = |(item, key): (usize, KeyRef<'a>)| {
            let puts = state.unconfirmed_of(key.as_bytes()).iter();
            puts.map(move |put| (item, put.clone())).collect::<Vec<_>>()
        };
        keys.enumerate().flat_map(of_key).collect()
    }

    /// Returns at most `limit` unconfirmed puts.
    pub(in crate::client) fn some_unconfirmed(&self, limit: usize) -> Vec<UnconfirmedPut> {
        self.state.lock().some_unconfirmed(limit)
    }

    fn update_count(&self, state: &MutexGuard<'_, OwnPuts>) {
        self.unconfirmed.store(state.unconfirmed_count(), Ordering::Release);
    }
}

impl ReservedPut {
    pub(in crate::client) fn new(
        puts: &Arc<OpenPuts>,
        request: u64,
        key: &ObjectKey,
        version: Version,
        replicas: impl Iterator<Item = ReplicaId>,
    ) -> Self {
        let failed_replicas = replicas.collect();
        let put = UnconfirmedPut { key: key.clone(), version, failed_replicas };
        Self { puts: Arc::clone(puts), request, put }
    }

    /// Records that the put was closed, or is unconfirmed.
    pub(in crate::client) fn close(&self) {
        self.puts.state.lock().release(self.request, self.put.version);
    }
}

impl Drop for ReservedPut {
    fn drop(&mut self) {
        // `try_lock`, since in a forked child no thread may exist that would release the lock.
        let Some(mut state) = self.puts.state.try_lock() else { return };
        if state.is_live(self.put.key.as_bytes(), self.request, self.put.version) {
            state.release(self.request, self.put.version);
            state.add_unconfirmed(self.put.clone());
            self.puts.update_count(&state);
        }
    }
}
