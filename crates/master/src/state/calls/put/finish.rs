//! Ends of puts: published, revoked, displaced by another put, or released after a timeout.

use mooncake_base::{
    ClientId, Error, ErrorCode, Moment, ReplicaId, Result, TenantId, key::Printed,
};

use crate::state::{
    calls::put::{AbandonReason, PutCalls, PutRef, write::Write},
    ids::{ObjectSlot, WriteSlot},
    inventory::{
        puts::{self, NewValue},
        read,
    },
    lease::Timestamp,
    ledger::effect::Effect,
    replica::Replica,
};

/// Puts whose memory is released at a time because their timeout has passed.
const RELEASE_SLICE: usize = 1024;

impl PutCalls<'_> {
    /// Displaces the puts of a client. Their memory is freed as soon as that is safe.
    pub(in crate::state) fn abandon_writes(
        &mut self,
        now: Moment,
        client: ClientId,
        why: AbandonReason,
    ) {
        for number in self.writes.of_client(client) {
            self.displace(number);
            if why == AbandonReason::Leaving {
                let write = self.unregister_write(number);
                self.log_put_dropped(write.version);
                let until = (write.window_began + self.inventory.rules().late_end()).into();
                self.release_put_memory(now, &write, until);
            }
        }
    }

    /// Abandons the puts of which no replica is left, so that they no longer keep their keys.
    pub(in crate::state) fn abandon_lost_writes(&mut self) {
        for number in self.writes.take_emptied() {
            self.displace(number);
            let write = self.unregister_write(number);
            self.log_put_dropped(write.version);
        }
    }

    /// Releases the memory of puts whose timeout has passed.
    pub(in crate::state) fn release_due(&mut self, now: Moment) {
        for _ in 0..RELEASE_SLICE {
            if !self.release_oldest_write(now) {
                return;
            }
        }
    }

    /// Releases the memory of the oldest unfinished put if its timeout has passed.
    pub(in crate::state) fn release_oldest_write(&mut self, now: Moment) -> bool {
        let Some(number) = self.writes.oldest() else { return false };
        if !(self.writes.at(number).window_began + self.inventory.rules().put_release)
            .has_passed(now)
        {
            return false;
        }
        self.displace(number);
        let write = self.unregister_write(number);
        self.log_put_dropped(write.version);
        self.inventory.counters_mut().puts_released += 1;
        self.release_put_memory(now, &write, Timestamp::default());
        true
    }

    /// Displaces puts of the object that are older than the rules allow. The object may be removed.
    pub(super) fn discard_stale_writes(&mut self, now: Moment, slot: ObjectSlot) {
        let discard = self.inventory.rules().put_discard;
        let stale: Vec<WriteSlot> = self
            .writes
            .chain(self.inventory.object(slot).newest_write)
            .filter(|&number| (self.writes.at(number).window_began + discard).has_passed(now))
            .collect();
        for number in stale {
            self.displace(number);
        }
    }

    /// Finds the object and the put that a writer names.
    pub(super) fn find_write(
        &self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: &PutRef<'_>,
    ) -> Result<(ObjectSlot, WriteSlot)> {
        let missing = || {
            let why = "no such unfinished put; it was ended, revoked, displaced or timed out";
            let error = Error::new(ErrorCode::OBJECT_NOT_FOUND, why).with("version", put.version);
            if put.key.is_empty() { error } else { error.with("key", Printed(put.key)) }
        };
        let number = self.writes.find(put.version).ok_or_else(missing)?;
        let write = self.writes.at(number);
        let slot = write.object.ok_or_else(missing)?;
        let object = self.inventory.object(slot);
        let is_named = put.key.is_empty() || put.key == self.inventory.objects().key(object);
        if !is_named || self.inventory.objects().tenant_index(tenant) != Some(object.tenant) {
            return Err(missing());
        }
        if write.client != client {
            return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, "the put belongs to another client")
                .with("key", Printed(self.inventory.objects().key(object))));
        }
        if (write.window_began + self.inventory.rules().put_release).has_passed(now) {
            return Err(missing());
        }
        Ok((slot, number))
    }

    /// Returns whether the value of the put is the present one of the key, which the writer names.
    pub(super) fn is_published(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        put: &PutRef<'_>,
    ) -> bool {
        if put.key.is_empty() {
            return false;
        }
        let Some(tenant) = self.inventory.objects().tenant_index(tenant) else { return false };
        self.inventory.find(now, tenant, put.key).is_some_and(|slot| {
            let object = self.inventory.object(slot);
            object.is_complete() && object.version == put.version.0
        })
    }

    /// Removes a put from its object and from the table.
    pub(super) fn remove_write(&mut self, slot: ObjectSlot, number: WriteSlot) -> Write {
        self.unlink_write(slot, number);
        self.unregister_write(number)
    }

    /// Removes a put to which no object links any more from the table.
    fn unregister_write(&mut self, number: WriteSlot) -> Write {
        let write = self.writes.remove(number);
        puts::end(self.inventory, &write.replicas);
        write
    }

    /// Returns until when bytes may still arrive at replicas of the put, of which the writer names
    /// those. A restart before then quarantines the memory, too.
    pub(super) fn late_until(
        &mut self,
        now: Moment,
        write: &Write,
        late: &[ReplicaId],
    ) -> Timestamp {
        let is_late = |replica: &Replica| replica.is_in(late, write.version);
        if late.is_empty() || !write.replicas.iter().any(is_late) {
            return Timestamp::default();
        }
        let until = write.window_began + self.inventory.rules().late_end();
        read::raise_max_granted(self.inventory, now, until.left(now));
        until.into()
    }

    /// Drops the replicas that failed and quarantines their memory. Returns their ordinals.
    pub(super) fn drop_failed_copies(
        &mut self,
        now: Moment,
        write: &mut Write,
        failed: &[ReplicaId],
    ) -> Vec<u8> {
        let mut dropped = Vec::new();
        if failed.is_empty() {
            return dropped;
        }
        let until = (write.window_began + self.inventory.rules().late_end()).into();
        write.replicas.retain(|replica| {
            let is_kept = !replica.is_in(failed, write.version);
            if !is_kept {
                // The replicas of a put have the lowest ordinals.
                dropped.extend(u8::try_from(replica.ordinal));
                let (tenant, length) = (write.tenant, write.length);
                puts::release_copy(self.inventory, now, tenant, length, *replica, until);
            }
            is_kept
        });
        dropped
    }

    /// Publishes the value of a put in place of the earlier one. `failed` are the ordinals of its
    /// replicas that were dropped.
    pub(super) fn publish(
        &mut self,
        now: Moment,
        slot: ObjectSlot,
        write: Write,
        put: &PutRef<'_>,
        failed: &[u8],
    ) {
        let value = NewValue {
            version: write.version,
            length: write.length,
            data_type: write.data_type,
            replicas: write.replicas,
            hash: write.hash,
            checksum: put.checksum,
            group: write.group,
            soft_pin: write.soft_pin,
            is_hard_pinned: write.is_hard_pinned,
            terms: write.terms,
        };
        puts::publish(self.inventory, now, slot, value, failed);
    }

    /// Frees the memory of a removed put after `until`.
    pub(super) fn release_put_memory(&mut self, now: Moment, write: &Write, until: Timestamp) {
        let (tenant, length) = (write.tenant, write.length);
        for &replica in write.replicas.iter() {
            puts::release_copy(self.inventory, now, tenant, length, replica, until);
        }
    }

    /// Makes a put impossible to end; its memory stays allocated.
    fn displace(&mut self, number: WriteSlot) {
        if let Some(slot) = self.writes.at_mut(number).object.take() {
            self.inventory.counters_mut().puts_displaced += 1;
            let version = self.writes.at(number).version;
            self.inventory.record(|| Effect::Displaced { version });
            self.unlink_write(slot, number);
            self.inventory.remove_if_empty(slot);
        }
    }

    fn unlink_write(&mut self, slot: ObjectSlot, number: WriteSlot) {
        let next = self.writes.at(number).next;
        let head = self.inventory.object(slot).newest_write;
        if head == number {
            return puts::set_newest(self.inventory, slot, next);
        }
        let before = self.writes.chain(head).find(|&other| self.writes.at(other).next == number);
        let before = before.expect("a put is linked from its object");
        self.writes.at_mut(before).next = next;
    }
}
