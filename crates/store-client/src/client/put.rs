//! Puts: reserve space for every replica, write them, then publish the objects that are complete.
//! Puts that only have to wait are retried.

mod close;
pub(super) mod io_session;
pub(super) mod open_puts;
mod overlapped;
pub(super) mod reservation;
mod restart;
mod start;
mod upload;
mod window;
mod write;

pub(in crate::client) use start::wire_millis;

use std::{
    hash::BuildHasher,
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::{Clock, Error, ErrorCode, Moment, ObjectKey, Result, SystemClock};
use mooncake_os::call_limit;
use mooncake_transfer_engine::LocalRange;
use rustc_hash::{FxBuildHasher, FxHashSet};

use self::{
    reservation::{Reservation, Write},
    restart::RESTARTS_MAX,
    start::ReserveItem,
    upload::{SourceLayout, Upload, UploadWrite},
};
use super::{Client, ClientInner, checksum::Checksummer};
use crate::{
    metrics::{Operation, OutcomeTotals},
    object::{PutItem, PutOptions, PutOutcome},
    protocol::{PutPatience, PutRetry, PutRounds},
    rpc::batch,
};

/// Maximum bytes reserved at once: a batch that fails midway leaves no more to be released. A larger
/// object goes alone.
const PART_BYTES_MAX: usize = 1 << 30;

/// Outcomes with their item numbers.
type NumberedOutcomes = Vec<(usize, Result<PutOutcome>)>;

impl Client {
    /// Puts objects. When this returns, each object is completely readable, or an existing one was
    /// kept, or the put failed and left nothing behind. A batch takes one call to start, one
    /// transfer per peer and one call to end; a large batch is split into parts. A key that occurs
    /// several times in a batch is put several times, in order.
    ///
    /// # Errors
    /// By object. An empty object is refused.
    pub fn put(&self, items: &[PutItem<'_>], options: &PutOptions) -> Vec<Result<PutOutcome>> {
        let begin = SystemClock.now();
        let outcomes = self.inner.put(items, options, begin);
        let mut sum = OutcomeTotals::default();
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
        self.inner.metrics.count_operation(operation, sum, took);
        outcomes
    }

    /// Reserves space for objects of the given lengths, to be written in pieces. `None`: an object
    /// with the key exists or is being written, and is kept.
    ///
    /// # Errors
    /// By object: no space left, a length of 0, or the master cannot be reached.
    pub fn reserve(
        &self,
        items: &[(ObjectKey, u64)],
        options: &PutOptions,
    ) -> Vec<Result<Option<Reservation>>> {
        if let Err(error) = check_options(items.len(), options) {
            return items.iter().map(|_| Err(error.clone())).collect();
        }
        let wanted = items.iter().enumerate();
        let wanted: Vec<_> = wanted
            .map(|(at, (key, length))| ReserveItem { at, key: key.into(), length: *length })
            .collect();
        let deadline = self.inner.rpc.deadline();
        let reserved = self.inner.reserve(&wanted, options, deadline).into_iter().zip(items);
        let named = |(reserved, (key, _)): (Result<Option<Upload>>, &(ObjectKey, u64))| {
            Ok(reserved?.map(|upload| Reservation::new(key, upload, &self.inner.open_puts)))
        };
        reserved.map(named).collect()
    }

    /// Writes into every replica of reserved objects. A replica that fails is dropped; the write
    /// fails when no replica is left.
    ///
    /// # Errors
    /// By write: the range is outside the object, the write window is over, or no replica could be
    /// written.
    pub fn write(&self, writes: &mut [Write<'_>]) -> Vec<Result<()>> {
        let begin = SystemClock.now();
        let mut puts = Vec::with_capacity(writes.len());
        for Write { reservation, ranges } in writes.iter_mut() {
            let Reservation { key, upload, .. } = &mut **reservation;
            puts.push(UploadWrite {
                key: (&*key).into(),
                upload,
                layout: SourceLayout::At(ranges),
            });
        }
        let outcomes = self.inner.write(&mut puts, begin);
        let mut sum = OutcomeTotals::default();
        for (write, outcome) in writes.iter().zip(&outcomes) {
            let bytes = total(write.ranges.iter().map(|(_, range)| range));
            sum.add(outcome.is_ok().then_some(bytes));
        }
        if !writes.is_empty() {
            let took = SystemClock.now().since(begin);
            self.inner.metrics.count_operation(Operation::PutParts, sum, took);
        }
        outcomes
    }

    /// Makes written objects readable. Objects without a complete replica are revoked instead.
    ///
    /// # Errors
    /// By object: no replica is complete, the write window is over, or the master refuses.
    pub fn publish(&self, reservations: Vec<Reservation>) -> Vec<Result<PutOutcome>> {
        let puts: Vec<_> = reservations.iter().map(Reservation::keyed).collect();
        let outcomes = self.inner.publish(&puts, self.inner.rpc.deadline());
        reservations.iter().for_each(Reservation::close);
        outcomes
    }

    /// Releases reserved space.
    ///
    /// # Errors
    /// By object: the reservation has expired, or the master cannot be reached.
    pub fn revoke(&self, reservations: Vec<Reservation>) -> Vec<Result<()>> {
        let puts: Vec<_> = reservations.iter().map(Reservation::keyed).collect();
        let outcomes = self.inner.revoke_puts(&puts, self.inner.rpc.deadline());
        reservations.iter().for_each(Reservation::close);
        outcomes
    }
}

/// A put of a batch.
struct PutBatch<'a> {
    items: &'a [PutItem<'a>],
    options: &'a PutOptions,
    /// The deadline of the batch's calls, without the time spent on writing.
    calls_until: Moment,
    written_us: AtomicU64,
}

impl PutBatch<'_> {
    /// Returns the deadline of the next call. All calls of a batch share one time limit, so that a
    /// hanging master costs it once and not for each part.
    fn call_deadline(&self) -> Moment {
        self.calls_until + Duration::from_micros(self.written_us.load(Ordering::Relaxed))
    }

    fn add_written(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.written_us.fetch_add(micros, Ordering::Relaxed);
    }
}

impl ClientInner {
    fn put(
        &self,
        items: &[PutItem<'_>],
        options: &PutOptions,
        begin: Moment,
    ) -> Vec<Result<PutOutcome>> {
        if let Err(error) = check_options(items.len(), options) {
            return items.iter().map(|_| Err(error.clone())).collect();
        }
        let calls_until = call_limit::capped(begin + self.config.rpc_timeout);
        let put = PutBatch { items, options, calls_until, written_us: AtomicU64::new(0) };
        let mut outcomes = vec![None; items.len()];
        let mut open: Vec<usize> = (0..items.len()).collect();
        while !open.is_empty() {
            let later = split_repeated(items, &mut open);
            self.put_distinct(open, &put, &mut outcomes);
            open = later;
        }
        let missing = || Err(Error::internal("a put was left out of its batch"));
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(missing)).collect()
    }

    /// Puts items with distinct keys. Retries those that only wait for memory, and those that
    /// the master has forgotten with the client, or that another master does not know.
    fn put_distinct(
        &self,
        mut open: Vec<usize>,
        put: &PutBatch<'_>,
        outcomes: &mut [Option<Result<PutOutcome>>],
    ) {
        let retry_of = |outcome: &Option<Result<PutOutcome>>| match outcome {
            Some(Err(error)) => PutRetry::of(error),
            _ => None,
        };
        let patience = PutPatience {
            fenced: self.config.fenced_wait,
            moving: self.config.fenced_wait.max(self.config.transfer_timeout),
        };
        let mut rounds = PutRounds::new(patience);
        loop {
            let registrations = self.session.registrations();
            for (at, outcome) in self.put_in_parts(&open, put) {
                outcomes[at] = Some(outcome);
            }
            open.retain(|&at| retry_of(&outcomes[at]).is_some());
            let retries: Vec<_> = open.iter().filter_map(|&at| retry_of(&outcomes[at])).collect();
            if rounds.may_register(&retries) && self.was_forgotten(&retries, registrations, put) {
                rounds.registered();
                continue;
            }
            match rounds.memory_wait(&retries, self.session.registrations()) {
                Some(wait) if self.lifetime.sleep_or_closed(wait) => {}
                _ => return,
            }
            open.retain(|&at| {
                retry_of(&outcomes[at]).is_some_and(|retry| retry.waits_for_memory())
            });
        }
    }

    /// Returns whether puts failed because the master has forgotten the client or another one has
    /// taken its place, and registers again.
    fn was_forgotten(&self, retries: &[PutRetry], registrations: u64, put: &PutBatch<'_>) -> bool {
        let registered = if retries.contains(&PutRetry::Registered) {
            self.session.register_again(registrations, put.call_deadline())
        } else if retries.contains(&PutRetry::Forgotten) {
            // Registers again if this is not the master of the last registration.
            self.session.heartbeat().map(drop)
        } else {
            return false;
        };
        match registered {
            Ok(()) => self.session.registrations() != registrations,
            // Yet another master has come during the registration.
            Err(error) => error.code() == ErrorCode::CLIENT_NOT_FOUND,
        }
    }

    /// Puts items in parts of limited size.
    fn put_in_parts(&self, open: &[usize], put: &PutBatch<'_>) -> NumberedOutcomes {
        let size = |&at: &usize| usize::try_from(total(put.items[at].parts)).unwrap_or(usize::MAX);
        let sizes: Vec<_> = open.iter().map(size).collect();
        let put_part = |part: &Range<usize>| self.put_part(&open[part.clone()], put, RESTARTS_MAX);
        let done = match overlapped::split(&sizes) {
            Some(parts) => overlapped::run_overlapped(&parts, put_part),
            None => batch::split(sizes.into_iter(), PART_BYTES_MAX).iter().map(put_part).collect(),
        };
        done.into_iter().flatten().collect()
    }

    /// Puts one part: reserve, write, publish. Starts puts again that no holder has taken.
    fn put_part(
        &self,
        part: &[usize],
        put: &PutBatch<'_>,
        restarts_left: usize,
    ) -> NumberedOutcomes {
        let wanted = |&at: &usize| {
            let PutItem { key, parts } = put.items[at];
            ReserveItem { at, key, length: total(parts) }
        };
        let wanted: Vec<_> = part.iter().map(wanted).collect();
        let mut done = Vec::with_capacity(part.len());
        let mut owners = Vec::with_capacity(part.len());
        let mut uploads = Vec::with_capacity(part.len());
        let reserved = self.reserve(&wanted, put.options, put.call_deadline());
        for (&at, reserved) in part.iter().zip(reserved) {
            match reserved {
                Ok(Some(upload)) => {
                    owners.push(at);
                    uploads.push(upload);
                }
                Ok(None) => done.push((at, Ok(PutOutcome::Existed))),
                Err(error) => done.push((at, Err(error))),
            }
        }
        let begin = SystemClock.now();
        if self.config.has_checksums {
            let deadline = begin + self.config.transfer_timeout;
            let mut checksummer = Checksummer::new(&self.engine, deadline);
            for (upload, &at) in uploads.iter_mut().zip(&owners) {
                upload.set_checksum(&mut checksummer, &put.items[at]);
            }
        }
        let mut writes = Vec::with_capacity(uploads.len());
        for (upload, &at) in uploads.iter_mut().zip(&owners) {
            let PutItem { key, parts } = put.items[at];
            writes.push(UploadWrite { key, upload, layout: SourceLayout::InOrder(parts) });
        }
        // Failures are recorded in the upload; `publish` reports them.
        let now = SystemClock.now();
        let lost = self.write_or_leave(&mut writes, restarts_left, now);
        let again: Vec<usize> = lost.into_iter().map(|index| owners[index]).collect();
        let puts: Vec<_> = writes.into_iter().map(|put| (put.key, &*put.upload)).collect();
        put.add_written(SystemClock.now().since(begin));
        let published = self.publish(&puts, put.call_deadline()).into_iter();
        let published = published.map(|published| put.options.kept_if_refused(published));
        done.extend(owners.into_iter().zip(published));
        self.open_puts.release(puts.iter().map(|(_, upload)| upload.request()));
        if !again.is_empty() {
            tracing::debug!(puts = again.len(), "no holder could be written, using other segments");
            done.retain(|(at, _)| !again.contains(at));
            done.extend(self.put_part(&again, put, restarts_left - 1));
        }
        done
    }
}

/// Keeps the first item of each key in `open` and returns the others.
fn split_repeated(items: &[PutItem<'_>], open: &mut Vec<usize>) -> Vec<usize> {
    let mut later = Vec::new();
    if may_repeat(items, open) {
        let mut seen = FxHashSet::default();
        open.retain(|&at| {
            let is_first = seen.insert(items[at].key);
            if !is_first {
                later.push(at);
            }
            is_first
        });
    }
    later
}

/// Returns whether a key may occur twice, judged by hashes alone, which is cheap.
fn may_repeat(items: &[PutItem<'_>], open: &[usize]) -> bool {
    if open.len() < 2 {
        return false;
    }
    let hasher = FxBuildHasher;
    let mut seen = FxHashSet::with_capacity_and_hasher(open.len(), hasher);
    !open.iter().all(|&at| seen.insert(hasher.hash_one(items[at].key)))
}

fn check_options(items: usize, options: &PutOptions) -> Result<()> {
    if !options.if_versions.is_empty() {
        if !options.is_upsert {
            return Err(Error::invalid("a put that replaces a version is an upsert"));
        }
        if options.if_versions.len() != items {
            return Err(Error::invalid("there must be one version for each item, or none")
                .with("if_versions", options.if_versions.len())
                .with("items", items));
        }
    }
    match options.groups.len() {
        0 => Ok(()),
        groups if groups == items => Ok(()),
        groups => Err(Error::invalid("there must be one group for each item, or none")
            .with("groups", groups)
            .with("items", items)),
    }
}

/// Returns the total length of the ranges. Saturates, since callers may pass arbitrary lengths.
pub(super) fn total<'a>(ranges: impl IntoIterator<Item = &'a LocalRange>) -> u64 {
    ranges.into_iter().fold(0, |sum, range| sum.saturating_add(range.length() as u64))
}

#[cfg(test)]
mod tests {
    use mooncake_base::KeyRef;

    use super::*;

    #[test]
    fn defers_repeated_keys_to_later_rounds() {
        let item =
            |key: &&'static str| PutItem { key: KeyRef::new(key.as_bytes()).unwrap(), parts: &[] };
        let later = |keys: &[&'static str]| {
            let items: Vec<_> = keys.iter().map(item).collect();
            let mut open: Vec<usize> = (0..items.len()).collect();
            let later = split_repeated(&items, &mut open);
            (open, later)
        };
        assert_eq!(later(&[]), (vec![], vec![]));
        assert_eq!(later(&["a"]), (vec![0], vec![]));
        assert_eq!(later(&["a", "b", "c"]), (vec![0, 1, 2], vec![]));
        assert_eq!(later(&["a", "b", "a", "a", "b"]), (vec![0, 1], vec![2, 3, 4]));
    }
}
