//! Segments: memory that clients offer to the pool.

use std::time::Duration;

use mooncake_base::{ClientId, Error, ErrorCode, Incarnation, Moment, Result, SegmentId};
use rustc_hash::FxHashMap;

use super::{
    State,
    allocator::{Allocator, LENGTH_MAX},
    effect::Effect,
    host::host_of,
    ids::{SegmentSlot, Slot},
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
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::GracefullyUnmounting => 1,
            Self::Unmounting => 2,
            Self::Draining => 3,
            Self::Drained => 4,
        }
    }

    /// Converts a code of the log. A code of a later version becomes `Ok`.
    pub(super) fn from_code(code: u8) -> Self {
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
}

/// A segment and its allocator.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) number: SegmentNumber,
    pub(super) spec: SegmentSpec,
    pub(super) client: ClientId,
    pub(super) host: Box<str>,
    pub(super) status: SegmentStatus,
    /// The client may be gone: hidden from readers and writers.
    pub(super) is_suspect: bool,
    /// Known from the log, but not announced since the restart.
    pub(super) is_unclaimed: bool,
    pub(super) allocator: Allocator,
    /// Set if the memory came back into the pool while readers or writers from before may still
    /// use it. Later grants in the segment do not extend it.
    pub(super) quarantined_until: Option<Moment>,
    /// End of the last fence and the last write granted in the segment.
    pub(super) busy_until: Moment,
    /// End of the grace, if the segment leaves with one.
    pub(super) unmount_at: Option<Moment>,
    /// Quarantined bytes, bytes of unfinished puts and hard-pinned bytes: eviction cannot free
    /// them.
    pub(super) fenced: u64,
    pub(super) writing: u64,
    pub(super) hard_pinned: u64,
}

impl Segment {
    /// Returns whether readers may be sent to the segment.
    pub(super) fn is_readable(&self) -> bool {
        self.is_claimed() && !self.is_suspect
    }

    /// Returns whether the segment is visible in the pool.
    pub(super) fn is_claimed(&self) -> bool {
        self.is_mounted() && !self.is_unclaimed
    }

    /// Returns whether the replicas in it exist.
    pub(super) fn is_mounted(&self) -> bool {
        self.status != SegmentStatus::Unmounting
    }

    /// Returns whether it accepts new objects once its quarantine is over.
    fn is_only_quarantined(&self) -> bool {
        let is_in_use = self.status == SegmentStatus::Ok && !self.is_suspect && !self.is_unclaimed;
        is_in_use && self.quarantined_until.is_some()
    }

    /// Returns whether it will accept new objects without further calls: once it is claimed and its
    /// quarantine is over.
    pub(super) fn is_coming_back(&self) -> bool {
        let is_awaited = self.is_unclaimed || self.quarantined_until.is_some();
        self.status == SegmentStatus::Ok && !self.is_suspect && is_awaited
    }

    pub(super) fn accepts_new(&self) -> bool {
        let is_awaited = self.is_unclaimed || self.quarantined_until.is_some();
        self.status == SegmentStatus::Ok && !self.is_suspect && !is_awaited
    }

    /// Returns the unallocated bytes.
    pub(super) fn free(&self) -> u64 {
        self.allocator.length() - self.allocator.used()
    }

    /// Returns the bytes that are free or could be freed by eviction.
    pub(super) fn reclaimable(&self) -> u64 {
        self.allocator.length().saturating_sub(self.fenced + self.writing + self.hard_pinned)
    }

    fn view(&self) -> SegmentView<'_> {
        SegmentView {
            spec: &self.spec,
            client: self.client,
            status: self.status,
            used: self.allocator.used(),
        }
    }
}

/// All segments, each in a slot that stays taken until no replica refers to it.
#[derive(Debug, Default)]
pub struct Segments {
    slots: Vec<Option<Segment>>,
    by_id: FxHashMap<SegmentId, SegmentSlot>,
    by_name: FxHashMap<Box<str>, Vec<SegmentSlot>>,
    open: Vec<SegmentSlot>,
    /// Bytes of all mounted segments.
    pub(super) mounted_bytes: u64,
    next_number: u32,
    /// Segments that left: the latest incarnation, and when the last grant in their memory ends.
    gone: FxHashMap<SegmentId, (Incarnation, Moment)>,
}

impl Segments {
    /// Returns the segments that accept new objects, in the order of their hosts.
    pub fn open(&self) -> &[SegmentSlot] {
        &self.open
    }

    /// Returns the number for the next segment.
    pub(super) fn next_number(&self) -> SegmentNumber {
        SegmentNumber(self.next_number)
    }

    /// Raises the number for the next segment.
    pub(super) fn set_next_number(&mut self, number: u32) {
        self.next_number = number;
    }

    /// Returns the segments of that name.
    pub(super) fn named(&self, name: &str) -> &[SegmentSlot] {
        self.by_name.get(name).map_or(&[], Vec::as_slice)
    }

    pub(super) fn by_id(&self, id: SegmentId) -> Option<SegmentSlot> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn at(&self, slot: SegmentSlot) -> &Segment {
        self.slots[slot.index()].as_ref().expect("a copy names only segments that are kept")
    }

    pub(super) fn at_mut(&mut self, slot: SegmentSlot) -> &mut Segment {
        self.slots[slot.index()].as_mut().expect("a copy names only segments that are kept")
    }

    /// Returns the earliest end of quarantine among the segments of at least this length.
    pub(super) fn quarantine_end(&self, length: u64) -> Option<Moment> {
        let quarantined = self.mounted().filter(|(_, segment)| segment.is_only_quarantined());
        let fitting = quarantined.filter(|(_, segment)| segment.allocator.length() >= length);
        fitting.filter_map(|(_, segment)| segment.quarantined_until).min()
    }

    /// Returns the bound of all slot numbers.
    pub(super) fn slot_count(&self) -> usize {
        self.slots.len()
    }

    /// Returns the mounted segments without unclaimed ones.
    pub(super) fn claimed(&self) -> impl Iterator<Item = (SegmentSlot, &Segment)> {
        self.mounted().filter(|(_, segment)| segment.is_claimed())
    }

    /// Returns the mounted segments.
    pub(super) fn mounted(&self) -> impl Iterator<Item = (SegmentSlot, &Segment)> {
        let numbered = self.slots.iter().enumerate();
        numbered
            .filter_map(|(slot, segment)| Some((SegmentSlot::from_index(slot), segment.as_ref()?)))
            .filter(|(_, segment)| segment.is_mounted())
    }

    /// Adds a segment and returns its slot.
    pub(super) fn insert(&mut self, segment: Segment) -> SegmentSlot {
        self.next_number = self.next_number.max(segment.number.0 + 1);
        let slot = match self.slots.iter().position(Option::is_none) {
            Some(slot) => SegmentSlot::from_index(slot),
            None => {
                self.slots.push(None);
                SegmentSlot::from_index(self.slots.len() - 1)
            }
        };
        self.mounted_bytes += segment.spec.length;
        self.by_id.insert(segment.spec.id, slot);
        self.by_name.entry(segment.spec.name.as_str().into()).or_default().push(slot);
        self.slots[slot.index()] = Some(segment);
        self.refresh_open();
        slot
    }

    /// Returns the end of the last grant in this memory from before it left the pool.
    fn busy_until(
        &mut self,
        now: Moment,
        id: SegmentId,
        incarnation: Incarnation,
    ) -> Option<Moment> {
        self.gone.retain(|_, (_, busy_until)| !busy_until.has_passed(now));
        let &(earlier, busy_until) = self.gone.get(&id)?;
        // An owner that returns to an earlier incarnation has the same quarantine.
        (incarnation <= earlier).then_some(busy_until)
    }

    /// Removes the segment from the indices; the slot stays taken until
    /// [`free_slot`](Self::free_slot).
    fn close(&mut self, slot: SegmentSlot) {
        let segment = self.at_mut(slot);
        segment.status = SegmentStatus::Unmounting;
        (segment.fenced, segment.writing, segment.hard_pinned) = (0, 0, 0);
        let (id, name) = (segment.spec.id, segment.spec.name.clone());
        let length = segment.spec.length;
        let (incarnation, busy_until) = (segment.spec.incarnation, segment.busy_until);
        // The allocator is no longer needed, and may be large.
        segment.allocator = Allocator::new(0);
        self.mounted_bytes -= length;
        let gone = self.gone.entry(id).or_insert((incarnation, busy_until));
        *gone = (incarnation.max(gone.0), busy_until.max(gone.1));
        self.by_id.remove(&id);
        if let Some(named) = self.by_name.get_mut(name.as_str()) {
            named.retain(|&other| other != slot);
            if named.is_empty() {
                self.by_name.remove(name.as_str());
            }
        }
        self.refresh_open();
    }

    /// Frees the slot of a segment that no replica refers to.
    pub(super) fn free_slot(&mut self, slot: SegmentSlot) {
        self.slots[slot.index()] = None;
    }

    /// Recomputes which segments accept new objects.
    pub(super) fn refresh_open(&mut self) {
        let mut open: Vec<SegmentSlot> = self
            .mounted()
            .filter(|(_, segment)| segment.accepts_new())
            .map(|(slot, _)| slot)
            .collect();
        open.sort_by(|&a, &b| (&self.at(a).host, a).cmp(&(&self.at(b).host, b)));
        self.open = open;
    }
}

impl State {
    /// Adds the segment to the pool. A repetition with the same id, incarnation and memory changes
    /// nothing; a later incarnation drops the objects of the earlier one. Memory that left the pool
    /// and comes back accepts no objects before the fences and writes granted in it have ended.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `SEGMENT_ALREADY_EXISTS`: another client or another
    /// memory has that id. `INVALID_PARAMS`: no length, or memory that overlaps another segment of
    /// the client or the end of the address space.
    pub fn mount(&mut self, now: Moment, client: ClientId, segment: SegmentSpec) -> Result<()> {
        self.clients.check(client)?;
        let refuse = |why: &str| Err(Error::invalid(why).with("segment", segment.id));
        if !(1..=LENGTH_MAX).contains(&segment.length) {
            return refuse("the segment is empty or longer than 128 TiB");
        }
        let Some(end) = segment.base.checked_add(segment.length) else {
            return refuse("the segment goes beyond the end of the address space");
        };
        if let Some(slot) = self.segments.by_id(segment.id) {
            let old = self.segments.at(slot);
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
        let overlapping = self.segments.mounted().filter(|(_, other)| {
            other.client == client
                && other.spec.base < end
                && segment.base < other.spec.base + other.spec.length
        });
        let (unclaimed, claimed): (Vec<_>, Vec<_>) = overlapping
            .map(|(slot, other)| (slot, other.is_unclaimed))
            .partition(|&(_, is_unclaimed)| is_unclaimed);
        if !claimed.is_empty() {
            return refuse("the memory overlaps another segment of the client");
        }
        // The client has other memory at these addresses since the restart.
        for (slot, _) in unclaimed {
            self.drop_segment(slot);
        }
        let granted_until = self.segments.busy_until(now, segment.id, segment.incarnation);
        let unknown_until = self.recovery.unknown_grants_until;
        let busy_until =
            granted_until.max((!unknown_until.has_passed(now)).then_some(unknown_until));
        if let Some(busy_until) = busy_until {
            self.timers.push(busy_until, Timer::QuarantineEnd(segment.id, segment.incarnation));
        }
        let number = self.segments.next_number();
        self.effects.record(|| Effect::Mounted { number, client, spec: segment.clone() });
        self.segments.insert(Segment {
            number,
            quarantined_until: busy_until,
            busy_until: busy_until.unwrap_or(now),
            host: host_of(&segment.name),
            client,
            status: SegmentStatus::Ok,
            is_suspect: self.clients.is_suspect(client),
            is_unclaimed: false,
            unmount_at: None,
            allocator: Allocator::new(segment.length),
            fenced: 0,
            writing: 0,
            hard_pinned: 0,
            spec: segment,
        });
        Ok(())
    }

    /// Removes the segment from the pool: at once, or after a grace in which it is readable but
    /// accepts no objects. A second call may shorten the grace, but not extend it.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns it.
    pub fn unmount(
        &mut self,
        now: Moment,
        client: ClientId,
        segment: SegmentId,
        grace: Duration,
    ) -> Result<()> {
        let Some(slot) = self.segments.by_id(segment) else {
            return Err(Error::new(ErrorCode::SEGMENT_NOT_FOUND, "no such segment is mounted")
                .with("segment", segment));
        };
        let found = self.segments.at_mut(slot);
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
        self.effects.record(|| Effect::SegmentStatus { number, status, grace });
        let incarnation = found.spec.incarnation;
        self.segments.refresh_open();
        self.timers.push(now + grace, Timer::Unmount(segment, incarnation));
        Ok(())
    }

    /// Returns the segment of a [`Place`](super::Place) of the last call.
    pub fn segment(&self, segment: SegmentSlot) -> SegmentView<'_> {
        self.segments.at(segment).view()
    }

    /// Returns every mounted segment, by name.
    pub fn list_segments(&self) -> Vec<SegmentView<'_>> {
        let mut views: Vec<_> =
            self.segments.claimed().map(|(_, segment)| segment.view()).collect();
        views.sort_by(|a, b| (&a.spec.name, a.spec.id).cmp(&(&b.spec.name, b.spec.id)));
        views
    }

    /// Handles the timer at the end of a grace.
    pub(super) fn end_grace(&mut self, id: SegmentId, incarnation: Incarnation) {
        let Some(slot) = self.segments.by_id(id) else { return };
        let segment = self.segments.at(slot);
        if segment.spec.incarnation == incarnation
            && segment.status == SegmentStatus::GracefullyUnmounting
        {
            self.drop_segment(slot);
        }
    }

    /// Handles the timer at the end of the quarantine of a segment.
    pub(super) fn end_segment_quarantine(
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
            self.segments.refresh_open();
        }
    }

    /// Drops a segment and every replica in it.
    pub(super) fn drop_segment(&mut self, slot: SegmentSlot) {
        let is_used = self.segments.at(slot).allocator.used() > 0;
        let number = self.segments.at(slot).number;
        self.effects.record(|| Effect::SegmentDropped { number });
        if std::mem::take(&mut self.segments.at_mut(slot).is_unclaimed) {
            self.recovery.segments -= 1;
        }
        self.quarantine.forget(slot);
        self.segments.close(slot);
        for (tenant, bytes) in self.writes.forget_segment(slot) {
            self.tenants.uncharge(tenant, bytes);
        }
        self.drop_task_replicas(slot);
        if is_used {
            self.sweeps.begin(slot);
        } else {
            self.segments.free_slot(slot);
        }
    }
}
