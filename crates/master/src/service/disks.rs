//! The calls about disks: owners mount them, take objects over, and report what they have.

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::Duration,
};

use bytes::Bytes;
use mooncake_base::{
    ClientId, Clock, Error, Moment, ReplicaId, Result, SegmentId, SystemClock, TenantId, Version,
};
use mooncake_proto::{
    calls::Method,
    columns::{Record, collapse_if_uniform},
    convert::Caller,
    v1,
};

use super::{
    BATCH_ITEMS_MAX, SLICE_ITEMS, check_batch, check_name, durability, millis,
    shared_state::SharedState,
    wire::{SegmentTable, disk_from_wire},
};
use crate::{
    journal::level::{self, RecordLevel},
    state::{
        DiskSpec, Offload, Offloaded, OwnDisk, PromotionBatch, PromotionCalls, RecordName, State,
    },
};

/// The maximum number of objects that one call takes over.
const FETCHED_MAX: usize = 4096;

/// The longest time that a call waits for objects to take over. While it waits, the end of its
/// connection is not seen.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// How long a call waits before it looks again for memory that is being freed.
const MEMORY_PAUSE: Duration = Duration::from_millis(5);

/// A disk, for metrics and pages.
#[derive(Debug, Clone)]
pub struct DiskSummary {
    /// Description by its owner.
    pub spec: DiskSpec,
    /// The client that has it open, or had it last.
    pub client: ClientId,
    /// Bytes that its records take.
    pub used: u64,
    /// Objects that have a copy in it.
    pub objects: u64,
    /// Objects that wait to be written to it.
    pub waiting: usize,
    /// Whether its objects can be read now.
    pub is_readable: bool,
}

/// The calls about disks.
#[derive(Debug)]
pub(super) struct DiskService {
    shared: Arc<SharedState>,
}

impl DiskService {
    pub(super) fn new(shared: Arc<SharedState>) -> Self {
        Self { shared }
    }

    pub(super) fn mount_disk(&self, r: &v1::MountDiskRequest) -> Result<v1::MountDiskResponse> {
        self.shared.op_metrics().count_one(Method::MountDisk, || {
            let caller = Caller::try_from(r.caller.as_ref())?;
            let disk = r.disk.as_ref().ok_or_else(|| Error::invalid("the call names no disk"))?;
            let spec = disk_from_wire(disk)?;
            level::check(self.shared.journal(), RecordLevel::DISKS, "a directory of a client")?;
            let mut state = self.shared.lock();
            state.disks().mount(caller.client, spec, r.used, r.reports_all)?;
            Ok(v1::MountDiskResponse {})
        })
    }

    pub(super) fn unmount_disk(
        &self,
        r: &v1::UnmountDiskRequest,
    ) -> Result<v1::UnmountDiskResponse> {
        self.shared.op_metrics().count_one(Method::UnmountDisk, || {
            let (client, disk) = owner(r.caller.as_ref(), &r.disk)?;
            self.shared.lock().disks().unmount(self.shared.now(), client, disk, r.forget)?;
            Ok(v1::UnmountDiskResponse {})
        })
    }

    /// Hands objects over that wait for a disk, or to be brought into memory from it. Does not wait for
    /// any.
    pub(super) fn fetch_offloads(
        &self,
        r: &v1::FetchOffloadsRequest,
    ) -> Result<v1::FetchOffloadsResponse> {
        Ok(self.hand_over(r)?.0)
    }

    /// Hands objects over. Returns whether others wait for memory that is being freed, too.
    fn hand_over(&self, r: &v1::FetchOffloadsRequest) -> Result<(v1::FetchOffloadsResponse, bool)> {
        self.shared.op_metrics().count_one(Method::FetchOffloads, || {
            let (client, disk) = owner(r.caller.as_ref(), &r.disk)?;
            let limit = usize::try_from(r.limit).unwrap_or(usize::MAX).min(FETCHED_MAX);
            let now = self.shared.now();
            let mut state = self.shared.lock();
            let offloaded = state.disks().take_over(now, client, disk, limit, r.bytes)?;
            let mut promotions = PromotionCalls::new(state.tasks());
            let promoted = promotions.fetch(now, client, disk, limit, r.promotion_bytes)?;
            Ok((handed_over(&state, &offloaded, &promoted), promoted.is_waiting))
        })
    }

    /// Hands objects over that wait for a disk, and waits for the first. Returns the log position that
    /// the answer waits for, too.
    ///
    /// Cancel-safe.
    pub(super) async fn fetch_offloads_when_there_are(
        &self,
        r: &v1::FetchOffloadsRequest,
    ) -> (Result<v1::FetchOffloadsResponse>, u64) {
        let deadline = tokio::time::Instant::now() + wait_of(r);
        loop {
            let mut signal = pin!(self.shared.offload_signal().notified());
            // Before the look at the queue, so that no object is missed that comes after it.
            signal.as_mut().enable();
            let (handed, position) = durability::with_log_position(|| self.hand_over(r));
            let Some(pause) = pause_of(&handed) else {
                return (handed.map(|(answer, _)| answer), position);
            };
            let end = deadline.min(tokio::time::Instant::now() + pause);
            if tokio::time::timeout_at(end, signal).await.is_err() && end == deadline {
                return (handed.map(|(answer, _)| answer), position);
            }
        }
    }

    /// Hands objects over that wait for a disk, and waits for the first in this thread. Returns the log
    /// position that the answer waits for, too.
    pub(super) fn fetch_offloads_in_thread(
        &self,
        r: &v1::FetchOffloadsRequest,
    ) -> (Result<v1::FetchOffloadsResponse>, u64) {
        let deadline = SystemClock.now() + wait_of(r);
        loop {
            let mut signal = pin!(self.shared.offload_signal().notified());
            signal.as_mut().enable();
            let (handed, position) = durability::with_log_position(|| self.hand_over(r));
            let Some(pause) = pause_of(&handed) else {
                return (handed.map(|(answer, _)| answer), position);
            };
            let end = deadline.min(SystemClock.now() + pause);
            if !park_until(signal, end) && end == deadline {
                return (handed.map(|(answer, _)| answer), position);
            }
        }
    }

    pub(super) fn report_records(
        &self,
        r: &v1::ReportRecordsRequest,
    ) -> Result<v1::ReportRecordsResponse> {
        let added = r.added.as_ref().map_or(0, |added| added.versions.len());
        let answer = self.apply_report(r);
        let failed = if answer.is_err() { added } else { 0 };
        self.shared.op_metrics().count_batch(Method::ReportRecords, added, failed);
        answer
    }

    fn apply_report(&self, r: &v1::ReportRecordsRequest) -> Result<v1::ReportRecordsResponse> {
        let (client, disk) = owner(r.caller.as_ref(), &r.disk)?;
        let now = self.shared.now();
        self.shared.lock().disks().own(client, disk)?.set_used(r.used);
        let mut stale = Vec::new();
        let mut at = 0;
        self.for_each_record(client, disk, r.dropped.as_ref(), |disk, record| {
            disk.record_lost(now, record);
        })?;
        self.for_each_record(client, disk, r.refused.as_ref(), |disk, record| {
            disk.record_refused(now, record);
        })?;
        self.for_each_record(client, disk, r.added.as_ref(), |disk, record| {
            if !disk.record_added(now, record) {
                stale.push(at);
            }
            at += 1;
        })?;
        let written = r.promoted.iter().map(|&replica| (ReplicaId(replica), true));
        let failed = r.not_promoted.iter().map(|&replica| (ReplicaId(replica), false));
        let ended: Vec<_> = written.chain(failed).take(BATCH_ITEMS_MAX).collect();
        let ended = self.shared.map_in_slices(&ended, |state, &(replica, is_written)| {
            PromotionCalls::new(state.tasks()).end(now, client, disk, replica, is_written)
        });
        ended.into_iter().collect::<Result<()>>()?;
        if r.is_complete && self.shared.lock().disks().own(client, disk)?.end_naming() {
            // A disk that left the pool meanwhile has no copies.
            let slice = |state: &mut State, next: &mut u32| match state.disks().own(client, disk) {
                Ok(mut disk) => disk.drop_unnamed(now, next),
                Err(_) => true,
            };
            self.shared.run_to_completion(&mut 0, slice, |_| {});
        }
        Ok(v1::ReportRecordsResponse { stale })
    }

    /// Passes the records of a disk to `handle` in order, one slice at a time.
    fn for_each_record(
        &self,
        client: ClientId,
        disk: SegmentId,
        columns: Option<&v1::RecordColumns>,
        mut handle: impl FnMut(&mut OwnDisk<'_>, &RecordName<'_>),
    ) -> Result<()> {
        let Some(columns) = columns else { return Ok(()) };
        check_batch(columns.versions.len())?;
        let records = columns.read()?;
        let mut named = Vec::with_capacity(records.len());
        for record in records {
            check_name("tenant", record.tenant)?;
            named.push((TenantId::new(record.tenant), record));
        }
        for slice in named.chunks(SLICE_ITEMS) {
            let mut state = self.shared.lock();
            let mut disk = state.disks().own(client, disk)?;
            for (tenant, Record { key, version, length, .. }) in slice {
                let (version, length) = (Version(*version), *length);
                handle(&mut disk, &RecordName { tenant, key, version, length });
            }
            state.unlock_fair();
        }
        Ok(())
    }
}

fn wait_of(r: &v1::FetchOffloadsRequest) -> Duration {
    Duration::from_millis(r.wait_ms).min(WAIT_MAX)
}

/// Returns how long a call waits before it looks again; `None` if it has something to answer.
fn pause_of(handed: &Result<(v1::FetchOffloadsResponse, bool)>) -> Option<Duration> {
    match handed {
        Ok((answer, true)) if is_empty(answer) => Some(MEMORY_PAUSE),
        Ok((answer, false)) if is_empty(answer) => Some(WAIT_MAX),
        Ok(_) | Err(_) => None,
    }
}

/// Parks this thread until the future is ready; `false` if the deadline comes first.
fn park_until(mut ready: std::pin::Pin<&mut impl Future<Output = ()>>, deadline: Moment) -> bool {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        if let Poll::Ready(()) = ready.as_mut().poll(&mut Context::from_waker(&waker)) {
            return true;
        }
        let left = deadline.left(SystemClock.now());
        if left.is_zero() {
            return false;
        }
        thread::park_timeout(left);
    }
}

/// Returns the caller and the disk that it names.
fn owner(caller: Option<&v1::Caller>, disk: &Bytes) -> Result<(ClientId, SegmentId)> {
    let disk = SegmentId::from_bytes(disk)
        .ok_or_else(|| Error::invalid("the id of a disk has 16 bytes").with("bytes", disk.len()))?;
    Ok((Caller::try_from(caller)?.client, disk))
}

fn handed_over(
    state: &State,
    offloaded: &Offloaded,
    promoted: &PromotionBatch,
) -> v1::FetchOffloadsResponse {
    let mut segments = SegmentTable::default();
    let (records, places) = columns(state, &mut segments, &offloaded.objects);
    let mut answer = v1::FetchOffloadsResponse {
        window_ms: millis(offloaded.fence),
        records: Some(records),
        places: Some(places),
        ..v1::FetchOffloadsResponse::default()
    };
    if !promoted.objects.is_empty() {
        let (promotions, places) = columns(state, &mut segments, &promoted.objects);
        answer.promotions = Some(promotions);
        answer.promotion_places = Some(places);
        answer.write_window_ms = millis(promoted.window);
    }
    answer.segments = segments.into_segments();
    answer
}

fn columns(
    state: &State,
    segments: &mut SegmentTable,
    objects: &[Offload],
) -> (v1::RecordColumns, v1::PlaceColumns) {
    let mut places = v1::PlaceColumns::default();
    for (item, object) in objects.iter().enumerate() {
        places.push(item, object.places.iter().map(|&place| segments.place(state, place)));
    }
    collapse_if_uniform(&mut places.segments);
    let records = v1::RecordColumns::pack(objects.iter().map(|object| Record {
        tenant: object.tenant.as_str(),
        key: &object.key,
        version: object.version.0,
        length: object.length,
    }));
    (records, places)
}

/// Returns whether an answer hands nothing over.
fn is_empty(answer: &v1::FetchOffloadsResponse) -> bool {
    let is_empty =
        |records: Option<&v1::RecordColumns>| records.is_none_or(|it| it.versions.is_empty());
    is_empty(answer.records.as_ref()) && is_empty(answer.promotions.as_ref())
}
