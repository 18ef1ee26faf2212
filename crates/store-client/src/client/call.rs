//! One call to the master, typed, and what its answers mean.

use std::{fmt::Display, sync::Arc};

use mooncake_base::{Clock, Error, ErrorCode, Moment, ReplicaId, Result, SegmentId, SystemClock};
use mooncake_proto::{
    columns::ColumnMismatch,
    v1::{self, request::Call, response::Call as Reply},
};
use smallvec::SmallVec;

use super::ClientInner;
use crate::{
    metrics,
    object::{Place, SegmentInfo},
};

impl ClientInner {
    /// Makes a call with the usual deadline; `pick` takes the answer that belongs to it.
    pub(super) fn call<A>(&self, call: Call, pick: impl FnOnce(Reply) -> Option<A>) -> Result<A> {
        self.call_at(SystemClock.now(), call, pick)
    }

    /// The same, for callers that know what time it is.
    pub(super) fn call_at<A>(
        &self,
        now: Moment,
        call: Call,
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        self.check_open()?;
        self.exchange(call, (now, now + self.config.rpc_timeout), pick)
    }

    /// Makes a call with a deadline of its own.
    pub(super) fn call_until<A>(
        &self,
        call: Call,
        deadline: Moment,
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        self.check_open()?;
        self.call_even_if_closed(call, deadline, pick)
    }

    /// Makes a call even if the client is about to end.
    pub(super) fn call_even_if_closed<A>(
        &self,
        call: Call,
        deadline: Moment,
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        self.exchange(call, (SystemClock.now(), deadline), pick)
    }

    fn exchange<A>(
        &self,
        call: Call,
        (sent, deadline): (Moment, Moment),
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        let number = metrics::call_index(&call);
        let released_fences = self.pending_releases.take();
        let response = self.link.call(v1::Request { call: Some(call), released_fences }, deadline);
        self.metrics.count_call(number, response.is_ok(), SystemClock.now().since(sent));
        match response?.call {
            Some(Reply::Failure(failure)) => Err((&failure).into()),
            Some(answer) => pick(answer).ok_or_else(|| protocol_error("it answers another call")),
            None => Err(protocol_error("it is empty")),
        }
    }
}

/// A failure that the master gave for one key, with that key if its words do not have it.
pub(super) fn item_error(failure: &v1::Failure, key: impl Display) -> Error {
    let error = Error::from(failure);
    if failure.message.contains("key=") { error } else { error.with("key", key) }
}

/// An answer that no master of ours would give.
pub(super) fn protocol_error(what: &str) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the master's answer makes no sense").with("because", what)
}

/// The columns of an answer to a call in columns.
pub(super) fn require_columns<T>(columns: Option<T>) -> Result<T> {
    columns.ok_or_else(|| protocol_error("it is not in columns, as the call was"))
}

/// Columns of an answer that do not fit together, or to the call.
pub(super) fn column_mismatch(_: ColumnMismatch) -> Error {
    protocol_error("its columns do not fit together, or are of another number of items")
}

/// Checks that the answer has one result for each item.
pub(super) fn check_count(results: usize, items: usize) -> Result<()> {
    if results == items { Ok(()) } else { Err(protocol_error("it has another number of results")) }
}

/// Reads the segments that the places of an answer point into.
pub(super) fn read_segments(segments: Vec<v1::Segment>) -> Result<Vec<Arc<SegmentInfo>>> {
    segments.into_iter().map(|segment| read_segment(segment).map(Arc::new)).collect()
}

/// Reads one segment.
pub(super) fn read_segment(segment: v1::Segment) -> Result<SegmentInfo> {
    let id =
        SegmentId::from_bytes(&segment.id).ok_or_else(|| protocol_error("a segment has no id"))?;
    if segment.base.checked_add(segment.length).is_none() {
        return Err(protocol_error("a segment wraps around"));
    }
    Ok(SegmentInfo {
        id,
        name: segment.name,
        endpoint: segment.endpoint,
        base: segment.base,
        length: segment.length,
        protocol: segment.protocol,
    })
}

/// Reads the places of one object of that length.
pub(super) fn read_places(
    places: impl Iterator<Item = v1::Place>,
    segments: &[Arc<SegmentInfo>],
    length: u64,
) -> Result<SmallVec<[Place; 1]>> {
    let read = |place: v1::Place| {
        let segment = segments
            .get(place.segment as usize)
            .ok_or_else(|| protocol_error("a place is in no segment"))?;
        let fits = place.length == length
            && place.offset.checked_add(length).is_some_and(|end| end <= segment.length);
        if !fits {
            return Err(protocol_error("a place does not fit its segment or its object"));
        }
        Ok(Place {
            segment: Arc::clone(segment),
            offset: place.offset,
            length,
            replica: ReplicaId(place.replica),
        })
    };
    places.map(read).collect()
}
