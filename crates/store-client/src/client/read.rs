//! Reads located objects: carries out the steps that [`ReadObjects`] decides, with one transfer per
//! peer and one call to the master for all objects of a step.

mod allowed_memory;
pub(super) mod destination;
mod disk;
pub(super) mod locate;
pub(super) mod ranges;

use std::borrow::Cow;

use mooncake_base::{Clock, Error, ErrorCode, Moment, ReplicaId, Result, SystemClock};
use mooncake_os::call_limit;
use mooncake_proto::v1;
use mooncake_transfer_engine::{LocalRange, Opcode, TimeLimits, TransferEntry};

use self::{
    destination::{DestinationLayout, layout},
    disk::DiskReader,
    locate::Grants,
};
use super::{
    Client, ClientInner,
    checksum::Checksummer,
    rounds::{RoundCursor, RoundSize},
};
use crate::{
    metrics::{Operation, OutcomeTotals},
    object::{Located, Read, SegmentInfo, Span},
    protocol::{ReadExtent, ReadObjects, ReadReplica, ReadSource, ReadStep},
    rpc::{batch, response},
    transfer::jobs::Jobs,
};

/// An object that is read, and the memory that its bytes go to.
struct Target<'a> {
    located: Cow<'a, Located>,
    layout: DestinationLayout<'a>,
    length: u64,
}

impl Client {
    /// Reads located objects or parts of them with one transfer per peer and returns the number of
    /// bytes of each read. Tries the replicas in turn. A read that completed after its fence is
    /// verified by the master or retried.
    ///
    /// If an object is replaced during a read of the whole object, the read may return the newer
    /// version if it has the same length.
    ///
    /// # Errors
    /// By read: the destination is too small or the range is outside the object (`INVALID_PARAMS`),
    /// no replica can be read (`TRANSFER_FAIL`), the object was replaced or removed during the read
    /// (`LEASE_EXPIRED`, `OBJECT_NOT_FOUND`). The content of the destination is then undefined.
    pub fn read(&self, reads: &[Read<'_>]) -> Vec<Result<u64>> {
        self.read_since(reads.first().map(|read| read.located.requested_at), reads)
    }

    /// Reads and records the operation's duration, counted from `begin` or, if `None`, from now.
    pub(super) fn read_since(&self, begin: Option<Moment>, reads: &[Read<'_>]) -> Vec<Result<u64>> {
        let now = SystemClock.now();
        let outcomes = self.inner.read(reads, now);
        let Some(first) = reads.first() else { return outcomes };
        let mut sum = OutcomeTotals::default();
        outcomes.iter().for_each(|outcome| sum.add(outcome.as_ref().ok().copied()));
        let operation = match (first.span, reads.len()) {
            (Span::Whole, 1) => Operation::Get,
            (Span::Whole, _) => Operation::GetBatch,
            (Span::Range { .. } | Span::Scattered(_) | Span::Grids(_), _) => Operation::GetParts,
        };
        let took = SystemClock.now().since(begin.unwrap_or(now));
        self.inner.metrics.count_operation(operation, sum, took);
        outcomes
    }
}

impl ClientInner {
    fn read(&self, reads: &[Read<'_>], now: Moment) -> Vec<Result<u64>> {
        if let Err(error) = self.lifetime.check_open() {
            return reads.iter().map(|_| Err(error.clone())).collect();
        }
        let mut objects = ReadObjects::new(call_limit::capped(now + self.config.transfer_timeout));
        let mut targets: Vec<_> =
            reads.iter().map(|read| self.add_read(read, &mut objects, now)).collect();
        let mut now = now;
        loop {
            match objects.next_step(now) {
                ReadStep::Transfer { reads, stall } => {
                    let limits = TimeLimits { deadline: objects.deadline(), stall };
                    now = self.transfer_step(&mut objects, &targets, &reads, limits, now);
                    continue;
                }
                ReadStep::Verify(late) => self.verify_step(&mut objects, &targets, &late),
                ReadStep::CompareChecksums(read) => {
                    self.checksum_step(&mut objects, &targets, &read);
                }
                ReadStep::Locate(failed) => {
                    self.locate_step(&mut objects, &mut targets, reads, &failed);
                }
                ReadStep::Done => break,
            }
            now = SystemClock.now();
            if call_limit::is_over() {
                now = now.max(objects.deadline());
            }
        }
        let outcomes = objects.into_outcomes().zip(&targets);
        outcomes
            .map(|(outcome, target)| match outcome {
                Ok(()) => Ok(target.length),
                Err(error) => Err(response::named_error(error, &target.located.key)),
            })
            .collect()
    }

    /// Checks a read, lays out its destination, and adds it to the objects.
    fn add_read<'a>(&self, read: &Read<'a>, objects: &mut ReadObjects, now: Moment) -> Target<'a> {
        let located = Cow::Borrowed(read.located);
        match layout(&located, read.span, read.into) {
            Ok(layout) => {
                let length = layout.nbytes();
                let extent = match read.span {
                    Span::Whole => ReadExtent::Whole,
                    Span::Range { .. } | Span::Scattered(_) | Span::Grids(_) => {
                        ReadExtent::Part(length)
                    }
                };
                objects.push(self.read_source(&located, extent, now), extent);
                Target { located, layout, length }
            }
            Err(error) => {
                objects.push_refused(error);
                Target { located, layout: DestinationLayout::Scattered(&[], &[]), length: 0 }
            }
        }
    }

    fn read_source(&self, located: &Located, extent: ReadExtent, now: Moment) -> ReadSource {
        let (bytes, is_whole) = match extent {
            ReadExtent::Whole => (located.length, true),
            ReadExtent::Part(bytes) => (bytes, false),
        };
        let replica = |place: usize| {
            let found = &located.places[place];
            let SegmentInfo { id, is_disk, .. } = *found.segment;
            ReadReplica { place, replica: found.replica, segment: id, is_on_disk: is_disk }
        };
        ReadSource {
            version: located.version,
            length: located.length,
            fence_end: located.fence,
            replicas: self
                .transfers
                .replicas()
                .order(&located.places, bytes, now)
                .into_iter()
                .map(replica)
                .collect(),
            // A checksum covers the whole object.
            has_checksum: self.config.has_checksums && is_whole && located.checksum.is_some(),
        }
    }

    /// Reads from one replica each and returns the time afterwards.
    fn transfer_step(
        &self,
        objects: &mut ReadObjects,
        targets: &[Target<'_>],
        reads: &[(usize, usize)],
        limits: TimeLimits,
        begin: Moment,
    ) -> Moment {
        let is_on_disk =
            |&(at, place): &(usize, usize)| targets[at].located.places[place].segment.is_disk;
        if reads.iter().any(is_on_disk) {
            return self.transfer_step_with_disks(objects, targets, reads, limits, begin);
        }
        let round_size = RoundSize::new(self.config.round_bytes);
        if round_size.is_exceeded_by(reads.iter().map(|&(at, _)| targets[at].length)) {
            let outcomes = self.read_in_rounds(objects, targets, reads, round_size, limits);
            return self.end_step(objects, reads, outcomes, begin);
        }
        let mut jobs = Jobs::with_capacity(reads.len());
        for &(at, place) in reads {
            targets[at].push_job(place, &mut jobs);
        }
        self.transfers.run(Opcode::Read, &mut jobs, limits);
        self.end_step(objects, reads, jobs.finish(), begin)
    }

    /// Like [`Self::transfer_step`], where some of the replicas are on disk: those in memory first.
    fn transfer_step_with_disks(
        &self,
        objects: &mut ReadObjects,
        targets: &[Target<'_>],
        reads: &[(usize, usize)],
        limits: TimeLimits,
        begin: Moment,
    ) -> Moment {
        let (on_disk, in_memory): (Vec<_>, Vec<_>) = reads
            .iter()
            .partition(|&&(at, place)| targets[at].located.places[place].segment.is_disk);
        let begin = if in_memory.is_empty() {
            begin
        } else {
            self.transfer_step(objects, targets, &in_memory, limits, begin)
        };
        let reader = DiskReader { client: self, targets, reads: &on_disk };
        let outcomes = reader.read(objects, limits);
        self.end_step(objects, &on_disk, outcomes, begin)
    }

    /// Reports the outcomes of reads and returns the time.
    fn end_step(
        &self,
        objects: &mut ReadObjects,
        reads: &[(usize, usize)],
        outcomes: impl IntoIterator<Item = Result<()>>,
        begin: Moment,
    ) -> Moment {
        let now = SystemClock.now();
        self.metrics.count_transfer(Opcode::Read, reads.len(), now.since(begin));
        for (&(at, _), outcome) in reads.iter().zip(outcomes) {
            if objects.transferred(at, outcome, now) {
                self.metrics.replicas.skipped_copies.increment();
            }
        }
        now
    }

    /// Reads objects that are large, or large together, in rounds. Each round that moves bytes moves
    /// the deadline.
    fn read_in_rounds(
        &self,
        objects: &mut ReadObjects,
        targets: &[Target<'_>],
        reads: &[(usize, usize)],
        round_size: RoundSize,
        mut limits: TimeLimits,
    ) -> Vec<Result<()>> {
        let mut outcomes: Vec<Result<()>> = vec![Ok(()); reads.len()];
        let layouts = reads.iter().map(|&(at, _)| RoundCursor::new(targets[at].layout.ranges()));
        let mut cursors: Vec<_> = layouts.collect();
        loop {
            let is_open = |nth: &usize| outcomes[*nth].is_ok() && !cursors[*nth].is_at_end();
            let mut open: Vec<usize> = (0..reads.len()).filter(is_open).collect();
            if open.is_empty() {
                return outcomes;
            }
            let mut budget = round_size.begin();
            let mut jobs = Jobs::with_capacity(open.len());
            let mut taken = 0;
            for &nth in &open {
                if budget.is_spent() {
                    break;
                }
                let (at, place) = reads[nth];
                let ranges = budget.take(&mut cursors[nth]);
                targets[at].push_part(place, &ranges, !cursors[nth].is_at_end(), &mut jobs);
                taken += 1;
            }
            open.truncate(taken);
            self.transfers.run(Opcode::Read, &mut jobs, limits);
            for (&nth, outcome) in open.iter().zip(jobs.finish()) {
                outcomes[nth] = outcome;
            }
            if open.iter().any(|&nth| outcomes[nth].is_ok()) {
                let deadline = SystemClock.now() + self.config.transfer_timeout;
                objects.extend_deadline(call_limit::capped(deadline));
                limits.deadline = objects.deadline();
            }
        }
    }

    /// Asks the master whether the replicas of late reads still exist.
    fn verify_step(
        &self,
        objects: &mut ReadObjects,
        targets: &[Target<'_>],
        late: &[(usize, ReplicaId)],
    ) {
        self.metrics.replicas.late_reads.add_nonzero(late.len() as u64);
        let deadline = self.rpc.deadline();
        let sizes = late.iter().map(|&(at, _)| targets[at].located.key.as_bytes().len());
        for range in batch::split(sizes, batch::KEY_BYTES_MAX) {
            let part = &late[range];
            let reads = part.iter().map(|&(at, replica)| v1::ReadRef {
                key: targets[at].located.key.as_bytes().to_vec().into(),
                version: targets[at].located.version.0,
                replica: replica.0,
            });
            let (caller, reads) = (self.rpc.caller(), reads.collect());
            let request = v1::VerifyRequest { caller, reads };
            let answer = self.rpc.call_until(request, deadline).map(|response| response.is_valid);
            let answer = answer.and_then(|valid| {
                response::check_count(valid.len(), part.len())?;
                Ok(valid)
            });
            for (nth, &(at, _)) in part.iter().enumerate() {
                objects.verified(at, answer.as_ref().map(|valid| valid[nth]).map_err(Clone::clone));
            }
        }
    }

    /// Compares bytes with the checksums that were kept with them.
    fn checksum_step(
        &self,
        objects: &mut ReadObjects,
        targets: &[Target<'_>],
        read: &[(usize, ReplicaId)],
    ) {
        let mut checksummer = Checksummer::new(&self.engine, objects.deadline());
        for &(at, replica) in read {
            let Target { located, layout, .. } = &targets[at];
            let found = checksummer.checksum(layout.ranges().map(|(_, range)| range));
            objects.compared(
                at,
                found.and_then(|found| {
                    if Some(found) == located.checksum {
                        return Ok(());
                    }
                    let error = self.checksum_error(located, replica);
                    tracing::error!(%error, "a replica of an object is damaged");
                    Err(error)
                }),
            );
        }
    }

    /// Counts a damaged replica and returns the error.
    fn checksum_error(&self, located: &Located, replica: ReplicaId) -> Error {
        self.metrics.replicas.checksum_mismatches.increment();
        let text = "the bytes do not match the checksum that was kept with them";
        let error = Error::new(ErrorCode::CHECKSUM_MISMATCH, text).with("key", &located.key);
        match located.places.iter().find(|place| place.replica == replica) {
            Some(place) => {
                self.metrics.count_peer_error(&place.segment.endpoint);
                error
                    .with("segment", &place.segment.name)
                    .with("address", format_args!("{:#x}", place.address()))
            }
            None => error,
        }
    }

    /// Locates failed objects again.
    fn locate_step(
        &self,
        objects: &mut ReadObjects,
        targets: &mut [Target<'_>],
        reads: &[Read<'_>],
        failed: &[usize],
    ) {
        let keys = failed.iter().map(|&at| targets[at].located.key.clone()).collect();
        let lease = failed.iter().any(|&at| targets[at].located.has_lease);
        let deadline = objects.deadline().min(self.rpc.deadline());
        let located = self.locate(keys, Grants { lease, ..Grants::READ }, deadline);
        let now = SystemClock.now();
        for (&at, located) in failed.iter().zip(located) {
            let extent = match reads[at].span {
                Span::Whole => ReadExtent::Whole,
                Span::Range { .. } | Span::Scattered(_) | Span::Grids(_) => {
                    ReadExtent::Part(targets[at].length)
                }
            };
            let found = located.as_ref().map_err(Clone::clone);
            let found = found.map(|located| self.read_source(located, extent, now));
            if objects.relocated(at, found)
                && let Ok(located) = located
            {
                targets[at].located = Cow::Owned(located);
            }
        }
    }
}

impl Target<'_> {
    /// Adds a transfer from one of the places.
    fn push_job(&self, place: usize, jobs: &mut Jobs) {
        let place = &self.located.places[place];
        let entry = |(offset, range): (u64, LocalRange)| {
            TransferEntry::new(range, place.address() + offset)
        };
        let is_chosen = self.located.places.len() > 1;
        jobs.reserve(self.layout.count_max());
        jobs.push(&place.segment, self.layout.ranges().map(entry), is_chosen);
    }

    /// Adds a transfer of some of the ranges. `is_part`: later ones move the rest.
    fn push_part(
        &self,
        place: usize,
        ranges: &[(u64, LocalRange)],
        is_part: bool,
        jobs: &mut Jobs,
    ) {
        let place = &self.located.places[place];
        let entry = |&(offset, range): &(u64, LocalRange)| {
            TransferEntry::new(range, place.address() + offset)
        };
        let is_chosen = self.located.places.len() > 1;
        jobs.push_part(&place.segment, ranges.iter().map(entry), is_chosen, is_part);
    }
}
