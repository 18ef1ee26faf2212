//! Soft pins are set, renewed and ended.

use std::time::Duration;

use mooncake_base::Moment;

use crate::state::{
    catalog::{eviction::EvictionPolicy, object::Flags, pins::Pin},
    ids::ObjectSlot,
    inventory::Inventory,
    ledger::effect::Effect,
    timer::Timer,
};

impl Inventory {
    /// Sets or renews the soft pin of an object.
    pub(in crate::state) fn pin(&mut self, now: Moment, slot: ObjectSlot, ttl: Duration) {
        let until = now + ttl;
        let object = self.catalog.objects.at_mut(slot);
        let (version, flags) = (object.version, object.flags);
        object.flags.set(Flags::SOFT_PINNED, true);
        if flags.has(Flags::GROUPED) && !flags.has(Flags::SOFT_PINNED) {
            self.catalog.groups.count_soft_pin(slot, true);
        }
        if self.catalog.pins.0.insert(slot, Pin { until, ttl }).is_none() {
            self.timers.push(until, Timer::SoftPin(slot, version));
        }
    }
}

/// Handles the timer of a soft pin: ends the pin or sets the timer again.
pub(in crate::state) fn check_pin(
    inventory: &mut Inventory,
    now: Moment,
    slot: ObjectSlot,
    version: u64,
) {
    let known = inventory.catalog.objects.get(slot).is_some_and(|object| object.version == version);
    if !known {
        return;
    }
    let Some(&Pin { until, .. }) = inventory.catalog.pins.0.get(&slot) else { return };
    if !until.has_passed(now) {
        inventory.timers.push(until, Timer::SoftPin(slot, version));
        return;
    }
    inventory.catalog.pins.0.remove(&slot);
    inventory.catalog.objects.at_mut(slot).flags.set(Flags::SOFT_PINNED, false);
    inventory.catalog.groups.count_soft_pin(slot, false);
    let object = inventory.catalog.objects.at(slot);
    inventory.log.effects.record(|| Effect::Pinned {
        object: inventory.catalog.objects.logged_name(object),
        pin: None,
    });
    if inventory.catalog.queue.soft.contains(slot) {
        inventory.catalog.queue.soft.remove(slot);
        inventory.catalog.enqueue(slot);
    }
    // Members of its group may have been demoted because of this pin.
    inventory.catalog.requeue_waiting(slot);
}
