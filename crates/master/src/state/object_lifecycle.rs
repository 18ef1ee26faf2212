//! The life of what can be read: found, swept of lost copies, queued for eviction, dropped.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use mooncake_base::Moment;
use rustc_hash::FxHashMap;

use super::{
    Effect, LoggedCopy, State,
    eviction::{EvictionPolicy, Lru},
    lease::Timestamp,
    object::{Flags, Replica, Replicas},
    read::FenceTicket,
    segment::SegmentStatus,
    timer::Timer,
};

/// How many objects one slice of a sweep looks at.
const SWEEP_SLICE: u32 = 4096;

/// Which object is evicted next.
#[derive(Debug)]
pub(super) struct EvictionQueue {
    pub(super) plain: Box<dyn EvictionPolicy>,
    /// Evicted after all of the others.
    pub(super) soft: Lru,
    /// Objects that were met while leased or fenced wait here, so that none is met twice in vain:
    /// until when, object, version.
    parked: BinaryHeap<Reverse<(Timestamp, u32, u64)>>,
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

/// Soft pins, of which there are few.
#[derive(Debug, Default)]
pub(super) struct Pins(FxHashMap<u32, Pin>);

#[derive(Debug, Clone, Copy)]
struct Pin {
    until: Moment,
    ttl: Duration,
}

impl Pins {
    /// How long the pin of the object lasts from each access on, if it has one.
    pub(super) fn ttl(&self, now: Moment, object: u32) -> Option<Duration> {
        self.0.get(&object).filter(|pin| !pin.until.has_passed(now)).map(|pin| pin.ttl)
    }

    /// How long it was to last, run out or not.
    pub(super) fn requested_ttl(&self, object: u32) -> Option<Duration> {
        self.0.get(&object).map(|pin| pin.ttl)
    }

    pub(super) fn count(&self) -> u64 {
        self.0.len() as u64
    }
}

/// Segments that went, whose copies are being forgotten.
#[derive(Debug, Default)]
pub(super) struct Sweeps {
    segments: Vec<u32>,
    next: u32,
    /// Segments that went while a sweep was on its way, and wait for the next.
    waiting: Vec<u32>,
}

impl Sweeps {
    pub(super) fn begin(&mut self, segment: u32) {
        if self.next == 0 {
            self.segments.push(segment);
        } else {
            self.waiting.push(segment);
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.segments.is_empty()
    }
}

impl State {
    /// The object of that key, without copies that were lost.
    pub(super) fn find(&mut self, tenant: u16, key: &[u8]) -> Option<u32> {
        self.find_hashed(self.objects.hash(tenant, key), tenant, key)
    }

    /// As [`find`](Self::find), for who knows the hash of the key.
    pub(super) fn find_hashed(&mut self, hash: u32, tenant: u16, key: &[u8]) -> Option<u32> {
        let slot = self.objects.find_hashed(hash, tenant, key)?;
        if !self.drop_lost_replicas(slot) {
            let is_written = self.writes.chain(self.objects.at(slot).newest_write).next().is_some();
            if !is_written {
                self.objects.remove(slot);
                return None;
            }
        }
        Some(slot)
    }

    /// Forgets copies of the object that were lost; whether there is still something to read.
    pub(super) fn drop_lost_replicas(&mut self, slot: u32) -> bool {
        let object = self.objects.at(slot);
        if self.sweeps.is_idle() || !object.is_complete() {
            return object.is_complete();
        }
        let is_standing = |replica: &&Replica| self.segments.at(replica.segment).is_mounted();
        let replicas = &object.replicas[..];
        let kept: Vec<Replica> = replicas.iter().filter(is_standing).copied().collect();
        if kept.len() == replicas.len() {
            return true;
        }
        let is_kept = !kept.is_empty();
        let before = object.bytes();
        let object = self.objects.at_mut(slot);
        object.replicas = Replicas::from(kept);
        self.tenants.uncharge(object.tenant, before - object.bytes());
        if object.flags.has(Flags::PARKED) {
            self.queue.parked_bytes -= before - object.bytes();
        }
        if !is_kept {
            self.clear_value(slot);
        }
        is_kept
    }

    /// Drops what can be read; its memory is free, or rests while a fence covers it.
    pub(super) fn drop_value(&mut self, now: Moment, slot: u32) {
        if !self.objects.at(slot).is_complete() {
            return;
        }
        self.dequeue(slot);
        let copied = self.copying_until(slot);
        let object = self.objects.at(slot);
        self.effects.record(|| Effect::Dropped { object: self.objects.logged_name(object) });
        let object = self.objects.at_mut(slot);
        let until = object.protection.fence().max(copied);
        let version = object.version;
        object.protection.clear_fence();
        self.tenants.uncharge(object.tenant, object.bytes());
        let is_hard_pinned = object.flags.has(Flags::HARD_PINNED);
        let replicas = std::mem::take(&mut object.replicas);
        for &replica in replicas.iter() {
            let segment = self.segments.at_mut(replica.segment);
            if is_hard_pinned && segment.is_mounted() {
                segment.hard_pinned -= segment.allocator.size(replica.block);
            }
            self.free_or_quarantine(now, replica, until, version);
        }
        self.clear_value(slot);
    }

    /// A reader hands back the fence it was granted for itself alone: the memory of the object, if
    /// it was freed meanwhile, need not rest any longer. Fences that stand for others too, or that
    /// were handed back before, are passed over.
    pub fn release_fence(&mut self, ticket: FenceTicket) {
        let FenceTicket { object, version, fence } = ticket;
        let fence = Timestamp::from_bits(fence);
        if fence == Timestamp::default() || version.0 == 0 {
            return;
        }
        if let Some(found) = self.objects.get_mut(object)
            && found.is_complete()
            && found.version() == version
        {
            if found.protection.fence() == fence {
                found.protection.clear_fence();
            }
            return;
        }
        while let Some((segment, block)) = self.quarantine.pop_read(fence, version.0) {
            let segment = self.segments.at_mut(segment);
            segment.fenced -= segment.allocator.size(block);
            segment.allocator.free(block);
        }
    }

    /// Gives the memory of a copy back; until then it rests.
    pub(super) fn release(&mut self, now: Moment, replica: Replica, until: Timestamp) {
        self.free_or_quarantine(now, replica, until, 0);
    }

    /// As [`release`](Self::release), of an object of that version: should readers of it be done
    /// earlier and say so, it rests no longer.
    fn free_or_quarantine(
        &mut self,
        now: Moment,
        replica: Replica,
        until: Timestamp,
        version: u64,
    ) {
        let segment = self.segments.at_mut(replica.segment);
        if segment.status == SegmentStatus::Unmounting {
            return;
        }
        if until > now.into() {
            segment.fenced += segment.allocator.size(replica.block);
            let time = until.left(now);
            // What fences may cover rests after a restart anyhow.
            if time > self.max_granted.fence {
                let number = segment.number;
                let offset = segment.allocator.offset(replica.block);
                let length = segment.allocator.size(replica.block);
                self.effects.record(|| Effect::Quarantined { number, offset, length, time });
            }
            self.quarantine.push(until, version, replica.segment, replica.block);
        } else {
            segment.allocator.free(replica.block);
        }
    }

    /// Frees a block whose rest is over.
    pub(super) fn free_due_quarantine(&mut self, now: Moment) -> bool {
        let Some((segment, block)) = self.quarantine.pop_due(now) else { return false };
        let segment = self.segments.at_mut(segment);
        segment.fenced -= segment.allocator.size(block);
        segment.allocator.free(block);
        true
    }

    /// The object may be evicted, if it ever may.
    pub(super) fn enqueue(&mut self, slot: u32) {
        self.enqueue_hashed(slot, self.objects.key_hash(slot));
    }

    /// As [`enqueue`](Self::enqueue), for who knows the hash of its key.
    pub(super) fn enqueue_hashed(&mut self, slot: u32, hash: u32) {
        let flags = self.objects.at(slot).flags;
        if flags.has(Flags::SOFT_PINNED) && !flags.has(Flags::HARD_PINNED) {
            self.queue.soft.insert(slot, 0);
        } else if !flags.has(Flags::HARD_PINNED) {
            self.queue.plain.insert(slot, hash);
        }
    }

    /// The object is not to be evicted for now.
    pub(super) fn dequeue(&mut self, slot: u32) {
        self.queue.plain.remove(slot);
        self.queue.soft.remove(slot);
        self.unpark(slot);
    }

    /// The object, which is in no queue, waits until then.
    pub(super) fn park(&mut self, slot: u32, until: Timestamp) {
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

    /// Pins the object softly, or longer if it is pinned.
    pub(super) fn pin(&mut self, now: Moment, slot: u32, ttl: Duration) {
        let until = now + ttl;
        let object = self.objects.at_mut(slot);
        object.flags.set(Flags::SOFT_PINNED, true);
        let version = object.version;
        if self.pins.0.insert(slot, Pin { until, ttl }).is_none() {
            self.timers.push(until, Timer::SoftPin(slot, version));
        }
    }

    /// The object was used: it goes later, and its soft pin lasts anew.
    pub(super) fn touch(&mut self, now: Moment, slot: u32) {
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

    /// A timer rang: the soft pin has run out, or the timer is set again.
    pub(super) fn check_pin(&mut self, now: Moment, slot: u32, version: u64) {
        let known = self.objects.get(slot).is_some_and(|object| object.version == version);
        let Some(&Pin { until, .. }) = self.pins.0.get(&slot).filter(|_| known) else { return };
        if !until.has_passed(now) {
            self.timers.push(until, Timer::SoftPin(slot, version));
            return;
        }
        self.pins.0.remove(&slot);
        self.objects.at_mut(slot).flags.set(Flags::SOFT_PINNED, false);
        let object = self.objects.at(slot);
        self.effects
            .record(|| Effect::Pinned { object: self.objects.logged_name(object), pin: None });
        // Members of its group may have been put behind the others on its account.
        let siblings = self.groups.members(slot).to_vec();
        for member in siblings.into_iter().chain([slot]) {
            if self.queue.soft.contains(member) {
                self.queue.soft.remove(member);
                self.enqueue(member);
            }
        }
    }

    /// One slice of the sweep after segments went; whether there is more to do.
    pub(super) fn sweep(&mut self) -> bool {
        if self.sweeps.is_idle() {
            return false;
        }
        let start = self.sweeps.next;
        let end = start.saturating_add(SWEEP_SLICE).min(self.objects.slot_count());
        for slot in start..end {
            if self.objects.get(slot).is_some() {
                self.drop_lost_replicas(slot);
                self.remove_if_empty(slot);
            }
        }
        self.sweeps.next = end;
        if end == self.objects.slot_count() {
            for segment in std::mem::take(&mut self.sweeps.segments) {
                self.segments.free_slot(segment);
            }
            self.sweeps.segments = std::mem::take(&mut self.sweeps.waiting);
            self.sweeps.next = 0;
        }
        !self.sweeps.is_idle()
    }

    /// Nothing is to be read under the key any more; its copies are gone already.
    fn clear_value(&mut self, slot: u32) {
        self.emit_removed(slot);
        self.dequeue(slot);
        let object = self.objects.at_mut(slot);
        let flags = object.flags;
        object.flags = Flags::default();
        self.tenants.remove_object(object.tenant, slot);
        self.objects.complete -= 1;
        if flags.has(Flags::BEING_COPIED) {
            self.tasks.forget_object(slot);
        }
        if flags.has(Flags::SOFT_PINNED) {
            self.pins.0.remove(&slot);
        }
        if flags.has(Flags::GROUPED) {
            self.leave_group(slot, flags.has(Flags::HARD_PINNED));
        }
    }

    /// The others of its group wait no longer for a member that could never be evicted.
    fn leave_group(&mut self, slot: u32, was_hard_pinned: bool) {
        let siblings = if was_hard_pinned { self.groups.members(slot).to_vec() } else { vec![] };
        self.groups.leave(slot);
        for member in siblings.into_iter().filter(|&member| member != slot) {
            self.unpark_early(member);
        }
    }

    /// What held the object has ended early: it waits no longer.
    pub(super) fn unpark_early(&mut self, slot: u32) {
        if self.objects.at(slot).flags.has(Flags::PARKED) {
            self.unpark(slot);
            self.enqueue(slot);
        }
    }

    /// One more copy of an object that can be read.
    pub(super) fn add_copy(&mut self, slot: u32, replica: Replica) {
        let object = self.objects.at_mut(slot);
        object.replicas.push(replica);
        let length = object.length;
        let flags = object.flags;
        let object = self.objects.at(slot);
        self.effects.record(|| Effect::ReplicaAdded {
            object: self.objects.logged_name(object),
            copy: LoggedCopy {
                segment: self.segments.at(replica.segment).number,
                offset: self.segments.at(replica.segment).allocator.offset(replica.block),
                ordinal: replica.ordinal,
            },
        });
        if flags.has(Flags::PARKED) {
            self.queue.parked_bytes += length;
        }
        if flags.has(Flags::HARD_PINNED) {
            let segment = self.segments.at_mut(replica.segment);
            segment.hard_pinned += segment.allocator.size(replica.block);
        }
    }

    /// Drops the copies of an object that lie in these segments; with the last one it is gone.
    /// How many were dropped.
    pub(super) fn drop_copies(&mut self, now: Moment, slot: u32, segments: &[u32]) -> usize {
        let object = self.objects.at(slot);
        let copies = object.replicas.iter().copied();
        let (dropped, kept): (Vec<_>, Vec<_>) =
            copies.partition(|copy| segments.contains(&copy.segment));
        if dropped.is_empty() {
            return 0;
        }
        if kept.is_empty() {
            self.drop_value(now, slot);
            self.remove_if_empty(slot);
            return dropped.len();
        }
        let fence = object.protection.fence().max(self.copying_until(slot));
        let object = self.objects.at_mut(slot);
        object.replicas = Replicas::from(kept);
        let freed = object.length * dropped.len() as u64;
        self.tenants.uncharge(object.tenant, freed);
        let flags = object.flags;
        if flags.has(Flags::PARKED) {
            self.queue.parked_bytes -= freed;
        }
        for &replica in &dropped {
            let object = self.objects.at(slot);
            self.effects.record(|| Effect::ReplicaDropped {
                object: self.objects.logged_name(object),
                ordinal: replica.ordinal,
            });
            let segment = self.segments.at_mut(replica.segment);
            if flags.has(Flags::HARD_PINNED) && segment.is_mounted() {
                segment.hard_pinned -= segment.allocator.size(replica.block);
            }
            self.release(now, replica, fence);
        }
        dropped.len()
    }

    fn unpark(&mut self, slot: u32) {
        let object = self.objects.at_mut(slot);
        if object.flags.has(Flags::PARKED) {
            object.flags.set(Flags::PARKED, false);
            object.flags.set(Flags::USED, false);
            self.queue.parked_bytes -= object.bytes();
        }
    }
}
