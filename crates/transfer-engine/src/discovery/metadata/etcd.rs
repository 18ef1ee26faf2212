//! etcd, over the JSON gateway of servers of version 3.4 and later.

use std::sync::atomic::{AtomicUsize, Ordering};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use serde_json::{Value, json};

use super::{
    MetadataSettings,
    http_client::{Answer, HttpClient, Request},
    keyed::{Claim, KeyValueServer},
};
use crate::discovery::descriptor::DESCRIPTOR_BYTES_MAX;

/// Default port of a member.
const PORT: u16 = 2379;

/// Maximum number of members in an address.
const MEMBERS_MAX: usize = 16;

/// The members of a cluster. Each member can answer every request.
#[derive(Debug)]
pub(super) struct EtcdServer {
    address: String,
    /// Base URLs of the members.
    members: Vec<String>,
    /// Index of the member that answered last.
    preferred: AtomicUsize,
    http_client: HttpClient,
}

impl EtcdServer {
    /// Parses a list of members, separated by `,` or `;`.
    ///
    /// # Errors
    /// A member is not a valid address.
    pub(super) fn new(address: &str, settings: &MetadataSettings) -> Result<Self> {
        let bad = |text| Error::invalid(text).with("address", address);
        let mut members = Vec::new();
        for member in address.split([',', ';']).map(str::trim) {
            let member = member.strip_prefix("http://").unwrap_or(member).trim_end_matches('/');
            let endpoint: Endpoint =
                member.parse().map_err(|_| bad("not the address of an etcd server"))?;
            members.push(format!("http://{}", endpoint.or_port(PORT)));
        }
        if members.len() > MEMBERS_MAX {
            return Err(bad("at most 16 members of an etcd cluster can be named"));
        }
        // Values are base64 (a third longer) inside a little JSON.
        let http_client =
            HttpClient::new(settings.connect_timeout, DESCRIPTOR_BYTES_MAX as u64 * 3 / 2);
        Ok(Self {
            address: address.to_owned(),
            members,
            preferred: AtomicUsize::new(0),
            http_client,
        })
    }

    /// Tries the members in turn, beginning with the one that answered last.
    fn call(&self, method: &str, question: &Value, deadline: Moment) -> Result<Value> {
        let body = question.to_string().into_bytes();
        let first = self.preferred.load(Ordering::Relaxed);
        let count = self.members.len();
        let mut failure = None;
        for turn in 0..count {
            let member = (first + turn) % count;
            let url = format!("{}/v3/kv/{method}", self.members[member]);
            let now = SystemClock.now();
            // A silent member must leave time for the members after it.
            let share = deadline.left(now) / u32::try_from(count - turn).unwrap_or(1);
            match self.http_client.call(Request::Post(&body), &url, now + share) {
                Ok(answer) => {
                    self.preferred.store(member, Ordering::Relaxed);
                    return read(&answer, &url);
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.expect("an address names at least one member"))
    }

    /// Runs a transaction. Returns whether its condition held, and the value found by the first
    /// step of the branch that ran.
    fn transaction(
        &self,
        condition: &Value,
        success: &Value,
        failure: &Value,
        deadline: Moment,
    ) -> Result<(bool, Option<Vec<u8>>)> {
        let question = json!({ "compare": [condition], "success": success, "failure": failure });
        let answer = self.call("txn", &question, deadline)?;
        let has_held = answer["succeeded"].as_bool().unwrap_or(false);
        let found = self.first_value(&answer["responses"][0]["response_range"])?;
        Ok((has_held, found))
    }

    fn first_value(&self, range: &Value) -> Result<Option<Vec<u8>>> {
        let Some(entry) = range["kvs"].as_array().and_then(|entries| entries.first()) else {
            return Ok(None);
        };
        // An empty value is omitted from the JSON.
        let text = entry["value"].as_str().unwrap_or("");
        BASE64.decode(text).map(Some).map_err(|source| {
            Error::new(ErrorCode::ETCD_OPERATION_ERROR, "an answer of etcd cannot be read")
                .with("url", &self.address)
                .caused_by(source)
        })
    }
}

impl KeyValueServer for EtcdServer {
    fn address(&self) -> &str {
        &self.address
    }

    fn get(&self, key: &str, deadline: Moment) -> Result<Option<Vec<u8>>> {
        let answer = self.call("range", &json!({ "key": BASE64.encode(key) }), deadline)?;
        self.first_value(&answer)
    }

    fn claim(
        &self,
        claim: Claim<'_>,
        expected: Option<&[u8]>,
        deadline: Moment,
    ) -> Result<Option<Vec<u8>>> {
        let key = BASE64.encode(claim.key);
        let condition = match expected {
            Some(value) => value_equals(claim.key, value),
            // A key that was never created, or was deleted, has revision 0.
            None => json!({ "target": "CREATE", "key": key, "create_revision": "0" }),
        };
        let steps = json!([put(claim.key, claim.value)]);
        let read_back = json!([{ "request_range": { "key": key } }]);
        let (is_ours, found) = self.transaction(&condition, &steps, &read_back, deadline)?;
        // The claim failed, but the entry was deleted a moment later: an empty entry names no
        // holder.
        Ok(if is_ours { None } else { Some(found.unwrap_or_default()) })
    }

    fn put(&self, claim: Claim<'_>, key: &str, value: &[u8], deadline: Moment) -> Result<bool> {
        let steps = json!([put(key, value)]);
        let condition = value_equals(claim.key, claim.value);
        Ok(self.transaction(&condition, &steps, &json!([]), deadline)?.0)
    }

    fn release(&self, claim: Claim<'_>, key: &str, deadline: Moment) -> Result<()> {
        let steps = json!([delete(key), delete(claim.key)]);
        let condition = value_equals(claim.key, claim.value);
        self.transaction(&condition, &steps, &json!([]), deadline).map(drop)
    }
}

fn value_equals(key: &str, value: &[u8]) -> Value {
    let (key, value) = (BASE64.encode(key), BASE64.encode(value));
    json!({ "target": "VALUE", "result": "EQUAL", "key": key, "value": value })
}

fn put(key: &str, value: &[u8]) -> Value {
    json!({ "request_put": { "key": BASE64.encode(key), "value": BASE64.encode(value) } })
}

fn delete(key: &str) -> Value {
    json!({ "request_delete_range": { "key": BASE64.encode(key) } })
}

/// Parses the JSON of a successful answer.
fn read(answer: &Answer, url: &str) -> Result<Value> {
    let refused = |text: &str| {
        Error::new(ErrorCode::ETCD_OPERATION_ERROR, text)
            .with("url", url)
            .with("status", answer.status)
            .with("answer", answer.quoted())
    };
    if !(200..300).contains(&answer.status) {
        return Err(refused("etcd refused the request"));
    }
    match serde_json::from_slice(&answer.body) {
        Ok(value @ Value::Object(_)) => Ok(value),
        _ => Err(refused("the server is not etcd 3.4 or later")),
    }
}

#[cfg(test)]
pub(super) use tests::fuzz_target;

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use mooncake_base::fuzz::{Target, outcome};

    use super::*;

    /// The JSON of an answer, and the value in its first entry.
    pub(in crate::discovery::metadata) fn fuzz_target() -> Target {
        let entry = json!([{ "key": "a2V5", "value": BASE64.encode(b"value") }]);
        let empty = json!([{ "key": "a2V5" }]);
        let range_response = |kvs: &Value| json!({ "response_range": { "kvs": kvs } });
        let seeds = [
            json!({ "kvs": entry, "count": "1" }),
            json!({ "kvs": empty }),
            json!({ "succeeded": true, "responses": [{ "response_put": {} }] }),
            json!({ "succeeded": false, "responses": [range_response(&entry)] }),
            json!({}),
        ];
        let seeds = seeds.iter().map(|seed| seed.to_string().into_bytes()).collect();
        Target { name: "etcd answer", seeds, run: answer }
    }

    fn answer(bytes: &[u8]) -> u64 {
        static SERVER: LazyLock<EtcdServer> = LazyLock::new(|| {
            EtcdServer::new("127.0.0.1", &MetadataSettings::default()).expect("it is an address")
        });
        let Ok(answer) = read(&Answer { status: 200, body: bytes.to_vec() }, "url") else {
            return 0;
        };
        let found = [&answer, &answer["responses"][0]["response_range"]].map(|range| {
            let found = SERVER.first_value(range);
            if let Ok(Some(value)) = &found {
                let again = json!({ "kvs": [{ "value": BASE64.encode(value) }] });
                assert_eq!(SERVER.first_value(&again).expect("we wrote it").as_ref(), Some(value));
            }
            found.map(|value| value.map(|value| value.is_empty())).map_err(|error| error.code())
        });
        outcome((found, answer["succeeded"].as_bool()))
    }
}
