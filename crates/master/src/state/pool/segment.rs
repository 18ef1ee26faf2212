//! Segments: memory that clients offer to the pool.

mod set;
mod table;

use std::time::Duration;

use mooncake_base::{ClientId, Error, ErrorCode, Incarnation, Moment, Result, SegmentId};

pub(in crate::state) use self::set::SegmentSet;
pub use self::table::Segments;
use crate::state::{
    client::ClientCalls,
    ids::SegmentSlot,
    log::effect::Effect,
    pool::{
        Pool,
        allocator::{Allocator, LENGTH_MAX},
        host::host_of,
        reserved::ReservedBytes,
    },
    timer::Timer,
};

/// Number of a segment in the log. Never reused, unlike a [`SegmentSlot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentNumber(pub u32);

/// Description of a segment by its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentSpec {
    /// Id that the owner chose.
    pub id: SegmentId,
    /// Counts how often the owner allocated the memory of this id.
    pub incarnation: Incarnation,
    /// "host:port" of the client; preferred segments are named by it.
    pub name: String,
    /// Endpoint of the transfer engine that peers open.
    pub endpoint: String,
    /// Address in the process of the owner.
    pub base: u64,
    /// Length in bytes.
    pub length: u64,
    /// "tcp" and the like; only shown.
    pub protocol: String,
}

/// Status of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SegmentStatus {
    /// In use.
    Ok,
    /// Readable, but accepts no new objects; its objects are being moved elsewhere.
    Draining,
    /// Emptied by a drain; accepts no new objects.
    Drained,
    /// Readable, but accepts no new objects; leaves the pool at the end of its grace.
    GracefullyUnmounting,
    /// Out of the pool; its replicas are still to be dropped.
    Unmounting,
}

impl SegmentStatus {
    /// Returns the code in the log.
    pub(in crate::state) fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::GracefullyUnmounting => 1,
            Self::Unmounting => 2,
            Self::Draining => 3,
            Self::Drained => 4,
        }
    }

    /// Converts a code of the log. A code of a later version becomes `Ok`.
    pub(in crate::state) fn from_code(code: u8) -> Self {
        match code {
            1 => Self::GracefullyUnmounting,
            2 => Self::Unmounting,
            3 => Self::Draining,
            4 => Self::Drained,
            _ => Self::Ok,
        }
    }
}

/// A segment as others see it.
#[derive(Debug, Clone, Copy)]
pub struct SegmentView<'a> {
    /// Description by its owner.
    pub spec: &'a SegmentSpec,
    /// Client that owns the segment.
    pub client: ClientId,
    /// Status of the segment.
    pub status: SegmentStatus,
    /// Allocated bytes: objects, unfinished puts and quarantined memory.
    pub used: u64,
    /// True while its client has lost its connection.
    pub is_suspect: bool,
}

/// A segment and its allocator.
#[derive(Debug)]
pub(in crate::state) struct Segment {
    pub(in crate::state) number: SegmentNumber,
    pub(in crate::state) spec: SegmentSpec,
    pub(in crate::state) client: ClientId,
    pub(in crate::state) host: Box<str>,
    pub(in crate::state) status: SegmentStatus,
    /// The client may be gone: hidden from readers and writers.
    pub(in crate::state) is_suspect: bool,
    /// Known from the log, but not announced since the restart.
    pub(in crate::state) is_unclaimed: bool,
    /// Whether the segment came from the log of an earlier master.
    pub(in crate::state) is_recovered: bool,
    pub(in crate::state) allocator: Allocator,
    /// Set if the memory came back into the pool while readers or writers from before may still
    /// use it. Later grants in the segment do not extend it.
    pub(in crate::state) quarantined_until: Option<Moment>,
    /// End of the last fence and the last write granted in the segment.
    pub(in crate::state) busy_until: Moment,
    /// End of the grace, if the segment leaves with one.
    pub(in crate::state) unmount_at: Option<Moment>,
    /// Whether its memory was in the pool before, and the record that it left is not on disk yet.
    pub(in crate::state) awaits_sync: bool,
    /// Index in the list of segments that accept new objects.
    pub(in crate::state) open_index: Option<usize>,
    pub(in crate::state::pool) reserved: ReservedBytes,
}

impl Segment {
    /// Creates an empty segment that accepts objects.
    pub(in crate::state) fn new(
        number: SegmentNumber,
        client: ClientId,
        spec: SegmentSpec,
        busy_until: Moment,
    ) -> Self {
        Self {
            number,
            client,
            host: host_of(&spec.name),
            status: SegmentStatus::Ok,
            is_suspect: false,
            is_unclaimed: false,
            is_recovered: false,
            allocator: Allocator::new(spec.length),
            quarantined_until: None,
            busy_until,
            unmount_at: None,
            awaits_sync: false,
            open_index: None,
            reserved: ReservedBytes::default(),
            spec,
        }
    }

    /// Records a grant in the segment that lasts until then.
    pub(in crate::state) fn extend_busy(&mut self, until: Moment) {
        self.busy_until = self.busy_until.max(until);
    }

    /// Returns whether readers may be sent to the segment.
    pub(in crate::state) fn is_readable(&self) -> bool {
        self.is_claimed() && !self.is_suspect
    }

    /// Returns whether the segment is visible in the pool.
    pub(in crate::state) fn is_claimed(&self) -> bool {
        self.is_mounted() && !self.is_unclaimed
    }

    /// Returns whether the replicas in it exist.
    pub(in crate::state) fn is_mounted(&self) -> bool {
        self.status != SegmentStatus::Unmounting
    }

    /// Returns whether it accepts new objects once its quarantine is over.
    fn is_only_quarantined(&self) -> bool {
        let is_in_use = self.status == SegmentStatus::Ok && !self.is_suspect && !self.is_unclaimed;
        is_in_use && self.quarantined_until.is_some()
    }

    /// Returns whether it will accept new objects without further calls: once it is claimed and its
    /// quarantine is over.
    pub(in crate::state) fn is_coming_back(&self) -> bool {
        self.status == SegmentStatus::Ok && !self.is_suspect && self.is_awaited()
    }

    pub(in crate::state) fn accepts_new(&self) -> bool {
        self.status == SegmentStatus::Ok && !self.is_suspect && !self.is_awaited()
    }

    fn is_awaited(&self) -> bool {
        self.is_unclaimed || self.quarantined_until.is_some() || self.awaits_sync
    }

    /// Returns the unallocated bytes.
    pub(in crate::state) fn free(&self) -> u64 {
        self.allocator.length() - self.allocator.used()
    }

    /// Returns the bytes that are free or could be freed by eviction.
    pub(in crate::state) fn reclaimable(&self) -> u64 {
        self.allocator.length().saturating_sub(self.reserved.sum())
    }

    pub(in crate::state) fn view(&self) -> SegmentView<'_> {
        SegmentView {
            spec: &self.spec,
            client: self.client,
            status: self.status,
            used: self.allocator.used(),
            is_suspect: self.is_suspect,
        }
    }
}

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
            for (tenant, bytes) in freed.chain(self.tasks.forget_segments(is_gone)) {
                self.inventory.catalog.tenants.uncharge(tenant, bytes);
            }
        }
        unused.into_iter().for_each(|slot| self.inventory.pool.segments.free_slot(slot));
    }
}

impl Pool {
    /// Returns the segment of a [`Place`](super::Place) of the last call.
    pub(in crate::state) fn segment(&self, segment: SegmentSlot) -> SegmentView<'_> {
        self.segments.at(segment).view()
    }

    /// Returns every mounted segment, by name.
    pub(in crate::state) fn list_segments(&self) -> Vec<SegmentView<'_>> {
        let mut views: Vec<_> =
            self.segments.claimed().map(|(_, segment)| segment.view()).collect();
        views.sort_by(|a, b| (&a.spec.name, a.spec.id).cmp(&(&b.spec.name, b.spec.id)));
        views
    }

    /// Handles the timer at the end of the quarantine of a segment.
    pub(in crate::state) fn end_segment_quarantine(
        &mut self,
        now: Moment,
        id: SegmentId,
        incarnation: Incarnation,
    ) {
        let Some(slot) = self.segments.by_id(id) else { return };
        let segment = self.segments.at_mut(slot);
        let is_over = segment.quarantined_until.is_some_and(|end| end.has_passed(now));
        if segment.spec.incarnation == incarnation && is_over {
            segment.quarantined_until = None;
            self.segments.refresh(slot);
        }
    }
}
