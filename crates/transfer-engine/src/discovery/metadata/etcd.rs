//! etcd, over the JSON gateway of servers of version 3.4 and later.

use mooncake_base::{Endpoint, Error, Moment, Result};
use mooncake_kv_client::{
    etcd::{EtcdGateway, decode, encode},
    http::HttpClient,
};
use serde_json::{Value, json};

use super::{
    MetadataSettings, TEXTS,
    keyed::{KeyClaim, KeyValueServer},
};
use crate::discovery::descriptor::DESCRIPTOR_BYTES_MAX;

/// The members of a cluster. Each member can answer every request.
#[derive(Debug)]
pub(super) struct EtcdServer {
    address: String,
    gateway: EtcdGateway,
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
            members.push(endpoint);
        }
        // Values are base64 (a third longer) inside a little JSON.
        let bytes_max = DESCRIPTOR_BYTES_MAX as u64 * 3 / 2;
        let http_client = HttpClient::new(settings.connect_timeout, bytes_max, &TEXTS);
        let gateway = EtcdGateway::new(&members, http_client)
            .map_err(|error| error.with("address", address))?;
        Ok(Self { address: address.to_owned(), gateway })
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
        let answer = self.gateway.call("kv/txn", &question, deadline)?;
        let has_held = answer["succeeded"].as_bool().unwrap_or(false);
        let found = self.first_value(&answer["responses"][0]["response_range"])?;
        Ok((has_held, found))
    }

    fn first_value(&self, range: &Value) -> Result<Option<Vec<u8>>> {
        let Some(entry) = range["kvs"].as_array().and_then(|entries| entries.first()) else {
            return Ok(None);
        };
        decode(entry, "value").map(Some).map_err(|error| error.with("url", &self.address))
    }
}

impl KeyValueServer for EtcdServer {
    fn address(&self) -> &str {
        &self.address
    }

    fn get(&self, key: &str, deadline: Moment) -> Result<Option<Vec<u8>>> {
        let answer = self.gateway.call("kv/range", &json!({ "key": encode(key) }), deadline)?;
        self.first_value(&answer)
    }

    fn claim(
        &self,
        claim: KeyClaim<'_>,
        expected: Option<&[u8]>,
        deadline: Moment,
    ) -> Result<Option<Vec<u8>>> {
        let key = encode(claim.key);
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

    fn put(&self, claim: KeyClaim<'_>, key: &str, value: &[u8], deadline: Moment) -> Result<bool> {
        let steps = json!([put(key, value)]);
        let condition = value_equals(claim.key, claim.value);
        Ok(self.transaction(&condition, &steps, &json!([]), deadline)?.0)
    }

    fn release(&self, claim: KeyClaim<'_>, key: &str, deadline: Moment) -> Result<()> {
        let steps = json!([delete(key), delete(claim.key)]);
        let condition = value_equals(claim.key, claim.value);
        self.transaction(&condition, &steps, &json!([]), deadline).map(drop)
    }
}

fn value_equals(key: &str, value: &[u8]) -> Value {
    let (key, value) = (encode(key), encode(value));
    json!({ "target": "VALUE", "result": "EQUAL", "key": key, "value": value })
}

fn put(key: &str, value: &[u8]) -> Value {
    json!({ "request_put": { "key": encode(key), "value": encode(value) } })
}

fn delete(key: &str) -> Value {
    json!({ "request_delete_range": { "key": encode(key) } })
}
