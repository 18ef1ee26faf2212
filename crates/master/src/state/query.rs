//! Selection, listing and removal of many objects: in byte order, in pages, in slices.

use mooncake_base::{Error, ErrorCode, Moment, ObjectKey, Result, TenantId, key::Printed};
use regex::bytes::{Regex, RegexBuilder};

use super::{
    State,
    ids::{ObjectSlot, Slot},
    object::{Flags, Object, ObjectState},
    read::{not_found, not_ready},
};

/// Objects scanned in one slice: about a millisecond of removals, since other calls may have to
/// wait for a slice.
const SLICE: u32 = 1024;

/// Maximum size of a compiled pattern.
const REGEX_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a pattern.
const PATTERN_BYTES_MAX: usize = 16 * 1024;
/// Maximum number of objects on one page.
pub const PAGE_MAX: usize = 10_000;

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
    /// `INVALID_PARAMS` if the pattern is malformed, longer than 16 KiB or needs more than 1 MiB.
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
}

/// A listing in progress. Each slice scans a part of the objects, so that other calls run in
/// between; an object that exists during the whole listing is never left out.
#[derive(Debug)]
pub struct Listing {
    pub(super) tenant: TenantId,
    pub(super) selector: Selector,
    pub(super) after: Option<Box<[u8]>>,
    pub(super) limit: usize,
    pub(super) next_slot: u32,
    pub(super) found: std::collections::BTreeMap<ObjectKey, ObjectSummary>,
    pub(super) is_last: bool,
}

impl Listing {
    /// Creates a listing of at most `limit` objects after the key `after`. A limit of 0, or one
    /// above [`PAGE_MAX`], counts as [`PAGE_MAX`].
    pub fn new(tenant: TenantId, selector: Selector, after: Option<&[u8]>, limit: usize) -> Self {
        let limit = if limit == 0 { PAGE_MAX } else { limit.min(PAGE_MAX) };
        Self {
            tenant,
            selector,
            after: after.map(Box::from),
            limit,
            next_slot: 0,
            found: std::collections::BTreeMap::new(),
            is_last: true,
        }
    }

    /// Returns the objects found, in byte order of the keys, and whether they are the last.
    pub fn into_page(self) -> Page {
        Page { objects: self.found.into_values().collect(), is_last: self.is_last }
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
    pub(super) tenant: TenantId,
    pub(super) selector: Selector,
    pub(super) is_forced: bool,
    pub(super) next_slot: u32,
    pub(super) removed: u64,
}

impl Removal {
    /// Creates a removal of the selected complete objects. Leased objects are skipped unless
    /// forced.
    pub fn new(tenant: TenantId, selector: Selector, is_forced: bool) -> Self {
        Self { tenant, selector, is_forced, next_slot: 0, removed: 0 }
    }

    /// Returns the number of objects removed so far.
    pub fn removed(&self) -> u64 {
        self.removed
    }
}

impl State {
    /// Removes the object.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: the first put is unfinished, forced or not;
    /// `OBJECT_HAS_LEASE` and `OBJECT_HAS_REPLICATION_TASK` unless forced.
    pub fn remove(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        is_forced: bool,
    ) -> Result<()> {
        let tenant = self.objects.tenant_index(tenant);
        let slot = tenant.and_then(|tenant| self.find(tenant, key));
        let slot = slot.ok_or_else(|| not_found(key))?;
        if self.is_unclaimed(slot) {
            // The object must not come back with its owner.
            self.remove_value(now, slot);
            return Err(not_found(key));
        }
        let object = self.objects.at(slot);
        if !object.is_complete() {
            return Err(not_ready(key));
        }
        if object.protection.is_leased(now) && !is_forced {
            return Err(Error::new(ErrorCode::OBJECT_HAS_LEASE, "the object has a lease")
                .with("key", Printed(key))
                .with("lease_left_ms", object.protection.lease_left(now).as_millis()));
        }
        if object.flags.has(Flags::BEING_COPIED) && !is_forced {
            let why = "a client is copying the object";
            let code = ErrorCode::OBJECT_HAS_REPLICATION_TASK;
            return Err(Error::new(code, why).with("key", Printed(key)));
        }
        self.remove_value(now, slot);
        Ok(())
    }

    /// Runs one slice of a removal. Returns whether it is done.
    pub fn remove_matching(&mut self, now: Moment, removal: &mut Removal) -> bool {
        let Some(tenant) = self.objects.tenant_index(&removal.tenant) else { return true };
        let end = removal.next_slot.saturating_add(SLICE).min(self.objects.slot_count());
        for slot in ObjectSlot::range(removal.next_slot, end) {
            let is_selected = self.objects.get(slot).is_some_and(|object| {
                object.tenant == tenant
                    && object.is_complete()
                    && (removal.is_forced
                        || !self.is_protected(now, object)
                        || self.is_unclaimed(slot))
                    && removal.selector.matches(self.objects.key(object))
            });
            // A lost object is not counted as removed; the sweep drops it.
            if is_selected && self.drop_lost_replicas(slot) {
                removal.removed += u64::from(!self.is_unclaimed(slot));
                self.remove_value(now, slot);
            }
        }
        removal.next_slot = end;
        let is_done = end == self.objects.slot_count();
        let is_clear = matches!(removal.selector, Selector::All) && self.objects.complete == 0;
        if is_done && is_clear && removal.removed > 0 {
            self.emit_cleared(&removal.tenant);
        }
        is_done
    }

    /// Runs one slice of a listing. Returns whether the page is complete. Grants no lease.
    pub fn list_objects(&self, listing: &mut Listing) -> bool {
        let Some(tenant) = self.objects.tenant_index(&listing.tenant) else { return true };
        let end = listing.next_slot.saturating_add(SLICE).min(self.objects.slot_count());
        for slot in ObjectSlot::range(listing.next_slot, end) {
            let Some(object) = self.objects.get(slot) else { continue };
            if object.tenant == tenant
                && listing.accepts(self.objects.key(object))
                && let Some(summary) = self.summary(object)
            {
                listing.add(summary);
            }
        }
        listing.next_slot = end;
        end == self.objects.slot_count()
    }

    /// Returns whether a lease or a running copy protects the object from a plain removal.
    fn is_protected(&self, now: Moment, object: &Object) -> bool {
        object.protection.is_leased(now) || object.flags.has(Flags::BEING_COPIED)
    }

    /// Visits one slice of the complete objects of a tenant, in no order. Returns the next
    /// position, if there is more. Grants no lease.
    pub fn walk(
        &self,
        tenant: &TenantId,
        from: u32,
        visit: &mut dyn FnMut(&[u8], u64),
    ) -> Option<u32> {
        let tenant = self.objects.tenant_index(tenant)?;
        let end = from.saturating_add(SLICE).min(self.objects.slot_count());
        for slot in ObjectSlot::range(from, end) {
            let Some(object) = self.objects.get(slot) else { continue };
            let mut copies = object.replicas.iter();
            if object.tenant == tenant
                && object.is_complete()
                && copies.any(|copy| self.segments.at(copy.segment).is_mounted())
            {
                visit(self.objects.key(object), object.length);
            }
        }
        (end < self.objects.slot_count()).then_some(end)
    }

    fn remove_value(&mut self, now: Moment, slot: ObjectSlot) {
        self.drop_value(now, slot);
        self.objects.at_mut(slot).protection = super::lease::LeaseAndFence::default();
        self.remove_if_empty(slot);
    }

    /// Returns the listed form of an object; `None` if all replicas were lost.
    fn summary(&self, object: &Object) -> Option<ObjectSummary> {
        let key = self.objects.object_key(object);
        let copies = object.replicas.iter();
        let mounted = copies.filter(|copy| self.segments.at(copy.segment).is_claimed()).count();
        if mounted > 0 {
            let replicas = mounted as u32;
            let length = object.length;
            return Some(ObjectSummary { key, length, state: ObjectState::Complete, replicas });
        }
        let newest = self.writes.at(self.writes.chain(object.newest_write).next()?);
        let replicas = newest.replicas.len() as u32;
        let length = newest.length;
        Some(ObjectSummary { key, length, state: ObjectState::Writing, replicas })
    }
}

impl Listing {
    /// Returns whether the key can belong on the page, judged by the objects scanned so far.
    fn accepts(&mut self, key: &[u8]) -> bool {
        if self.after.as_deref().is_some_and(|after| key <= after) {
            return false;
        }
        let last = self.found.last_key_value().filter(|_| self.found.len() >= self.limit);
        let is_beyond = last.is_some_and(|(last, _)| key > last.as_bytes());
        if is_beyond && !self.is_last {
            return false;
        }
        self.selector.matches(key)
    }

    fn add(&mut self, summary: ObjectSummary) {
        self.found.insert(summary.key.clone(), summary);
        if self.found.len() > self.limit {
            self.found.pop_last();
            self.is_last = false;
        }
    }
}
