//! Selection, listing and removal of many objects: in byte order, in pages, in slices.

use mooncake_base::{Error, Moment, ObjectKey, Result, TenantId};
use regex::bytes::{Regex, RegexBuilder};

use crate::state::{
    calls::put::write::Writes,
    catalog::object::{Object, ObjectState, Objects},
    ids::{ObjectSlot, Slot, TenantIndex},
    inventory::{
        Inventory,
        disks::readable_disk,
        removal::{Protection, RemovalTerms, SLICE, SparedObjects, report_cleared},
    },
};

/// Key bytes after which a slice ends early.
const SLICE_KEY_BYTES: usize = 256 << 10;

/// Maximum size of a compiled pattern. A match takes a time in proportion to it, and to the key.
const REGEX_BYTES_MAX: usize = 256 << 10;

/// Maximum length of a pattern.
const PATTERN_BYTES_MAX: usize = 16 * 1024;

/// Maximum number of objects on one page.
pub const PAGE_MAX: usize = 10_000;

/// Maximum size of a page, and of a page in progress. One key is always on it.
pub(in crate::state) const PAGE_BYTES_MAX: usize = 8 << 20;

/// Upper bound of the size of an object on a page without its key.
const SUMMARY_BYTES: usize = 64;

/// A condition on keys.
#[derive(Debug, Clone)]
pub enum Selector {
    /// Every key.
    All,
    /// Keys that contain a match of the pattern.
    Regex(Regex),
    /// Keys with this prefix.
    Prefix(Box<[u8]>),
}

impl Selector {
    /// Selects keys that contain a match of the pattern (searched, not anchored).
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the pattern is malformed, longer than 16 KiB or needs more than 256 KiB.
    pub fn regex(pattern: &str) -> Result<Self> {
        if pattern.len() > PATTERN_BYTES_MAX {
            return Err(Error::invalid("the pattern is too long")
                .with("pattern_bytes", pattern.len())
                .with("limit", PATTERN_BYTES_MAX));
        }
        let built = RegexBuilder::new(pattern)
            .size_limit(REGEX_BYTES_MAX)
            .dfa_size_limit(REGEX_BYTES_MAX)
            .build();
        match built {
            Ok(regex) => Ok(Self::Regex(regex)),
            Err(error) => {
                // The last line has the reason, those before it the position.
                let text = error.to_string();
                let why = text.lines().last().unwrap_or_default().trim_start_matches("error: ");
                Err(Error::invalid("the pattern is not a regular expression")
                    .with("pattern", pattern)
                    .with("why", why))
            }
        }
    }

    /// Returns whether the key is selected.
    pub fn matches(&self, key: &[u8]) -> bool {
        match self {
            Self::All => true,
            Self::Regex(regex) => regex.is_match(key),
            Self::Prefix(prefix) => key.starts_with(prefix),
        }
    }
}

/// The objects of a slice whose keys a pattern is still to be matched with. That can take seconds for
/// long keys, so the state must not be locked meanwhile.
#[derive(Debug, Default)]
pub(in crate::state) struct Candidates {
    pub(in crate::state) found: Vec<(ObjectSlot, Box<[u8]>)>,
    is_matched: bool,
}

impl Candidates {
    fn push(&mut self, slot: ObjectSlot, key: &[u8]) {
        self.found.push((slot, Box::from(key)));
        self.is_matched = false;
    }

    /// Keeps the objects whose keys are selected.
    fn match_keys(&mut self, selector: &Selector) {
        if !std::mem::replace(&mut self.is_matched, true) {
            self.found.retain(|(_, key)| selector.matches(key));
        }
    }
}

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
    pub(in crate::state) found: std::collections::BTreeMap<ObjectKey, ObjectSummary>,
    /// Size of what was found.
    pub(in crate::state) bytes: usize,
    /// The smallest key that did not fit: the page ends before it.
    pub(in crate::state) end: Option<ObjectKey>,
    pub(in crate::state) candidates: Candidates,
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
            found: std::collections::BTreeMap::new(),
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
}

/// A page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Objects in byte order of the keys.
    pub objects: Vec<ObjectSummary>,
    /// True if no object comes after these.
    pub is_last: bool,
}

/// A removal of many objects in progress, in slices like [`Listing`].
#[derive(Debug)]
pub struct Removal {
    tenant: TenantId,
    selector: Selector,
    terms: RemovalTerms,
    next_slot: u32,
    removed: u64,
    spared: SparedObjects,
    pub(in crate::state) candidates: Candidates,
}

impl Removal {
    /// Creates a removal of the selected complete objects. Leased objects are skipped unless
    /// forced.
    pub fn new(tenant: TenantId, selector: Selector, is_forced: bool) -> Self {
        Self::with_terms(tenant, selector, RemovalTerms { is_forced, ..RemovalTerms::default() })
    }

    /// Creates a removal of those selected complete objects that the terms allow, in any version.
    pub fn with_terms(tenant: TenantId, selector: Selector, terms: RemovalTerms) -> Self {
        let (candidates, spared) = (Candidates::default(), SparedObjects::default());
        Self { tenant, selector, terms, next_slot: 0, removed: 0, spared, candidates }
    }

    /// Matches a pattern with the keys of the last slice, like [`Listing::match_keys`].
    pub fn match_keys(&mut self) {
        self.candidates.match_keys(&self.selector);
    }

    /// Returns the number of objects removed so far.
    pub fn removed(&self) -> u64 {
        self.removed
    }

    /// Returns the number of selected objects left so far.
    pub fn spared(&self) -> SparedObjects {
        self.spared
    }
}

impl Removal {
    /// Runs one slice of a self. Returns whether it is done.
    pub(in crate::state) fn step(&mut self, now: Moment, inventory: &mut Inventory) -> bool {
        let Some(tenant) = inventory.objects().tenant_index(&self.tenant) else {
            return true;
        };
        self.match_keys();
        for (slot, key) in std::mem::take(&mut self.candidates.found) {
            if self.is_candidate(inventory, slot, tenant)
                && inventory.objects().key(inventory.object(slot)) == &key[..]
            {
                self.remove_selected(now, inventory, slot);
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
            if !self.is_candidate(inventory, slot, tenant) {
                continue;
            }
            let key = inventory.objects().key(inventory.object(slot));
            if is_pattern {
                bytes += key.len();
                self.candidates.push(slot, key);
            } else if self.selector.matches(key) {
                self.remove_selected(now, inventory, slot);
            }
        }
        self.next_slot = end;
        let is_done = end == inventory.objects().slot_count() && self.candidates.found.is_empty();
        let is_clear = matches!(self.selector, Selector::All) && inventory.objects().complete == 0;
        if is_done && is_clear && self.removed > 0 {
            report_cleared(inventory, &self.tenant);
        }
        is_done
    }

    /// Returns whether the removal asks for the object if its key is selected.
    fn is_candidate(&self, inventory: &Inventory, slot: ObjectSlot, tenant: TenantIndex) -> bool {
        let found = inventory.objects().get(slot);
        found.is_some_and(|object| object.tenant == tenant && object.is_complete())
    }

    /// Removes a selected object, or counts what protects it. A lost object is not counted as
    /// removed; the sweep drops it.
    fn remove_selected(&mut self, now: Moment, inventory: &mut Inventory, slot: ObjectSlot) {
        let protection = if inventory.is_unclaimed(slot) {
            None
        } else {
            self.terms.protection(now, inventory.object(slot))
        };
        match protection {
            None => {}
            Some(Protection::Lease) => return self.spared.leased += 1,
            Some(Protection::HardPin) => return self.spared.hard_pinned += 1,
            Some(Protection::RunningCopy) => return self.spared.being_copied += 1,
        }
        if inventory.drop_lost_replicas(slot) {
            self.removed += u64::from(!inventory.is_unclaimed(slot));
            inventory.remove_value(now, slot);
        }
    }
}

impl Listing {
    /// Runs one slice of a self. Returns whether the page is complete. Grants no lease.
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
}

impl Listing {
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

/// Returns the end of the slice that begins at a slot number.
fn end_of_slice(objects: &Objects, start: u32) -> u32 {
    start.saturating_add(SLICE).min(objects.slot_count())
}
