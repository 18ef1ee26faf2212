//! Segments that clients mount and unmount.

use std::time::Duration;

use mooncake_base::{ClientId, Error, ErrorCode, Incarnation, Moment, Result, SegmentId};

use crate::state::{
    calls::clients::ClientCalls,
    ids::SegmentSlot,
    ledger::effect::Effect,
    pool::{
        Pool,
        allocator::LENGTH_MAX,
        segment::{Segment, SegmentSpec, SegmentStatus, SegmentView},
    },
    timer::Timer,
};

impl<'a> ClientCalls<'a> {
    /// Returns the mounted segments in so many slots of the table from one on, and whether there are
    /// more slots.
    pub(crate) fn segments_in(
        self,
        from: usize,
        slots: usize,
    ) -> (impl Iterator<Item = SegmentView<'a>>, bool) {
        let pool: &'a Pool = &self.inventory.pool;
        let (segments, has_more) = pool.segments.claimed_in(from, slots);
        (segments.map(Segment::view), has_more)
    }
}

impl ClientCalls<'_> {
    /// Adds the segment to the pool. A repetition with the same id, incarnation and memory changes
    /// nothing; a later incarnation drops the objects of the earlier one. Memory that left the pool
    /// and comes back accepts no objects before the fences and writes granted in it have ended.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `SEGMENT_ALREADY_EXISTS`: another client or another
    /// memory has that id. `INVALID_PARAMS`: no length, or memory that overlaps another segment of
    /// the client or the end of the address space.
    pub(in crate::state) fn mount(
        &mut self,
        now: Moment,
        client: ClientId,
        segment: SegmentSpec,
    ) -> Result<()> {
        self.inventory.clients.check(client)?;
        let refuse = |why: &str| Err(Error::invalid(why).with("segment", segment.id));
        if !(1..=LENGTH_MAX).contains(&segment.length) {
            return refuse("the segment is empty or longer than 128 TiB");
        }
        let Some(end) = segment.base.checked_add(segment.length) else {
            return refuse("the segment goes beyond the end of the address space");
        };
        if let Some(slot) = self.inventory.pool.segments.by_id(segment.id) {
            let old = self.inventory.pool.segments.at(slot);
            if old.client == client && old.spec == segment {
                self.claim_segment(slot);
                return Ok(());
            }
            if old.client != client || segment.incarnation <= old.spec.incarnation {
                return Err(Error::new(
                    ErrorCode::SEGMENT_ALREADY_EXISTS,
                    "another segment has that id",
                )
                .with("segment", segment.id)
                .with("owner", old.client));
            }
            self.drop_segment(slot);
        }
        self.check_neighbors(client, &segment, end)?;
        let unsynced = &self.inventory.pool.unsynced;
        let is_synced = |position| unsynced.is_synced(position);
        let before =
            self.inventory.pool.segments.before(now, segment.id, segment.incarnation, is_synced);
        let unsynced_position = before.map(|gone| gone.position).filter(|&at| !is_synced(at));
        let granted_until = before.map(|gone| gone.busy_until).filter(|end| !end.has_passed(now));
        let unknown_until = self.inventory.recovery.unknown_grants_until;
        let busy_until =
            granted_until.max((!unknown_until.has_passed(now)).then_some(unknown_until));
        if let Some(busy_until) = busy_until {
            self.inventory
                .timers
                .push(busy_until, Timer::QuarantineEnd(segment.id, segment.incarnation));
        }
        let number = self.inventory.pool.segments.next_number();
        self.inventory.log.effects.record(|| Effect::Mounted {
            number,
            client,
            spec: segment.clone(),
        });
        let mut new = Segment::new(number, client, segment, busy_until.unwrap_or(now));
        new.quarantined_until = busy_until;
        new.is_suspect = self.inventory.clients.is_suspect(client);
        new.awaits_sync = unsynced_position.is_some();
        let slot = self.inventory.pool.segments.insert(new);
        if let Some(position) = unsynced_position {
            self.inventory.pool.await_sync_of_mount(slot, position);
        }
        Ok(())
    }

    /// Checks a new segment against the others of its client.
    fn check_neighbors(&mut self, client: ClientId, new: &SegmentSpec, end: u64) -> Result<()> {
        let overlapping = self.inventory.pool.segments.overlapping(client, new.base, end);
        if overlapping.iter().any(|&slot| !self.inventory.pool.segments.at(slot).is_unclaimed) {
            let why = "the memory overlaps another segment of the client";
            return Err(Error::invalid(why).with("segment", new.id));
        }
        // The client has other memory at these addresses since the restart.
        self.drop_segments(&overlapping);
        let limit = self.inventory.rules.segments_per_client_max;
        if self.inventory.pool.segments.count_of(client) >= limit {
            let why = "the client has too many segments; mount fewer and larger ones";
            return Err(Error::invalid(why).with("segment", new.id).with("limit", limit));
        }
        Ok(())
    }

    /// Removes the segment from the pool: at once, or after a grace in which it is readable but
    /// accepts no objects. A second call may shorten the grace, but not extend it.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns it.
    pub(in crate::state) fn unmount(
        &mut self,
        now: Moment,
        client: ClientId,
        segment: SegmentId,
        grace: Duration,
    ) -> Result<()> {
        let Some(slot) = self.inventory.pool.segments.by_id(segment) else {
            return Err(Error::new(ErrorCode::SEGMENT_NOT_FOUND, "no such segment is mounted")
                .with("segment", segment));
        };
        let found = self.inventory.pool.segments.at_mut(slot);
        if found.client != client {
            return Err(Error::new(
                ErrorCode::ILLEGAL_CLIENT,
                "the segment belongs to another client",
            )
            .with("segment", segment)
            .with("owner", found.client));
        }
        if grace.is_zero() {
            self.drop_segment(slot);
            return Ok(());
        }
        found.status = SegmentStatus::GracefullyUnmounting;
        found.unmount_at = Some(now + grace);
        let (number, status) = (found.number, found.status.code());
        self.inventory.log.effects.record(|| Effect::SegmentStatus { number, status, grace });
        let incarnation = found.spec.incarnation;
        self.inventory.pool.segments.refresh(slot);
        self.inventory.timers.push(now + grace, Timer::Unmount(segment, incarnation));
        Ok(())
    }

    /// Handles the timer at the end of a grace.
    pub(in crate::state) fn end_grace(&mut self, id: SegmentId, incarnation: Incarnation) {
        let Some(slot) = self.inventory.pool.segments.by_id(id) else { return };
        let segment = self.inventory.pool.segments.at(slot);
        if segment.spec.incarnation == incarnation
            && segment.status == SegmentStatus::GracefullyUnmounting
        {
            self.drop_segment(slot);
        }
    }

    /// Drops a segment and every replica in it.
    pub(in crate::state) fn drop_segment(&mut self, slot: SegmentSlot) {
        self.drop_segments(&[slot]);
    }

    /// Drops segments and every replica in them. Unfinished puts and quarantined memory are looked
    /// through once for all of them.
    pub(in crate::state) fn drop_segments(&mut self, slots: &[SegmentSlot]) {
        let (mut was_written, mut was_waiting) = (false, false);
        let mut unused = Vec::new();
        for &slot in slots {
            let segment = self.inventory.pool.segments.at_mut(slot);
            let number = segment.number;
            was_written |= segment.reserved.writing > 0;
            was_waiting |= segment.reserved.fenced + segment.reserved.withheld > 0;
            let is_used = segment.allocator.used() > 0;
            if std::mem::take(&mut segment.is_unclaimed) {
                self.inventory.recovery.segments -= 1;
            }
            self.inventory.log.effects.record(|| Effect::SegmentDropped { number });
            self.inventory.pool.segments.close(slot, self.inventory.log.effects.position());
            match is_used {
                true => self.inventory.sweeps.begin(slot),
                false => unused.push(slot),
            }
        }
        let segments = &self.inventory.pool.segments;
        let is_gone = |slot| !segments.at(slot).is_mounted();
        if was_waiting {
            self.inventory.pool.quarantine.forget(is_gone);
            self.inventory.pool.unsynced.forget(segments);
        }
        self.searches.forget(is_gone);
        if was_written {
            let freed = slots.iter().flat_map(|&slot| self.writes.forget_segment(slot));
            let copied = self.tasks.forget_segments(is_gone);
            let promoted = self.inventory.promotions.forget_segments(is_gone);
            for (tenant, bytes) in freed.chain(copied).chain(promoted) {
                self.inventory.catalog.tenants.uncharge(tenant, bytes);
            }
        }
        unused.into_iter().for_each(|slot| self.inventory.pool.segments.free_slot(slot));
    }
}
