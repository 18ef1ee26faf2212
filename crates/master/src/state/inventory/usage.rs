//! Uses of objects: they are evicted later.

use mooncake_base::Moment;

use crate::state::{
    catalog::{eviction::EvictionPolicy, object::Flags},
    ids::ObjectSlot,
    inventory::Inventory,
};

impl Inventory {
    /// Records a use: the object is evicted later, and its soft pin is renewed.
    pub(in crate::state) fn touch(&mut self, now: Moment, slot: ObjectSlot) {
        self.take_back(slot);
        self.catalog.queue.plain.touch(slot);
        self.catalog.tenants.touch_object(self.catalog.objects.at(slot).tenant, slot);
        let flags = &mut self.catalog.objects.at_mut(slot).flags;
        flags.set(Flags::USED, flags.has(Flags::PARKED));
        if !self.catalog.objects.at(slot).flags.has(Flags::SOFT_PINNED) {
            return;
        }
        self.catalog.queue.soft.touch(slot);
        if let Some(ttl) = self.catalog.pins.ttl(now, slot) {
            self.pin(now, slot, ttl);
        }
    }
}
