//! The order of eviction: which objects are candidates, and which are parked until a lease ends.

use crate::state::ids::{KeyHash, ObjectSlot};
use std::{cmp::Reverse, collections::BinaryHeap};

use mooncake_base::Moment;

use super::{
    State,
    eviction::{EvictionPolicy, Lru},
    lease::Timestamp,
    object::Flags,
};

/// Which object is evicted next.
#[derive(Debug)]
pub(super) struct EvictionQueue {
    pub(super) plain: Box<dyn EvictionPolicy>,
    /// Evicted after all of the others.
    pub(super) soft: Lru,
    /// Objects that were met while leased or fenced wait here, so that none is met twice in vain:
    /// until when, object, version.
    parked: BinaryHeap<Reverse<(Timestamp, ObjectSlot, u64)>>,
    /// Bytes of the objects that wait there.
    pub(super) parked_bytes: u64,
    /// When a call last batch_started for objects.
    batch_started: Option<Moment>,
}

impl EvictionQueue {
    pub(super) fn new(plain: Box<dyn EvictionPolicy>) -> Self {
        Self {
            plain,
            soft: Lru::default(),
            parked: BinaryHeap::new(),
            parked_bytes: 0,
            batch_started: None,
        }
    }

    /// A call looks for objects; the keys of one call come at the same time.
    pub(super) fn begin_batch(&mut self, now: Moment) {
        if self.batch_started.replace(now) != Some(now) {
            self.plain.begin_batch();
        }
    }
}

impl State {
    /// The object may be evicted, if it ever may.
    pub(super) fn enqueue(&mut self, slot: ObjectSlot) {
        self.enqueue_hashed(slot, self.objects.key_hash(slot));
    }

    /// As [`enqueue`](Self::enqueue), for who knows the hash of its key.
    pub(super) fn enqueue_hashed(&mut self, slot: ObjectSlot, hash: KeyHash) {
        let flags = self.objects.at(slot).flags;
        if flags.has(Flags::SOFT_PINNED) && !flags.has(Flags::HARD_PINNED) {
            self.queue.soft.insert(slot, KeyHash::new(0));
        } else if !flags.has(Flags::HARD_PINNED) {
            self.queue.plain.insert(slot, hash);
        }
    }

    /// The object is not to be evicted for now.
    pub(super) fn dequeue(&mut self, slot: ObjectSlot) {
        self.queue.plain.remove(slot);
        self.queue.soft.remove(slot);
        self.unpark(slot);
    }

    /// The object was used: it goes later, and its soft pin lasts anew.
    pub(super) fn touch(&mut self, now: Moment, slot: ObjectSlot) {
        self.queue.plain.touch(slot);
        self.tenants.touch_object(self.objects.at(slot).tenant, slot);
        let flags = &mut self.objects.at_mut(slot).flags;
        flags.set(Flags::USED, flags.has(Flags::PARKED));
        if !self.objects.at(slot).flags.has(Flags::SOFT_PINNED) {
            return;
        }
        self.queue.soft.touch(slot);
        if let Some(ttl) = self.pins.ttl(now, slot) {
            self.pin(now, slot, ttl);
        }
    }

    /// The object, which is in no queue, waits until then.
    pub(super) fn park(&mut self, slot: ObjectSlot, until: Timestamp) {
        let object = self.objects.at_mut(slot);
        object.flags.set(Flags::PARKED, true);
        self.queue.parked_bytes += object.bytes();
        self.queue.parked.push(Reverse((until, slot, object.version)));
    }

    /// Objects whose leases have ended may be evicted again.
    pub(super) fn unpark_due(&mut self, now: Moment) {
        while let Some(&Reverse((until, slot, version))) = self.queue.parked.peek() {
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

    /// What held the object has ended early: it waits no longer.
    pub(super) fn unpark_early(&mut self, slot: ObjectSlot) {
        if self.objects.at(slot).flags.has(Flags::PARKED) {
            self.unpark(slot);
            self.enqueue(slot);
        }
    }

    pub(super) fn unpark(&mut self, slot: ObjectSlot) {
        let object = self.objects.at_mut(slot);
        if object.flags.has(Flags::PARKED) {
            object.flags.set(Flags::PARKED, false);
            object.flags.set(Flags::USED, false);
            self.queue.parked_bytes -= object.bytes();
        }
    }
}
