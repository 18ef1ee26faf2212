//! Complete objects: lookup, added and dropped replicas, removal, and quarantine of freed memory.

use mooncake_base::Moment;

use crate::state::{
    catalog::object::{Flags, NO_WRITE},
    ids::{KeyHash, ObjectSlot, SegmentSlot, TenantIndex},
    inventory::{Inventory, disks, expiry, read::FenceTicket},
    lease::Timestamp,
    ledger::effect::{Effect, LoggedCopy},
    pool::freed::FreedTo,
    replica::{Replica, Replicas},
};

impl Inventory {
    /// Finds an object and drops its lost replicas. A member of a condemned group is evicted, and an
    /// object whose time is over is dropped.
    pub(in crate::state) fn find(
        &mut self,
        now: Moment,
        tenant: TenantIndex,
        key: &[u8],
    ) -> Option<ObjectSlot> {
        self.find_hashed(now, self.catalog.objects.hash(tenant, key), tenant, key)
    }

    /// Finds an object by a key whose hash is known, like [`find`](Self::find).
    pub(in crate::state) fn find_hashed(
        &mut self,
        now: Moment,
        hash: KeyHash,
        tenant: TenantIndex,
        key: &[u8],
    ) -> Option<ObjectSlot> {
        let slot = self.catalog.objects.find_hashed(hash, tenant, key)?;
        if self.catalog.groups.is_condemned(slot) {
            self.evict_value(now, slot, &mut FreedTo::Pool);
        }
        expiry::drop_if_expired(self, now, slot);
        if !self.drop_lost_replicas(slot) && self.catalog.objects.at(slot).newest_write == NO_WRITE
        {
            self.catalog.objects.remove(slot);
            return None;
        }
        Some(slot)
    }

    /// Removes an object with neither a value nor a put.
    pub(in crate::state) fn remove_if_empty(&mut self, slot: ObjectSlot) {
        self.catalog.remove_if_empty(slot);
    }

    /// Drops the value of an object. The memory is freed, or quarantined while a fence covers it.
    pub(in crate::state) fn drop_value(&mut self, now: Moment, slot: ObjectSlot) {
        self.drop_value_to(now, slot, &mut FreedTo::Pool);
    }

    /// Drops the value of an object like [`drop_value`](Self::drop_value). Memory that is freed at once
    /// goes where `to` says.
    pub(in crate::state) fn drop_value_to(
        &mut self,
        now: Moment,
        slot: ObjectSlot,
        to: &mut FreedTo<'_>,
    ) {
        if self.catalog.objects.at(slot).is_complete() {
            // Recorded again if the object was released ahead: who asks for a removal waits for
            // this record.
            self.log.record_drop(&self.catalog, slot);
            self.drop_released(now, slot, self.log.effects.position(), to);
        }
    }

    /// Drops the value of an object whose release is recorded below the log position.
    pub(in crate::state) fn drop_released(
        &mut self,
        now: Moment,
        slot: ObjectSlot,
        position: u64,
        to: &mut FreedTo<'_>,
    ) {
        self.catalog.dequeue(slot);
        let copied = self.catalog.copying_until(slot);
        let object = self.catalog.objects.at_mut(slot);
        let until = object.protection.fence().max(copied);
        let version = object.version;
        object.protection.clear_fence();
        self.catalog.tenants.uncharge(object.tenant, object.bytes());
        let is_hard_pinned = object.flags.has(Flags::HARD_PINNED);
        let replicas = std::mem::take(&mut object.replicas);
        for &replica in replicas.iter() {
            if is_hard_pinned {
                self.pool.remove_hard_pin(&replica);
            }
            self.free_or_quarantine(now, replica, until, version, position, to);
        }
        self.clear_value(slot);
    }

    /// Clears the value of an object whose replicas are gone.
    pub(in crate::state) fn clear_value(&mut self, slot: ObjectSlot) {
        let object = self.catalog.objects.at(slot);
        debug_assert!(object.is_complete(), "a value is dropped once");
        debug_assert!(object.replicas.is_empty(), "the memory of a value is freed first");
        self.log.emit_removed(&self.catalog, slot);
        self.catalog.dequeue(slot);
        disks::forget_copy(self, slot);
        self.offloads.forget_object(slot);
        self.catalog.released.remove(slot);
        let object = self.catalog.objects.at_mut(slot);
        let flags = object.flags;
        object.flags = Flags::default();
        self.catalog.tenants.remove_object(object.tenant, slot);
        self.catalog.objects.complete -= 1;
        if flags.has(Flags::BEING_COPIED) {
            self.catalog.copied.remove(&slot);
        }
        if flags.has(Flags::SOFT_PINNED) {
            self.catalog.pins.remove(slot);
            self.catalog.groups.count_soft_pin(slot, false);
        }
        self.catalog.annotations.remove(slot);
        if flags.has(Flags::GROUPED) {
            self.catalog.leave_group(slot, flags.has(Flags::HARD_PINNED));
        }
    }

    /// Adds a replica to a complete object.
    pub(in crate::state) fn add_copy(&mut self, slot: ObjectSlot, replica: Replica) {
        self.take_back(slot);
        let object = self.catalog.objects.at_mut(slot);
        debug_assert!(
            object.replicas.iter().all(|other| other.ordinal != replica.ordinal),
            "replicas of an object have different numbers"
        );
        let had_memory = !object.replicas.is_empty();
        object.replicas.push(replica);
        if !had_memory {
            disks::enter_memory(self, slot);
        }
        let object = self.catalog.objects.at(slot);
        let length = object.length;
        let flags = object.flags;
        let object = self.catalog.objects.at(slot);
        self.log.effects.record(|| Effect::ReplicaAdded {
            object: self.catalog.objects.logged_name(object),
            copy: LoggedCopy {
                segment: self.pool.segments.at(replica.segment).number,
                offset: self.pool.segments.at(replica.segment).allocator.offset(replica.block),
                ordinal: replica.ordinal,
            },
        });
        if flags.has(Flags::PARKED) {
            self.catalog.queue.parked_bytes += length;
        }
        if flags.has(Flags::HARD_PINNED) {
            self.pool.add_hard_pin(&replica);
        }
    }

    /// Drops the replicas of an object in these segments; the object is removed with its last
    /// replica. Returns the number of dropped replicas.
    pub(in crate::state) fn drop_copies(
        &mut self,
        now: Moment,
        slot: ObjectSlot,
        segments: &[SegmentSlot],
    ) -> usize {
        let object = self.catalog.objects.at(slot);
        let copies = object.replicas.iter().copied();
        let (dropped, kept): (Vec<_>, Vec<_>) =
            copies.partition(|copy| segments.contains(&copy.segment));
        if dropped.is_empty() {
            return 0;
        }
        if kept.is_empty() {
            match self.disk_copy(slot) {
                Some(_) => disks::drop_memory(self, now, slot, &mut FreedTo::Pool),
                None => {
                    self.drop_value(now, slot);
                    self.catalog.remove_if_empty(slot);
                }
            }
            return dropped.len();
        }
        let fence = object.protection.fence().max(self.catalog.copying_until(slot));
        let object = self.catalog.objects.at_mut(slot);
        object.replicas = Replicas::from(kept);
        let freed = object.length * dropped.len() as u64;
        self.catalog.tenants.uncharge(object.tenant, freed);
        let flags = object.flags;
        if flags.has(Flags::PARKED) {
            self.catalog.queue.parked_bytes -= freed;
        }
        for &replica in &dropped {
            let object = self.catalog.objects.at(slot);
            self.log.effects.record(|| Effect::ReplicaDropped {
                object: self.catalog.objects.logged_name(object),
                ordinal: replica.ordinal,
            });
            if flags.has(Flags::HARD_PINNED) {
                self.pool.remove_hard_pin(&replica);
            }
            self.release(now, replica, fence);
        }
        dropped.len()
    }

    /// Releases a fence that was granted to one reader only: if the memory was freed meanwhile, its
    /// quarantine ends. Has no effect on fences of several readers and on fences that were released
    /// before.
    pub(in crate::state) fn release_fence(&mut self, ticket: FenceTicket) {
        let FenceTicket { object, version, fence } = ticket;
        let fence = Timestamp::from_bits(fence);
        if fence == Timestamp::default() || version.0 == 0 {
            return;
        }
        if let Some(found) = self.catalog.objects.get_mut(object)
            && found.is_complete()
            && found.version() == version
        {
            if found.protection.fence() == fence {
                found.protection.clear_fence();
            }
            return;
        }
        while let Some(freed) = self.pool.quarantine.pop_read(fence, version.0) {
            self.pool.end_quarantine(freed);
        }
    }

    /// Frees the memory of a replica, after a quarantine until `until`.
    pub(in crate::state) fn release(&mut self, now: Moment, replica: Replica, until: Timestamp) {
        let position = self.log.effects.position();
        self.free_or_quarantine(now, replica, until, 0, position, &mut FreedTo::Pool);
    }

    /// Frees the memory of a replica whose release is recorded below the log position. If its
    /// readers release their fence of `version` earlier, the quarantine ends then. Memory that needs no
    /// quarantine goes where `to` says.
    pub(in crate::state) fn free_or_quarantine(
        &mut self,
        now: Moment,
        replica: Replica,
        until: Timestamp,
        version: u64,
        position: u64,
        to: &mut FreedTo<'_>,
    ) {
        let segment = self.pool.segments.at(replica.segment);
        if !segment.is_mounted() {
            return;
        }
        if until > now.into() {
            let time = until.left(now);
            // Other memory is quarantined after a restart anyway.
            if !self.max_granted.covers(time) {
                let number = segment.number;
                let offset = segment.allocator.offset(replica.block);
                let length = segment.allocator.size(replica.block);
                self.log.effects.record(|| Effect::Quarantined { number, offset, length, time });
            }
            let position = self.log.effects.position();
            self.pool.quarantine_block(until, version, replica.segment, replica.block, position);
        } else {
            self.pool.free_block_to(to, replica.segment, replica.block, position);
        }
    }
}
