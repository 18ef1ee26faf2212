//! GET /api/v1/keys and /api/v1/key_groups: keys by prefix and search, for the page.
//!
//! Both sweep all objects, slice by slice, outside of the runtime. The number of concurrent sweeps is
//! limited; further requests are refused as retryable.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

use axum::{
    extract::{RawQuery, State},
    http::StatusCode,
    response::Response,
};
use bytes::Bytes;
use mooncake_base::{Error, ErrorCode};
use mooncake_proto::v1::{self, request, response};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use super::{Admin, AdminContext, call_failure, decoded, failure, json_reply, parameter};

/// The maximum number of concurrent sweeps over all objects.
pub(super) const SWEEPS_MAX: usize = 2;

/// The maximum number of keys in one reply.
const KEYS_MAX: u32 = 500;

/// The maximum number of groups in one reply. Keys of further groups are counted together.
const GROUPS_MAX: usize = 200;

/// The number of largest objects in one reply.
const LARGEST_MAX: usize = 10;

/// The maximum length of a prefix or search text.
const QUERY_BYTES_MAX: usize = 4096;

/// The delimiters that end a group.
const DELIMITERS: &[u8] = b"/@:|";

/// GET /api/v1/keys?prefix=P&search=S&after=K&limit=N: keys that begin with P and contain S, in
/// byte order after K.
pub(super) async fn keys(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let take = |name| decoded(parameter(&query, name).unwrap_or_default());
    let (prefix, search, after) = (take("prefix"), take("search"), take("after"));
    let limit = parameter(&query, "limit").and_then(|text| text.parse().ok()).unwrap_or(100);
    if prefix.len().max(search.len()) > QUERY_BYTES_MAX {
        return failure(StatusCode::BAD_REQUEST, &Error::invalid("the search is too long"));
    }
    let call = v1::ListObjectsRequest {
        caller: None,
        selector: Some(v1::KeySelector { by: Some(selector(&prefix, &search)) }),
        after: Bytes::from(after),
        limit: u32::clamp(limit, 1, KEYS_MAX),
    };
    let _permit = match begin_sweep(&admin) {
        Ok(permit) => permit,
        Err(refusal) => return *refusal,
    };
    match admin.ask(request::Call::ListObjects(call)).await {
        response::Call::ListObjects(page) => {
            let objects: Vec<Value> = page.objects.iter().map(object).collect();
            // The last key is percent-encoded, because a key need not be valid text.
            let next = page
                .objects
                .last()
                .map(|last| percent_encode(&last.key, NON_ALPHANUMERIC).to_string());
            json_reply(&json!({
                "success": true, "keys": objects, "is_last": page.is_last, "next": next,
            }))
        }
        other => call_failure(other),
    }
}

/// GET /api/v1/key_groups?prefix=P&sort=bytes: groups keys by the text from P up to the next delimiter,
/// with the number of keys and their bytes, those with most keys first, or with most bytes, and the
/// largest objects.
pub(super) async fn groups(State(admin): AdminContext, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let prefix = decoded(parameter(&query, "prefix").unwrap_or_default());
    let is_by_bytes = parameter(&query, "sort") == Some("bytes");
    let permit = match begin_sweep(&admin) {
        Ok(permit) => permit,
        Err(refusal) => return *refusal,
    };
    let swept = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let mut groups = PrefixCounts::new(prefix);
        let mut from = Some(0);
        while let Some(start) = from {
            from = admin.service.walk(start, &mut |key, length| groups.add(key, length));
        }
        json_reply(&groups.json(is_by_bytes))
    });
    swept.await.unwrap_or_else(|source| {
        let error = Error::internal("the search panicked").caused_by(source);
        failure(StatusCode::INTERNAL_SERVER_ERROR, &error)
    })
}

/// Takes a permit for a sweep over all objects, or returns the reply that refuses it.
pub(super) fn begin_sweep(admin: &Admin) -> Result<OwnedSemaphorePermit, Box<Response>> {
    admin.sweeps.clone().try_acquire_owned().map_err(|_| {
        let error = Error::new(ErrorCode::RPC_FAIL, "others are going through all keys; retry");
        Box::new(failure(StatusCode::SERVICE_UNAVAILABLE, &error))
    })
}

fn selector(prefix: &[u8], search: &[u8]) -> v1::key_selector::By {
    if search.is_empty() {
        return v1::key_selector::By::Prefix(Bytes::copy_from_slice(prefix));
    }
    let (prefix, search) = (literal_pattern(prefix), literal_pattern(search));
    v1::key_selector::By::Regex(format!("(?s-u)^{prefix}.*?{search}"))
}

/// Returns a pattern that matches exactly these bytes.
fn literal_pattern(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect()
}

fn object(object: &v1::ObjectSummary) -> Value {
    json!({
        "key": String::from_utf8_lossy(&object.key),
        "bytes": object.length,
        "replicas": object.replicas,
        "disk_replicas": object.disk_replicas,
        "is_complete": object.state() == v1::ObjectState::Complete,
    })
}

/// Number and bytes of keys per group.
#[derive(Debug)]
struct PrefixCounts {
    prefix: Vec<u8>,
    counts: HashMap<Box<[u8]>, (u64, u64)>,
    others: (u64, u64),
    /// The largest objects, the smallest of them on top.
    largest: BinaryHeap<Reverse<(u64, Box<[u8]>)>>,
}

impl PrefixCounts {
    fn new(prefix: Vec<u8>) -> Self {
        let largest = BinaryHeap::with_capacity(LARGEST_MAX + 1);
        Self { prefix, counts: HashMap::new(), others: (0, 0), largest }
    }

    fn add(&mut self, key: &[u8], length: u64) {
        let Some(rest) = key.strip_prefix(&self.prefix[..]) else { return };
        let end = rest.iter().position(|byte| DELIMITERS.contains(byte));
        let group = &rest[..end.map_or(rest.len(), |end| end + 1)];
        let is_new = !self.counts.contains_key(group);
        let count = if !is_new {
            self.counts.get_mut(group).expect("it was just found")
        } else if self.counts.len() < GROUPS_MAX {
            self.counts.entry(Box::from(group)).or_default()
        } else {
            &mut self.others
        };
        count.0 += 1;
        count.1 += length;
        let is_large = self.largest.peek().is_none_or(|Reverse((least, _))| length > *least);
        if is_large || self.largest.len() < LARGEST_MAX {
            self.largest.push(Reverse((length, Box::from(key))));
            if self.largest.len() > LARGEST_MAX {
                self.largest.pop();
            }
        }
    }

    fn json(self, is_by_bytes: bool) -> Value {
        let order = |(keys, bytes): &(u64, u64)| {
            if is_by_bytes { (*bytes, *keys) } else { (*keys, *bytes) }
        };
        let mut groups: Vec<_> = self.counts.into_iter().collect();
        groups.sort_by(|(a, one), (b, other)| order(other).cmp(&order(one)).then(a.cmp(b)));
        let rows: Vec<Value> = groups
            .iter()
            .map(|(group, (keys, bytes))| {
                json!({
                    "group": String::from_utf8_lossy(group),
                    "keys": keys,
                    "bytes": bytes,
                    "is_key": !group.last().is_some_and(|byte| DELIMITERS.contains(byte)),
                })
            })
            .collect();
        let largest = self.largest.into_sorted_vec().into_iter().map(
            |Reverse((bytes, key))| json!({"key": String::from_utf8_lossy(&key), "bytes": bytes}),
        );
        json!({
            "success": true,
            "largest": largest.collect::<Vec<_>>(),
            "groups": rows,
            "others": {"keys": self.others.0, "bytes": self.others.1},
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keys_up_to_next_delimiter() {
        let mut groups = PrefixCounts::new(b"m/".to_vec());
        for (key, length) in [("m/a/1", 1), ("m/a/2", 2), ("m/b@1", 4), ("m/c", 8), ("x/a", 9)] {
            groups.add(key.as_bytes(), length);
        }
        let shown = groups.json(true);
        let rows: Vec<_> = shown["groups"].as_array().unwrap().iter().collect();
        let row =
            |at: usize| (rows[at]["group"].as_str().unwrap(), rows[at]["keys"].as_u64().unwrap());
        assert_eq!((rows.len(), row(0), row(1), row(2)), (3, ("c", 1), ("b@", 1), ("a/", 2)));
        assert_eq!((&rows[0]["is_key"], &rows[2]["bytes"]), (&json!(true), &json!(3)));
    }

    #[test]
    fn sorts_groups_and_names_the_largest_objects() {
        let groups = || {
            let mut groups = PrefixCounts::new(Vec::new());
            for number in 0..LARGEST_MAX as u64 + 5 {
                groups.add(format!("many/{number}").as_bytes(), number);
            }
            groups.add(b"few/a", 1000);
            groups
        };
        let first = |shown: &Value| shown["groups"][0]["group"].as_str().unwrap().to_owned();
        assert_eq!(first(&groups().json(false)), "many/");
        let shown = groups().json(true);
        assert_eq!(first(&shown), "few/");
        let largest = shown["largest"].as_array().unwrap();
        assert_eq!((largest.len(), &largest[0]["key"]), (LARGEST_MAX, &json!("few/a")));
        assert_eq!(largest[9]["bytes"], 6, "the smaller ones are left out");
    }

    #[test]
    fn counts_groups_beyond_limit_together() {
        let mut groups = PrefixCounts::new(Vec::new());
        for number in 0..GROUPS_MAX + 5 {
            groups.add(format!("{number}/k").as_bytes(), 1);
        }
        assert_eq!(groups.json(false)["others"], json!({"keys": 5, "bytes": 5}));
    }

    #[test]
    fn search_text_is_matched_literally() {
        let v1::key_selector::By::Regex(text) = selector(b"a.", b"(\xff") else { panic!() };
        let pattern = regex::bytes::Regex::new(&text).unwrap();
        assert!(pattern.is_match(b"a.\n.(\xff!"));
        assert!(!pattern.is_match(b"ab(\xff") && !pattern.is_match(b"a.("));
    }
}
