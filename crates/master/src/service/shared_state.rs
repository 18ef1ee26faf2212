//! The state behind its lock, and what goes with it: the log, object events, the clock, the tenants
//! and the counters of calls.
//!
//! All kinds of calls share it. A call locks the state for one slice of its items at a time.

use std::{
    borrow::Cow,
    sync::{Arc, OnceLock, atomic::AtomicU64},
    time::Duration,
};

use bytes::Bytes;
use mooncake_base::sync::{Mutex, MutexGuard};
use mooncake_base::{Clock, Error, Moment, Result, SegmentId, SystemClock, TenantId};
use mooncake_proto::v1;
use tokio::sync::Notify;

use super::{
    Leadership, SLICE_ITEMS, STEPS_PER_SLICE, check_name,
    client_log::RefusedVersions,
    disk_progress::DiskProgress,
    op_metrics::OpMetrics,
    state_guard::{self, StateGuard},
};
use crate::{
    events::Events,
    fatal::FatalError,
    journal::{Journal, shipping},
    state::{LeaseSweep, State, log_rest, sweep_leases},
};

/// Slices of a sweep for leases at a time; there are other calls in between.
const LEASE_SLICES: usize = 64;

#[derive(Debug)]
pub(crate) struct SharedState {
    /// The id of the master. It need not be secret, but must differ between starts.
    identity: [u8; 16],
    clock: Arc<dyn Clock>,
    /// The default tenant. It is the only one unless `is_multi_tenant`.
    tenant: TenantId,
    is_multi_tenant: bool,
    /// Never locked while the sessions of clients are locked.
    state: Mutex<State>,
    /// Never waited for while the state is locked.
    journal: Option<Journal>,
    /// Set when no call is answered any more.
    fatal: Arc<FatalError>,
    events: OnceLock<Arc<Events>>,
    op_metrics: OpMetrics,
    refused_versions: RefusedVersions,
    /// Clients that were refused because of their token.
    refused_tokens: AtomicU64,
    /// Notified when objects wait for a disk.
    offload_signal: Notify,
    /// What puts wait for that wait for disks.
    disk_progress: DiskProgress,
    /// How often the state was locked.
    #[cfg(test)]
    locks: AtomicU64,
    /// The right to answer, for one of several masters.
    leadership: OnceLock<Leadership>,
}

impl SharedState {
    pub(super) fn new(state: State, clock: Arc<dyn Clock>, journal: Option<Journal>) -> Self {
        let fatal = journal.as_ref().map_or_else(Arc::default, |journal| journal.fatal().clone());
        Self {
            identity: SegmentId::random().to_bytes(),
            clock,
            tenant: TenantId::default(),
            is_multi_tenant: state.rules().is_multi_tenant,
            state: Mutex::new(state),
            journal,
            fatal,
            events: OnceLock::new(),
            op_metrics: OpMetrics::default(),
            refused_versions: RefusedVersions::default(),
            refused_tokens: AtomicU64::new(0),
            offload_signal: Notify::new(),
            disk_progress: DiskProgress::default(),
            #[cfg(test)]
            locks: Default::default(),
            leadership: OnceLock::new(),
        }
    }

    /// Publishes object events through `events` from now on. Called once.
    pub(super) fn set_events(&self, events: Arc<Events>) {
        let _ = self.events.set(events);
        self.lock().log_mut().enable_events();
    }

    /// Locks the state. Unlocking publishes events and appends effects to the log.
    pub(super) fn lock(&self) -> StateGuard<'_> {
        #[cfg(test)]
        self.locks.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (events, journal) = (self.events.get(), self.journal.as_ref());
        let mut state = self.state.lock();
        if let Some(journal) = journal {
            state.confirm_synced(journal.synced_position());
            state.confirm_durable(journal.durable_position());
            state.puts().set_answerable(journal.answerable_position());
        }
        let (offload_signal, disk_progress) = (&self.offload_signal, &self.disk_progress);
        StateGuard::new(state, events, journal, &self.fatal, offload_signal, disk_progress)
    }

    /// Returns what puts wait for that wait for disks.
    pub(super) fn disk_progress(&self) -> &DiskProgress {
        &self.disk_progress
    }

    /// Returns what is notified when objects wait for a disk.
    pub(super) fn offload_signal(&self) -> &Notify {
        &self.offload_signal
    }

    /// Tells the standbys which objects got a lease since the last call, and those that attached since
    /// then which other objects have one, a part at each call. Without standbys leases are not noted.
    pub(crate) fn tell_leases(&self, sweep: &mut LeaseSweep) {
        let Some(journal) = &self.journal else { return };
        let mut state = self.lock();
        if !shipping::has_standbys(journal) {
            return state.log_mut().stop_lease_notes();
        }
        let lease = state.rules().lease_ttl;
        let notes = state.log_mut().take_lease_notes(lease);
        drop(state);
        let is_any_new = shipping::tell_leases(journal, &notes);
        if is_any_new || notes.is_any {
            sweep.restart();
        }
        for _ in 0..LEASE_SLICES {
            let Ok(state) = self.lock_for_journal() else { return };
            let Some(notes) = sweep_leases(&state, sweep, self.now()) else { return };
            MutexGuard::unlock_fair(state);
            if shipping::tell_leases(journal, &notes) {
                sweep.restart();
            }
        }
    }

    /// Brings into the log which memory must rest, and tells the standbys that they know of all of it, so
    /// that the next leader may use the other memory at once. Called when no call is under way. Takes at
    /// most `time`; without it, all free memory rests.
    pub(crate) fn hand_rest_over(&self, time: Duration) {
        let Some(journal) = &self.journal else { return };
        let deadline = SystemClock.now() + time;
        let mut state = self.lock();
        if !log_rest(&mut state, self.now()) {
            return;
        }
        // Appends the records.
        drop(state);
        let position = journal.appended();
        if journal.wait_synced(position, deadline) {
            shipping::tell_rest_logged(journal, deadline.left(SystemClock.now()));
        }
    }

    /// Locks the state for a thread of the log, without events and effects.
    ///
    /// # Errors
    /// A panic left the state half changed.
    pub(super) fn lock_for_journal(&self) -> Result<MutexGuard<'_, State>> {
        // All earlier changes are appended already: each guard appends before it unlocks the state.
        let state = self.state.lock();
        match self.fatal.get() {
            Some(error) => Err(error.clone()),
            None => Ok(state),
        }
    }

    /// Handles the items in order, one slice at a time, and unlocks the state between slices. A slice
    /// ends early when its items took many steps.
    pub(super) fn map_in_slices<T, R>(
        &self,
        items: &[T],
        mut handle: impl FnMut(&mut State, &T) -> R,
    ) -> Vec<R> {
        let mut results = Vec::with_capacity(items.len());
        while let rest @ [_, ..] = &items[results.len()..] {
            let mut state = self.lock();
            let steps = state.steps();
            for item in rest.iter().take(SLICE_ITEMS) {
                results.push(handle(&mut state, item));
                if state.steps() - steps > STEPS_PER_SLICE {
                    break;
                }
            }
            if items.len() > SLICE_ITEMS || results.len() < items.len() {
                state.unlock_fair();
            }
        }
        results
    }

    /// Passes the items to `handle` in order, one slice at a time, and unlocks the state between
    /// slices.
    pub(super) fn for_each_slice<T>(&self, items: &[T], mut handle: impl FnMut(&mut State, &[T])) {
        for slice in items.chunks(SLICE_ITEMS) {
            let mut state = self.lock();
            handle(&mut state, slice);
            if items.len() > SLICE_ITEMS {
                state.unlock_fair();
            }
        }
    }

    /// Runs a sweep slice by slice. Unlocks the state between slices, and matches the keys of a slice
    /// then.
    pub(super) fn run_to_completion<S>(
        &self,
        sweep: &mut S,
        mut slice: impl FnMut(&mut State, &mut S) -> bool,
        match_keys: fn(&mut S),
    ) {
        loop {
            let mut state = self.lock();
            let is_done = slice(&mut state, sweep);
            state.unlock_fair();
            if is_done {
                return;
            }
            match_keys(sweep);
            self.wait_if_behind();
        }
    }

    /// Waits for the log if much is queued, so that a sweep over many objects cannot fill memory
    /// while the disk is slow.
    fn wait_if_behind(&self) {
        if let Some(journal) = self.journal.as_ref().filter(|journal| journal.is_behind()) {
            // The sweep goes on without the standby.
            let _ = journal.wait_durable(state_guard::own_log_position());
        }
    }

    /// Returns how often the state was locked.
    #[cfg(test)]
    pub(super) fn locks(&self) -> u64 {
        self.locks.load(std::sync::atomic::Ordering::Relaxed)
    }

    pub(super) fn identity(&self) -> &[u8; 16] {
        &self.identity
    }

    pub(super) fn now(&self) -> Moment {
        self.clock.now()
    }

    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    /// Makes answers depend on the leadership. Called once, before any call.
    pub(crate) fn set_leadership(&self, leadership: Leadership) {
        let _ = self.leadership.set(leadership);
    }

    /// Returns the right to answer; `None` for a single master, which always may.
    pub(super) fn leadership(&self) -> Option<&Leadership> {
        self.leadership.get()
    }

    /// Returns whether this master may answer at this moment.
    pub(crate) fn may_answer(&self) -> bool {
        self.leadership().is_none_or(Leadership::is_valid)
    }

    /// Answers no call any more.
    pub(crate) fn end(&self, why: Error) {
        self.fatal.end(why);
        if let Some(journal) = &self.journal {
            // Wakes all that wait.
            journal.set_stuck(None);
        }
    }

    /// Returns the peers of another version.
    pub(crate) fn refused_versions(&self) -> &RefusedVersions {
        &self.refused_versions
    }

    /// Returns the number of clients that were refused because of their token.
    pub(crate) const fn refused_tokens(&self) -> &AtomicU64 {
        &self.refused_tokens
    }

    /// Returns the error after which no call is answered any more.
    pub(crate) fn fatal(&self) -> &Arc<FatalError> {
        &self.fatal
    }

    pub(super) fn events(&self) -> Option<&Arc<Events>> {
        self.events.get()
    }

    pub(super) fn op_metrics(&self) -> &OpMetrics {
        &self.op_metrics
    }

    /// Returns whether each tenant has its own keys and quota.
    pub(super) fn is_multi_tenant(&self) -> bool {
        self.is_multi_tenant
    }

    /// Returns the default tenant.
    pub(super) fn default_tenant(&self) -> &TenantId {
        &self.tenant
    }

    /// Returns the tenant whose keys the call is about: the default tenant if the call names none,
    /// and always without multi-tenancy.
    pub(super) fn tenant(&self, caller: Option<&v1::Caller>) -> Result<Cow<'_, TenantId>> {
        match caller.map_or("", |caller| &caller.tenant) {
            "" | TenantId::DEFAULT => Ok(Cow::Borrowed(&self.tenant)),
            _ if !self.is_multi_tenant => Ok(Cow::Borrowed(&self.tenant)),
            name => {
                check_name("tenant", name)?;
                Ok(Cow::Owned(TenantId::new(name)))
            }
        }
    }

    /// Returns the timeline id under which a restart would resume; empty without a healthy log.
    pub(super) fn timeline_id(&self) -> Bytes {
        let timeline_id = self.journal.as_ref().and_then(Journal::timeline_id);
        timeline_id.map(|timeline_id| Bytes::copy_from_slice(&timeline_id)).unwrap_or_default()
    }

    /// Returns how much of the log is on disk, for clients to report to a later master.
    pub(super) fn log_mark(&self) -> Option<v1::LogMark> {
        let (timeline_id, synced_frame) = self.journal.as_ref()?.synced()?;
        let (master, timeline) = (first_bytes(self.identity), first_bytes(timeline_id));
        Some(v1::LogMark { master, timeline, synced_frame })
    }

    /// Returns whether the log that a client heard of is that of another master than this one.
    pub(super) fn is_another_master(&self, heard: &v1::LogMark) -> bool {
        heard.master != first_bytes(self.identity)
    }

    /// Returns whether a client heard of another log than that of this master, which may have none.
    pub(super) fn has_other_log(&self, heard: &v1::LogMark) -> bool {
        let own = self.journal.as_ref().and_then(Journal::timeline_id).map(first_bytes);
        self.is_another_master(heard) && own != Some(heard.timeline)
    }

    /// Returns whether an earlier master of this timeline had more of the log on disk than was
    /// recovered: the disk lost it, or an older copy of the files was put in place.
    pub(super) fn has_lost_log(&self, heard: &v1::LogMark) -> bool {
        let Some(journal) = &self.journal else { return false };
        self.is_another_master(heard)
            && heard.synced_frame > journal.recovered_end()
            && journal.timeline_id().is_some_and(|id| first_bytes(id) == heard.timeline)
    }
}

fn first_bytes(id: [u8; 16]) -> u64 {
    u128::from_le_bytes(id) as u64
}
