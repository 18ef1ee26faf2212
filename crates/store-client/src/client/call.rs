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
    protocol::{CallKind, CallRetry},
};

impl ClientInner {
    /// Makes a call with the configured RPC time-out. `pick` extracts the expected response
    /// variant.
    pub(super) fn call<A>(&self, call: Call, pick: impl FnOnce(Reply) -> Option<A>) -> Result<A> {
        let now = SystemClock.now();
        self.call_at((now, now + self.config.rpc_timeout), call, pick)
    }

    /// Makes a call with an explicit deadline.
    pub(super) fn call_until<A>(
        &self,
        call: Call,
        deadline: Moment,
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        self.call_at((SystemClock.now(), deadline), call, pick)
    }

    /// Makes a call with an explicit deadline, for callers that already have the current time.
    pub(super) fn call_at<A>(
        &self,
        times: (Moment, Moment),
        call: Call,
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        self.check_open()?;
        self.exchange(call, times, |_| {}, pick)
    }

    /// Makes a call that is changed by `prepare` before it is sent again.
    pub(super) fn call_repeating<A>(
        &self,
        call: Call,
        deadline: Moment,
        prepare: impl Fn(&mut Call),
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        self.check_open()?;
        self.exchange(call, (SystemClock.now(), deadline), prepare, pick)
    }

    /// Makes a call even if the client is already closing.
    pub(super) fn exchange<A>(
        &self,
        call: Call,
        (sent, deadline): (Moment, Moment),
        prepare: impl Fn(&mut Call),
        pick: impl FnOnce(Reply) -> Option<A>,
    ) -> Result<A> {
        if deadline.has_passed(sent) {
            let text = "the time limit passed before the call was sent";
            return Err(
                Error::new(ErrorCode::RPC_TIMEOUT, text).with("master", self.link.address())
            );
        }
        let index = metrics::call_index(&call);
        let retry = CallRetry::new(
            kind(&call),
            deadline,
            self.id.bits() as u64 ^ u64::from(sent.since_boot().subsec_nanos()),
        );
        let (call_number, answered_below) = match is_numbered(&call) {
            true => self.call_numbers.lock().begin(),
            false => (0, 0),
        };
        let released_fences = self.pending_releases.take();
        let request =
            v1::Request { call: Some(call), released_fences, call_number, answered_below };
        let response = self.call_with_retries(request, sent, retry, prepare);
        if call_number != 0 {
            self.call_numbers.lock().end(call_number);
        }
        self.metrics.count_call(index, response.is_ok(), SystemClock.now().since(sent));
        match response?.call {
            Some(Reply::Failure(failure)) => Err((&failure).into()),
            Some(answer) => {
                pick(answer).ok_or_else(|| protocol_error("the response belongs to another call"))
            }
            None => Err(protocol_error("the response is empty")),
        }
    }

    /// Sends a request until it is answered or given up.
    fn call_with_retries(
        &self,
        mut request: v1::Request,
        sent: Moment,
        mut retry: CallRetry,
        prepare: impl Fn(&mut Call),
    ) -> Result<v1::Response> {
        let mut now = sent;
        loop {
            let failure = match self.link.call(request, retry.attempt_deadline(now)) {
                Ok(response) => return Ok(response),
                Err(failure) => *failure,
            };
            now = SystemClock.now();
            let (Some(again), Some(pause)) =
                (failure.request, retry.after_failure(failure.kind, now))
            else {
                return Err(failure.error);
            };
            tracing::debug!(client = %self.name, error = %failure.error, ?pause, "repeating a call");
            if !pause.is_zero() {
                if !self.sleep_or_closed(pause) {
                    return Err(failure.error);
                }
                now = SystemClock.now();
            }
            request = again;
            request.call.as_mut().into_iter().for_each(&prepare);
        }
    }
}

/// Returns what a second execution of the call does.
fn kind(call: &Call) -> CallKind {
    match call {
        Call::PutEnd(_) | Call::PutRevoke(_) => CallKind::ClosesPut,
        Call::PutStart(start) if start.request_id == 0 => CallKind::SentOnce,
        _ => CallKind::Repeatable,
    }
}

/// Returns whether the call needs a number, by which the master knows a repetition. `PutStart` has
/// its own; `PutEnd` and `PutRevoke` name versions, which no other put has.
fn is_numbered(call: &Call) -> bool {
    matches!(
        call,
        Call::Unmount(_)
            | Call::Remove(_)
            | Call::RemoveMatching(_)
            | Call::CreateTasks(_)
            | Call::EndTasks(_)
            | Call::ClearReplicas(_)
            | Call::CreateDrainJobs(_)
            | Call::CancelDrainJobs(_)
            | Call::SetQuotas(_)
    )
}

/// Converts the master's failure for one key and adds the key if the message lacks it.
pub(super) fn item_error(failure: &v1::Failure, key: impl Display) -> Error {
    named_error(failure.into(), key)
}

/// Adds the key to an error that does not name it.
pub(super) fn named_error(error: Error, key: impl Display) -> Error {
    if error.message().contains("key=") { error } else { error.with("key", key) }
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
