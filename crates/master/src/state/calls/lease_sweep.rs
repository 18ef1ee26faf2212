//! A look at all objects for those that have a lease, for a master that begins to follow.

use mooncake_base::Moment;

use crate::state::{
    ids::{ObjectSlot, Slot},
    inventory::Inventory,
    ledger::lease_notes::{LeaseNotes, milliseconds},
};

/// Slots of objects that one slice looks at.
const SLICE_SLOTS: u32 = 4096;

/// Looks at all objects in slices. Leases that are granted meanwhile have notes of their own.
#[derive(Debug, Default)]
pub struct LeaseSweep {
    /// The next slot; `None` when the sweep is over.
    next: Option<u32>,
}

impl LeaseSweep {
    /// Begins again with the first object.
    pub fn restart(&mut self) {
        self.next = Some(0);
    }

    /// Notes the leased ones among the next objects; `None` when the sweep is over.
    pub(in crate::state) fn slice(
        &mut self,
        inventory: &Inventory,
        now: Moment,
    ) -> Option<LeaseNotes> {
        let first = self.next?;
        let objects = inventory.objects();
        let end = objects.slot_count().min(first.saturating_add(SLICE_SLOTS));
        let found = ObjectSlot::range(first, end).filter_map(|slot| objects.get(slot));
        let leased =
            found.filter(|object| object.is_complete() && object.protection.is_leased(now));
        let leases = leased
            .map(|object| (object.version, milliseconds(object.protection.lease_left(now))))
            .collect();
        self.next = (end < objects.slot_count()).then_some(end);
        Some(LeaseNotes { is_any: false, leases, is_whole: self.next.is_none() })
    }
}
