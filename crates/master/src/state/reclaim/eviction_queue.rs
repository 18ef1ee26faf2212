//! The order of eviction: which objects are candidates, and which are parked until a lease ends.

use std::{cmp::Reverse, collections::BinaryHeap};

use mooncake_base::Moment;

use crate::state::{
    catalog::{Catalog, object::Flags},
    ids::{KeyHash, ObjectSlot},
    inventory::Inventory,
    read::lease::Timestamp,
    reclaim::eviction::{EvictionPolicy, Lru},
};

/// Parked objects that one call returns to the order.
const UNPARK_SLICE: usize = 4096;

/// Objects in the order of eviction.
#[derive(Debug)]
pub(in crate::state) struct EvictionQueue {
    pub(in crate::state) plain: Box<dyn EvictionPolicy>,
    /// Soft-pinned objects, evicted after all others.
    pub(in crate::state) soft: Lru,
    /// Objects found leased or fenced, until their protection ends, so that none is examined twice
    /// without success: end, object, version.
    parked: BinaryHeap<Reverse<(Timestamp, ObjectSlot, u64)>>,
    /// Bytes of parked objects.
    pub(in crate::state) parked_bytes: u64,
    /// Start of the last call that looked up objects.
    batch_started: Option<Moment>,
}

impl EvictionQueue {
    pub(in crate::state) fn new(plain: Box<dyn EvictionPolicy>) -> Self {
        Self {
            plain,
            soft: Lru::default(),
            parked: BinaryHeap::new(),
            parked_bytes: 0,
            batch_started: None,
        }
    }

    /// Marks the start of a call that looks up objects: all keys of one call belong to one batch.
    pub(in crate::state) fn begin_batch(&mut self, now: Moment) {
        if self.batch_started.replace(now) != Some(now) {
            self.plain.begin_batch();
        }
    }
}

impl Catalog {
    /// Makes the object a candidate for eviction, unless it is hard-pinned.
    pub(in crate::state) fn enqueue(&mut self, slot: ObjectSlot) {
        self.enqueue_hashed(slot, self.objects.key_hash(slot));
    }

    /// Makes an object a candidate whose key hash is known.
    pub(in crate::state) fn enqueue_hashed(&mut self, slot: ObjectSlot, hash: KeyHash) {
        let flags = self.objects.at(slot).flags;
        if flags.has(Flags::SOFT_PINNED) && !flags.has(Flags::HARD_PINNED) {
            self.queue.soft.insert(slot, KeyHash::new(0));
        } else if !flags.has(Flags::HARD_PINNED) {
            self.queue.plain.insert(slot, hash);
        }
    }

    /// Takes the object out of the eviction order.
    pub(in crate::state) fn dequeue(&mut self, slot: ObjectSlot) {
        self.queue.plain.remove(slot);
        self.queue.soft.remove(slot);
        self.unpark(slot);
    }

    /// Parks an object that is in no queue.
    pub(in crate::state) fn park(&mut self, slot: ObjectSlot, until: Timestamp) {
        let object = self.objects.at_mut(slot);
        object.flags.set(Flags::PARKED, true);
        self.queue.parked_bytes += object.bytes();
        self.queue.parked.push(Reverse((until, slot, object.version)));
        self.record_waiting(slot);
    }

    /// Returns parked objects whose protection has ended to the eviction order.
    pub(in crate::state) fn unpark_due(&mut self, now: Moment) {
        for _ in 0..UNPARK_SLICE {
            let Some(&Reverse((until, slot, version))) = self.queue.parked.peek() else { return };
            if until > now.into() {
                return;
            }
            self.queue.parked.pop();
            let parked = self
                .objects
                .get(slot)
                .filter(|object| object.version == version && object.flags.has(Flags::PARKED));
            let Some(object) = parked else { continue };
            let end = object.protection.protected_until();
            if end > now.into() {
                self.queue.parked.push(Reverse((end, slot, version)));
            } else {
                let (was_used, is_soft) =
                    (object.flags.has(Flags::USED), object.flags.has(Flags::SOFT_PINNED));
                self.unpark(slot);
                if was_used || is_soft {
                    self.enqueue(slot);
                } else {
                    self.queue.plain.put_back(slot);
                }
            }
        }
    }

    /// Returns a parked object to the eviction order because its protection ended early.
    pub(in crate::state) fn unpark_early(&mut self, slot: ObjectSlot) {
        if self.objects.at(slot).flags.has(Flags::PARKED) {
            self.unpark(slot);
            self.enqueue(slot);
        }
    }

    pub(in crate::state) fn unpark(&mut self, slot: ObjectSlot) {
        let object = self.objects.at_mut(slot);
        if object.flags.has(Flags::PARKED) {
            object.flags.set(Flags::PARKED, false);
            object.flags.set(Flags::USED, false);
            self.queue.parked_bytes -= object.bytes();
        }
    }
}

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
