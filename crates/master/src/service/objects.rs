//! The calls about objects: put, locate, probe, remove and list.

mod put_start;
mod suffixes;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use mooncake_base::{Error, ErrorCode, Moment, ReplicaId, Result, TenantId, Version};
use mooncake_proto::{
    calls::Method,
    convert::Caller,
    items::count_refs,
    v1::{self, ItemResult},
};

use super::{
    BATCH_ITEMS_MAX, SLICE_ITEMS, check_batch,
    encoding::{LocateReply, push_done, put_refs, version_at, versions},
    millis,
    op_metrics::{FailedItems, Op},
    shared_state::SharedState,
    traffic::{Traffic, TrafficCount},
    wire::{SegmentTable, object_state, replicas, selector, tags_to_wire},
};
use crate::state::{
    FenceTicket, Listing, LocateOptions, ObjectSlot, ObjectState, ObjectSummary, ObjectView,
    Prefetch, PromotionCalls, PutRef, Removal, RemovalTerms, SparedObjects, State,
};

/// The maximum length of a group name.
const GROUP_BYTES_MAX: usize = 1024;

/// The calls about objects.
#[derive(Debug)]
pub(super) struct ObjectService {
    shared: Arc<SharedState>,
    traffic: Traffic,
}

impl ObjectService {
    pub(super) fn new(shared: Arc<SharedState>) -> Self {
        Self { shared, traffic: Traffic::default() }
    }

    /// Returns the counters of reads and of value sizes.
    pub(super) fn traffic(&self) -> TrafficCount {
        self.traffic.snapshot()
    }

    /// Gives unfinished puts a new write window.
    pub(super) fn put_renew(&self, r: &v1::PutRenewRequest) -> Result<v1::PutRenewResponse> {
        check_batch(r.versions.len())?;
        let tenant = self.shared.tenant(r.caller.as_ref())?;
        let client = Caller::try_from(r.caller.as_ref())?.client;
        let (mut done, mut write_window_ms) = (v1::DoneColumns::default(), 0);
        self.shared.for_each_slice(&r.versions, |state, versions| {
            write_window_ms = millis(state.rules().write_window);
            let now = self.shared.now();
            for &version in versions {
                let put = PutRef::of(Version(version));
                push_done(&mut done, state.puts().put_renew(now, client, &tenant, put));
            }
        });
        self.shared.op_metrics().count_batch(
            Method::PutRenew,
            r.versions.len(),
            done.failures.len(),
        );
        Ok(v1::PutRenewResponse { write_window_ms, columns: Some(done) })
    }

    pub(super) fn put_end(&self, r: &v1::PutEndRequest) -> Result<v1::PutEndResponse> {
        let done = self.end_puts(Method::PutEnd, r.caller.as_ref(), r.columns.as_ref())?;
        Ok(v1::PutEndResponse { columns: Some(done) })
    }

    pub(super) fn put_revoke(&self, r: &v1::PutRevokeRequest) -> Result<v1::PutRevokeResponse> {
        let done = self.end_puts(Method::PutRevoke, r.caller.as_ref(), r.columns.as_ref())?;
        Ok(v1::PutRevokeResponse { columns: Some(done) })
    }

    /// The fence is sized by the bytes of all objects together. Those of many keys are counted before
    /// any is granted, so that the state is unlocked meanwhile. An object that is replaced by a larger
    /// one in between makes the fence shorter than its size asks for, which readers allow for.
    pub(super) fn locate(&self, r: &v1::LocateRequest) -> Result<v1::LocateResponse> {
        check_batch(r.count())?;
        let keys = r.keys()?;
        let tenant = self.shared.tenant(r.caller.as_ref())?;
        let grant = LocateOptions { has_lease: r.lease, has_fence: r.fence };
        let mut segments = SegmentTable::default();
        let mut reply = LocateReply::new(keys.len(), &r.tag);
        let (mut hits, mut failed, mut bytes) = (0, FailedItems::default(), 0);
        let (mut disk_hits, mut disk_bytes) = (0, 0);
        let now = self.shared.now();
        let counted = (r.fence && keys.len() > SLICE_ITEMS).then(|| {
            let mut counted: u64 = 0;
            self.shared.for_each_slice(&keys, |state, keys| {
                let found = state.probe_all(now, &tenant, keys, false);
                counted = found.iter().map(|it| it.length).fold(counted, u64::saturating_add);
            });
            counted
        });
        // The state grants no longer fence than the log has on disk, so that nobody waits for it.
        let mut fence = None;
        self.shared.for_each_slice(&keys, |state, keys| {
            let located = state.locate_counted(now, &tenant, keys, grant, counted, |state, it| {
                match &it {
                    Ok(object) => {
                        (hits, bytes) = (hits + 1, bytes + object.length);
                        if object.places.is_empty() {
                            (disk_hits, disk_bytes) = (disk_hits + 1, disk_bytes + object.length);
                        }
                    }
                    Err(error) => failed.add(error.code()),
                }
                reply.push(state, &mut segments, it);
            });
            fence = Some(fence.map_or(located.1, |fence: Duration| fence.min(located.1)));
        });
        let fence = fence.unwrap_or_default();
        if r.lease || r.fence {
            self.traffic.looked_up(keys.len(), hits, bytes);
            self.traffic.found_on_disk(disk_hits, disk_bytes);
        }
        self.shared.op_metrics().count_items(Method::Locate, keys.len(), failed);
        Ok(reply.into_response(segments, millis(fence)))
    }

    /// Releases fences that readers no longer need.
    pub(super) fn release_fences(&self, returned: &[v1::FenceRelease]) {
        let holds = returned.iter().flat_map(|returned| {
            let objects = returned.versions.iter().zip(&returned.objects);
            objects.map(|(&version, &object)| FenceTicket {
                object: ObjectSlot::new(object),
                version: Version(version),
                fence: returned.fence,
            })
        });
        let holds: Vec<FenceTicket> = holds.take(BATCH_ITEMS_MAX).collect();
        self.shared.map_in_slices(&holds, |state, &hold| state.release_fence(hold));
    }

    pub(super) fn verify(&self, r: &v1::VerifyRequest) -> Result<v1::VerifyResponse> {
        check_batch(r.reads.len())?;
        let tenant = self.shared.tenant(r.caller.as_ref())?;
        let is_valid = self.shared.map_in_slices(&r.reads, |state, read| {
            let (version, replica) = (Version(read.version), ReplicaId(read.replica));
            state.verify(&tenant, &read.key, version, replica)
        });
        self.shared.op_metrics().count_batch(Method::Verify, is_valid.len(), 0);
        Ok(v1::VerifyResponse { is_valid })
    }

    pub(super) fn probe(&self, r: &v1::ProbeRequest) -> Result<v1::ProbeResponse> {
        check_batch(r.keys.len().saturating_mul(1 + r.suffixes.len()))?;
        suffixes::check(&r.suffixes)?;
        let tenant = self.shared.tenant(r.caller.as_ref())?;
        let now = self.shared.now();
        let mut states = Vec::with_capacity(r.keys.len());
        let mut lengths = Vec::with_capacity(r.keys.len());
        self.shared.for_each_slice(&r.keys, |state, keys| {
            let probed = state.probe_all(now, &tenant, keys, r.lease);
            states.extend(probed.iter().map(|probed| i32::from(object_state(probed.state))));
            lengths.extend(probed.iter().map(|probed| probed.length));
        });
        self.shared.op_metrics().count_batch(Method::Probe, states.len(), 0);
        let found_suffixes = suffixes::find(&self.shared, now, &tenant, r, &states);
        let (prefetching, prefetch_refused) = self.prefetch(now, &tenant, r);
        Ok(v1::ProbeResponse { states, lengths, found_suffixes, prefetching, prefetch_refused })
    }

    /// Asks for objects in memory that only a disk has. Returns the numbers of the keys of those that
    /// wait, and of those that are refused.
    fn prefetch(
        &self,
        now: Moment,
        tenant: &TenantId,
        r: &v1::ProbeRequest,
    ) -> (Vec<u32>, Vec<u32>) {
        if r.prefetched.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let named = |&number: &u32| Some((number, r.keys.get(number as usize)?));
        let wanted: Vec<_> = r.prefetched.iter().filter_map(named).take(r.keys.len()).collect();
        let asked = self.shared.map_in_slices(&wanted, |state, &(number, key)| {
            (number, PromotionCalls::new(state.tasks()).prefetch(now, tenant, key))
        });
        let numbers_of = |outcome: Prefetch| {
            let found = asked.iter().filter(|(_, asked)| *asked == outcome);
            found.map(|(number, _)| *number).collect()
        };
        (numbers_of(Prefetch::Queued), numbers_of(Prefetch::Refused))
    }

    pub(super) fn describe(&self, r: &v1::DescribeRequest) -> Result<v1::DescribeResponse> {
        check_batch(r.keys.len())?;
        let tenant = self.shared.tenant(r.caller.as_ref())?;
        let now = self.shared.now();
        let views =
            self.shared.map_in_slices(&r.keys, |state, key| state.view_object(now, &tenant, key));
        let codes = views.iter().filter_map(|view| Some(view.as_ref().err()?.code()));
        self.shared.op_metrics().count_items(Method::Describe, views.len(), codes.collect());
        Ok(v1::DescribeResponse { results: views.into_iter().map(description).collect() })
    }

    pub(super) fn set_expiry(&self, r: &v1::SetExpiryRequest) -> Result<v1::SetExpiryResponse> {
        check_batch(r.keys.len())?;
        let tenant = self.shared.tenant(r.caller.as_ref())?;
        let now = self.shared.now();
        let ttl = r.ttl_ms.map(Duration::from_millis);
        let results = self.shared.map_in_slices(&r.keys, |state, key| {
            ItemResult::from(state.puts().set_expiry(now, &tenant, key, ttl).map(|_| ()))
        });
        let failed = FailedItems::of(&results);
        self.shared.op_metrics().count_items(Method::SetExpiry, results.len(), failed);
        Ok(v1::SetExpiryResponse { results })
    }

    pub(super) fn remove(&self, r: &v1::RemoveRequest) -> Result<v1::RemoveResponse> {
        check_batch(r.keys.len())?;
        let tenant = self.shared.tenant(r.caller.as_ref())?;
        let now = self.shared.now();
        let versions = versions(&r.if_versions, r.keys.len())?;
        let numbered: Vec<_> = r.keys.iter().enumerate().collect();
        let results = self.shared.map_in_slices(&numbered, |state, &(item, key)| {
            let terms = RemovalTerms {
                is_forced: r.force,
                spares_hard_pinned: r.spare_hard_pinned,
                if_version: version_at(versions, item),
            };
            ItemResult::from(state.remove_under(now, &tenant, key, &terms))
        });
        let failed = FailedItems::of(&results);
        self.shared.op_metrics().count_items(Method::Remove, results.len(), failed);
        Ok(v1::RemoveResponse { results })
    }

    pub(super) fn remove_matching(
        &self,
        r: &v1::RemoveMatchingRequest,
    ) -> Result<v1::RemoveMatchingResponse> {
        use v1::key_selector::By;
        let is_all = matches!(r.selector.as_ref().and_then(|w| w.by.as_ref()), Some(By::All(_)));
        let op = if is_all { Op::RemoveAll } else { Op::Call(Method::RemoveMatching) };
        self.shared.op_metrics().count_one(op, || {
            let tenant = self.shared.tenant(r.caller.as_ref())?;
            let terms = RemovalTerms {
                is_forced: r.force,
                spares_hard_pinned: r.spare_hard_pinned,
                if_version: None,
            };
            let selector = selector(r.selector.as_ref())?;
            let mut removal = Removal::with_terms(tenant.into_owned(), selector, terms);
            self.shared.run_to_completion(
                &mut removal,
                |state, removal| state.remove_matching(self.shared.now(), removal),
                Removal::match_keys,
            );
            let SparedObjects { leased, hard_pinned, being_copied } = removal.spared();
            let removed = removal.removed();
            Ok(v1::RemoveMatchingResponse { removed, leased, hard_pinned, being_copied })
        })
    }

    pub(super) fn list_objects(
        &self,
        r: &v1::ListObjectsRequest,
    ) -> Result<v1::ListObjectsResponse> {
        self.shared.op_metrics().count_one(Method::ListObjects, || {
            let after = (!r.after.is_empty()).then_some(&r.after[..]);
            let limit = usize::try_from(r.limit).unwrap_or(usize::MAX);
            let tenant = self.shared.tenant(r.caller.as_ref())?;
            let mut listing =
                Listing::new(tenant.into_owned(), selector(r.selector.as_ref())?, after, limit);
            self.shared.run_to_completion(
                &mut listing,
                |state, listing| state.list_objects(listing),
                Listing::match_keys,
            );
            let page = listing.into_page();
            let objects = page.objects.iter().map(summary_to_wire).collect();
            Ok(v1::ListObjectsResponse { objects, is_last: page.is_last })
        })
    }

    fn end_puts(
        &self,
        method: Method,
        caller: Option<&v1::Caller>,
        columns: Option<&v1::PutRefColumns>,
    ) -> Result<v1::DoneColumns> {
        check_batch(count_refs(columns))?;
        let puts = put_refs(columns)?;
        let tenant = self.shared.tenant(caller)?;
        let caller = Caller::try_from(caller)?;
        let now = self.shared.now();
        let mut reply = v1::DoneColumns::default();
        self.shared.for_each_slice(&puts, |state, puts| {
            for put in puts {
                let failed_replicas = replicas(put.failed_replicas);
                let late = replicas(put.late_replicas);
                let put = PutRef {
                    key: put.key,
                    version: Version(put.version),
                    failed_replicas: &failed_replicas,
                    checksum: put.checksum,
                };
                let client = caller.client;
                let ended = match method {
                    Method::PutEnd => state.puts().put_end_late(now, client, &tenant, put, &late),
                    _ => state.puts().put_revoke(now, client, &tenant, put),
                };
                push_done(&mut reply, ended);
            }
        });
        self.shared.op_metrics().count_batch(method, puts.len(), reply.failures.len());
        Ok(reply)
    }
}

/// Checks the name of a group.
fn check_group(group: &[u8]) -> Result<()> {
    if group.len() <= GROUP_BYTES_MAX {
        return Ok(());
    }
    Err(Error::invalid("the group name is too long")
        .with("group_bytes", group.len())
        .with("limit", GROUP_BYTES_MAX))
}

/// Returns the caller's own unfinished put, if it is why a put did not start.
fn unfinished_put(
    state: &State,
    caller: &Caller,
    tenant: &TenantId,
    key: &[u8],
    error: &Error,
) -> Option<v1::UnfinishedPut> {
    if error.code() != ErrorCode::OBJECT_ALREADY_EXISTS {
        return None;
    }
    let found = state.unfinished_put(caller.client, tenant, key)?;
    let (request_id, item) = split_item_id(found.request);
    Some(v1::UnfinishedPut { version: found.version.0, request_id, item })
}

/// Bits of an item's number in the id of the item.
const ITEM_BITS: u32 = BATCH_ITEMS_MAX.trailing_zeros();

/// Maximum number of a call whose items have ids: the upper bits of an id are the number.
const NUMBERED_CALL_MAX: u64 = u64::MAX >> ITEM_BITS;

/// Refuses a number of a call that does not fit into the ids of its items. `field` names it.
pub(super) fn check_call_number(field: &'static str, number: u64) -> Result<()> {
    if number <= NUMBERED_CALL_MAX {
        return Ok(());
    }
    Err(Error::invalid("the number of the call is too large; count calls from 1")
        .with(field, number)
        .with("limit", NUMBERED_CALL_MAX))
}

/// Returns an id that is unique among the caller's items, even if a call names one key twice. It is
/// 0 if the caller does not number the call. [`check_call_number`] has accepted the number.
pub(super) fn item_id(call: u64, items_before: u64) -> u64 {
    const { assert!(BATCH_ITEMS_MAX == 1 << ITEM_BITS) };
    if call == 0 { 0 } else { call << ITEM_BITS | items_before }
}

/// Returns the number of the call and of the item from the id of an item.
fn split_item_id(id: u64) -> (u64, u32) {
    let item = id & (BATCH_ITEMS_MAX as u64 - 1);
    (id >> ITEM_BITS, item as u32)
}

fn summary_to_wire(object: &ObjectSummary) -> v1::ObjectSummary {
    v1::ObjectSummary {
        key: Bytes::copy_from_slice(object.key.as_bytes()),
        length: object.length,
        state: object_state(object.state).into(),
        replicas: object.replicas,
        disk_replicas: object.disk_replicas,
    }
}

fn description(view: Result<ObjectView>) -> v1::DescribeResult {
    let view = match view {
        Ok(view) => view,
        Err(error) => {
            return v1::DescribeResult { failure: Some((&error).into()), ..Default::default() };
        }
    };
    let state = match view.version {
        Some(_) => ObjectState::Complete,
        None => ObjectState::Writing,
    };
    v1::DescribeResult {
        failure: None,
        state: object_state(state).into(),
        version: view.version.map_or(0, |version| version.0),
        length: view.length,
        replicas: u32::try_from(view.copies.len()).unwrap_or(u32::MAX),
        data_type: view.data_type.into(),
        checksum: view.checksum,
        expires_in_ms: view.expires_in.map(millis),
        tags: tags_to_wire(&view.tags),
        hard_pin: view.is_hard_pinned,
        soft_pin_ttl_ms: view.soft_pin_ttl.map(millis),
        group: view.group.unwrap_or_default().into(),
    }
}
