//! Conversion of the master's responses.

use std::{fmt::Display, sync::Arc};

use mooncake_base::{Error, ErrorCode, ReplicaId, Result, SegmentId};
use mooncake_proto::{columns::ColumnMismatch, v1};
use smallvec::SmallVec;

use crate::object::{Place, SegmentInfo};

/// Converts the master's failure for one key and adds the key if the message lacks it.
pub(crate) fn item_error(failure: &v1::Failure, key: impl Display) -> Error {
    let error = named_error(failure.into(), key);
    if error.code() != ErrorCode::NO_AVAILABLE_HANDLE {
        return error;
    }
    match remedy_for_space(&error) {
        Some(remedy) => error.with_remedy(remedy),
        None => error,
    }
}

/// Returns what helps a put that found no memory, where that is not what helps usually.
fn remedy_for_space(error: &Error) -> Option<&'static str> {
    let value = |wanted| error.context().find(|&(name, _)| name == wanted).map(|(_, value)| value);
    if value("retry_after_ms").is_some() {
        return Some("Put it again after that time; nothing has to be unpinned or added.");
    }
    // Only errors about an object that is larger than any segment name the largest one.
    match value("largest_segment")? {
        "0" => Some(
            "Lend memory, for instance with StoreConfig(segment_bytes=\"4GB\") in a process that \
             stays, or with `mooncake_client --master_server_address=HOST:PORT \
             --global_segment_size=4GB`.",
        ),
        _ => Some("Lend a segment that is larger than the object, or put it in parts."),
    }
}

/// Adds the key to an error that does not name it.
pub(crate) fn named_error(error: Error, key: impl Display) -> Error {
    let names_key = error.context().any(|(name, _)| name == "key");
    if names_key { error } else { error.with("key", key) }
}

/// An error for a response that violates the protocol.
pub(crate) fn protocol_error(what: &str) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the master's response violates the protocol")
        .with("because", what)
}

/// Returns the columns of a response, or a protocol error if the response has none.
pub(crate) fn require_columns<T>(columns: Option<T>) -> Result<T> {
    columns.ok_or_else(|| protocol_error("the response has no columns"))
}

/// A protocol error for columns whose lengths do not match each other or the request.
pub(crate) fn column_mismatch(_: ColumnMismatch) -> Error {
    protocol_error("the columns differ in length or do not match the request")
}

/// Checks that the response has one result for each item.
pub(crate) fn check_count(results: usize, items: usize) -> Result<()> {
    if results == items {
        Ok(())
    } else {
        Err(protocol_error("the number of results does not match the request"))
    }
}

/// Converts the segments that the places of a response refer to.
pub(crate) fn read_segments(segments: Vec<v1::Segment>) -> Result<Vec<Arc<SegmentInfo>>> {
    segments.into_iter().map(|segment| read_segment(segment).map(Arc::new)).collect()
}

/// Converts one segment.
pub(crate) fn read_segment(segment: v1::Segment) -> Result<SegmentInfo> {
    let id =
        SegmentId::from_bytes(&segment.id).ok_or_else(|| protocol_error("a segment has no id"))?;
    if segment.base.checked_add(segment.length).is_none() {
        return Err(protocol_error("the end of a segment overflows"));
    }
    let is_disk = segment.kind == i32::from(v1::SegmentKind::Disk);
    Ok(SegmentInfo {
        id,
        is_disk,
        name: segment.name,
        endpoint: segment.endpoint,
        base: segment.base,
        length: segment.length,
        protocol: segment.protocol,
    })
}

/// Converts the places of an object of the given length.
pub(crate) fn read_places(
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
