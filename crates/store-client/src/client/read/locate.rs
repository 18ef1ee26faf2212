//! Locates objects: where their replicas are, and until when their memory stays theirs.

use std::{sync::Arc, time::Duration};

use mooncake_base::{
    Clock, Error, ErrorCode, KeyRef, Moment, ObjectKey, Result, SystemClock, Version,
};
use mooncake_proto::{
    columns::{Located as LocatedRow, Outcome},
    v1,
};

use crate::{
    client::{Client, ClientInner, prefetch::await_prefetched},
    fences::ReadFences,
    object::{Located, SegmentInfo},
    protocol::fence_end,
    rpc::{batch, response},
};

/// What a locate call asks for besides the places of the replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::client) struct Grants<'a> {
    /// Renew the lease, which delays eviction and removal.
    pub(in crate::client) lease: bool,
    /// Fence the memory for a read: it is not reused meanwhile.
    pub(in crate::client) fence: bool,
    /// Name of a tag whose value is returned; empty: none.
    pub(in crate::client) tag: &'a str,
}

/// The response to a locate call.
struct LocateReply {
    columns: v1::LocatedColumns,
    grant: LocateGrant,
}

/// The part of a locate response that all of its objects share.
struct LocateGrant {
    has_lease: bool,
    /// The segments that the places refer to.
    segments: Vec<Arc<SegmentInfo>>,
    requested_at: Moment,
    fence: Moment,
    fences: Option<Arc<ReadFences>>,
}

impl Client {
    /// Locates objects that will be read soon: takes leases and fences their memory for the read.
    ///
    /// # Errors
    /// By key: `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` while it is being written, or the
    /// master cannot be reached.
    pub fn locate(&self, keys: &[ObjectKey]) -> Vec<Result<Located>> {
        self.locate_owned(keys.to_vec(), true)
    }

    /// Locates objects that will be read soon: fences their memory for the read, and leases them if
    /// `takes_lease` is set. Without a lease they can be removed and evicted as before; the read then
    /// returns the bytes of one version, or fails.
    ///
    /// # Errors
    /// Same as [`locate`](Self::locate).
    pub fn locate_owned(&self, keys: Vec<ObjectKey>, takes_lease: bool) -> Vec<Result<Located>> {
        self.locate_with(keys, Grants { lease: takes_lease, ..Grants::READ })
    }

    /// Locates objects without the intention to read them: takes no fences, and leases if
    /// `takes_lease` is set. Reading them anyway costs one more call.
    ///
    /// # Errors
    /// Same as [`locate`](Self::locate).
    pub fn describe(&self, keys: &[ObjectKey], takes_lease: bool) -> Vec<Result<Located>> {
        let grants = Grants { lease: takes_lease, fence: false, ..Grants::READ };
        self.locate_with(keys.to_vec(), grants)
    }

    /// Locates objects with these grants.
    pub(in crate::client) fn locate_with(
        &self,
        keys: Vec<ObjectKey>,
        grants: Grants<'_>,
    ) -> Vec<Result<Located>> {
        let deadline = self.inner.rpc.deadline();
        let located = self.inner.locate(keys, grants, deadline);
        if grants.fence {
            await_prefetched(&self.inner, located, grants, deadline)
        } else {
            located
        }
    }
}

impl Grants<'_> {
    /// The grants of a read.
    pub(in crate::client) const READ: Self = Self { lease: true, fence: true, tag: "" };
}

impl ClientInner {
    /// Locates objects. All messages share the deadline.
    pub(in crate::client) fn locate(
        &self,
        keys: Vec<ObjectKey>,
        grants: Grants<'_>,
        deadline: Moment,
    ) -> Vec<Result<Located>> {
        let located = self.locate_uncounted(keys, grants, deadline);
        let hits = located.iter().filter(|outcome| outcome.is_ok()).count();
        self.metrics.replicas.hits.add_nonzero(hits as u64);
        self.metrics.replicas.misses.add_nonzero((located.len() - hits) as u64);
        located
    }

    /// Does what [`locate`](Self::locate) does for objects that were counted before.
    pub(in crate::client) fn locate_uncounted(
        &self,
        keys: Vec<ObjectKey>,
        grants: Grants<'_>,
        deadline: Moment,
    ) -> Vec<Result<Located>> {
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
            let answer = self.request_locate(packed, grants, deadline);
            let part = keys.by_ref().take(count);
            match answer.as_ref().map_err(Clone::clone).and_then(|places| places.read(count)) {
                Ok((grant, found)) => {
                    let objects = found.zip(part).map(|(found, key)| grant.located(found, key));
                    located.extend(objects.map(|object| object.map_err(|error| self.miss(error))));
                }
                Err(error) => located.extend(part.map(|_| Err(error.clone()))),
            }
        }
        located
    }

    /// Returns the error of an object that the master did not locate. If all that hold a copy have
    /// lost their connection, the object is probably lost, and counts as absent like in a probe.
    fn miss(&self, error: Error) -> Error {
        if error.code() != ErrorCode::TRANSFER_FAIL || self.config.reports_lost_holders {
            return error;
        }
        let text = "no copy can be read: every process that holds one has lost its connection";
        let remedy = "Put the object again, or wait: it is back if one of these processes is.";
        let miss = Error::new(ErrorCode::OBJECT_NOT_FOUND, text).with_remedy(remedy);
        match error.context().find(|&(name, _)| name == "key") {
            Some((_, key)) => miss.with("key", key),
            None => miss,
        }
    }

    fn request_locate(
        &self,
        keys: v1::KeyColumn,
        grants: Grants<'_>,
        deadline: Moment,
    ) -> Result<LocateReply> {
        let request = v1::LocateRequest {
            caller: self.rpc.caller(),
            lease: grants.lease,
            fence: grants.fence,
            keys: Some(keys),
            tag: grants.tag.to_owned(),
        };
        let requested_at = SystemClock.now();
        let response = self.rpc.call_at(request, requested_at, deadline)?;
        let fence = fence_end(requested_at, Duration::from_millis(response.fence_ms));
        let fences =
            ReadFences::from_response(&response, fence, self.rpc.pending_releases()).map(Arc::new);
        let segments = response::read_segments(response.segments)?;
        let columns = response::require_columns(response.columns)?;
        let has_lease = grants.lease;
        let grant = LocateGrant { has_lease, segments, requested_at, fence, fences };
        Ok(LocateReply { columns, grant })
    }
}

impl LocateReply {
    /// Returns the result for each of the keys.
    fn read(
        &self,
        keys: usize,
    ) -> Result<(&LocateGrant, impl Iterator<Item = Outcome<'_, LocatedRow<'_>>>)> {
        Ok((&self.grant, self.columns.read(keys).map_err(response::column_mismatch)?))
    }
}

impl LocateGrant {
    /// Converts one row of the response.
    fn located(&self, found: Outcome<'_, LocatedRow<'_>>, key: ObjectKey) -> Result<Located> {
        let found = found.map_err(|failure| response::item_error(failure, &key))?;
        let places = found.places.to_messages(found.length);
        Ok(Located {
            places: response::read_places(places, &self.segments, found.length)?,
            key,
            version: Version(found.version),
            length: found.length,
            checksum: found.checksum,
            tag: found.tag.into(),
            has_lease: self.has_lease,
            requested_at: self.requested_at,
            fence: self.fence,
            _fences: self.fences.clone(),
        })
    }
}
