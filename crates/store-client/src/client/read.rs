//! Reads: locate the objects, then transfer their bytes straight from the owners. A read counts
//! only if the memory belonged to the object during the whole transfer.

use std::{borrow::Cow, sync::Arc, time::Duration};

use mooncake_base::{
    Clock, Error, ErrorCode, ErrorKind, KeyRef, Moment, ObjectKey, ReplicaId, Result, SystemClock,
    Version,
};
use mooncake_proto::{
    columns::{Located as LocatedRow, Outcome},
    v1::{self, request::Call, response::Call as Reply},
};
use mooncake_transfer_engine::{LocalRange, Opcode, TimeLimits, TransferEntry};
use smallvec::SmallVec;

use super::{
    Client, ClientInner, ReadFences, batch, call,
    checksum::Checksummer,
    put::total,
    transfer::{Jobs, STALL_LIMIT},
};
use crate::{
    metrics::{Operation, OutcomeTotals},
    object::{Located, Read, SegmentInfo, Span},
};

/// Fixed margin subtracted from each fence, since the local clock and the master's run at different
/// speeds.
const FENCE_MARGIN: Duration = Duration::from_millis(5);

/// Further margin, as a fraction of the fence: 1/50, far more than any two clocks drift apart.
const FENCE_MARGIN_SHARE: u32 = 50;

/// The response to a locate call.
struct LocateReply {
    columns: v1::LocatedColumns,
    grant: LocateGrant,
}

/// The part of a locate response that all of its objects share.
struct LocateGrant {
    /// The segments that the places refer to.
    segments: Vec<Arc<SegmentInfo>>,
    requested_at: Moment,
    fence: Moment,
    fences: Option<Arc<ReadFences>>,
}

/// A read in progress.
#[derive(Debug)]
struct Attempt<'a> {
    located: Cow<'a, Located>,
    span: Span<'a>,
    /// Offsets within the object and their destinations.
    ranges: SmallVec<[(u64, LocalRange); 1]>,
    length: u64,
    /// Indexes of the replicas, the best one first.
    candidates: SmallVec<[usize; 1]>,
    /// Number of replicas tried so far.
    tried: usize,
    /// Indexes of the replicas whose holder was silent. They are tried again with more patience when
    /// no other replica could be read.
    silent: SmallVec<[usize; 1]>,
    state: AttemptState,
    /// Whether the bytes are verified: read within the fence or confirmed by the master, and
    /// matching the checksum.
    is_verified: bool,
}

#[derive(Debug)]
enum AttemptState {
    Open,
    /// The replica that was read, and the time of completion.
    Done(ReplicaId, Moment),
    Failed(Error),
}

impl Client {
    /// Locates objects that will be read soon: takes leases and fences their memory for the read.
    ///
    /// # Errors
    /// By key: `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` while it is being written, or the
    /// master cannot be reached.
    pub fn locate(&self, keys: &[ObjectKey]) -> Vec<Result<Located>> {
        self.inner.locate(keys.to_vec(), true)
    }

    /// Like [`locate`](Self::locate), for callers that do not need the keys afterwards.
    ///
    /// # Errors
    /// Same as [`locate`](Self::locate).
    pub fn locate_owned(&self, keys: Vec<ObjectKey>) -> Vec<Result<Located>> {
        self.inner.locate(keys, true)
    }

    /// Locates objects without the intention to read them: takes leases but no fences. Reading them
    /// anyway costs one more call.
    ///
    /// # Errors
    /// Same as [`locate`](Self::locate).
    pub fn describe(&self, keys: &[ObjectKey]) -> Vec<Result<Located>> {
        self.inner.locate(keys.to_vec(), false)
    }

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
            (Span::Range { .. } | Span::Scattered(_), _) => Operation::GetParts,
        };
        let took = SystemClock.now().since(begin.unwrap_or(now));
        self.inner.metrics.count_operation(operation, sum, took);
        outcomes
    }
}

impl ClientInner {
    fn locate(&self, keys: Vec<ObjectKey>, has_fence: bool) -> Vec<Result<Located>> {
        let mut located = Vec::with_capacity(keys.len());
        let ranges =
            batch::split(keys.iter().map(|key| key.as_bytes().len()), batch::KEY_BYTES_MAX);
        let messages: Vec<_> = ranges
            .into_iter()
            .map(|range| v1::KeyColumn::pack(keys[range].iter().map(KeyRef::from)))
            .collect();
        let mut keys = keys.into_iter();
        for packed in messages {
            let count = packed.lengths.len();
            let answer = self.request_locate(packed, has_fence);
            let part = keys.by_ref().take(count);
            match answer.as_ref().map_err(Clone::clone).and_then(|places| places.read(count)) {
                Ok((grant, found)) => {
                    located.extend(found.zip(part).map(|(found, key)| grant.located(found, key)))
                }
                Err(error) => located.extend(part.map(|_| Err(error.clone()))),
            }
        }
        let hits = located.iter().filter(|outcome| outcome.is_ok()).count();
        self.metrics.count_located(hits as u64, (located.len() - hits) as u64);
        located
    }

    fn request_locate(&self, keys: v1::KeyColumn, has_fence: bool) -> Result<LocateReply> {
        let call = Call::Locate(v1::LocateRequest {
            caller: Some(self.caller.clone()),
            keys: Vec::new(),
            lease: true,
            fence: has_fence,
            columns: Some(keys),
        });
        // The fence counts from before the call was sent: the master cannot have begun earlier.
        let requested_at = SystemClock.now();
        let response = self.call_at(requested_at, call, |answer| match answer {
            Reply::Locate(response) => Some(response),
            _ => None,
        })?;
        let fence = Duration::from_millis(response.fence_ms);
        let margin = FENCE_MARGIN + fence / FENCE_MARGIN_SHARE;
        let fence = requested_at + fence.saturating_sub(margin);
        let fences =
            ReadFences::from_response(&response, fence, &self.pending_releases).map(Arc::new);
        let segments = call::read_segments(response.segments)?;
        let columns = call::require_columns(response.columns)?;
        Ok(LocateReply { columns, grant: LocateGrant { segments, requested_at, fence, fences } })
    }

    fn read(&self, reads: &[Read<'_>], now: Moment) -> Vec<Result<u64>> {
        if let Err(error) = self.check_open() {
            return reads.iter().map(|_| Err(error.clone())).collect();
        }
        let deadline = now + self.config.transfer_timeout;
        let mut attempts: Vec<Result<Attempt<'_>>> = reads
            .iter()
            .map(|read| self.attempt(Cow::Borrowed(read.located), read.span, read.into, now))
            .collect();
        self.fetch_and_verify(&mut attempts, now, deadline);
        self.retry_relocated(reads, &mut attempts, deadline);
        attempts.into_iter().map(|attempt| attempt.and_then(Attempt::finish)).collect()
    }

    /// Checks a read and lays out its destination.
    fn attempt<'a>(
        &self,
        located: Cow<'a, Located>,
        span: Span<'a>,
        into: &[LocalRange],
        now: Moment,
    ) -> Result<Attempt<'a>> {
        let ranges = layout(&located, span, into)?;
        let length = total(ranges.iter().map(|(_, range)| range));
        let candidates = self.replica_order(&located.places, length, now);
        // An empty read is complete.
        let state = match length {
            0 => AttemptState::Done(ReplicaId(0), Moment::default()),
            _ => AttemptState::Open,
        };
        Ok(Attempt {
            located,
            span,
            ranges,
            length,
            candidates,
            tried: 0,
            silent: SmallVec::new(),
            state,
            is_verified: false,
        })
    }

    /// Fetches all open reads, verifies late ones with the master, and fetches from another replica
    /// where a checksum does not match.
    fn fetch_and_verify(
        &self,
        attempts: &mut [Result<Attempt<'_>>],
        now: Moment,
        deadline: Moment,
    ) {
        let mut now = now;
        loop {
            now = self.fetch(attempts, now, deadline);
            now = self.fetch_silent(attempts, now, deadline);
            let mut late: Vec<_> =
                attempts.iter_mut().flatten().filter(|attempt| attempt.is_late()).collect();
            if !late.is_empty() {
                self.metrics.count_late(late.len());
                self.verify_late(&mut late);
            }
            if !self.verify_checksums(attempts) {
                return;
            }
        }
    }

    /// Tries the replicas of every open read in turn and returns the time afterwards. Leaves a silent
    /// holder for the next replica.
    fn fetch(&self, attempts: &mut [Result<Attempt<'_>>], now: Moment, deadline: Moment) -> Moment {
        let mut now = now;
        loop {
            let mut jobs = Jobs::with_capacity(attempts.len());
            let mut running = Vec::with_capacity(attempts.len());
            for attempt in attempts.iter_mut().flatten() {
                if let Some(at) = attempt.next_job(&mut jobs) {
                    running.push((attempt, at));
                }
            }
            if jobs.is_empty() {
                return now;
            }
            // Nobody is kept waiting by reads that all need the same holder.
            let is_patient = jobs.has_one_segment()
                && running.iter().all(|(attempt, _)| attempt.candidates.len() == 1);
            let stall = (!is_patient).then_some(STALL_LIMIT);
            now = self.run_reads((jobs, running), TimeLimits { deadline, stall }, now);
        }
    }

    /// Tries the silent holders of failed reads again, with growing patience, and returns the time
    /// afterwards.
    fn fetch_silent(
        &self,
        attempts: &mut [Result<Attempt<'_>>],
        now: Moment,
        deadline: Moment,
    ) -> Moment {
        let mut now = now;
        let mut stall = STALL_LIMIT;
        for round in 0.. {
            let mut jobs = Jobs::default();
            let mut running = Vec::new();
            for attempt in attempts.iter_mut().flatten() {
                if let Some(at) = attempt.next_silent_job(round, &mut jobs) {
                    running.push((attempt, at));
                }
            }
            if jobs.is_empty() || deadline.has_passed(now) {
                break;
            }
            stall *= 2;
            let is_last = now + stall >= deadline
                || running.iter().all(|(attempt, _)| attempt.silent.len() == 1);
            let limits = TimeLimits { deadline, stall: (!is_last).then_some(stall) };
            now = self.run_reads((jobs, running), limits, now);
            if is_last {
                break;
            }
        }
        now
    }

    /// Reads from one replica each and returns the time afterwards.
    fn run_reads(
        &self,
        (mut jobs, running): (Jobs, Vec<(&mut Attempt<'_>, usize)>),
        limits: TimeLimits,
        begin: Moment,
    ) -> Moment {
        self.run_jobs(Opcode::Read, &mut jobs, limits);
        let now = SystemClock.now();
        self.metrics.count_transfer(Opcode::Read, jobs.len(), now.since(begin));
        for ((attempt, at), outcome) in running.into_iter().zip(jobs.finish()) {
            match outcome {
                Ok(()) => {
                    let replica = attempt.located.places[at].replica;
                    attempt.state = AttemptState::Done(replica, now);
                }
                Err(error) => {
                    attempt.record_silence(at, &error, limits);
                    if attempt.has_untried_replica() && !limits.deadline.has_passed(now) {
                        self.metrics.count_skipped(1);
                        continue;
                    }
                    let key = &attempt.located.key;
                    attempt.state = AttemptState::Failed(error.with("key", key));
                }
            }
        }
        now
    }

    /// Compares the bytes with the writers' checksums. Returns whether some reads need another
    /// replica.
    fn verify_checksums(&self, attempts: &mut [Result<Attempt<'_>>]) -> bool {
        let mut needs_retry = false;
        let mut checksummer = Checksummer::default();
        for attempt in attempts.iter_mut().flatten() {
            let AttemptState::Done(replica, _) = attempt.state else { continue };
            if attempt.is_verified {
                continue;
            }
            let is_wanted = self.config.has_checksums && attempt.span == Span::Whole;
            let Some(expected) = attempt.located.checksum.filter(|_| is_wanted) else {
                attempt.is_verified = true;
                continue;
            };
            match checksummer.checksum(attempt.ranges.iter().map(|(_, range)| range)) {
                Ok(sum) if sum == expected => attempt.is_verified = true,
                Ok(_) => {
                    let error = self.checksum_error(&attempt.located, replica);
                    tracing::error!(%error, "a replica of an object is damaged");
                    attempt.state = match attempt.has_untried_replica() {
                        true => AttemptState::Open,
                        false => AttemptState::Failed(error),
                    };
                    needs_retry |= attempt.has_untried_replica();
                }
                Err(error) => attempt.state = AttemptState::Failed(error),
            }
        }
        needs_retry
    }

    /// Counts a damaged replica and returns the error.
    fn checksum_error(&self, located: &Located, replica: ReplicaId) -> Error {
        self.metrics.count_mismatch();
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

    /// Asks the master whether the replicas of late reads still exist, and fails the reads whose
    /// replica is gone.
    fn verify_late(&self, late: &mut [&mut Attempt<'_>]) {
        let sizes = late.iter().map(|attempt| attempt.located.key.as_bytes().len());
        for range in batch::split(sizes, batch::KEY_BYTES_MAX) {
            let part = &mut late[range];
            let reads = part.iter().map(|attempt| attempt.read_ref()).collect();
            let call = Call::Verify(v1::VerifyRequest { caller: Some(self.caller.clone()), reads });
            let answer = self.call(call, |answer| match answer {
                Reply::Verify(response) => Some(response.is_valid),
                _ => None,
            });
            let answer = answer.and_then(|valid| {
                call::check_count(valid.len(), part.len())?;
                Ok(valid)
            });
            for (at, attempt) in part.iter_mut().enumerate() {
                match &answer {
                    Ok(valid) if valid[at] => {}
                    Ok(_) => {
                        attempt.state = AttemptState::Failed(replaced_error(&attempt.located.key))
                    }
                    Err(error) => attempt.state = AttemptState::Failed(error.clone()),
                }
            }
        }
    }

    /// Locates failed objects again. Reads them once more if they have moved or if the first read
    /// was only too late.
    fn retry_relocated(
        &self,
        reads: &[Read<'_>],
        attempts: &mut [Result<Attempt<'_>>],
        deadline: Moment,
    ) {
        let failed: Vec<usize> = (0..attempts.len())
            .filter(|&at| attempts[at].as_ref().is_ok_and(Attempt::is_retryable))
            .collect();
        if failed.is_empty() || deadline.has_passed(SystemClock.now()) {
            return;
        }
        let keys: Vec<_> = failed.iter().map(|&at| reads[at].located.key.clone()).collect();
        let mut again = Vec::new();
        let mut owners = Vec::new();
        for (&at, located) in failed.iter().zip(self.locate(keys, true)) {
            let Ok(old) = &attempts[at] else { continue };
            match located {
                Ok(new) if old.can_retry_with(&new) => {
                    let now = SystemClock.now();
                    again.push(self.attempt(Cow::Owned(new), old.span, reads[at].into, now));
                    owners.push(at);
                }
                Ok(_) => {}
                Err(error) => attempts[at] = Err(error),
            }
        }
        self.fetch_and_verify(&mut again, SystemClock.now(), deadline);
        for (at, attempt) in owners.into_iter().zip(again) {
            attempts[at] = attempt;
        }
    }
}

impl LocateReply {
    /// Returns the result for each of the keys.
    fn read(
        &self,
        keys: usize,
    ) -> Result<(&LocateGrant, impl Iterator<Item = Outcome<'_, LocatedRow<'_>>>)> {
        Ok((&self.grant, self.columns.read(keys).map_err(call::column_mismatch)?))
    }
}

impl LocateGrant {
    /// Converts one row of the response.
    fn located(&self, found: Outcome<'_, LocatedRow<'_>>, key: ObjectKey) -> Result<Located> {
        let found = found.map_err(|failure| call::item_error(failure, &key))?;
        let places = found.places.to_messages(found.length);
        Ok(Located {
            places: call::read_places(places, &self.segments, found.length)?,
            key,
            version: Version(found.version),
            length: found.length,
            checksum: found.checksum,
            requested_at: self.requested_at,
            fence: self.fence,
            _fences: self.fences.clone(),
        })
    }
}

impl Attempt<'_> {
    /// Returns whether an untried replica is left.
    fn has_untried_replica(&self) -> bool {
        self.tried < self.candidates.len()
    }

    /// Adds a transfer from the next replica, if the read is open.
    fn next_job(&mut self, jobs: &mut Jobs) -> Option<usize> {
        if !matches!(self.state, AttemptState::Open) {
            return None;
        }
        let Some(&at) = self.candidates.get(self.tried) else {
            let text = "no replica of the object can be read";
            let error = Error::new(ErrorCode::TRANSFER_FAIL, text).with("key", &self.located.key);
            self.state = AttemptState::Failed(error);
            return None;
        };
        self.tried += 1;
        self.push_job(at, jobs);
        Some(at)
    }

    /// Adds a transfer from the silent holder whose turn it is in this round, if the read has failed.
    fn next_silent_job(&self, round: usize, jobs: &mut Jobs) -> Option<usize> {
        if self.silent.is_empty() || !matches!(self.state, AttemptState::Failed(_)) {
            return None;
        }
        let at = self.silent[round % self.silent.len()];
        self.push_job(at, jobs);
        Some(at)
    }

    fn push_job(&self, at: usize, jobs: &mut Jobs) {
        let place = &self.located.places[at];
        let entry = |(offset, range): &(u64, LocalRange)| {
            TransferEntry::new(*range, place.address() + offset)
        };
        let is_chosen = self.located.places.len() > 1;
        jobs.push(&place.segment, self.ranges.iter().map(entry), is_chosen);
    }

    /// Remembers whether the holder of a replica was only silent, in which case it may answer later.
    fn record_silence(&mut self, at: usize, error: &Error, limits: TimeLimits) {
        let is_silent = error.kind() == ErrorKind::Timeout && limits.stall.is_some();
        if !is_silent {
            self.silent.retain(|silent| *silent != at);
        } else if !self.silent.contains(&at) {
            self.silent.push(at);
        }
    }

    fn is_late(&self) -> bool {
        !self.is_verified
            && matches!(&self.state, AttemptState::Done(_, at)
                if self.length > 0 && self.located.fence.has_passed(*at))
    }

    fn is_retryable(&self) -> bool {
        let AttemptState::Failed(error) = &self.state else { return false };
        !matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Closed)
    }

    /// Returns whether the read may continue with a newer locate result.
    ///
    /// A part of an object must come from the same version, since the caller combines parts.
    /// Replicas that could not be read before are not tried again.
    fn can_retry_with(&self, new: &Located) -> bool {
        let is_same_version = self.located.version == new.version;
        let is_allowed = match self.span {
            Span::Whole => self.located.length == new.length,
            Span::Range { .. } | Span::Scattered(_) => is_same_version,
        };
        let is_expired =
            matches!(&self.state, AttemptState::Failed(e) if e.code() == ErrorCode::LEASE_EXPIRED);
        let has_moved = !is_same_version
            || new
                .places
                .iter()
                .any(|place| self.located.places.iter().all(|old| old.replica != place.replica));
        is_allowed && (is_expired || has_moved)
    }

    fn read_ref(&self) -> v1::ReadRef {
        let replica = match self.state {
            AttemptState::Done(replica, _) => replica.0,
            AttemptState::Open | AttemptState::Failed(_) => 0,
        };
        v1::ReadRef {
            key: self.located.key.as_bytes().to_vec().into(),
            version: self.located.version.0,
            replica,
        }
    }

    fn finish(self) -> Result<u64> {
        match self.state {
            AttemptState::Done(..) => Ok(self.length),
            AttemptState::Failed(error) => Err(error),
            AttemptState::Open => Err(Error::internal("a read was left out of its batch")),
        }
    }
}

/// Maps the span to offsets within the object and destination ranges.
fn layout(
    located: &Located,
    span: Span<'_>,
    into: &[LocalRange],
) -> Result<SmallVec<[(u64, LocalRange); 1]>> {
    let (offset, length) = match span {
        Span::Whole => (0, located.length),
        Span::Range { offset, length } => (offset, length),
        Span::Scattered(offsets) => return scatter(located, offsets, into),
    };
    check_part(located, offset, length)?;
    fill(offset, length, into).ok_or_else(|| {
        let room = total(into);
        Error::invalid("the destination is smaller than the read")
            .with("key", &located.key)
            .with("destination_bytes", room)
            .with("bytes", length)
    })
}

fn scatter(
    located: &Located,
    offsets: &[u64],
    into: &[LocalRange],
) -> Result<SmallVec<[(u64, LocalRange); 1]>> {
    if offsets.len() != into.len() {
        return Err(Error::invalid("there must be one destination for each part")
            .with("key", &located.key)
            .with("parts", offsets.len())
            .with("destinations", into.len()));
    }
    let mut ranges = Vec::with_capacity(into.len());
    for (&offset, range) in offsets.iter().zip(into) {
        check_part(located, offset, range.length() as u64)?;
        if range.length() > 0 {
            ranges.push((offset, *range));
        }
    }
    Ok(SmallVec::from_vec(ranges))
}

/// Checks that the range is within the object.
pub(super) fn check_part(located: &Located, offset: u64, length: u64) -> Result<()> {
    if offset.checked_add(length).is_some_and(|end| end <= located.length) {
        return Ok(());
    }
    Err(Error::invalid("the range ends outside the object")
        .with("key", &located.key)
        .with("object_bytes", located.length)
        .with("offset", offset)
        .with("length", length))
}

/// Distributes `length` bytes from `offset` on over the ranges, in order; `None` if they do not
/// fit.
fn fill(offset: u64, length: u64, into: &[LocalRange]) -> Option<SmallVec<[(u64, LocalRange); 1]>> {
    let mut done = 0;
    let take = |range: &LocalRange| {
        let begin = done;
        let taken = (length - begin).min(range.length() as u64);
        done += taken;
        (taken > 0).then(|| (offset + begin, range.part(0, taken as usize)))
    };
    let ranges = into.iter().filter_map(take).collect();
    (done == length).then_some(ranges)
}

fn replaced_error(key: &ObjectKey) -> Error {
    let text = "the object was replaced or removed while it was read";
    Error::new(ErrorCode::LEASE_EXPIRED, text).with("key", key)
}
