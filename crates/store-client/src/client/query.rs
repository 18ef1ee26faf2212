//! Queries and removals, which need only the master.

use std::time::Duration;

use bytes::Bytes;
use mooncake_base::{
    Clock, Error, ErrorCode, KeyBatch, Moment, ObjectKey, Result, SystemClock, Version,
};
use mooncake_proto::v1::{self, key_selector::By};

use super::{Client, ClientInner, put::wire_millis};
use crate::{
    object::{
        FoundKeys, MasterStatus, ObjectDetails, ObjectPage, ObjectStatus, ObjectSummary, Presence,
        ProbeTerms, RemovalCounts, RemovalTerms, SegmentUse, Selector,
    },
    rpc::{batch, response},
};

impl Client {
    /// Returns the status of each object. The terms say what the probe does with those that exist.
    ///
    /// # Errors
    /// By key: the master cannot be reached. A missing object is `None`.
    pub fn exists(
        &self,
        keys: &[ObjectKey],
        terms: ProbeTerms,
    ) -> Vec<Result<Option<ObjectStatus>>> {
        let deadline = self.inner.rpc.deadline();
        batch::for_keys(keys, |_, packed| {
            let found = self.probe(packed, terms, &[], deadline)?;
            let states = found.states.iter().zip(&found.lengths);
            Ok(states.map(|(&state, &length)| Ok(read_status(state, length))).collect())
        })
    }

    /// Like [`exists`](Self::exists) without lengths, for large numbers of keys.
    pub fn presence(&self, keys: KeyBatch, terms: ProbeTerms) -> Presence {
        let deadline = self.inner.rpc.deadline();
        let mut presence = Presence { found: Vec::with_capacity(keys.len()), failure: None };
        for keys in batch::messages(keys) {
            let count = keys.len();
            match self.probe(keys, terms, &[], deadline) {
                Ok(found) => presence.found.extend(found.states.iter().map(|&s| Some(is_there(s)))),
                Err(error) => {
                    presence.found.extend(std::iter::repeat_n(None, count));
                    presence.failure.get_or_insert(error);
                }
            }
        }
        presence
    }

    /// Looks for a complete object with each key, and where there is none, for those whose keys are
    /// that key with one of the suffixes behind it: at most 8 of at most 64 bytes. Leases nothing.
    ///
    /// # Errors
    /// By key: the master cannot be reached, or refuses the suffixes.
    pub fn exists_or_suffixed(
        &self,
        keys: &[ObjectKey],
        suffixes: &[impl AsRef<[u8]>],
    ) -> Vec<Result<FoundKeys>> {
        let suffixes: Vec<Bytes> =
            suffixes.iter().map(|suffix| Bytes::copy_from_slice(suffix.as_ref())).collect();
        let suffixes = &suffixes[..];
        let deadline = self.inner.rpc.deadline();
        batch::for_keys(keys, |keys, packed| {
            let found = self.probe(packed, ProbeTerms::default(), suffixes, deadline)?;
            let is_there: Vec<bool> = found.states.iter().map(|&state| is_there(state)).collect();
            if found.found_suffixes.is_empty() && !suffixes.is_empty() {
                return Ok(self.probe_suffixed(keys, &is_there, suffixes, deadline));
            }
            let each = is_there.into_iter().enumerate();
            Ok(each
                .map(|(at, is_there)| {
                    let suffixes = found.found_suffixes.get(at).copied().unwrap_or_default();
                    Ok(FoundKeys { is_there, suffixes })
                })
                .collect())
        })
    }

    /// Asks a master that does not know suffixes for the keys with them.
    fn probe_suffixed(
        &self,
        keys: &[ObjectKey],
        are_there: &[bool],
        suffixes: &[Bytes],
        deadline: Moment,
    ) -> Vec<Result<FoundKeys>> {
        let mut found: Vec<Result<FoundKeys>> =
            are_there.iter().map(|&is_there| Ok(FoundKeys { is_there, suffixes: 0 })).collect();
        let mut places = Vec::new();
        let mut suffixed = Vec::new();
        for (at, key) in keys.iter().enumerate().filter(|&(at, _)| !are_there[at]) {
            for (bit, suffix) in suffixes.iter().enumerate() {
                // No object has a key that is too long.
                if let Ok(key) = ObjectKey::new([key.as_bytes(), suffix].concat()) {
                    places.push((at, bit));
                    suffixed.push(key);
                }
            }
        }
        let states = batch::for_keys(&suffixed, |_, packed| {
            let probed = self.probe(packed, ProbeTerms::default(), &[], deadline)?;
            Ok(probed.states.iter().map(|&state| Ok(is_there(state))).collect())
        });
        for ((at, bit), state) in places.into_iter().zip(states) {
            match (&mut found[at], state) {
                (Ok(found), Ok(is_there)) => found.suffixes |= u32::from(is_there) << bit,
                (found, Err(error)) => *found = Err(error),
                (Err(_), Ok(_)) => {}
            }
        }
        found
    }

    fn probe(
        &self,
        keys: Vec<Bytes>,
        ProbeTerms { takes_lease, prefetches }: ProbeTerms,
        suffixes: &[Bytes],
        deadline: Moment,
    ) -> Result<v1::ProbeResponse> {
        let count = keys.len();
        let prefetched = if prefetches {
            self.inner.asked_keys.select(&keys, SystemClock.now())
        } else {
            Vec::new()
        };
        let asked = if prefetched.is_empty() { Vec::new() } else { keys.clone() };
        let request = v1::ProbeRequest {
            caller: self.inner.rpc.caller(),
            keys,
            lease: takes_lease,
            suffixes: suffixes.to_vec(),
            prefetched,
        };
        let found = self.inner.rpc.call_until(request, deadline)?;
        if !asked.is_empty() {
            self.inner.asked_keys.record_answer(&asked, &found, SystemClock.now());
        }
        response::check_count(found.states.len(), count)?;
        response::check_count(found.lengths.len(), count)?;
        if !found.found_suffixes.is_empty() {
            response::check_count(found.found_suffixes.len(), count)?;
        }
        Ok(found)
    }

    /// Removes objects; with `is_forced`, also leased ones.
    ///
    /// # Errors
    /// By key: `OBJECT_NOT_FOUND`, `OBJECT_HAS_LEASE`, `REPLICA_IS_NOT_READY` while it is being
    /// written for the first time, or the master cannot be reached.
    pub fn remove(&self, keys: &[ObjectKey], is_forced: bool) -> Vec<Result<()>> {
        self.remove_under(keys, &RemovalTerms { is_forced, ..RemovalTerms::default() })
    }

    /// Removes objects like [`remove`](Self::remove), if the terms allow it.
    ///
    /// # Errors
    /// By key: `OBJECT_ALREADY_EXISTS`: it has another version; `OBJECT_HAS_LEASE`: it is
    /// hard-pinned; or the errors of [`remove`](Self::remove).
    pub fn remove_under(&self, keys: &[ObjectKey], terms: &RemovalTerms) -> Vec<Result<()>> {
        let deadline = self.inner.rpc.deadline();
        batch::for_keys(keys, |keys, packed| {
            let request = v1::RemoveRequest {
                caller: self.inner.rpc.caller(),
                keys: packed,
                force: terms.is_forced,
                if_versions: terms.if_version.iter().map(|version| version.0).collect(),
                spare_hard_pinned: terms.spares_hard_pinned,
            };
            let response = self.inner.rpc.call_until(request, deadline)?;
            read_results(&response.results, keys)
        })
        .into_iter()
        .map(|removed| removed.map_err(with_remedy_for_version))
        .collect()
    }

    /// Returns what the master knows of each object. Takes no lease.
    ///
    /// # Errors
    /// By key: `OBJECT_NOT_FOUND`, or the master cannot be reached.
    pub fn details(&self, keys: &[ObjectKey]) -> Vec<Result<ObjectDetails>> {
        let deadline = self.inner.rpc.deadline();
        batch::for_keys(keys, |keys, packed| {
            let caller = self.inner.rpc.caller();
            let request = v1::DescribeRequest { caller, keys: packed };
            let results = self.inner.rpc.call_until(request, deadline)?.results;
            response::check_count(results.len(), keys.len())?;
            let read = |(result, key): (v1::DescribeResult, &ObjectKey)| match &result.failure {
                Some(failure) => Err(response::item_error(failure, key)),
                None => Ok(read_details(result)),
            };
            Ok(results.into_iter().zip(keys).map(read).collect())
        })
    }

    /// Lets objects expire after `ttl` from now, or never.
    ///
    /// # Errors
    /// By key: `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` while it is being written for the first
    /// time, `INVALID_PARAMS` for no time at all, or the master cannot be reached.
    pub fn set_expiry(&self, keys: &[ObjectKey], ttl: Option<Duration>) -> Vec<Result<()>> {
        let deadline = self.inner.rpc.deadline();
        batch::for_keys(keys, |keys, packed| {
            let request = v1::SetExpiryRequest {
                caller: self.inner.rpc.caller(),
                keys: packed,
                ttl_ms: ttl.map(wire_millis),
            };
            let results = self.inner.rpc.call_until(request, deadline)?.results;
            read_results(&results, keys)
        })
    }

    /// Removes the selected objects, except leased ones (unless forced) and objects being written.
    /// Returns the number of removed objects.
    ///
    /// # Errors
    /// The regular expression is invalid, or the master cannot be reached.
    pub fn remove_matching(&self, selector: &Selector, is_forced: bool) -> Result<u64> {
        let terms = RemovalTerms { is_forced, ..RemovalTerms::default() };
        Ok(self.remove_matching_under(selector, &terms)?.removed)
    }

    /// Removes the selected objects that the terms allow, in any version, except objects being
    /// written.
    ///
    /// # Errors
    /// The regular expression is invalid, or the master cannot be reached.
    pub fn remove_matching_under(
        &self,
        selector: &Selector,
        terms: &RemovalTerms,
    ) -> Result<RemovalCounts> {
        let request = v1::RemoveMatchingRequest {
            caller: self.inner.rpc.caller(),
            selector: Some(wire_selector(selector)),
            force: terms.is_forced,
            spare_hard_pinned: terms.spares_hard_pinned,
        };
        let answer = self.inner.rpc.call(request)?;
        Ok(RemovalCounts {
            removed: answer.removed,
            leased: answer.leased,
            hard_pinned: answer.hard_pinned,
            being_copied: answer.being_copied,
        })
    }

    /// Lists objects in the byte order of their keys, starting behind `after`, at most `limit` of
    /// them (0: the maximum per response). Takes no lease.
    ///
    /// # Errors
    /// The regular expression is invalid, or the master cannot be reached.
    pub fn list(
        &self,
        selector: &Selector,
        after: Option<&ObjectKey>,
        limit: u32,
    ) -> Result<ObjectPage> {
        let request = v1::ListObjectsRequest {
            caller: self.inner.rpc.caller(),
            selector: Some(wire_selector(selector)),
            after: after.map(|key| key.as_bytes().to_vec().into()).unwrap_or_default(),
            limit,
        };
        let response = self.inner.rpc.call(request)?;
        let read = |object: v1::ObjectSummary| {
            Ok(ObjectSummary {
                is_complete: object.state() == v1::ObjectState::Complete,
                key: ObjectKey::new(object.key.to_vec())?,
                length: object.length,
                replicas: object.replicas,
                disk_replicas: object.disk_replicas,
            })
        };
        let objects = response.objects.into_iter().map(read).collect::<Result<_>>()?;
        Ok(ObjectPage { objects, is_last: response.is_last })
    }

    /// Returns the segments of the whole pool.
    ///
    /// # Errors
    /// The master cannot be reached.
    pub fn segments(&self) -> Result<Vec<SegmentUse>> {
        self.inner.segments()
    }

    /// Returns the status of the master.
    ///
    /// # Errors
    /// The master cannot be reached.
    pub fn status(&self) -> Result<MasterStatus> {
        self.inner.status(self.inner.rpc.deadline())
    }

    /// Checks that the client is open and that the master answers.
    ///
    /// # Errors
    /// A closed error, or the master cannot be reached.
    pub fn health(&self) -> Result<()> {
        self.status().map(drop)
    }

    /// Returns the length of each object.
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
        let terms = ProbeTerms { takes_lease: true, ..ProbeTerms::default() };
        self.exists(keys, terms).into_iter().zip(keys).map(named).collect()
    }
}

/// Replaces the remedy of an object that exists by that of one that was replaced.
fn with_remedy_for_version(error: Error) -> Error {
    match error.code() {
        ErrorCode::OBJECT_ALREADY_EXISTS => error.with_remedy(
            "The object was replaced meanwhile; ask for its version again, and decide anew.",
        ),
        _ => error,
    }
}

impl ClientInner {
    /// Returns the segments of the whole pool.
    pub(super) fn segments(&self) -> Result<Vec<SegmentUse>> {
        let caller = self.rpc.caller();
        let request = v1::ListSegmentsRequest { caller };
        let response = self.rpc.call(request)?;
        let read = |summary: v1::SegmentSummary| {
            let is_connected = !summary.is_lost;
            let takes_objects = is_connected && summary.status() == v1::SegmentStatus::Ok;
            let segment = summary
                .segment
                .ok_or_else(|| response::protocol_error("a segment has no description"))?;
            let segment = response::read_segment(segment)?;
            Ok(SegmentUse { segment, used: summary.used, takes_objects, is_connected })
        };
        response.segments.into_iter().map(read).collect()
    }

    pub(super) fn status(&self, deadline: Moment) -> Result<MasterStatus> {
        let request = v1::StatusRequest { caller: self.rpc.caller() };
        let status = self.rpc.call_until(request, deadline)?;
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

fn read_results(results: &[v1::ItemResult], keys: &[ObjectKey]) -> Result<Vec<Result<()>>> {
    response::check_count(results.len(), keys.len())?;
    let read = |(result, key): (&v1::ItemResult, &ObjectKey)| match &result.failure {
        Some(failure) => Err(response::item_error(failure, key)),
        None => Ok(()),
    };
    Ok(results.iter().zip(keys).map(read).collect())
}

fn read_details(found: v1::DescribeResult) -> ObjectDetails {
    ObjectDetails {
        version: (found.version != 0).then_some(Version(found.version)),
        length: found.length,
        replicas: found.replicas,
        data_type: found.data_type,
        checksum: found.checksum,
        expires_in: found.expires_in_ms.map(Duration::from_millis),
        tags: found.tags.into_iter().map(|tag| (tag.name, tag.value)).collect(),
        is_hard_pinned: found.hard_pin,
        soft_pin_ttl: found.soft_pin_ttl_ms.map(Duration::from_millis),
        group: found.group.into(),
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
