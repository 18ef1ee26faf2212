//! The lease as an object of Kubernetes (`coordination.k8s.io/v1`, `Lease`). The in-sync set is an
//! annotation of the same object, since two objects cannot be changed together; `resourceVersion` is
//! compared by the API server.
//!
//! A Lease does not disappear when it is over. As in the leader election of Kubernetes' own clients,
//! a lease is over when an observer has seen no change of the object for its duration, by the clock of
//! the observer.

mod api;
mod leader_label;
mod time;

use std::time::Duration;

use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock, sync::Mutex};
use serde_json::{Value, json};

use self::time::rfc3339;
pub use api::ApiServer;
use api::Written;
pub use leader_label::LeaderLabel;

use crate::{
    etcd::whole_seconds,
    in_sync::InSyncSet,
    service::{
        Acquisition, Basis, Bid, Change, Hold, LeaseService, Snapshot, after_watch, view_of,
    },
    view::{Leader, LeaderAddress, Lease, OwnerToken},
};

/// Annotations of the object.
const IN_SYNC: &str = "mooncake.io/in-sync";
const OWNER: &str = "mooncake.io/owner-token";

/// Attempts of a change whose object is changed by others meanwhile.
const TRIES: usize = 4;

/// A cluster's leader in a Lease.
#[derive(Debug)]
pub struct KubernetesLease {
    api: ApiServer,
    name: String,
    ttl: Duration,
    observed: Mutex<Observed>,
}

/// The version of the object that was seen last, since when, and the duration of the lease in it.
#[derive(Debug, Default)]
struct Observed {
    version: String,
    since: Moment,
    duration: Duration,
}

impl KubernetesLease {
    /// Creates the client of the Lease `name` in the namespace of the API server.
    ///
    /// # Errors
    /// The name is not one of an object of Kubernetes.
    pub fn new(api: ApiServer, name: &str, ttl: Duration) -> Result<Self> {
        api::check_name(name)?;
        Ok(Self { api, name: name.to_owned(), ttl, observed: Mutex::default() })
    }

    /// Creates the client of a Lease for a program in a pod, with the service account of the pod.
    ///
    /// # Errors
    /// The program does not run in a pod, or a name is invalid.
    pub fn in_pod(namespace: &str, name: &str, ttl: Duration) -> Result<Self> {
        Self::new(ApiServer::in_pod(Some(namespace))?, name, ttl)
    }

    /// Returns whether the lease in an object is over, by what this process has observed.
    fn is_over(&self, object: &Value) -> bool {
        let holder = object["spec"]["holderIdentity"].as_str().unwrap_or("");
        if holder.is_empty() {
            return true;
        }
        let seconds = object["spec"]["leaseDurationSeconds"].as_u64().unwrap_or(0);
        let duration = Duration::from_secs(seconds.min(3600)).max(self.ttl);
        let (version, now) = (version(object), SystemClock.now());
        let mut observed = self.observed.lock();
        if observed.version != version {
            *observed = Observed { version: version.to_owned(), since: now, duration };
        }
        now.since(observed.since) >= duration
    }

    fn snapshot(&self, object: &Value) -> Result<Snapshot> {
        let in_sync = annotation(object, IN_SYNC).map(|value| InSyncSet::read(value.as_bytes()));
        let in_sync = in_sync.transpose()?;
        let leader = if self.is_over(object) {
            None
        } else {
            let holder = object["spec"]["holderIdentity"].as_str().unwrap_or("");
            Some(Leader {
                address: LeaderAddress::read(holder.as_bytes())?,
                view: view_of(transitions(object), in_sync.as_ref()),
                owner: annotation(object, OWNER).and_then(OwnerToken::parse),
            })
        };
        Ok(Snapshot { leader, in_sync, mark: version(object).to_owned() })
    }

    /// Changes the object as `change` says, which returns `None` to leave it as it is. Returns what
    /// was written.
    fn update(
        &self,
        deadline: Moment,
        change: impl Fn(&Value) -> Result<Option<Value>>,
    ) -> Result<Option<Value>> {
        for _ in 0..TRIES {
            let found = self.api.get(&self.name, deadline)?;
            let object = found.clone().unwrap_or(Value::Null);
            let Some(changed) = change(&object)? else { return Ok(None) };
            let written = match found {
                Some(_) => self.api.replace(&self.name, &changed, deadline)?,
                None => self.api.create(&self.name, changed, deadline)?,
            };
            if let Written::Done(object) = written {
                return Ok(Some(object));
            }
        }
        Err(Error::new(ErrorCode::K8S_LEASE_OPERATION_ERROR, "the Lease changes without pause")
            .with("lease", &self.name))
    }

    fn update_if_held(
        &self,
        lease: &Lease,
        deadline: Moment,
        change: impl Fn(&mut Value) -> Result<bool>,
    ) -> Result<Hold> {
        let written = self.update(deadline, |object| {
            let is_held = annotation(object, OWNER).and_then(OwnerToken::parse)
                == Some(lease.owner)
                && transitions(object) == lease.term()
                && object["spec"]["holderIdentity"]
                    .as_str()
                    .is_some_and(|holder| !holder.is_empty());
            let mut changed = object.clone();
            Ok((is_held && change(&mut changed)?).then_some(changed))
        })?;
        Ok(if written.is_some() { Hold::Held } else { Hold::Lost })
    }
}

impl LeaseService for KubernetesLease {
    fn address(&self) -> String {
        format!("k8s://{}/{}", self.api.namespace(), self.name)
    }

    fn read(&self, deadline: Moment) -> Result<Snapshot> {
        match self.api.get(&self.name, deadline)? {
            None => Ok(Snapshot::default()),
            Some(object) => self.snapshot(&object).map_err(|error| error.with("lease", &self.name)),
        }
    }

    fn acquire(&self, bid: &Bid, deadline: Moment) -> Result<Acquisition> {
        let written = self.update(deadline, |object| {
            let set = annotation(object, IN_SYNC);
            let holds = match bid.basis {
                Basis::Member => set == Some(&*bid.set.value()),
                Basis::Founder => set.is_none(),
                Basis::Forced => true,
            };
            if !holds || !self.is_over(object) {
                return Ok(None);
            }
            let mut changed = object.clone();
            annotate(&mut changed, IN_SYNC, &bid.set.value());
            annotate(&mut changed, OWNER, &bid.owner.to_string());
            let now = rfc3339();
            let spec = &mut changed["spec"];
            spec["holderIdentity"] = json!(LeaderAddress::Warming.value(bid.owner));
            spec["leaseDurationSeconds"] = json!(whole_seconds(self.ttl));
            spec["leaseTransitions"] = json!(transitions(object) + 1);
            spec["acquireTime"] = json!(now);
            spec["renewTime"] = json!(now);
            Ok(Some(changed))
        })?;
        Ok(match written {
            Some(object) => Acquisition::Acquired(bid.view(transitions(&object))),
            None => Acquisition::Refused,
        })
    }

    fn renew(&self, lease: &Lease, deadline: Moment) -> Result<Hold> {
        self.update_if_held(lease, deadline, |object| {
            object["spec"]["renewTime"] = json!(rfc3339());
            Ok(true)
        })
    }

    fn announce(&self, lease: &Lease, address: &str, deadline: Moment) -> Result<Hold> {
        self.update_if_held(lease, deadline, |object| {
            object["spec"]["holderIdentity"] = json!(address);
            Ok(true)
        })
    }

    fn change_in_sync(&self, change: &Change, deadline: Moment) -> Result<Hold> {
        self.update_if_held(&change.lease, deadline, |object| {
            let holds = annotation(object, IN_SYNC) == Some(&*change.from.value());
            annotate(object, IN_SYNC, &change.to.value());
            Ok(holds)
        })
    }

    fn mark_lost(&self, lost: &InSyncSet, deadline: Moment) -> Result<()> {
        let marked = self.update(deadline, |object| {
            let mut changed = object.clone();
            annotate(&mut changed, IN_SYNC, &lost.value());
            Ok(annotation(object, IN_SYNC).is_none().then_some(changed))
        });
        marked.map(drop)
    }

    fn release(&self, lease: &Lease, deadline: Moment) -> Result<()> {
        let released = self.update_if_held(lease, deadline, |object| {
            object["spec"]["holderIdentity"] = json!("");
            Ok(true)
        });
        released.map(drop)
    }

    fn watch(&self, seen: &Snapshot, deadline: Moment) -> Result<Snapshot> {
        // A lease that ends changes nothing in the object, so that the wait ends with it.
        let end = match &seen.leader {
            Some(_) => {
                let observed = self.observed.lock();
                deadline.min(observed.since + observed.duration + Duration::from_millis(1))
            }
            None => deadline,
        };
        match self.api.wait_for_change(&self.name, &seen.mark, end) {
            Err(error) if error.code() != ErrorCode::RPC_TIMEOUT => Err(error),
            _ => self.read(after_watch(deadline)),
        }
    }

    fn close(&self) {
        self.api.close();
    }
}

fn version(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().unwrap_or("")
}

fn transitions(object: &Value) -> u64 {
    object["spec"]["leaseTransitions"].as_u64().unwrap_or(0)
}

fn annotation<'a>(object: &'a Value, name: &str) -> Option<&'a str> {
    object["metadata"]["annotations"][name].as_str()
}

fn annotate(object: &mut Value, name: &str, value: &str) {
    object["metadata"]["annotations"][name] = json!(value);
}
