//! Lists of objects: in byte order, in pages, in slices.

use std::collections::BTreeMap;

use mooncake_base::{ObjectKey, TenantId};

use super::{Candidates, SLICE_KEY_BYTES, Selector, end_of_slice};
use crate::state::{
    calls::put::write::Writes,
    catalog::object::{Object, ObjectState},
    ids::{ObjectSlot, Slot},
    inventory::{Inventory, disks::readable_disk},
};

/// Maximum number of objects on one page.
pub const PAGE_MAX: usize = 10_000;

/// Maximum size of a page, and of a page in progress. One key is always on it.
pub(in crate::state) const PAGE_BYTES_MAX: usize = 8 << 20;

/// Upper bound of the size of an object on a page without its key.
const SUMMARY_BYTES: usize = 64;

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectSummary {
    /// Key of the object.
    pub key: ObjectKey,
    /// Length in bytes; of the newest put if nothing is readable yet.
    pub length: u64,
    /// Complete or being written, never absent.
    pub state: ObjectState,
    /// Number of replicas, or requested replicas of a put.
    pub replicas: u32,
    /// The replicas of these that are on disks.
    pub disk_replicas: u32,
}

/// A listing in progress. Each slice scans a part of the objects, so that other calls run in
/// between; an object that exists during the whole listing is never left out.
#[derive(Debug)]
pub struct Listing {
    pub(in crate::state) tenant: TenantId,
    pub(in crate::state) selector: Selector,
    pub(in crate::state) after: Option<Box<[u8]>>,
    pub(in crate::state) limit: usize,
    pub(in crate::state) next_slot: u32,
    pub(in crate::state) found: BTreeMap<ObjectKey, ObjectSummary>,
    /// Size of what was found.
    pub(in crate::state) bytes: usize,
    /// The smallest key that did not fit: the page ends before it.
    pub(in crate::state) end: Option<ObjectKey>,
    pub(in crate::state) candidates: Candidates,
}

/// A page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Objects in byte order of the keys.
    pub objects: Vec<ObjectSummary>,
    /// True if no object comes after these.
    pub is_last: bool,
}

impl Listing {
    /// Creates a listing of at most `limit` objects after the key `after`, and of at most
    /// 8 MiB. A limit of 0, or one above [`PAGE_MAX`], counts as [`PAGE_MAX`].
    pub fn new(tenant: TenantId, selector: Selector, after: Option<&[u8]>, limit: usize) -> Self {
        let limit = if limit == 0 { PAGE_MAX } else { limit.min(PAGE_MAX) };
        Self {
            tenant,
            selector,
            after: after.map(Box::from),
            limit,
            next_slot: 0,
            found: BTreeMap::new(),
            bytes: 0,
            end: None,
            candidates: Candidates::default(),
        }
    }

    /// Matches a pattern with the keys of the last slice. To be called between two slices, while the
    /// state is not locked; otherwise the next slice does it.
    pub fn match_keys(&mut self) {
        self.candidates.match_keys(&self.selector);
    }

    /// Returns the objects found, in byte order of the keys, and whether they are the last.
    pub fn into_page(self) -> Page {
        Page { objects: self.found.into_values().collect(), is_last: self.end.is_none() }
    }

    /// Runs one slice. Returns whether the page is complete. Grants no lease.
    pub(in crate::state) fn step(&mut self, inventory: &Inventory, writes: &Writes) -> bool {
        let Some(tenant) = inventory.objects().tenant_index(&self.tenant) else {
            return true;
        };
        self.match_keys();
        for (slot, key) in std::mem::take(&mut self.candidates.found) {
            if let Some(object) = inventory.objects().get(slot)
                && object.tenant == tenant
                && inventory.objects().key(object) == &key[..]
                && self.is_wanted(&key)
                && let Some(summary) = summary(inventory, writes, slot, object)
            {
                self.add(summary);
            }
        }
        let is_pattern = matches!(self.selector, Selector::Regex(_));
        let (mut end, mut bytes) = (self.next_slot, 0);
        for slot in
            ObjectSlot::range(self.next_slot, end_of_slice(inventory.objects(), self.next_slot))
        {
            if bytes >= SLICE_KEY_BYTES {
                break;
            }
            end += 1;
            let Some(object) =
                inventory.objects().get(slot).filter(|object| object.tenant == tenant)
            else {
                continue;
            };
            let key = inventory.objects().key(object);
            if !self.is_wanted(key) {
                continue;
            }
            if is_pattern {
                bytes += key.len();
                self.candidates.push(slot, key);
            } else if self.selector.matches(key)
                && let Some(summary) = summary(inventory, writes, slot, object)
            {
                bytes += key.len();
                self.add(summary);
            }
        }
        self.next_slot = end;
        end == inventory.objects().slot_count() && self.candidates.found.is_empty()
    }

    /// Returns whether a selected key can belong on the page, judged by the objects scanned so far.
    fn is_wanted(&self, key: &[u8]) -> bool {
        self.after.as_deref().is_none_or(|after| key > after)
            && self.end.as_ref().is_none_or(|end| key < end.as_bytes())
    }

    /// Adds an object, and drops the last ones if the page is larger than it may be.
    fn add(&mut self, summary: ObjectSummary) {
        let bytes = |key: &ObjectKey| key.as_bytes().len() + SUMMARY_BYTES;
        // An object that was found before is replaced.
        if !self.found.contains_key(&summary.key) {
            self.bytes += bytes(&summary.key);
        }
        self.found.insert(summary.key.clone(), summary);
        while self.found.len() > self.limit || (self.bytes > PAGE_BYTES_MAX && self.found.len() > 1)
        {
            let Some((key, _)) = self.found.pop_last() else { return };
            self.bytes -= bytes(&key);
            self.end = Some(key);
        }
    }
}

/// Returns the listed form of an object; `None` if no replica can be read and none is written.
fn summary(
    inventory: &Inventory,
    writes: &Writes,
    slot: ObjectSlot,
    object: &Object,
) -> Option<ObjectSummary> {
    let key = inventory.objects().object_key(object);
    let disk_replicas = u32::from(readable_disk(inventory, slot).is_some());
    let replicas =
        inventory.pool().readable_copies(&object.replicas).count() as u32 + disk_replicas;
    if replicas > 0 {
        let (length, state) = (object.length, ObjectState::Complete);
        return Some(ObjectSummary { key, length, state, replicas, disk_replicas });
    }
    let newest = writes.at(writes.chain(object.newest_write).next()?);
    let replicas = newest.replicas.len() as u32;
    let (length, state) = (newest.length, ObjectState::Writing);
    Some(ObjectSummary { key, length, state, replicas, disk_replicas: 0 })
}
