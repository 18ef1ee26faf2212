//! The lease in etcd: a key that is attached to a lease of etcd, and transactions over it and the
//! in-sync set. Needs etcd 3.4 or later, over its JSON gateway.
//!
//! The lease of etcd has the owner token as its id, so that a compare of the key's lease tells whose
//! key it is. The number of a view is the revision that created the key, as in upstream.

use std::time::Duration;

use mooncake_base::{Endpoint, Error, ErrorCode, Moment, Result};
use mooncake_kv_client::{
    etcd::{EtcdGateway, decode, encode, number},
    http::HttpClient,
};
use serde_json::{Value, json};

use crate::{
    TEXTS,
    in_sync::InSyncSet,
    service::{
        Acquisition, Basis, Bid, CONNECT_TIMEOUT, Change, Hold, LeaseService, Snapshot,
        after_watch, view_of,
    },
    view::{ClusterId, Leader, LeaderAddress, Lease, OwnerToken},
};

/// Maximum length of an answer.
const BYTES_MAX: u64 = 64 << 10;

/// A cluster's leader in etcd.
#[derive(Debug)]
pub struct EtcdLease {
    address: String,
    gateway: EtcdGateway,
    leader_key: String,
    in_sync_key: String,
    ttl_seconds: u64,
}

impl EtcdLease {
    /// Creates the client of the members of etcd, for a lease of whole seconds or a little longer.
    ///
    /// # Errors
    /// There is no member, or there are too many.
    pub fn new(members: &[Endpoint], cluster: &ClusterId, ttl: Duration) -> Result<Self> {
        let names: Vec<_> = members.iter().map(ToString::to_string).collect();
        let http_client = HttpClient::new(CONNECT_TIMEOUT, BYTES_MAX, &TEXTS);
        let prefix = format!("mooncake-store/{}", cluster.as_str());
        Ok(Self {
            address: format!("etcd://{}", names.join(";")),
            gateway: EtcdGateway::new(members, http_client)?,
            leader_key: format!("{prefix}/master_view"),
            in_sync_key: format!("{prefix}/in_sync"),
            ttl_seconds: whole_seconds(ttl),
        })
    }

    fn transaction(&self, compare: &[Value], success: &[Value], deadline: Moment) -> Result<Value> {
        let question = json!({ "compare": compare, "success": success });
        self.gateway.call("kv/txn", &question, deadline)
    }

    /// The condition that the leader's key is that of a lease.
    fn is_held(&self, lease: &Lease) -> [Value; 2] {
        let key = encode(&self.leader_key);
        [
            json!({ "target": "LEASE", "key": key, "lease": lease.owner.number().to_string() }),
            json!({ "target": "CREATE", "key": key, "create_revision": lease.term().to_string() }),
        ]
    }

    fn hold(answer: &Value) -> Hold {
        if answer["succeeded"].as_bool().unwrap_or(false) { Hold::Held } else { Hold::Lost }
    }

    fn put_set(&self, set: &InSyncSet) -> Value {
        put(&self.in_sync_key, set.value().as_bytes(), None)
    }

    fn set_is(&self, set: &InSyncSet) -> Value {
        let (key, value) = (encode(&self.in_sync_key), encode(set.value()));
        json!({ "target": "VALUE", "key": key, "value": value })
    }

    fn snapshot(&self, answer: &Value) -> Result<Snapshot> {
        let entry = |index: usize| &answer["responses"][index]["response_range"]["kvs"][0];
        let in_sync = match entry(1) {
            Value::Null => None,
            entry => Some(InSyncSet::read(&decode(entry, "value")?)?),
        };
        let leader = match entry(0) {
            Value::Null => None,
            entry => Some(Leader {
                address: LeaderAddress::read(&decode(entry, "value")?)?,
                view: view_of(revision(&entry["create_revision"]), in_sync.as_ref()),
                owner: match revision(&entry["lease"]) {
                    0 => None,
                    lease => Some(OwnerToken::new(lease)),
                },
            }),
        };
        let mark = revision(&answer["header"]["revision"]).to_string();
        Ok(Snapshot { leader, in_sync, mark })
    }

    /// Waits until the leader's key or the set changes after a revision, or until the deadline.
    fn wait_for_change(&self, after: u64, deadline: Moment) -> Result<()> {
        let from = (after + 1).to_string();
        let watch = |key: &str| json!({ "key": encode(key), "start_revision": from });
        // One stream has one watch in the gateway; the range from `in_sync` to `master_view` has both.
        let mut request = watch(&self.in_sync_key);
        request["range_end"] = json!(encode(format!("{}\0", self.leader_key)));
        let question = json!({ "create_request": request });
        let mut lines = self.gateway.stream("watch", &question, deadline)?;
        while let Some(line) = lines.next_line()? {
            let message: Value = serde_json::from_slice(&line).map_err(|source| {
                Error::new(ErrorCode::ETCD_OPERATION_ERROR, "an event of etcd cannot be read")
                    .with("url", &self.address)
                    .caused_by(source)
            })?;
            let result = &message["result"];
            // A cancelled watch, as of a revision that was compacted, tells nothing; the values are
            // read anew.
            let is_over =
                result["canceled"].as_bool().unwrap_or(false) || !message["error"].is_null();
            if is_over || result["events"].as_array().is_some_and(|events| !events.is_empty()) {
                return Ok(());
            }
        }
        Ok(())
    }
}

impl LeaseService for EtcdLease {
    fn address(&self) -> String {
        self.address.clone()
    }

    fn read(&self, deadline: Moment) -> Result<Snapshot> {
        let reads = [range(&self.leader_key), range(&self.in_sync_key)];
        let answer = self.transaction(&[], &reads, deadline)?;
        self.snapshot(&answer).map_err(|error| error.with("url", &self.address))
    }

    fn acquire(&self, bid: &Bid, deadline: Moment) -> Result<Acquisition> {
        let id = bid.owner.number().to_string();
        let grant = json!({ "ID": id, "TTL": self.ttl_seconds.to_string() });
        if let Err(error) = self.gateway.call("lease/grant", &grant, deadline) {
            // A member that was asked in vain before may have granted it; the transaction tells.
            tracing::debug!(%error, "etcd did not grant the lease");
        }
        let key = encode(&self.leader_key);
        let mut compare = vec![json!({ "target": "CREATE", "key": key, "create_revision": "0" })];
        let mut success = vec![put(
            &self.leader_key,
            LeaderAddress::Warming.value(bid.owner).as_bytes(),
            Some(bid.owner),
        )];
        match bid.basis {
            Basis::Member => compare.push(self.set_is(&bid.set)),
            Basis::Founder => {
                let key = encode(&self.in_sync_key);
                compare.push(json!({ "target": "CREATE", "key": key, "create_revision": "0" }));
                success.push(self.put_set(&bid.set));
            }
            Basis::Forced => success.push(self.put_set(&bid.set)),
        }
        let answer = self.transaction(&compare, &success, deadline)?;
        Ok(match Self::hold(&answer) {
            Hold::Held => Acquisition::Acquired(bid.view(revision(&answer["header"]["revision"]))),
            Hold::Lost => Acquisition::Refused,
        })
    }

    fn renew(&self, lease: &Lease, deadline: Moment) -> Result<Hold> {
        let question = json!({ "ID": lease.owner.number().to_string() });
        let answer = self.gateway.call("lease/keepalive", &question, deadline)?;
        if number(&answer["result"]["TTL"]) <= 0 {
            return Ok(Hold::Lost);
        }
        // An operator may have removed the key while its lease lives.
        let compare = self.is_held(lease);
        Ok(Self::hold(&self.transaction(&compare, &[], deadline)?))
    }

    fn announce(&self, lease: &Lease, address: &str, deadline: Moment) -> Result<Hold> {
        let put = put(&self.leader_key, address.as_bytes(), Some(lease.owner));
        Ok(Self::hold(&self.transaction(&self.is_held(lease), &[put], deadline)?))
    }

    fn change_in_sync(&self, change: &Change, deadline: Moment) -> Result<Hold> {
        let [owner, term] = self.is_held(&change.lease);
        let compare = [owner, term, self.set_is(&change.from)];
        Ok(Self::hold(&self.transaction(&compare, &[self.put_set(&change.to)], deadline)?))
    }

    fn mark_lost(&self, lost: &InSyncSet, deadline: Moment) -> Result<()> {
        let key = encode(&self.in_sync_key);
        let absent = json!({ "target": "CREATE", "key": key, "create_revision": "0" });
        self.transaction(&[absent], &[self.put_set(lost)], deadline).map(drop)
    }

    fn release(&self, lease: &Lease, deadline: Moment) -> Result<()> {
        let held = self.is_held(lease);
        let delete = json!({ "request_delete_range": { "key": encode(&self.leader_key) } });
        if Self::hold(&self.transaction(&held, &[delete], deadline)?) == Hold::Held {
            // The lease of a key that is gone ends by itself if this fails.
            let question = json!({ "ID": lease.owner.number().to_string() });
            drop(self.gateway.call("lease/revoke", &question, deadline));
        }
        Ok(())
    }

    fn watch(&self, seen: &Snapshot, deadline: Moment) -> Result<Snapshot> {
        if let Ok(after) = seen.mark.parse()
            && let Err(error) = self.wait_for_change(after, deadline)
        {
            if error.code() != ErrorCode::RPC_TIMEOUT {
                // The stream of this member broke; the next one may be well.
                self.gateway.prefer_next_member();
                return Err(error);
            }
            return Ok(seen.clone());
        }
        self.read(after_watch(deadline))
    }

    fn close(&self) {
        self.gateway.close();
    }
}

/// etcd counts leases in seconds. A lease in etcd that is longer than ours is safe.
pub(crate) fn whole_seconds(ttl: Duration) -> u64 {
    ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)
}

fn revision(value: &Value) -> u64 {
    u64::try_from(number(value)).unwrap_or(0)
}

fn range(key: &str) -> Value {
    json!({ "request_range": { "key": encode(key) } })
}

fn put(key: &str, value: &[u8], lease: Option<OwnerToken>) -> Value {
    let mut put = json!({ "key": encode(key), "value": encode(value) });
    if let Some(lease) = lease {
        put["lease"] = json!(lease.number().to_string());
    }
    json!({ "request_put": put })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::View;

    fn lease() -> EtcdLease {
        let cluster = ClusterId::new("c").unwrap();
        EtcdLease::new(&[Endpoint::new("h", 1)], &cluster, Duration::from_secs(5)).unwrap()
    }

    #[test]
    fn keys_are_those_of_upstream() {
        let lease = lease();
        assert_eq!(lease.leader_key, "mooncake-store/c/master_view");
        assert_eq!(lease.in_sync_key, "mooncake-store/c/in_sync");
        // One range of the watch has both.
        assert!(lease.in_sync_key < lease.leader_key);
    }

    #[test]
    fn lease_in_etcd_is_never_shorter() {
        for (millis, seconds) in [(1000, 1), (1001, 2), (5000, 5), (2500, 3)] {
            assert_eq!(whole_seconds(Duration::from_millis(millis)), seconds);
        }
    }

    #[test]
    fn reads_the_leader_of_another_program() {
        let entry = json!({ "value": encode("10.0.0.1:50051"), "create_revision": "17" });
        let answer = json!({
            "header": { "revision": "20" },
            "responses": [{ "response_range": { "kvs": [entry] } }, { "response_range": {} }],
        });
        let snapshot = lease().snapshot(&answer).unwrap();
        let leader = snapshot.leader.unwrap();
        assert_eq!(leader.address, LeaderAddress::Serving("10.0.0.1:50051".into()));
        assert_eq!((leader.view, leader.owner), (View(17), None));
        assert_eq!((snapshot.in_sync, &*snapshot.mark), (None, "20"));
    }
}
