//! The endpoints for objects.

use axum::{
    body::Bytes,
    extract::{RawQuery, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use mooncake_base::{Error, SegmentId};
use mooncake_proto::{
    columns::{Located, Outcome},
    v1::{self, request, response},
};
use serde_json::{Map, Value, json};

use super::{AdminContext, call_failure, decoded, failure, json_reply, parameter, streamed_text};

/// The maximum number of keys in one query.
const KEYS_MAX: usize = 10_000;

/// GET /get_all_keys: one key per line, in no particular order, streamed slice by slice.
pub(super) async fn all_keys(State(admin): AdminContext) -> Response {
    let mut from = Some(0);
    streamed_text(std::iter::from_fn(move || {
        let mut text = Vec::new();
        from = admin.service.walk(from?, &mut |key, _| {
            text.extend_from_slice(key);
            text.push(b'\n');
        });
        Some(Bytes::from(text))
    }))
}

/// GET /query_key?key=K: the replicas of an object; grants a lease. The key is used without
/// decoding, as in upstream. If no such object exists, the decoded key is tried.
pub(super) async fn query_key(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let key = parameter(&query, "key").unwrap_or_default();
    let ask = async |key: &[u8]| {
        let keys = Some(v1::KeyColumn::pack([key]));
        let call = v1::LocateRequest { keys, lease: true, ..Default::default() };
        admin.ask(request::Call::Locate(call)).await
    };
    let plain = decoded(key);
    let mut answer = ask(key.as_bytes()).await;
    if plain != key.as_bytes()
        && let response::Call::Locate(found) = &answer
        && found.columns.as_ref().is_some_and(|columns| !columns.failures.is_empty())
    {
        answer = ask(&plain).await;
    }
    let response::Call::Locate(answer) = answer else { return call_failure(answer) };
    match outcomes(&answer, 1).next() {
        Some(Ok(found)) => {
            json_reply(&json!({"success": true, "data": replicas(&answer.segments, &found)}))
        }
        Some(Err(refusal)) => {
            let code = Error::from(refusal).code();
            failure(StatusCode::NOT_FOUND, &Error::new(code, code.name()))
        }
        None => failure(StatusCode::INTERNAL_SERVER_ERROR, &Error::internal("no answer")),
    }
}

/// GET /batch_query_keys?keys=a,b: the replicas of several objects; grants no lease.
pub(super) async fn query_keys(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let text = decoded(parameter(&query, "keys").unwrap_or_default());
    let keys: Vec<&[u8]> = text.split(|byte| *byte == b',').collect();
    if text.is_empty() {
        let body = json!({
            "success": false,
            "error": "No keys provided. Use ?keys=key1,key2,...",
        });
        return (StatusCode::BAD_REQUEST, json_reply(&body)).into_response();
    }
    if keys.len() > KEYS_MAX {
        let error = Error::invalid("too many keys in one query").with("limit", KEYS_MAX);
        return failure(StatusCode::BAD_REQUEST, &error);
    }
    let column = Some(v1::KeyColumn::pack(&keys));
    let call = v1::LocateRequest { keys: column, ..Default::default() };
    let answer = match admin.ask(request::Call::Locate(call)).await {
        response::Call::Locate(answer) => answer,
        other => return call_failure(other),
    };
    let mut data = Map::new();
    for (key, outcome) in keys.iter().zip(outcomes(&answer, keys.len())) {
        let is_ok = outcome.is_ok();
        let (error, values, on_disk) = match outcome {
            Ok(found) => {
                let on_disk = disk_copies(&answer.segments, &found);
                (Value::Null, replicas(&answer.segments, &found), on_disk)
            }
            Err(failure) => (json!(Error::from(failure).code().name()), Value::Null, Value::Null),
        };
        let entry = json!({
            "ok": is_ok,
            "error": error,
            "values": values,
            "disk_values": null,
            "local_disk_values": on_disk,
            "nof_values": null,
        });
        data.insert(String::from_utf8_lossy(key).into_owned(), entry);
    }
    json_reply(&json!({"success": true, "data": data}))
}

/// Returns the outcomes of a locate call with this number of keys.
fn outcomes(
    answer: &v1::LocateResponse,
    keys: usize,
) -> impl Iterator<Item = Outcome<'_, Located<'_>>> {
    // The answer comes from the service of this process, which writes columns that match.
    answer.columns.iter().filter_map(move |columns| columns.read(keys).ok()).flatten()
}

/// Returns the copies on disk of an object in upstream's JSON form; null if there are none. Upstream
/// names the client; here the disk outlives it.
fn disk_copies(segments: &[v1::Segment], found: &Located<'_>) -> Value {
    let copy = |(disk, place): (&v1::Segment, v1::Place)| {
        let id = SegmentId::from_bytes(&disk.id).map(|id| id.to_string()).unwrap_or_default();
        json!({
            "client_id": id,
            "object_size": place.length,
            "transport_endpoint": disk.endpoint,
        })
    };
    let copies: Vec<Value> = places(segments, found).filter(is_on_disk).map(copy).collect();
    if copies.is_empty() { Value::Null } else { copies.into() }
}

/// Returns the replicas in memory of an object in upstream's JSON form.
fn replicas(segments: &[v1::Segment], found: &Located<'_>) -> Value {
    let replica = |(segment, place): (&v1::Segment, v1::Place)| {
        json!({
            "size_": place.length,
            "buffer_address_": segment.base.wrapping_add(place.offset),
            "protocol_": segment.protocol,
            "transport_endpoint_": segment.endpoint,
        })
    };
    places(segments, found).filter(|it| !is_on_disk(it)).map(replica).collect()
}

/// Returns the places of an object, each with its segment.
fn places<'a>(
    segments: &'a [v1::Segment],
    found: &Located<'a>,
) -> impl Iterator<Item = (&'a v1::Segment, v1::Place)> {
    let places = found.places.clone().to_messages(found.length);
    places.filter_map(|place| Some((segments.get(place.segment as usize)?, place)))
}

fn is_on_disk((segment, _): &(&v1::Segment, v1::Place)) -> bool {
    segment.kind() == v1::SegmentKind::Disk
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replica_shows_address_in_owner_memory() {
        let segment = v1::Segment {
            base: 0x1000,
            protocol: "tcp".to_owned(),
            endpoint: "h:1".to_owned(),
            ..v1::Segment::default()
        };
        let mut places = v1::PlaceColumns::default();
        let known = v1::Place { segment: 0, offset: 0x10, length: 3, replica: 1 };
        let unknown = v1::Place { segment: 7, ..known };
        places.push(0, [known, unknown].into_iter());
        let places = places.read(1).unwrap().take();
        let found = Located { version: 1, length: 3, checksum: None, tag: "", places };
        let shown = replicas(&[segment], &found);
        assert_eq!(
            shown,
            json!([{
                "size_": 3,
                "buffer_address_": 0x1010,
                "protocol_": "tcp",
                "transport_endpoint_": "h:1",
            }])
        );
    }
}
