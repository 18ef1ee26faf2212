//! Objects whose time is over are dropped.

use mooncake_base::Moment;

use crate::state::{ids::ObjectSlot, inventory::Inventory};

impl Inventory {
    /// Drops the value of an object whose time is over, leased or not. Readers in flight keep their
    /// fence.
    pub(in crate::state) fn drop_if_expired(&mut self, now: Moment, slot: ObjectSlot) {
        if self.catalog.annotations.has_expired(now, slot) {
            self.log.counters.objects_expired += 1;
            self.drop_value(now, slot);
        }
    }

    /// Removes the object that expired first. Returns whether there was one.
    pub(in crate::state) fn remove_expired(&mut self, now: Moment) -> bool {
        let Some(&(expires, slot)) = self.catalog.annotations.by_expiry.first() else {
            return false;
        };
        if !expires.has_passed(now) {
            return false;
        }
        self.drop_if_expired(now, slot);
        self.catalog.remove_if_empty(slot);
        true
    }
}
