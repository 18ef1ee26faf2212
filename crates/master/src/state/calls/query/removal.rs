//! Removal of many objects, in slices.

use mooncake_base::{Moment, TenantId};

use super::{Candidates, SLICE_KEY_BYTES, Selector, end_of_slice};
use crate::state::{
    ids::{ObjectSlot, Slot, TenantIndex},
    inventory::{
        Inventory,
        removal::{Protection, RemovalTerms, SparedObjects, report_cleared},
    },
};

/// A removal of many objects in progress, in slices like [`Listing`](super::listing::Listing).
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

    /// Matches a pattern with the keys of the last slice, as in a listing.
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

    /// Runs one slice. Returns whether it is done.
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
