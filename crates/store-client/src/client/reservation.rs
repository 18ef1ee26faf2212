//! Uploads: space for an object reserved at the master, written, then published or revoked.

use std::{sync::atomic::Ordering, time::Duration};

use mooncake_base::{
    Clock, Error, ErrorCode, KeyRef, Moment, ObjectKey, ReplicaId, Result, SystemClock, Version,
};
use mooncake_proto::{
    columns::{ItemPlaces, Outcome, collapse_if_uniform},
    v1::{self, request::Call, response::Call as Reply},
};
use mooncake_transfer_engine::{LocalRange, Opcode, TransferEntry};
use smallvec::SmallVec;

use super::{ClientInner, batch, call, checksum::Checksummer, transfer::Jobs};
use crate::object::{Place, PutItem, PutOptions, PutOutcome, SoftPin};

/// Subtracted from the write window, since the local clock and the master's may run at different
/// speeds.
const WINDOW_MARGIN: Duration = Duration::from_millis(50);

/// Space reserved for a new object: to be written, then published or revoked.
///
/// If dropped without either, the master reclaims the space after its time-out.
#[derive(Debug, Clone)]
pub struct Reservation {
    pub(super) key: ObjectKey,
    pub(super) upload: Upload,
}

/// A write into a reserved object.
#[derive(Debug)]
pub struct Write<'a> {
    /// The object.
    pub reservation: &'a mut Reservation,
    /// Offsets within the object and the bytes to write there.
    pub ranges: Vec<(u64, LocalRange)>,
}

/// The replicas reserved for one object. The key is kept elsewhere.
#[derive(Debug, Clone)]
pub(super) struct Upload {
    version: Version,
    length: u64,
    places: SmallVec<[Place; 1]>,
    checksum: Option<u64>,
    /// Replicas that could not be written, and the last error.
    failed: Vec<ReplicaId>,
    error: Option<Error>,
    /// End of the write window; writing later is forbidden.
    until: Moment,
}

/// An object to reserve space for, with its index in the batch.
#[derive(Debug)]
pub(super) struct ReserveItem<'a> {
    pub(super) at: usize,
    pub(super) key: KeyRef<'a>,
    pub(super) length: u64,
}

/// A write into an upload.
#[derive(Debug)]
pub(super) struct UploadWrite<'a> {
    pub(super) key: KeyRef<'a>,
    pub(super) upload: &'a mut Upload,
    pub(super) layout: Layout<'a>,
}

/// Source ranges of a write and their position in the object.
#[derive(Debug, Clone, Copy)]
pub(super) enum Layout<'a> {
    /// Consecutive ranges.
    InOrder(&'a [LocalRange]),
    /// Ranges at explicit offsets.
    At(&'a [(u64, LocalRange)]),
}

/// An upload with its key.
pub(super) type KeyedUpload<'a> = (KeyRef<'a>, &'a Upload);

impl Layout<'_> {
    /// Iterates over offsets within the object and their source ranges.
    fn ranges(self) -> impl Iterator<Item = (u64, LocalRange)> {
        let count = match self {
            Self::InOrder(parts) => parts.len(),
            Self::At(ranges) => ranges.len(),
        };
        let mut end = 0_u64;
        (0..count).map(move |at| {
            let (offset, range) = match self {
                Self::InOrder(parts) => (end, parts[at]),
                Self::At(ranges) => ranges[at],
            };
            // Saturates, since callers may pass arbitrary lengths.
            end = offset.saturating_add(range.length() as u64);
            (offset, range)
        })
    }
}

impl Reservation {
    /// Returns the key.
    pub fn key(&self) -> &ObjectKey {
        &self.key
    }

    /// Returns the upload with its key.
    pub(super) fn keyed(&self) -> KeyedUpload<'_> {
        ((&self.key).into(), &self.upload)
    }

    /// Returns the length of the object.
    pub fn length(&self) -> u64 {
        self.upload.length
    }

    /// Merges the failed replicas from a clone that was written through.
    pub(super) fn merge(&mut self, other: Self) {
        let (own, other) = (&mut self.upload, other.upload);
        for replica in other.failed {
            if !own.failed.contains(&replica) {
                own.failed.push(replica);
            }
        }
        own.error = own.error.take().or(other.error);
    }
}

impl Upload {
    /// Computes and stores the checksum of a value that is written whole.
    pub(super) fn set_checksum(&mut self, checksummer: &mut Checksummer, item: &PutItem<'_>) {
        match checksummer.checksum(item.parts.iter()) {
            Ok(sum) => self.checksum = Some(sum),
            Err(error) => {
                for at in 0..self.places.len() {
                    self.fail_replica(self.places[at].replica, error.clone(), item.key);
                }
            }
        }
    }

    fn healthy(&self) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(|place| !self.failed.contains(&place.replica))
    }

    fn has_no_replica(&self) -> bool {
        self.healthy().next().is_none()
    }

    fn fail_replica(&mut self, replica: ReplicaId, error: Error, key: KeyRef<'_>) {
        self.failed.push(replica);
        self.error = Some(error.with("key", key));
    }

    /// Returns the error for an upload without healthy replicas.
    fn no_replica_error(&self, key: KeyRef<'_>) -> Error {
        self.error.clone().unwrap_or_else(|| {
            Error::new(ErrorCode::WRITE_FAIL, "the put has no replica").with("key", key)
        })
    }

    fn window_error(&self, key: KeyRef<'_>) -> Error {
        Error::new(ErrorCode::WRITE_FAIL, "the put took longer than its write window")
            .with("key", key)
            .with("bytes", self.length)
    }
}

impl UploadWrite<'_> {
    /// Checks that the write is possible now.
    fn check(&self, now: Moment) -> Result<()> {
        if self.upload.has_no_replica() {
            return Err(self.upload.no_replica_error(self.key));
        }
        if self.upload.until.has_passed(now) {
            return Err(self.upload.window_error(self.key));
        }
        for (offset, range) in self.layout.ranges() {
            let end = offset.checked_add(range.length() as u64);
            if end.is_none_or(|end| end > self.upload.length) {
                return Err(Error::invalid("the write ends outside the object")
                    .with("key", self.key)
                    .with("object_bytes", self.upload.length)
                    .with("offset", offset)
                    .with("length", range.length()));
            }
        }
        Ok(())
    }

    /// Returns the transfers into one replica.
    fn transfers_to(&self, place: &Place) -> impl Iterator<Item = TransferEntry> {
        let address = place.address();
        let some = self.layout.ranges().filter(|(_, range)| range.length() > 0);
        some.map(move |(offset, range)| TransferEntry::new(range, address + offset))
    }
}

impl ClientInner {
    /// Reserves space, split into messages. `None`: an object with the key exists and is kept.
    pub(super) fn reserve(
        &self,
        items: &[ReserveItem<'_>],
        options: &PutOptions,
    ) -> Vec<Result<Option<Upload>>> {
        let mut results = Vec::with_capacity(items.len());
        let size = |item: &ReserveItem<'_>| {
            item.key.as_bytes().len() + options.groups.get(item.at).map_or(0, String::len)
        };
        for range in batch::split(items.iter().map(size), batch::KEY_BYTES_MAX) {
            let part = &items[range];
            if let Err(error) = self.reserve_part(part, options, &mut results) {
                let failed = part.iter().map(|item| Err(error.clone().with("key", item.key)));
                results.extend(failed);
            }
        }
        results
    }

    /// Reserves the items of one message. Appends their results, or nothing on an error.
    fn reserve_part(
        &self,
        items: &[ReserveItem<'_>],
        options: &PutOptions,
        results: &mut Vec<Result<Option<Upload>>>,
    ) -> Result<()> {
        let mut lengths: Vec<u64> = items.iter().map(|item| item.length).collect();
        collapse_if_uniform(&mut lengths);
        let group =
            |item: &ReserveItem<'_>| options.groups.get(item.at).cloned().unwrap_or_default();
        let groups = match options.groups.is_empty() {
            true => Vec::new(),
            false => items.iter().map(group).collect(),
        };
        let keys = Some(v1::KeyColumn::pack(items.iter().map(|item| item.key)));
        let call = Call::PutStart(v1::PutStartRequest {
            caller: Some(self.caller.clone()),
            items: Vec::new(),
            config: Some(wire_options(options)),
            replace: options.is_upsert,
            request_id: self.put_calls.fetch_add(1, Ordering::Relaxed) + 1,
            columns: Some(v1::PutColumns { keys, lengths, groups }),
        });
        let sent = SystemClock.now();
        let response = self.call_at(sent, call, |answer| match answer {
            Reply::PutStart(response) => Some(response),
            _ => None,
        })?;
        let columns = call::require_columns(response.columns)?;
        let started = columns.read(items.len()).map_err(call::column_mismatch)?;
        let segments = call::read_segments(response.segments)?;
        let window = Duration::from_millis(response.write_window_ms);
        let until = sent + window.saturating_sub(WINDOW_MARGIN);
        let read =
            |(started, item): (Outcome<'_, (u64, ItemPlaces<'_>)>, &ReserveItem<'_>)| match started
            {
                Err(failure) => match call::item_error(failure, item.key) {
                    error if is_existing(&error) && !options.is_upsert => Ok(None),
                    error => Err(error),
                },
                Ok((version, places)) => Ok(Some(Upload {
                    version: Version(version),
                    length: item.length,
                    places: call::read_places(
                        places.to_messages(item.length),
                        &segments,
                        item.length,
                    )?,
                    checksum: None,
                    failed: Vec::new(),
                    error: None,
                    until,
                })),
            };
        results.extend(started.zip(items).map(read));
        Ok(())
    }

    /// Writes into every healthy replica. Failures are also recorded in the upload.
    pub(super) fn write(&self, puts: &mut [UploadWrite<'_>], now: Moment) -> Vec<Result<()>> {
        let mut until = now + self.config.transfer_timeout;
        let mut jobs = Jobs::with_capacity(puts.len());
        let mut owners = Vec::with_capacity(puts.len());
        let mut outcomes: Vec<Result<()>> = Vec::with_capacity(puts.len());
        let open = self.check_open();
        for (at, put) in puts.iter().enumerate() {
            let checked = open.clone().and_then(|()| put.check(now));
            if checked.is_ok() {
                until = until.min(put.upload.until);
                for place in put.upload.healthy() {
                    jobs.push(&place.segment, put.transfers_to(place), false);
                    owners.push((at, place.replica));
                }
            }
            outcomes.push(checked);
        }
        if !jobs.is_empty() {
            self.run_jobs(Opcode::Write, &mut jobs, until);
            let took = SystemClock.now().since(now);
            self.metrics.count_transfer(Opcode::Write, puts.len(), took);
        }
        for (outcome, (at, replica)) in jobs.finish().zip(owners) {
            if let Err(error) = outcome {
                self.metrics.count_lost(1);
                let UploadWrite { key, upload, .. } = &mut puts[at];
                upload.fail_replica(replica, error, *key);
                if upload.has_no_replica() {
                    outcomes[at] = Err(upload.no_replica_error(*key));
                }
            }
        }
        outcomes
    }

    /// Makes objects readable. Objects without a complete replica, or past their write window, are
    /// revoked instead.
    pub(super) fn publish(&self, puts: &[KeyedUpload<'_>]) -> Vec<Result<PutOutcome>> {
        let now = SystemClock.now();
        let mut lost = Vec::new();
        let mut whole = Vec::with_capacity(puts.len());
        let mut outcomes = Vec::with_capacity(puts.len());
        for &(key, upload) in puts {
            let failed = if upload.has_no_replica() {
                Some(upload.no_replica_error(key))
            } else {
                upload.until.has_passed(now).then(|| upload.window_error(key))
            };
            outcomes.push(match failed {
                Some(error) => {
                    lost.push((key, upload));
                    Err(error)
                }
                None => {
                    whole.push((key, upload));
                    let replicas = u32::try_from(upload.healthy().count()).unwrap_or(u32::MAX);
                    Ok(PutOutcome::Stored { replicas })
                }
            });
        }
        for ((key, _), outcome) in lost.iter().zip(self.revoke_puts(&lost)) {
            if let Err(error) = outcome {
                tracing::debug!(%key, %error, "cannot revoke a failed put");
            }
        }
        let ended = self.end_puts(&whole);
        for (outcome, ended) in outcomes.iter_mut().filter(|o| o.is_ok()).zip(ended) {
            if let Err(error) = ended {
                *outcome = Err(error);
            }
        }
        outcomes
    }

    fn end_puts(&self, puts: &[KeyedUpload<'_>]) -> Vec<Result<()>> {
        self.finish_puts(puts, |columns, caller| {
            let (caller, columns) = (Some(caller), Some(columns));
            let call = Call::PutEnd(v1::PutEndRequest { caller, puts: Vec::new(), columns });
            self.call(call, |answer| match answer {
                Reply::PutEnd(response) => Some(response.columns),
                _ => None,
            })
        })
    }

    /// Revokes puts and releases their space.
    pub(super) fn revoke_puts(&self, puts: &[KeyedUpload<'_>]) -> Vec<Result<()>> {
        self.finish_puts(puts, |columns, caller| {
            let (caller, columns) = (Some(caller), Some(columns));
            let call = Call::PutRevoke(v1::PutRevokeRequest { caller, puts: Vec::new(), columns });
            self.call(call, |answer| match answer {
                Reply::PutRevoke(response) => Some(response.columns),
                _ => None,
            })
        })
    }

    /// Ends or revokes puts, split into messages.
    fn finish_puts(
        &self,
        puts: &[KeyedUpload<'_>],
        call: impl Fn(v1::PutRefColumns, v1::Caller) -> Result<Option<v1::DoneColumns>>,
    ) -> Vec<Result<()>> {
        let mut results = Vec::with_capacity(puts.len());
        for part in puts.chunks(batch::ITEMS_MAX) {
            let answer = call(put_refs(part), self.caller.clone()).and_then(call::require_columns);
            let answer = answer.as_ref().map_err(Clone::clone);
            let read = |(done, (key, _)): (Outcome<'_, ()>, &KeyedUpload<'_>)| {
                done.map_err(|failure| call::item_error(failure, key))
            };
            match answer.and_then(|done| done.read(part.len()).map_err(call::column_mismatch)) {
                Ok(done) => results.extend(done.zip(part).map(read)),
                Err(error) => {
                    results.extend(part.iter().map(|(key, _)| Err(error.clone().with("key", key))));
                }
            }
        }
        results
    }
}

/// Converts puts to columns. Their versions identify them.
fn put_refs(puts: &[KeyedUpload<'_>]) -> v1::PutRefColumns {
    let mut columns = v1::PutRefColumns {
        versions: puts.iter().map(|(_, upload)| upload.version.0).collect(),
        ..Default::default()
    };
    for ((_, upload), item) in puts.iter().zip(0_u32..) {
        if let Some(checksum) = upload.checksum {
            columns.checksums.get_or_insert_default().push(item as usize, checksum);
        }
        for replica in &upload.failed {
            columns.failed_items.push(item);
            columns.failed_replicas.push(replica.0);
        }
    }
    columns
}

fn is_existing(error: &Error) -> bool {
    error.code() == ErrorCode::OBJECT_ALREADY_EXISTS
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

#[cfg(test)]
mod tests {
    use super::{super::bytes::dangling_range, *};

    #[test]
    fn layout_yields_offsets_of_parts_and_ranges() {
        let offsets = |layout: Layout<'_>| layout.ranges().map(|(at, _)| at).collect::<Vec<_>>();
        let parts = [dangling_range(3), dangling_range(0), dangling_range(5), dangling_range(1)];
        assert_eq!(offsets(Layout::InOrder(&parts)), [0, 3, 3, 8]);
        assert_eq!(offsets(Layout::At(&[(7, dangling_range(2)), (1, dangling_range(4))])), [7, 1]);
        let most = [dangling_range(usize::MAX), dangling_range(usize::MAX), dangling_range(1)];
        assert_eq!(offsets(Layout::InOrder(&most)), [0, u64::MAX, u64::MAX]);
    }
}
