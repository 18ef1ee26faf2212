//! Segments that clients mount and unmount.

use std::time::Duration;

use mooncake_base::{ClientId, Error, ErrorCode, Incarnation, Moment, Result, SegmentId};

use crate::state::{
    calls::clients::ClientCalls,
    ids::SegmentSlot,
    inventory::segments,
    pool::{
        Pool,
        allocator::LENGTH_MAX,
        segment::{Segment, SegmentSpec, SegmentStatus, SegmentView},
    },
};

impl<'a> ClientCalls<'a> {
    /// Returns the mounted segments in so many slots of the table from one on, and whether there are
    /// more slots.
    pub(crate) fn segments_in(
        self,
        from: usize,
        slots: usize,
    ) -> (impl Iterator<Item = SegmentView<'a>>, bool) {
        let pool: &'a Pool = self.inventory.pool();
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
        self.inventory.clients().check(client)?;
        let refuse = |why: &str| Err(Error::invalid(why).with("segment", segment.id));
        if !(1..=LENGTH_MAX).contains(&segment.length) {
            return refuse("the segment is empty or longer than 128 TiB");
        }
        let Some(end) = segment.base.checked_add(segment.length) else {
            return refuse("the segment goes beyond the end of the address space");
        };
        if let Some(slot) = self.inventory.segments().by_id(segment.id) {
            let old = self.inventory.segment(slot);
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
        segments::mount(self.inventory, now, client, segment);
        Ok(())
    }

    /// Checks a new segment against the others of its client.
    fn check_neighbors(&mut self, client: ClientId, new: &SegmentSpec, end: u64) -> Result<()> {
        let overlapping = self.inventory.segments().overlapping(client, new.base, end);
        if overlapping.iter().any(|&slot| !self.inventory.segment(slot).is_unclaimed) {
            let why = "the memory overlaps another segment of the client";
            return Err(Error::invalid(why).with("segment", new.id));
        }
        // The client has other memory at these addresses since the restart.
        self.drop_segments(&overlapping);
        let limit = self.inventory.rules().segments_per_client_max;
        if self.inventory.segments().count_of(client) >= limit {
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
        let Some(slot) = self.inventory.segments().by_id(segment) else {
            return Err(Error::new(ErrorCode::SEGMENT_NOT_FOUND, "no such segment is mounted")
                .with("segment", segment));
        };
        let found = self.inventory.segment(slot);
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
        segments::begin_grace(self.inventory, now, slot, grace);
        Ok(())
    }

    /// Handles the timer at the end of a grace.
    pub(in crate::state) fn end_grace(&mut self, id: SegmentId, incarnation: Incarnation) {
        let Some(slot) = self.inventory.segments().by_id(id) else { return };
        let segment = self.inventory.segment(slot);
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
        let left = segments::drop_all(self.inventory, slots);
        let segments = self.inventory.segments();
        let is_gone = |slot| !segments.at(slot).is_mounted();
        self.searches.forget(is_gone);
        if left.was_written {
            let copied = self.tasks.forget_segments(is_gone);
            let freed = slots.iter().flat_map(|&slot| self.writes.forget_segment(slot));
            segments::end_lost_writes(self.inventory, freed.chain(copied));
        }
        segments::free_unused(self.inventory, left);
    }
}
