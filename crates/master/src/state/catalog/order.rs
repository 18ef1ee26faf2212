//! The order of eviction: which objects are candidates, and which are parked until a lease ends.

use std::{cmp::Reverse, collections::BinaryHeap};

use mooncake_base::Moment;
use smallvec::{SmallVec, smallvec};

use crate::state::{
    catalog::{
        Catalog,
        eviction::{EvictionPolicy, Lru},
        group::GROUP_SLICE,
        object::{Flags, Object},
    },
    ids::{KeyHash, ObjectSlot},
    lease::Timestamp,
    rules::Rules,
};

impl Catalog {
    /// Removes the object from its group. If the object was hard-pinned, the group may be evicted
    /// from now on.
    pub(in crate::state) fn leave_group(&mut self, slot: ObjectSlot, was_hard_pinned: bool) {
        if was_hard_pinned {
            self.requeue_waiting(slot);
        }
        self.groups.leave(slot);
    }

    /// Returns members of the object's group to the order of eviction that left it because of this
    /// object: one is enough to evict the group.
    pub(in crate::state) fn requeue_waiting(&mut self, slot: ObjectSlot) {
        let mut has_any = false;
        // The second time if those that were recorded have left since.
        for _ in 0..2 {
            for member in self.groups.take_waiting(slot) {
                if member != slot && self.groups.index(member) == self.groups.index(slot) {
                    has_any |= self.requeue(member);
                }
            }
            if has_any {
                return;
            }
        }
    }

    /// Returns an object that was parked or demoted because of another member of its group to the
    /// order of eviction. Returns whether it was.
    fn requeue(&mut self, slot: ObjectSlot) -> bool {
        if self.objects.at(slot).flags.has(Flags::PARKED) {
            self.unpark_early(slot);
            return true;
        }
        let is_demoted = self.queue.soft.contains(slot);
        if is_demoted {
            self.queue.soft.remove(slot);
            self.enqueue(slot);
        }
        is_demoted
    }
}

/// The two eviction orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::state) enum EvictionPass {
    Plain,
    Soft,
}

impl EvictionPass {
    /// Returns the eviction orders that the rules allow.
    pub(in crate::state) fn allowed(rules: &Rules) -> &'static [Self] {
        if rules.is_soft_pin_evictable { &[Self::Plain, Self::Soft] } else { &[Self::Plain] }
    }
}

impl Catalog {
    /// Returns the object and the first of those that are evicted together with it: all of a small
    /// group. Each member of a condemned group is evicted on its own.
    pub(in crate::state) fn first_of_group(&self, object: ObjectSlot) -> SmallVec<[ObjectSlot; 1]> {
        let mut first = smallvec![object];
        if !self.groups.is_condemned(object) {
            let members = self.groups.members(object).iter().copied();
            first.extend(members.filter(|&member| member != object).take(GROUP_SLICE - 1));
        }
        first
    }

    /// Puts an object into the order of those that are evicted after all others.
    pub(in crate::state) fn demote(&mut self, object: ObjectSlot) {
        self.queue.soft.insert(object, KeyHash::new(0));
        self.record_waiting(object);
    }

    /// Records that a member of a group left the order of eviction, perhaps because of another.
    pub(in crate::state) fn record_waiting(&mut self, object: ObjectSlot) {
        let Self { groups, objects, queue, .. } = self;
        if !objects.at(object).flags.has(Flags::GROUPED) {
            return;
        }
        groups.add_waiting(object, |other| {
            let is_parked = objects.get(other).is_some_and(|found| found.flags.has(Flags::PARKED));
            is_parked || queue.soft.contains(other)
        });
    }

    pub(in crate::state) fn pop(&mut self, pass: EvictionPass) -> Option<ObjectSlot> {
        let next = match pass {
            EvictionPass::Plain => self.queue.plain.pop(),
            EvictionPass::Soft => self.queue.soft.pop(),
        };
        debug_assert!(
            next.is_none_or(|next| self.objects.get(next).is_some_and(Object::is_complete)),
            "the order of eviction has complete objects only"
        );
        next
    }

    /// Returns an object to the head of its order.
    pub(in crate::state) fn put_back(&mut self, object: ObjectSlot) {
        let Some(found) = self.objects.get(object) else { return };
        let flags = found.flags;
        if !flags.has(Flags::COMPLETE) || found.replicas.is_empty() {
            return;
        }
        if flags.has(Flags::SOFT_PINNED) {
            self.queue.soft.put_back(object);
        } else {
            self.queue.plain.put_back(object);
        }
    }
}

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
    /// Parked objects that are examined before their time, since their protection may have ended.
    early: Vec<Reverse<(Timestamp, ObjectSlot, u64)>>,
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
            early: Vec::new(),
            parked_bytes: 0,
            batch_started: None,
        }
    }

    /// Lets all parked objects be examined again: a disk may take objects over that are only leased.
    pub(in crate::state) fn examine_parked_early(&mut self) {
        self.early.extend(std::mem::take(&mut self.parked));
    }

    /// Returns whether parked objects are left to be examined early.
    pub(in crate::state) fn has_early(&self) -> bool {
        !self.early.is_empty()
    }

    /// Returns the earliest end of the protection of parked objects.
    pub(in crate::state) fn next_parked_end(&self) -> Option<Timestamp> {
        self.parked.peek().map(|&Reverse((end, ..))| end)
    }

    /// Takes a parked object to examine.
    fn pop_parked(&mut self, now: Moment) -> Option<(ObjectSlot, u64)> {
        if let Some(Reverse((_, slot, version))) = self.early.pop() {
            return Some((slot, version));
        }
        let &Reverse((until, slot, version)) = self.parked.peek()?;
        if until > now.into() {
            return None;
        }
        self.parked.pop();
        Some((slot, version))
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
        let object = self.objects.at(slot);
        let flags = object.flags;
        if object.replicas.is_empty() {
            // Its only copy is on disk.
            return;
        }
        debug_assert!(object.is_complete(), "only complete objects are evicted");
        debug_assert!(!flags.has(Flags::PARKED), "a parked object is in no order");
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
        debug_assert!(object.is_complete(), "only complete objects are parked");
        debug_assert!(!object.flags.has(Flags::PARKED), "an object is parked once");
        debug_assert!(!self.queue.soft.contains(slot), "a parked object is in no order");
        object.flags.set(Flags::PARKED, true);
        self.queue.parked_bytes += object.bytes();
        self.queue.parked.push(Reverse((until, slot, object.version)));
        self.record_waiting(slot);
    }

    /// Returns parked objects whose protection has ended to the eviction order.
    pub(in crate::state) fn unpark_due(&mut self, now: Moment, leases_keep_memory: bool) {
        for _ in 0..UNPARK_SLICE {
            let Some((slot, version)) = self.queue.pop_parked(now) else { return };
            let parked = self
                .objects
                .get(slot)
                .filter(|object| object.version == version && object.flags.has(Flags::PARKED));
            let Some(object) = parked else { continue };
            let end = if leases_keep_memory {
                object.protection.protected_until()
            } else {
                object.protection.memory_until()
            };
            if end > now.into() {
                self.queue.parked.push(Reverse((end, slot, version)));
            } else {
                self.end_parking(slot);
            }
        }
    }

    /// Returns a parked object to its place in the eviction order: the first, unless it was used.
    pub(in crate::state) fn end_parking(&mut self, slot: ObjectSlot) {
        let flags = self.objects.at(slot).flags;
        self.unpark(slot);
        if flags.has(Flags::USED) || flags.has(Flags::SOFT_PINNED) {
            self.enqueue(slot);
        } else {
            self.queue.plain.put_back(slot);
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
