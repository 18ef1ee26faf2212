//! Reads copies on disk: has their owner load ranges of records into registered memory, moves the
//! bytes from there like those of any other copy, and gives the memory back.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use mooncake_base::{
    Clock, Error, ErrorCode, Moment, Result, SegmentId, SystemClock, TenantId, sync::Mutex,
};
use mooncake_os::{
    call_limit::{self, Helpers},
    threads::start_scoped,
};
use mooncake_proto::records::{Loaded, RECORDS_MAX, Wanted};
use mooncake_transfer_engine::{HeldRange, LocalRange, Opcode, TimeLimits, TransferEntry};

use super::Target;
use crate::{
    client::{ClientInner, offload::directory_calls::DirectoryCalls},
    disk::{
        lent_memory::{is_held, of_caller},
        owner::Owner,
        reader::{Load, RecordReader},
        record_range::{RecordRange, record_ranges},
        server::places_of,
        staging::StagingRange,
    },
    object::SegmentInfo,
    protocol::ReadObjects,
    transfer::jobs::Jobs,
};

/// The bytes that one load brings.
const BATCH_BYTES_MAX: u64 = 16 << 20;

/// The bytes of keys in one load, unless a single key is longer.
const BATCH_KEY_BYTES_MAX: usize = 512 << 10;

/// The threads of one call.
const WORKERS_MAX: usize = 4;

/// The least time that an owner has to load records, however impatient the reader is: a device is
/// slower than memory.
const LOAD_TIME_MIN: Duration = Duration::from_secs(10);

/// Reads objects from copies on disk: each read names an object and one of its places.
pub(super) struct DiskReader<'a> {
    pub(super) client: &'a ClientInner,
    pub(super) targets: &'a [Target<'a>],
    pub(super) reads: &'a [(usize, usize)],
}

/// A range of one of the reads.
struct RangeRead {
    /// The number of the read.
    nth: usize,
    range: RecordRange,
    /// Whether later ranges belong to the same read.
    is_part: bool,
}

/// Who loads records.
enum Loader<'a> {
    /// A directory of this process.
    Own(&'a Owner),
    /// The record server of another process.
    Server(RecordReader),
}

/// Memory that records were loaded into, if any were.
struct LoadedMemory {
    /// Of this process; held until it is dropped.
    own: Option<StagingRange>,
    /// Of a record server; 0: none.
    lease: u64,
}

/// Ranges that are loaded together.
#[derive(Clone, Copy)]
struct Batch<'a> {
    group: &'a DirectoryReads<'a>,
    ranges: &'a [RangeRead],
}

/// What the threads of one call share.
struct Progress<'a> {
    batches: VecDeque<Batch<'a>>,
    objects: &'a mut ReadObjects,
    outcomes: &'a mut [Result<()>],
    limits: TimeLimits,
}

impl<'a> Progress<'a> {
    /// Returns the next batch of which a range belongs to a read that has not failed.
    fn next_batch(&mut self) -> Option<Batch<'a>> {
        loop {
            let batch = self.batches.pop_front()?;
            if batch.ranges.iter().any(|read| self.outcomes[read.nth].is_ok()) {
                return Some(batch);
            }
        }
    }

    /// Fails a batch, and all that are still to be read from its directory.
    fn fail_directory(&mut self, batch: Batch<'_>, error: &Error) {
        let id = batch.group.segment.id;
        let others = self.batches.iter().filter(|other| other.group.segment.id == id).copied();
        for read in others.chain([batch]).flat_map(|batch| batch.ranges) {
            if self.outcomes[read.nth].is_ok() {
                self.outcomes[read.nth] = Err(error.clone());
            }
        }
    }

    /// Records what became of the first ranges of a batch; the others are read later. If bytes have
    /// arrived, the reads have until the given deadline.
    fn record(&mut self, batch: Batch<'a>, outcome: Result<Vec<Result<()>>>, deadline: Moment) {
        let (outcomes, rest) = match outcome {
            Ok(outcomes) => {
                let rest = &batch.ranges[outcomes.len()..];
                (outcomes, rest)
            }
            Err(error) => (vec![Err(error); batch.ranges.len()], &[][..]),
        };
        if outcomes.iter().any(Result::is_ok) {
            self.objects.extend_deadline(deadline);
            self.limits.deadline = self.objects.deadline();
        }
        for (read, outcome) in batch.ranges.iter().zip(outcomes) {
            if self.outcomes[read.nth].is_ok() {
                self.outcomes[read.nth] = outcome;
            }
        }
        if !rest.is_empty() {
            self.batches.push_front(Batch { ranges: rest, ..batch });
        }
    }
}

/// The ranges to read from one directory.
struct DirectoryReads<'a> {
    segment: &'a Arc<SegmentInfo>,
    tenant: &'a TenantId,
    ranges: Vec<RangeRead>,
}

impl DiskReader<'_> {
    /// Reads from a copy on disk each, and returns the outcomes. Each load that brings bytes moves
    /// the deadline.
    pub(super) fn read(&self, objects: &mut ReadObjects, limits: TimeLimits) -> Vec<Result<()>> {
        let Self { client, targets, reads } = *self;
        let mut outcomes: Vec<Result<()>> = vec![Ok(()); reads.len()];
        let tenant = client.session.tenant();
        let mut groups: Vec<DirectoryReads<'_>> = Vec::new();
        for (nth, &(at, place)) in reads.iter().enumerate() {
            let segment = &targets[at].located.places[place].segment;
            let group = groups.iter_mut().position(|group| group.segment.id == segment.id);
            let group = group.unwrap_or_else(|| {
                groups.push(DirectoryReads { segment, tenant: &tenant, ranges: Vec::new() });
                groups.len() - 1
            });
            let ranges = record_ranges(targets[at].layout.ranges());
            let last = ranges.len();
            let read = |(number, range): (usize, RecordRange)| {
                let is_part = number + 1 < last;
                RangeRead { nth, range, is_part }
            };
            groups[group].ranges.extend(ranges.into_iter().enumerate().map(read));
        }
        for group in &mut groups {
            if let Some(owner) = client.disks.owner(group.segment.id) {
                self.read_in_place(owner, group, &mut outcomes);
            }
        }
        let mut batches = VecDeque::new();
        for group in &groups {
            cut(group, &mut batches, |range| {
                self.targets[self.reads[range.nth].0].located.key.as_bytes().len()
            });
        }
        if !batches.is_empty() {
            let workers = batches.len().min(WORKERS_MAX);
            let progress =
                Mutex::new(Progress { batches, objects, outcomes: &mut outcomes, limits });
            run_workers(workers, &|| self.read_batches(&progress));
        }
        outcomes
    }

    /// Reads batches until none is left.
    fn read_batches(&self, progress: &Mutex<Progress<'_>>) {
        let mut loaders: Vec<(SegmentId, Loader<'_>)> = Vec::new();
        loop {
            let (batch, limits) = {
                let mut progress = progress.lock();
                let Some(batch) = progress.next_batch() else { break };
                (batch, progress.limits)
            };
            let id = batch.group.segment.id;
            let kept =
                loaders.iter().position(|(of, _)| *of == id).map(|at| loaders.swap_remove(at));
            let loader = match kept {
                Some((_, loader)) => Ok(loader),
                None => self.loader(batch.group.segment, limits),
            };
            let mut loader = match loader {
                Ok(loader) => loader,
                Err(error) => {
                    progress.lock().fail_directory(batch, &error);
                    continue;
                }
            };
            let outcome = self.read_batch(&mut loader, &batch, limits);
            if outcome.is_ok() {
                loaders.push((id, loader));
            }
            let deadline = SystemClock.now() + self.client.config.transfer_timeout;
            progress.lock().record(batch, outcome, call_limit::capped(deadline));
        }
        for (_, loader) in loaders {
            if let Loader::Server(reader) = loader {
                self.client.disks.readers().keep(reader);
            }
        }
    }

    /// Reads the ranges that one part of memory takes in full straight into that memory, where it
    /// stays mapped: where the caller keeps it, or it is registered. Those are done then.
    fn read_in_place(
        &self,
        owner: &Owner,
        group: &mut DirectoryReads<'_>,
        outcomes: &mut [Result<()>],
    ) {
        let ranges = std::mem::take(&mut group.ranges);
        let whole: Vec<_> = ranges.iter().filter_map(|read| read.range.whole()).collect();
        let mut held = self.hold(&whole).into_iter();
        let mut memory = Vec::with_capacity(whole.len());
        let mut in_place = Vec::with_capacity(whole.len());
        for read in ranges {
            match read.range.whole().and_then(|_| held.next().flatten()) {
                Some(held) => {
                    memory.push(held);
                    in_place.push(read);
                }
                None => group.ranges.push(read),
            }
        }
        let ranges: Vec<LocalRange> = memory.iter().map(|(range, _)| *range).collect();
        if have_overlaps(&ranges) {
            group.ranges.extend(in_place);
            return;
        }
        let wanted: Vec<_> = in_place.iter().map(|read| self.wanted(read, group.tenant)).collect();
        let loaded = owner.read(&wanted, ranges.iter().map(of_caller));
        drop(memory);
        for (read, loaded) in in_place.iter().zip(&loaded) {
            if *loaded != Loaded::Good {
                outcomes[read.nth] = Err(gone(*loaded).with("segment", &group.segment.name));
            }
        }
        if loaded.iter().any(|one| is_lost(*one)) {
            DirectoryCalls { client: self.client, owner }.report_lost_soon();
        }
    }

    /// Returns each range of memory that stays mapped as long as the result lives.
    fn hold(&self, ranges: &[LocalRange]) -> Vec<Option<(LocalRange, Option<HeldRange>)>> {
        let named: Vec<_> = ranges.iter().filter(|range| !is_held(range)).copied().collect();
        let mut held = self.client.engine.regions().hold_all(&named).into_iter();
        let hold = |range: &LocalRange| {
            if is_held(range) {
                Some((*range, None))
            } else {
                held.next().flatten().map(|held| (held.range(), Some(held)))
            }
        };
        ranges.iter().map(hold).collect()
    }

    fn loader(&self, segment: &SegmentInfo, limits: TimeLimits) -> Result<Loader<'_>> {
        let client = self.client;
        if let Some(owner) = client.disks.owner(segment.id) {
            return Ok(Loader::Own(owner));
        }
        let now = SystemClock.now();
        let suspected = client.transfers.replicas().suspected();
        let deadline = call_limit::capped(limits.give_up_at());
        let reader = client.disks.readers().connect(&segment.endpoint, deadline);
        let reader = reader.inspect_err(|_| {
            if !call_limit::is_over() {
                suspected.add(&segment.endpoint, now);
            }
        });
        reader
            .map(Loader::Server)
            .map_err(|error| error.with("segment", &segment.name).with("peer", &segment.endpoint))
    }

    /// Loads and moves the first ranges of a batch, as many as the owner has memory for; returns what
    /// became of each.
    ///
    /// # Errors
    /// The owner cannot be reached, or its memory was given to others meanwhile.
    fn read_batch(
        &self,
        loader: &mut Loader<'_>,
        batch: &Batch<'_>,
        limits: TimeLimits,
    ) -> Result<Vec<Result<()>>> {
        let Batch { group, ranges } = *batch;
        let wanted: Vec<_> = ranges.iter().map(|read| self.wanted(read, group.tenant)).collect();
        let (memory, load) = self.load(loader, group.segment.id, &wanted, limits)?;
        let taken = load.ranges.iter().take_while(|(loaded, _)| *loaded != Loaded::Later).count();
        if taken == 0 {
            let text = "the owner of a disk had no memory for a read until the deadline";
            return Err(Error::new(ErrorCode::RPC_TIMEOUT, text)
                .with("segment", &group.segment.name)
                .with("peer", &group.segment.endpoint));
        }
        let staged = Arc::new(SegmentInfo {
            id: load.segment.unwrap_or(group.segment.id),
            endpoint: load.endpoint,
            base: 0,
            length: u64::MAX,
            is_disk: false,
            ..SegmentInfo::clone(group.segment)
        });
        let mut jobs = Jobs::with_capacity(taken);
        for (read, &(loaded, address)) in ranges.iter().zip(&load.ranges).take(taken) {
            if loaded == Loaded::Good {
                let parts = read.range.parts.iter();
                let entries = parts.map(|&(at, range)| TransferEntry::new(range, address + at));
                jobs.reserve(read.range.parts.len());
                jobs.push_part(&staged, entries, false, read.is_part);
            }
        }
        if !jobs.is_empty() {
            self.client.transfers.run(Opcode::Read, &mut jobs, limits);
        }
        let mut moved = jobs.finish();
        let outcomes = load.ranges.iter().take(taken).map(|(loaded, _)| match loaded {
            Loaded::Good => moved.next().unwrap_or_else(|| Err(gone(Loaded::Failed))),
            loaded => Err(gone(*loaded).with("segment", &group.segment.name)),
        });
        let outcomes = outcomes.collect();
        self.release(loader, memory, limits)?;
        Ok(outcomes)
    }

    /// Has the ranges loaded, as many of the first as there is memory for.
    fn load(
        &self,
        loader: &mut Loader<'_>,
        disk: SegmentId,
        wanted: &[Wanted<'_>],
        limits: TimeLimits,
    ) -> Result<(LoadedMemory, Load)> {
        let deadline = load_deadline(limits);
        match loader {
            Loader::Own(owner) => {
                let staging = self.client.disks.staging();
                let (places, bytes) = places_of(wanted, staging.share());
                let mut ranges = vec![(Loaded::Later, 0); wanted.len()];
                let stage = staging.reserve(bytes, deadline)?;
                if let Some(stage) = &stage {
                    let loaded = owner.load(&wanted[..places.len()], &places, stage);
                    if loaded.iter().any(|one| is_lost(*one)) {
                        DirectoryCalls { client: self.client, owner }.report_lost_soon();
                    }
                    for ((range, loaded), place) in ranges.iter_mut().zip(loaded).zip(places) {
                        *range = (loaded, stage.address(place));
                    }
                }
                let endpoint = self.client.engine.segment_name().to_owned();
                let segment = stage.as_ref().map(StagingRange::segment);
                let memory = LoadedMemory { own: stage, lease: 0 };
                Ok((memory, Load { lease: 0, endpoint, segment, ranges }))
            }
            Loader::Server(reader) => {
                let load = reader.load(disk, wanted, deadline)?;
                let loaded = load.ranges.iter().zip(wanted);
                let good = loaded.filter(|((loaded, _), _)| *loaded == Loaded::Good);
                self.client.metrics.disk.count_remote(good.map(|(_, wanted)| wanted.length).sum());
                Ok((LoadedMemory { own: None, lease: load.lease }, load))
            }
        }
    }

    /// Returns how a range is asked for.
    fn wanted<'t>(&'t self, read: &RangeRead, tenant: &'t TenantId) -> Wanted<'t> {
        let located = &self.targets[self.reads[read.nth].0].located;
        Wanted {
            tenant: tenant.as_str(),
            key: located.key.as_bytes(),
            version: located.version.0,
            offset: read.range.offset,
            length: read.range.length,
        }
    }

    /// Gives memory back, and learns whether it was held until now.
    fn release(
        &self,
        loader: &mut Loader<'_>,
        memory: LoadedMemory,
        limits: TimeLimits,
    ) -> Result<()> {
        drop(memory.own);
        match loader {
            Loader::Server(reader) if memory.lease != 0 => {
                reader.release(memory.lease, load_deadline(limits))
            }
            Loader::Server(_) | Loader::Own(_) => Ok(()),
        }
    }
}

/// Runs the same work on so many threads, this one included: while one waits for a device, another
/// moves bytes.
fn run_workers(workers: usize, work: &(impl Fn() + Sync)) {
    let helpers = Helpers::new();
    std::thread::scope(|scope| {
        for _ in 1..workers {
            let (limit, helper) = (call_limit::current(), helpers.add());
            let spawned = start_scoped(scope, "mc-disk-read", move || {
                let _helper = helper;
                call_limit::run_under(limit, work);
            });
            if let Err(error) = spawned {
                // The other threads take the batches.
                tracing::warn!(%error, "cannot start a thread for a read from disk");
            }
        }
        work();
        helpers.wait();
    });
}

/// Returns whether two of the ranges have a byte in common.
fn have_overlaps(ranges: &[LocalRange]) -> bool {
    let mut sorted: Vec<_> = ranges.iter().map(|range| (range.address(), range.length())).collect();
    sorted.sort_unstable();
    sorted.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0)
}

/// Returns whether the owner does not have the record any more.
fn is_lost(loaded: Loaded) -> bool {
    matches!(loaded, Loaded::Missing | Loaded::Damaged)
}

/// Cuts the ranges of a directory into batches.
fn cut<'a>(
    group: &'a DirectoryReads<'a>,
    batches: &mut VecDeque<Batch<'a>>,
    key_bytes_of: impl Fn(&RangeRead) -> usize,
) {
    let mut ranges = &group.ranges[..];
    while !ranges.is_empty() {
        let (mut bytes, mut key_bytes) = (0, 0);
        let fits = |read: &&RangeRead| {
            bytes += read.range.length;
            key_bytes += key_bytes_of(read);
            bytes <= BATCH_BYTES_MAX && key_bytes <= BATCH_KEY_BYTES_MAX
        };
        let count = ranges.iter().take(RECORDS_MAX).take_while(fits).count().max(1);
        let (first, rest) = ranges.split_at(count);
        batches.push_back(Batch { group, ranges: first });
        ranges = rest;
    }
}

fn load_deadline(limits: TimeLimits) -> Moment {
    let patience = limits.stall.map_or(Duration::MAX, |stall| stall.max(LOAD_TIME_MIN));
    match patience {
        Duration::MAX => call_limit::capped(limits.deadline),
        patience => call_limit::capped(limits.deadline.min(SystemClock.now() + patience)),
    }
}

/// Returns the error of a record that was not loaded.
fn gone(loaded: Loaded) -> Error {
    match loaded {
        Loaded::Missing => {
            Error::new(ErrorCode::OBJECT_NOT_FOUND, "the copy on disk was dropped meanwhile")
        }
        Loaded::Damaged => {
            Error::new(ErrorCode::OBJECT_NOT_FOUND, "the copy on disk is damaged, and was dropped")
        }
        Loaded::Good | Loaded::Failed | Loaded::Later => {
            Error::new(ErrorCode::TRANSFER_FAIL, "the copy on disk cannot be read")
        }
    }
}
