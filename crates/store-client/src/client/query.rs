//! Looking and removing: what needs the master only.

use std::time::Duration;

use bytes::Bytes;
use mooncake_base::{Error, ErrorCode, KeyBatch, Moment, ObjectKey, Result};
use mooncake_proto::v1::{self, key_selector::By, request::Call, response::Call as Reply};

use super::{Client, ClientInner, batch, call};
use crate::object::{
    MasterStatus, ObjectPage, ObjectStatus, ObjectSummary, Presence, SegmentUse, Selector,
};

impl Client {
    /// Whether objects exist, and how long they are. Leases those that do, unless told not to.
    ///
    /// # Errors
    /// By key: the master cannot be reached. A missing object is `None`.
    pub fn exists(
        &self,
        keys: &[ObjectKey],
        takes_lease: bool,
    ) -> Vec<Result<Option<ObjectStatus>>> {
        batch::for_keys(keys, |_, packed| {
            let found = self.probe(packed, takes_lease)?;
            let states = found.states.iter().zip(&found.lengths);
            Ok(states.map(|(&state, &length)| Ok(read_status(state, length))).collect())
        })
    }

    /// As [`exists`](Self::exists), where only yes or no is wanted, of very many keys.
    pub fn presence(&self, keys: KeyBatch, takes_lease: bool) -> Presence {
        let mut presence = Presence { found: Vec::with_capacity(keys.len()), failure: None };
        for keys in batch::messages(keys) {
            let count = keys.len();
            match self.probe(keys, takes_lease) {
                Ok(found) => presence.found.extend(found.states.iter().map(|&s| Some(is_there(s)))),
                Err(error) => {
                    presence.found.extend(std::iter::repeat_n(None, count));
                    presence.failure.get_or_insert(error);
                }
            }
        }
        presence
    }

    fn probe(&self, keys: Vec<Bytes>, takes_lease: bool) -> Result<v1::ProbeResponse> {
        let count = keys.len();
        let caller = Some(self.inner.caller.clone());
        let call = Call::Probe(v1::ProbeRequest { caller, keys, lease: takes_lease });
        let found = self.inner.call(call, |answer| match answer {
            Reply::Probe(found) => Some(found),
            _ => None,
        })?;
        call::check_count(found.states.len(), count)?;
        call::check_count(found.lengths.len(), count)?;
        Ok(found)
    }

    /// Removes objects; by force also those that are leased.
    ///
    /// # Errors
    /// By key: `OBJECT_NOT_FOUND`, `OBJECT_HAS_LEASE`, `REPLICA_IS_NOT_READY` while it is being
    /// written for the first time, or the master cannot be reached.
    pub fn remove(&self, keys: &[ObjectKey], is_forced: bool) -> Vec<Result<()>> {
        batch::for_keys(keys, |keys, packed| {
            let call = Call::Remove(v1::RemoveRequest {
                caller: Some(self.inner.caller.clone()),
                keys: packed,
                force: is_forced,
            });
            let response = self.inner.call(call, |answer| match answer {
                Reply::Remove(response) => Some(response),
                _ => None,
            })?;
            call::check_count(response.results.len(), keys.len())?;
            let read = |(result, key): (&v1::ItemResult, &ObjectKey)| match &result.failure {
                Some(failure) => Err(call::item_error(failure, key)),
                None => Ok(()),
            };
            Ok(response.results.iter().zip(keys).map(read).collect())
        })
    }

    /// Removes the objects that the selector names, but for those that are leased (unless forced)
    /// or being written. Says how many went.
    ///
    /// # Errors
    /// A bad expression, or the master cannot be reached.
    pub fn remove_matching(&self, selector: &Selector, is_forced: bool) -> Result<u64> {
        let call = Call::RemoveMatching(v1::RemoveMatchingRequest {
            caller: Some(self.inner.caller.clone()),
            selector: Some(wire_selector(selector)),
            force: is_forced,
        });
        self.inner.call(call, |answer| match answer {
            Reply::RemoveMatching(response) => Some(response.removed),
            _ => None,
        })
    }

    /// Lists objects in the byte order of their keys, from behind `after` on, at most `limit` of
    /// them (0: as many as one answer may hold). Takes no lease.
    ///
    /// # Errors
    /// A bad expression, or the master cannot be reached.
    pub fn list(
        &self,
        selector: &Selector,
        after: Option<&ObjectKey>,
        limit: u32,
    ) -> Result<ObjectPage> {
        let call = Call::ListObjects(v1::ListObjectsRequest {
            caller: Some(self.inner.caller.clone()),
            selector: Some(wire_selector(selector)),
            after: after.map(|key| key.as_bytes().to_vec().into()).unwrap_or_default(),
            limit,
        });
        let response = self.inner.call(call, |answer| match answer {
            Reply::ListObjects(response) => Some(response),
            _ => None,
        })?;
        let read = |object: v1::ObjectSummary| {
            Ok(ObjectSummary {
                is_complete: object.state() == v1::ObjectState::Complete,
                key: ObjectKey::new(object.key.to_vec())?,
                length: object.length,
                replicas: object.replicas,
            })
        };
        let objects = response.objects.into_iter().map(read).collect::<Result<_>>()?;
        Ok(ObjectPage { objects, is_last: response.is_last })
    }

    /// The segments of the whole pool.
    ///
    /// # Errors
    /// The master cannot be reached.
    pub fn segments(&self) -> Result<Vec<SegmentUse>> {
        let caller = Some(self.inner.caller.clone());
        let call = Call::ListSegments(v1::ListSegmentsRequest { caller });
        let response = self.inner.call(call, |answer| match answer {
            Reply::ListSegments(response) => Some(response),
            _ => None,
        })?;
        let read = |summary: v1::SegmentSummary| {
            let takes_objects = summary.status() == v1::SegmentStatus::Ok;
            let segment = summary
                .segment
                .ok_or_else(|| call::protocol_error("a segment is not described"))?;
            let segment = call::read_segment(segment)?;
            Ok(SegmentUse { segment, used: summary.used, takes_objects })
        };
        response.segments.into_iter().map(read).collect()
    }

    /// What the master says of itself.
    ///
    /// # Errors
    /// The master cannot be reached.
    pub fn status(&self) -> Result<MasterStatus> {
        self.inner.status(self.inner.rpc_deadline())
    }

    /// Whether the client is open and its master answers.
    ///
    /// # Errors
    /// A closed error, or the master cannot be reached.
    pub fn health(&self) -> Result<()> {
        self.status().map(drop)
    }

    /// Registers memory of the caller with the engine, for transfers into it. Touches no page.
    ///
    /// # Errors
    /// An empty range, or one that overlaps another.
    pub fn register_memory(&self, address: u64, length: u64) -> Result<()> {
        self.inner.check_open()?;
        self.inner.engine.regions().register(address, length, "*")
    }

    /// Takes memory of the caller out again; it begins where a registered range begins.
    ///
    /// # Errors
    /// No range begins there, or a peer still uses it.
    pub fn unregister_memory(&self, address: u64) -> Result<()> {
        self.inner.check_open()?;
        self.inner.engine.regions().unregister(address)
    }

    /// How long an object is.
    ///
    /// # Errors
    /// By key: `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` while it is being written, or the
    /// master cannot be reached.
    pub fn sizes(&self, keys: &[ObjectKey]) -> Vec<Result<u64>> {
        let named = |(status, key): (Result<Option<ObjectStatus>>, &ObjectKey)| match status? {
            Some(ObjectStatus::Complete { length }) => Ok(length),
            Some(ObjectStatus::Writing) => {
                let text = "the object is still being written";
                Err(Error::new(ErrorCode::REPLICA_IS_NOT_READY, text).with("key", key))
            }
            None => {
                Err(Error::new(ErrorCode::OBJECT_NOT_FOUND, "object not found").with("key", key))
            }
        };
        self.exists(keys, true).into_iter().zip(keys).map(named).collect()
    }
}

impl ClientInner {
    pub(super) fn status(&self, deadline: Moment) -> Result<MasterStatus> {
        let call = Call::Status(v1::StatusRequest { caller: Some(self.caller.clone()) });
        let status = self.call_until(call, deadline, |answer| match answer {
            Reply::Status(status) => Some(status),
            _ => None,
        })?;
        Ok(MasterStatus {
            version: status.version,
            uptime: Duration::from_millis(status.uptime_ms),
            keys: status.keys,
            clients: status.clients,
            capacity: status.capacity,
            used: status.used,
            fenced: status.fenced,
            rpc_address: status.rpc_address,
            admin_address: status.admin_address,
            metadata_address: status.metadata_address,
        })
    }
}

fn read_status(state: i32, length: u64) -> Option<ObjectStatus> {
    match v1::ObjectState::try_from(state).unwrap_or_default() {
        v1::ObjectState::Absent => None,
        v1::ObjectState::Writing => Some(ObjectStatus::Writing),
        v1::ObjectState::Complete => Some(ObjectStatus::Complete { length }),
    }
}

fn is_there(state: i32) -> bool {
    state == v1::ObjectState::Complete as i32
}

fn wire_selector(selector: &Selector) -> v1::KeySelector {
    let by = match selector {
        Selector::All => By::All(true),
        Selector::Regex(expression) => By::Regex(expression.clone()),
        Selector::Prefix(prefix) => By::Prefix(prefix.clone().into()),
    };
    v1::KeySelector { by: Some(by) }
}
