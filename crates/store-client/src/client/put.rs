//! Putting: reserve space for every copy, write them, then publish what is whole.

use std::{sync::atomic::Ordering, time::Duration};

use mooncake_base::{
    Clock, Error, ErrorCode, Moment, ObjectKey, ReplicaId, Result, SystemClock, Version,
};
use mooncake_proto::v1::{self, request::Call, response::Call as Answer};
use mooncake_transfer_engine::{LocalRange, Opcode, Piece};
use rustc_hash::FxHashSet;

use super::{Client, Shared, batch, call, checksum::Summer, mount::is_unknown, transfer::Job};
use crate::{
    metrics::{Operation, Sum},
    object::{Place, PutItem, PutOptions, PutOutcome, SoftPin},
};

/// Taken off the write window: our clock and the master's may run at different speeds.
const WINDOW_MARGIN: Duration = Duration::from_millis(50);

/// Between two tries of a put that waits for a fence to end, whatever the master says.
const FENCE_NAP_MIN: Duration = Duration::from_millis(5);
/// Short, because readers hand fences back before they end.
const FENCE_NAP_MAX: Duration = Duration::from_millis(20);

/// The most bytes that are reserved before they are written: they must all be there within one
/// write window. A larger object goes alone.
const PART_BYTES_MAX: usize = 1 << 30;

/// Space for an object that is not there yet: to be written, then published or revoked.
///
/// Dropped without either, it is taken back by the master after its time-out.
#[derive(Debug, Clone)]
pub struct Reservation {
    key: ObjectKey,
    version: Version,
    length: u64,
    places: Vec<Place>,
    checksum: Option<u64>,
    /// Copies that could not be written, and why the last one could not.
    failed: Vec<ReplicaId>,
    error: Option<Error>,
    /// No byte may be written later.
    until: Moment,
}

/// Bytes for a reserved object.
#[derive(Debug)]
pub struct Write<'a> {
    /// The object.
    pub reservation: &'a mut Reservation,
    /// Offsets within it, and what is to lie there.
    pub ranges: Vec<(u64, LocalRange)>,
}

impl Reservation {
    /// The name of the object.
    pub fn key(&self) -> &ObjectKey {
        &self.key
    }

    /// How long the object will be.
    pub fn length(&self) -> u64 {
        self.length
    }

    fn live(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(|place| !self.failed.contains(&place.replica))
    }

    /// Takes over which copies failed in a write through a clone of this.
    pub(super) fn learn(&mut self, other: Self) {
        for replica in other.failed {
            if !self.failed.contains(&replica) {
                self.failed.push(replica);
            }
        }
        self.error = self.error.take().or(other.error);
    }

    fn fail(&mut self, replica: ReplicaId, error: Error) {
        self.failed.push(replica);
        self.error = Some(error.with("key", &self.key));
    }

    fn fail_all(&mut self, error: &Error) {
        for at in 0..self.places.len() {
            self.fail(self.places[at].replica, error.clone());
        }
    }

    /// Why no copy is left.
    fn loss(&self) -> Error {
        self.error.clone().unwrap_or_else(|| {
            Error::new(ErrorCode::WRITE_FAIL, "the put has no copy").with("key", &self.key)
        })
    }

    fn reference(&self) -> v1::PutRef {
        v1::PutRef {
            key: self.key.as_bytes().to_vec().into(),
            version: self.version.0,
            failed_replicas: self.failed.iter().map(|replica| replica.0).collect(),
            checksum: self.checksum,
        }
    }
}

impl Client {
    /// Puts objects: each is readable, whole, when this returns, or was kept as it was, or failed
    /// and left nothing behind. One call to start, one transfer per peer and one call to end, for
    /// the whole batch. The same key twice in a batch is put twice, in order.
    ///
    /// # Errors
    /// By object. An object of no bytes is refused.
    pub fn put(&self, items: &[PutItem<'_>], options: &PutOptions) -> Vec<Result<PutOutcome>> {
        let begin = SystemClock.now();
        let outcomes = self.shared.put(items, options, begin);
        let mut sum = Sum::default();
        for (item, outcome) in items.iter().zip(&outcomes) {
            sum.add(match outcome {
                Ok(PutOutcome::Stored { .. }) => Some(total(item.parts)),
                Ok(PutOutcome::Existed) => Some(0),
                Err(_) => None,
            });
        }
        let operation = match (options.is_upsert, items.len()) {
            (_, 0) => return outcomes,
            (false, 1) => Operation::Put,
            (false, _) => Operation::PutBatch,
            (true, 1) => Operation::Upsert,
            (true, _) => Operation::UpsertBatch,
        };
        let took = SystemClock.now().since(begin);
        self.shared.metrics.count_operation(operation, sum, took);
        outcomes
    }

    /// Reserves space for objects of these lengths, to be written in pieces. `None`: an object of
    /// that name exists, or somebody is writing it, and it is kept.
    ///
    /// # Errors
    /// By object: no room, no length, the master cannot be reached.
    pub fn reserve(
        &self,
        items: &[(ObjectKey, u64)],
        options: &PutOptions,
    ) -> Vec<Result<Option<Reservation>>> {
        let items: Vec<_> = items.iter().enumerate().map(|(at, (k, l))| (at, k, *l)).collect();
        if let Err(error) = check_groups(items.len(), options) {
            return items.iter().map(|_| Err(error.clone())).collect();
        }
        self.shared.reserve(&items, options)
    }

    /// Writes into every copy of reserved objects. A copy that fails is given up; the write fails
    /// when no copy is left.
    ///
    /// # Errors
    /// By write: outside of the object, after the write window, or no copy could be written.
    pub fn write(&self, writes: &mut [Write<'_>]) -> Vec<Result<()>> {
        let begin = SystemClock.now();
        let outcomes = self.shared.write(writes, begin);
        let mut sum = Sum::default();
        for (write, outcome) in writes.iter().zip(&outcomes) {
            let bytes = total(write.ranges.iter().map(|(_, range)| range));
            sum.add(outcome.is_ok().then_some(bytes));
        }
        if !writes.is_empty() {
            let took = SystemClock.now().since(begin);
            self.shared.metrics.count_operation(Operation::PutParts, sum, took);
        }
        outcomes
    }

    /// Makes written objects readable. What has no whole copy left is revoked instead.
    ///
    /// # Errors
    /// By object: no copy is whole, the write window is over, or the master refuses.
    pub fn publish(&self, reservations: Vec<Reservation>) -> Vec<Result<PutOutcome>> {
        self.shared.publish(reservations)
    }

    /// Gives reserved space back.
    ///
    /// # Errors
    /// By object: the reservation is gone already, or the master cannot be reached.
    pub fn revoke(&self, reservations: Vec<Reservation>) -> Vec<Result<()>> {
        self.shared.give_back(&reservations.iter().collect::<Vec<_>>())
    }
}

impl Shared {
    fn put(
        &self,
        items: &[PutItem<'_>],
        options: &PutOptions,
        mut begin: Moment,
    ) -> Vec<Result<PutOutcome>> {
        if let Err(error) = check_groups(items.len(), options) {
            return items.iter().map(|_| Err(error.clone())).collect();
        }
        let mut outcomes = vec![None; items.len()];
        let mut open: Vec<usize> = (0..items.len()).collect();
        while !open.is_empty() {
            let later = split_repeated(items, &mut open);
            self.put_wave((open, begin), items, options, &mut outcomes);
            begin = SystemClock.now();
            open = later;
        }
        let missing = || Err(Error::internal("a put was left out of its batch"));
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(missing)).collect()
    }

    /// Puts items of different keys, again those that only wait for a fence to end or for the
    /// master to know us.
    fn put_wave(
        &self,
        (mut open, begin): (Vec<usize>, Moment),
        items: &[PutItem<'_>],
        options: &PutOptions,
        outcomes: &mut [Option<Result<PutOutcome>>],
    ) {
        let give_up = begin + self.config.fenced_wait;
        let mut may_revive = true;
        loop {
            let registrations = self.registrations();
            let sizes = open.iter().map(|&at| total(items[at].parts) as usize);
            for range in batch::cut(sizes, PART_BYTES_MAX) {
                self.put_part(&open[range], items, options, outcomes);
            }
            let retries: Vec<_> = open.iter().filter_map(|&at| Retry::of(&outcomes[at])).collect();
            let Some(wait) = retries.iter().map(|retry| retry.wait).min() else { return };
            if retries.iter().any(|retry| retry.is_unknown) {
                if !may_revive || self.revive(registrations, self.rpc_deadline()).is_err() {
                    return;
                }
                may_revive = false;
            } else if (SystemClock.now() + wait).has_passed(give_up) {
                if !self.rest(wait) {
                    return;
                }
            } else {
                return;
            }
            open.retain(|&at| Retry::of(&outcomes[at]).is_some());
        }
    }

    /// One round: reserve, write, publish.
    fn put_part(
        &self,
        part: &[usize],
        items: &[PutItem<'_>],
        options: &PutOptions,
        outcomes: &mut [Option<Result<PutOutcome>>],
    ) {
        let wanted: Vec<_> =
            part.iter().map(|&at| (at, &items[at].key, total(items[at].parts))).collect();
        let mut owners = Vec::with_capacity(part.len());
        let mut reservations = Vec::with_capacity(part.len());
        for (&at, reserved) in part.iter().zip(self.reserve(&wanted, options)) {
            match reserved {
                Ok(Some(reservation)) => {
                    owners.push(at);
                    reservations.push(reservation);
                }
                Ok(None) => outcomes[at] = Some(Ok(PutOutcome::Existed)),
                Err(error) => outcomes[at] = Some(Err(error)),
            }
        }
        if self.config.has_checksums {
            let mut summer = Summer::default();
            for (reservation, &at) in reservations.iter_mut().zip(&owners) {
                match summer.sum(items[at].parts.iter()) {
                    Ok(sum) => reservation.checksum = Some(sum),
                    Err(error) => reservation.fail_all(&error),
                }
            }
        }
        let mut writes: Vec<_> = reservations
            .iter_mut()
            .zip(&owners)
            .map(|(reservation, &at)| Write { reservation, ranges: in_order(items[at].parts) })
            .collect();
        // What failed is noted in the reservation, and publishing says so.
        self.write(&mut writes, SystemClock.now());
        for (at, outcome) in owners.into_iter().zip(self.publish(reservations)) {
            outcomes[at] = Some(outcome);
        }
    }

    fn reserve(
        &self,
        items: &[(usize, &ObjectKey, u64)],
        options: &PutOptions,
    ) -> Vec<Result<Option<Reservation>>> {
        let mut results = Vec::with_capacity(items.len());
        let size = |item: &(usize, &ObjectKey, u64)| {
            item.1.as_bytes().len() + options.groups.get(item.0).map_or(0, String::len)
        };
        for range in batch::cut(items.iter().map(size), batch::KEY_BYTES_MAX) {
            let part = &items[range];
            match self.reserve_part(part, options) {
                Ok(part) => results.extend(part),
                Err(error) => results
                    .extend(part.iter().map(|(_, key, _)| Err(error.clone().with("key", key)))),
            }
        }
        results
    }

    fn reserve_part(
        &self,
        items: &[(usize, &ObjectKey, u64)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Option<Reservation>>>> {
        let keys = batch::pack(items.iter().map(|item| item.1));
        let put_items = items.iter().zip(keys).map(|((at, _, length), key)| v1::PutItem {
            key,
            length: *length,
            group: options.groups.get(*at).cloned().unwrap_or_default(),
        });
        let call = Call::PutStart(v1::PutStartRequest {
            caller: Some(self.caller.clone()),
            items: put_items.collect(),
            config: Some(wire_options(options)),
            replace: options.is_upsert,
            request: self.put_calls.fetch_add(1, Ordering::Relaxed) + 1,
        });
        let sent = SystemClock.now();
        let response = self.call_at(sent, call, |answer| match answer {
            Answer::PutStart(response) => Some(response),
            _ => None,
        })?;
        call::check_count(response.results.len(), items.len())?;
        let segments = call::read_segments(response.segments)?;
        let window = Duration::from_millis(response.write_window_ms);
        let until = sent + window.saturating_sub(WINDOW_MARGIN);
        let read = |(result, (_, key, length)): (v1::PutStartResult, &(usize, &ObjectKey, u64))| {
            match &result.failure {
                Some(failure) => match call::item_error(failure, key) {
                    error if exists(&error) && !options.is_upsert => Ok(None),
                    error => Err(error),
                },
                None => Ok(Some(Reservation {
                    key: (*key).clone(),
                    version: Version(result.version),
                    length: *length,
                    places: call::read_places(&result.places, &segments, *length)?,
                    checksum: None,
                    failed: Vec::new(),
                    error: None,
                    until,
                })),
            }
        };
        Ok(response.results.into_iter().zip(items).map(read).collect())
    }

    fn write(&self, writes: &mut [Write<'_>], now: Moment) -> Vec<Result<()>> {
        let mut until = now + self.config.transfer_timeout;
        let mut jobs = Vec::with_capacity(writes.len());
        let mut owners = Vec::with_capacity(writes.len());
        let mut outcomes: Vec<Result<()>> = Vec::with_capacity(writes.len());
        for (at, write) in writes.iter().enumerate() {
            let checked = self.check_open().and_then(|()| check_write(write, now));
            if checked.is_ok() {
                until = until.min(write.reservation.until);
                for place in write.reservation.live() {
                    jobs.push(Job::new(&place.segment, pieces(place, &write.ranges)));
                    owners.push((at, place.replica));
                }
            }
            outcomes.push(checked);
        }
        if !jobs.is_empty() {
            self.run(Opcode::Write, &mut jobs, until);
            let took = SystemClock.now().since(now);
            self.metrics.count_transfer(Opcode::Write, writes.len(), took);
        }
        for (job, (at, replica)) in jobs.into_iter().zip(owners) {
            if let Err(error) = job.finish() {
                self.metrics.count_lost(1);
                let reservation = &mut *writes[at].reservation;
                reservation.fail(replica, error);
                if reservation.live().next().is_none() {
                    outcomes[at] = Err(reservation.loss());
                }
            }
        }
        outcomes
    }

    fn publish(&self, reservations: Vec<Reservation>) -> Vec<Result<PutOutcome>> {
        let now = SystemClock.now();
        let mut outcomes: Vec<Option<Result<PutOutcome>>> = vec![None; reservations.len()];
        let (mut whole, mut lost) = (Vec::new(), Vec::new());
        for (at, reservation) in reservations.iter().enumerate() {
            if reservation.live().next().is_none() {
                outcomes[at] = Some(Err(reservation.loss()));
                lost.push(reservation);
            } else if reservation.until.has_passed(now) {
                outcomes[at] = Some(Err(late(reservation)));
                lost.push(reservation);
            } else {
                whole.push((at, reservation));
            }
        }
        for (lost, outcome) in lost.iter().zip(self.give_back(&lost)) {
            if let Err(error) = outcome {
                tracing::debug!(key = %lost.key, %error, "a put that failed was not revoked");
            }
        }
        let refs: Vec<_> = whole.iter().map(|(_, reservation)| *reservation).collect();
        for ((at, reservation), ended) in whole.iter().zip(self.end(&refs)) {
            let replicas = u32::try_from(reservation.live().count()).unwrap_or(u32::MAX);
            outcomes[*at] = Some(ended.map(|()| PutOutcome::Stored { replicas }));
        }
        let missing = || Err(Error::internal("a put was left out of its batch"));
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(missing)).collect()
    }

    fn end(&self, puts: &[&Reservation]) -> Vec<Result<()>> {
        self.finish(puts, |puts, caller| {
            let call = Call::PutEnd(v1::PutEndRequest { caller: Some(caller), puts });
            self.call(call, |answer| match answer {
                Answer::PutEnd(response) => Some(response.results),
                _ => None,
            })
        })
    }

    fn give_back(&self, puts: &[&Reservation]) -> Vec<Result<()>> {
        self.finish(puts, |puts, caller| {
            let call = Call::PutRevoke(v1::PutRevokeRequest { caller: Some(caller), puts });
            self.call(call, |answer| match answer {
                Answer::PutRevoke(response) => Some(response.results),
                _ => None,
            })
        })
    }

    /// Ends or revokes puts, in messages that fit.
    fn finish(
        &self,
        puts: &[&Reservation],
        call: impl Fn(Vec<v1::PutRef>, v1::Caller) -> Result<Vec<v1::ItemResult>>,
    ) -> Vec<Result<()>> {
        let mut results = Vec::with_capacity(puts.len());
        for range in
            batch::cut(puts.iter().map(|put| put.key.as_bytes().len()), batch::KEY_BYTES_MAX)
        {
            let part = &puts[range];
            let refs = part.iter().map(|put| put.reference()).collect();
            let answer = call(refs, self.caller.clone()).and_then(|answer| {
                call::check_count(answer.len(), part.len())?;
                Ok(answer)
            });
            match answer {
                Ok(answer) => {
                    results.extend(part.iter().zip(answer).map(
                        |(put, result)| match &result.failure {
                            Some(failure) => Err(call::item_error(failure, &put.key)),
                            None => Ok(()),
                        },
                    ));
                }
                Err(error) => {
                    results.extend(part.iter().map(|put| Err(error.clone().with("key", &put.key))))
                }
            }
        }
        results
    }
}

/// Why and when a put that failed is worth another try.
struct Retry {
    wait: Duration,
    is_unknown: bool,
}

impl Retry {
    fn of(outcome: &Option<Result<PutOutcome>>) -> Option<Self> {
        let outcome = outcome.as_ref()?;
        if is_unknown(outcome) {
            return Some(Self { wait: Duration::ZERO, is_unknown: true });
        }
        let error = outcome.as_ref().err()?;
        if error.code() != ErrorCode::NO_AVAILABLE_HANDLE {
            return None;
        }
        // The master says so if nothing but the end of a fence is awaited.
        let (_, after) = error.message().split_once("retry_after_ms=")?;
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let wait = Duration::from_millis(after[..digits].parse().ok()?);
        Some(Self { wait: wait.clamp(FENCE_NAP_MIN, FENCE_NAP_MAX), is_unknown: false })
    }
}

/// Keeps in `open` the first item of each key and hands back the others.
fn split_repeated(items: &[PutItem<'_>], open: &mut Vec<usize>) -> Vec<usize> {
    let mut later = Vec::new();
    if open.len() > 1 {
        let mut seen = FxHashSet::default();
        open.retain(|&at| {
            let is_first = seen.insert(&items[at].key);
            if !is_first {
                later.push(at);
            }
            is_first
        });
    }
    later
}

fn check_groups(items: usize, options: &PutOptions) -> Result<()> {
    match options.groups.len() {
        0 => Ok(()),
        groups if groups == items => Ok(()),
        groups => Err(Error::invalid("there must be one group for each item, or none")
            .with("groups", groups)
            .with("items", items)),
    }
}

fn check_write(write: &Write<'_>, now: Moment) -> Result<()> {
    let reservation = &*write.reservation;
    if reservation.live().next().is_none() {
        return Err(reservation.loss());
    }
    if reservation.until.has_passed(now) {
        return Err(late(reservation));
    }
    for (offset, range) in &write.ranges {
        let end = offset.checked_add(range.length() as u64);
        if end.is_none_or(|end| end > reservation.length) {
            return Err(Error::invalid("the write ends outside of the object")
                .with("key", &reservation.key)
                .with("object_bytes", reservation.length)
                .with("offset", offset)
                .with("length", range.length()));
        }
    }
    Ok(())
}

/// The write of these ranges into one copy.
fn pieces(place: &Place, ranges: &[(u64, LocalRange)]) -> Vec<Piece> {
    let some = ranges.iter().filter(|(_, range)| range.length() > 0);
    some.map(|(offset, range)| Piece::new(*range, place.address() + offset)).collect()
}

/// The parts, one behind the other.
fn in_order(parts: &[LocalRange]) -> Vec<(u64, LocalRange)> {
    let place = |offset: &mut u64, part: &LocalRange| {
        let at = *offset;
        *offset += part.length() as u64;
        Some((at, *part))
    };
    parts.iter().scan(0, place).collect()
}

/// How many bytes the ranges have together. Lengths that callers made up may be more than there is.
pub(super) fn total<'a>(ranges: impl IntoIterator<Item = &'a LocalRange>) -> u64 {
    ranges.into_iter().fold(0, |sum, range| sum.saturating_add(range.length() as u64))
}

fn exists(error: &Error) -> bool {
    error.code() == ErrorCode::OBJECT_ALREADY_EXISTS
}

fn late(reservation: &Reservation) -> Error {
    Error::new(ErrorCode::WRITE_FAIL, "the put took longer than its write window")
        .with("key", &reservation.key)
        .with("bytes", reservation.length)
}

fn wire_options(options: &PutOptions) -> v1::ReplicateConfig {
    let soft_pin = match options.soft_pin {
        SoftPin::Preserve => v1::SoftPin::Preserve,
        SoftPin::Enable => v1::SoftPin::Enable,
        SoftPin::Disable => v1::SoftPin::Disable,
    };
    v1::ReplicateConfig {
        replica_num: options.replicas,
        soft_pin: soft_pin.into(),
        soft_pin_ttl_ms: options
            .soft_pin_ttl
            .map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)),
        with_hard_pin: options.is_hard_pinned,
        preferred_segments: options.preferred_segments.clone(),
        prefer_same_node: options.prefers_own_segments,
        data_type: options.data_type,
    }
}
