//! Typed calls to the master and conversion of its responses.

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
    /// Makes a call with the configured RPC time-out. `pick` extracts the expected response
    /// variant.
    pub(super) fn call<A>(&self, call: Call, pick: impl FnOnce(Reply) -> Option<A>) -> Result<A> {
        self.call_at(SystemClock.now(), call, pick)
    }

    /// Like [`call`](Self::call), for callers that already have the current time.
    pub(super) fn call_at<A>(
        &self,
        now: Moment,
        call: Call,
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        self.check_open()?;
        self.exchange(call, (now, now + self.config.rpc_timeout), pick)
    }

    /// Makes a call with an explicit deadline.
    pub(super) fn call_until<A>(
        &self,
        call: Call,
        deadline: Moment,
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        self.check_open()?;
        self.call_even_if_closed(call, deadline, pick)
    }

    /// Makes a call even if the client is already closing.
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
        let request = v1::Request { call: Some(call), released_fences, ..Default::default() };
        let response = self.link.call(request, deadline);
        self.metrics.count_call(number, response.is_ok(), SystemClock.now().since(sent));
        match response?.call {
            Some(Reply::Failure(failure)) => Err((&failure).into()),
            Some(answer) => {
                pick(answer).ok_or_else(|| protocol_error("the response belongs to another call"))
            }
            None => Err(protocol_error("the response is empty")),
        }
    }
}

/// Converts the master's failure for one key and adds the key if the message lacks it.
pub(super) fn item_error(failure: &v1::Failure, key: impl Display) -> Error {
    let error = Error::from(failure);
    if failure.message.contains("key=") { error } else { error.with("key", key) }
}

/// An error for a response that violates the protocol.
pub(super) fn protocol_error(what: &str) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the master's response violates the protocol")
        .with("because", what)
}

/// Returns the columns of a response, or a protocol error if the response has none.
pub(super) fn require_columns<T>(columns: Option<T>) -> Result<T> {
    columns.ok_or_else(|| protocol_error("the response has no columns"))
}

/// A protocol error for columns whose lengths do not match each other or the request.
pub(super) fn column_mismatch(_: ColumnMismatch) -> Error {
    protocol_error("the columns differ in length or do not match the request")
}

/// Checks that the response has one result for each item.
pub(super) fn check_count(results: usize, items: usize) -> Result<()> {
    if results == items {
        Ok(())
    } else {
        Err(protocol_error("the number of results does not match the request"))
    }
}

/// Converts the segments that the places of a response refer to.
pub(super) fn read_segments(segments: Vec<v1::Segment>) -> Result<Vec<Arc<SegmentInfo>>> {
    segments.into_iter().map(|segment| read_segment(segment).map(Arc::new)).collect()
}

/// Converts one segment.
pub(super) fn read_segment(segment: v1::Segment) -> Result<SegmentInfo> {
    let id =
        SegmentId::from_bytes(&segment.id).ok_or_else(|| protocol_error("a segment has no id"))?;
    if segment.base.checked_add(segment.length).is_none() {
        return Err(protocol_error("the end of a segment overflows"));
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

/// Converts the places of an object of the given length.
pub(super) fn read_places(
    places: impl Iterator<Item = v1::Place>,
    segments: &[Arc<SegmentInfo>],
    length: u64,
) -> Result<SmallVec<[Place; 1]>> {
    let read = |place: v1::Place| {
        let segment = segments
            .get(place.segment as usize)
            .ok_or_else(|| protocol_error("a place refers to no segment"))?;
        let fits = place.length == length
            && place.offset.checked_add(length).is_some_and(|end| end <= segment.length);
        if !fits {
            return Err(protocol_error("a place is outside its segment or has the wrong length"));
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
