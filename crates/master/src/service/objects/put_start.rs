//! The call that starts puts: one slice of items per lock of the state, and waits for memory that
//! is still being freed.

use std::{sync::Arc, time::Duration};

use mooncake_base::{
    Clock, Error, ErrorCode, KeyRef, Moment, Result, SystemClock, TenantId, key::Printed,
};
use mooncake_proto::{calls::Method, convert::Caller, v1};

use super::{ObjectService, check_call_number, check_group, item_id, suffixes, unfinished_put};
use crate::{
    service::{
        SLICE_ITEMS, STEPS_PER_SLICE, check_batch, durability,
        encoding::{PutItem, PutStartReply, put_items},
        millis,
        op_metrics::FailedItems,
        state_guard::StateGuard,
        wire::{SegmentTable, put_options},
    },
    state::{ObjectState, Pending, Probed, Put, PutOptions, PutProgress, PutStep},
};

/// How long one call waits for memory in all.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Pause of a call while many others search for memory.
const TURN_PAUSE: Duration = Duration::from_millis(1);
/// When the client of a put that waited too long should try again.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// A call that starts puts, between two slices of its items.
#[derive(Debug)]
struct PutStartCall {
    /// Taken out while its items are read.
    request: v1::PutStartRequest,
    request_id: u64,
    is_replacing: bool,
    caller: Caller,
    tenant: TenantId,
    options: PutOptions,
    /// Peers that the client could not reach.
    avoided_endpoints: Vec<String>,
    /// The next item, and the progress of its put.
    next: usize,
    progress: PutProgress,
    segments: SegmentTable,
    reply: PutStartReply,
    write_window_ms: u64,
    failed: FailedItems,
    /// All puts so far start in memory that rests after a restart by what the log says already.
    is_prepared: bool,
    deadline: Moment,
}

impl ObjectService {
    /// Starts puts; waits for memory on the calling thread.
    pub(in crate::service) fn put_start(
        &self,
        r: v1::PutStartRequest,
    ) -> Result<v1::PutStartResponse> {
        let mut call = self.begin_put_start(r)?;
        self.run_put_start(&mut call, true)?;
        Ok(self.end_put_start(call))
    }

    /// Starts puts; waits for memory on a thread of its own. Returns the log position that the answer
    /// waits for, too: none if it promises nothing but memory that rests after a restart anyway. A
    /// refusal may promise what another call did.
    pub(in crate::service) async fn put_start_in_parts(
        self: &Arc<Self>,
        r: v1::PutStartRequest,
    ) -> (Result<v1::PutStartResponse>, u64) {
        let (begun, position) = durability::with_log_position(|| {
            let mut call = self.begin_put_start(r)?;
            let is_done = self.run_put_start(&mut call, false)?;
            Ok((call, is_done))
        });
        let mut call = match begun {
            Ok((call, true)) => {
                let position = if call.is_prepared { durability::NO_POSITION } else { position };
                return (Ok(self.end_put_start(call)), position);
            }
            Ok((call, false)) => call,
            Err(error) => return (Err(error), position),
        };
        let objects = Arc::clone(self);
        let rest = tokio::task::spawn_blocking(move || {
            durability::with_log_position(|| {
                objects.run_put_start(&mut call, true)?;
                Ok(objects.end_put_start(call))
            })
        });
        match rest.await {
            Ok((answer, later)) => (answer, position.max(later)),
            Err(source) => (Err(durability::panicked().caused_by(source)), position),
        }
    }

    fn begin_put_start(&self, request: v1::PutStartRequest) -> Result<PutStartCall> {
        let r = &request;
        check_batch(r.count())?;
        check_call_number("request_id", r.request_id)?;
        let items = put_items(r)?.len();
        let caller = Caller::try_from(r.caller.as_ref())?;
        let tenant = self.shared.tenant(r.caller.as_ref())?.into_owned();
        let options = put_options(r.config.as_ref())?;
        self.check_absent(&tenant, r.if_absent.as_ref())?;
        suffixes::check(&r.absent_suffixes)?;
        Ok(PutStartCall {
            request_id: r.request_id,
            is_replacing: r.replace,
            caller,
            tenant,
            options,
            avoided_endpoints: r.avoided_endpoints.clone(),
            next: 0,
            progress: PutProgress::default(),
            segments: SegmentTable::default(),
            reply: PutStartReply::with_capacity(items),
            write_window_ms: 0,
            failed: FailedItems::default(),
            is_prepared: true,
            deadline: SystemClock.now() + WAIT_MAX,
            request,
        })
    }

    /// Fails if an object exists whose absence is a condition of the call.
    fn check_absent(&self, tenant: &TenantId, keys: Option<&v1::KeyColumn>) -> Result<()> {
        let Some(keys) = keys else { return Ok(()) };
        check_batch(keys.lengths.len())?;
        let keys = keys.keys()?;
        let now = self.shared.now();
        let probed = self.shared.lock().probe_all(now, tenant, &keys, false);
        let is_stored = |probed: &Probed| probed.state == ObjectState::Complete;
        match probed.iter().position(is_stored) {
            None => Ok(()),
            Some(at) => {
                let text = "an object exists without which the objects were to be put";
                Err(Error::new(ErrorCode::OBJECT_ALREADY_EXISTS, text)
                    .with("exists", Printed(keys[at])))
            }
        }
    }

    /// Starts the puts that are left. Returns `false` if one has to wait and `may_wait` is not set.
    fn run_put_start(&self, call: &mut PutStartCall, may_wait: bool) -> Result<bool> {
        // The items borrow from the request, which therefore leaves the call meanwhile.
        let request = std::mem::take(&mut call.request);
        let items = put_items(&request)?;
        let mut is_done = true;
        while call.next < items.len() {
            let slice = &items[call.next..items.len().min(call.next + SLICE_ITEMS)];
            // The keys are made while the state is not locked.
            let keys = slice.iter().map(|item| item.key);
            let suffixed = suffixes::suffixed(keys, &request.absent_suffixes);
            let mut state = self.shared.lock();
            let pending = self.start_slice(&mut state, call, slice, &suffixed);
            if items.len() > SLICE_ITEMS || pending.is_some() {
                state.unlock_fair();
            } else {
                drop(state);
            }
            match pending {
                Some(_) if !may_wait => {
                    is_done = false;
                    break;
                }
                Some(pending) => self.wait_for_memory(pending, call.deadline),
                None => {}
            }
        }
        drop(items);
        call.request = request;
        Ok(is_done)
    }

    fn end_put_start(&self, call: PutStartCall) -> v1::PutStartResponse {
        self.shared.op_metrics().count_items(Method::PutStart, call.next, call.failed);
        let log_mark = self.shared.log_mark();
        call.reply.into_response(call.segments, call.write_window_ms, log_mark)
    }

    /// Starts the puts of one slice, up to the first one that has to wait. Refuses those of which an
    /// object with one of the suffixed keys is readable; each item has the same number of these.
    fn start_slice(
        &self,
        state: &mut StateGuard<'_>,
        call: &mut PutStartCall,
        slice: &[PutItem<'_>],
        suffixed: &[Vec<u8>],
    ) -> Option<Pending> {
        let state = &mut **state;
        call.write_window_ms = millis(state.rules().write_window);
        let now = self.shared.now();
        let put_owner = state.puts().put_owner(now, call.caller.client, &call.tenant);
        let put_owner =
            put_owner.map(|owner| state.puts().avoiding(owner, &call.avoided_endpoints));
        let keys = slice.iter().map(|item| item.key);
        let hashes = state.puts().prefetch_hashes(put_owner.as_ref().ok(), keys);
        let probed = if suffixed.is_empty() {
            Vec::new()
        } else {
            state.probe_all(now, &call.tenant, suffixed, false)
        };
        let found = |at: usize| {
            let per_item = suffixed.len() / slice.len();
            let range = at * per_item..(at + 1) * per_item;
            let is_stored = |probed: &Probed| probed.state == ObjectState::Complete;
            probed[range.clone()].iter().position(is_stored).map(|n| &suffixed[range.start + n])
        };
        let steps = state.steps();
        for (at, (&item, hash)) in slice.iter().zip(hashes).enumerate() {
            let PutItem { length, group, if_version, .. } = item;
            let request = item_id(call.request_id, call.next as u64);
            let (options, is_replacing) = (&call.options, call.is_replacing);
            let progress = &mut call.progress;
            let step = put_owner.as_ref().map_err(Clone::clone).and_then(|put_owner| {
                if let Some(found) = found(at) {
                    return Err(suffixes::refusal(found));
                }
                let key = KeyRef::new(item.key)?;
                check_group(group)?;
                let put = Put { key, length, group, options, is_replacing, if_version, request };
                state.puts().put_step_hashed(now, put_owner, hash, &put, progress)
            });
            let started = match step {
                Ok(PutStep::Started(started)) => Ok(started),
                Ok(PutStep::Pending(pending)) if !call.is_late() => return Some(pending),
                Ok(PutStep::Pending(pending)) => Err(state
                    .puts()
                    .pending_error(pending)
                    .with("waited_ms", WAIT_MAX.as_millis())
                    .with("retry_after_ms", RETRY_AFTER.as_millis())),
                Err(error) => Err(error),
            };
            state.puts().cancel_put(std::mem::take(&mut call.progress));
            call.is_prepared &= started.as_ref().is_ok_and(|started| started.is_prepared);
            let started = started.map_err(|error| {
                call.failed.add(error.code());
                let (caller, tenant) = (&call.caller, &call.tenant);
                let unfinished_put = unfinished_put(state, caller, tenant, item.key, &error);
                v1::Failure { unfinished_put, ..v1::Failure::from(&error) }
            });
            if started.is_ok() {
                self.traffic.put(length);
            }
            call.reply.push(state, &mut call.segments, started);
            call.next += 1;
            if state.steps() - steps > STEPS_PER_SLICE {
                break;
            }
        }
        None
    }

    fn wait_for_memory(&self, pending: Pending, deadline: Moment) {
        match (pending, self.shared.journal()) {
            (Pending::Yield, _) => {}
            (Pending::Sync(position), Some(journal)) => {
                journal.wait_synced(position, deadline);
            }
            (Pending::Disks(progress), _) => {
                self.shared.disk_progress().wait(progress, deadline);
            }
            (Pending::Busy | Pending::Sync(_), _) => std::thread::park_timeout(TURN_PAUSE),
        }
    }
}

impl PutStartCall {
    fn is_late(&self) -> bool {
        self.deadline.has_passed(SystemClock.now())
    }
}
