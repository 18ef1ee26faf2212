//! Segments: memory that clients lend to the pool.

use crate::state::ids::{SegmentSlot, Slot};
use std::time::Duration;

use mooncake_base::{ClientId, Error, ErrorCode, Incarnation, Moment, Result, SegmentId};
use rustc_hash::FxHashMap;

use super::{
    State,
    allocator::{Allocator, LENGTH_MAX},
    effect::Effect,
    host::host_of,
    timer::Timer,
};

/// What the log calls a segment. Never used again, unlike a [`SegmentSlot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentNumber(pub u32);

/// What the owner of a segment says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentSpec {
    /// Made by the owner.
    pub id: SegmentId,
    /// How often the owner made the memory anew under this id.
    pub incarnation: Incarnation,
    /// "host:port" of its client; what preferences name.
    pub name: String,
    /// What a peer opens in its transfer engine.
    pub endpoint: String,
    /// Address in the owner's memory.
    pub base: u64,
    /// Bytes.
    pub length: u64,
    /// "tcp" and the like; carried for those who show it.
    pub protocol: String,
}

/// Where a segment stands in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SegmentStatus {
    /// In use.
    Ok,
    /// Readable, but takes no new objects; those in it are being moved elsewhere.
    Draining,
    /// All of it was moved elsewhere; it takes nothing new.
    Drained,
    /// Readable, but takes no new objects; goes at the end of its grace.
    GracefullyUnmounting,
    /// Gone; the objects that were in it are being forgotten.
    Unmounting,
}

impl SegmentStatus {
    /// How the log writes it.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::GracefullyUnmounting => 1,
            Self::Unmounting => 2,
            Self::Draining => 3,
            Self::Drained => 4,
        }
    }

    /// What the log wrote so; in use, if a later version wrote it.
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

/// A segment as others may see it.
#[derive(Debug, Clone, Copy)]
pub struct SegmentView<'a> {
    /// What its owner says of it.
    pub spec: &'a SegmentSpec,
    /// Its owner.
    pub client: ClientId,
    /// Where it stands in its life.
    pub status: SegmentStatus,
    /// Bytes given away: objects, objects being written, and memory under fences.
    pub used: u64,
}

/// One segment, and what is in it.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) number: SegmentNumber,
    pub(super) spec: SegmentSpec,
    pub(super) client: ClientId,
    pub(super) host: Box<str>,
    pub(super) status: SegmentStatus,
    /// Its client may be gone: not named to readers, not given to writers.
    pub(super) is_suspect: bool,
    /// Known from the log; its owner has not announced it since.
    pub(super) is_unclaimed: bool,
    pub(super) allocator: Allocator,
    /// Taken back into the pool while somebody may still read or write what lay in it before: until
    /// then. What is granted in it meanwhile makes that no longer.
    pub(super) quarantined_until: Option<Moment>,
    /// When the last fence and the last write that were granted in it end.
    pub(super) busy_until: Moment,
    /// When it goes, if it does so with a grace.
    pub(super) unmount_at: Option<Moment>,
    /// Bytes under fences, of puts under way, and of hard-pinned objects: all that eviction
    /// cannot win.
    pub(super) fenced: u64,
    pub(super) writing: u64,
    pub(super) hard_pinned: u64,
}

impl Segment {
    /// Whether copies in it may be named to readers.
    pub(super) fn is_readable(&self) -> bool {
        self.is_claimed() && !self.is_suspect
    }

    /// Whether it is in the pool for others to see.
    pub(super) fn is_claimed(&self) -> bool {
        self.is_mounted() && !self.is_unclaimed
    }

    /// Whether copies in it are still what they were.
    pub(super) fn is_mounted(&self) -> bool {
        self.status != SegmentStatus::Unmounting
    }

    /// Whether it takes new objects as soon as it has rested.
    fn is_only_quarantined(&self) -> bool {
        let is_in_use = self.status == SegmentStatus::Ok && !self.is_suspect && !self.is_unclaimed;
        is_in_use && self.quarantined_until.is_some()
    }

    /// Whether it will take new objects by itself: once its owner has announced it after a restart,
    /// and it has rested.
    pub(super) fn is_coming_back(&self) -> bool {
        let is_awaited = self.is_unclaimed || self.quarantined_until.is_some();
        self.status == SegmentStatus::Ok && !self.is_suspect && is_awaited
    }

    pub(super) fn accepts_new(&self) -> bool {
        let is_awaited = self.is_unclaimed || self.quarantined_until.is_some();
        self.status == SegmentStatus::Ok && !self.is_suspect && !is_awaited
    }

    /// Bytes nobody has.
    pub(super) fn free(&self) -> u64 {
        self.allocator.length() - self.allocator.used()
    }

    /// Bytes that are free or could be by evicting everything that may ever be evicted.
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

/// All segments, each under a number that stays until no copy names it any more.
#[derive(Debug, Default)]
pub struct Segments {
    slots: Vec<Option<Segment>>,
    by_id: FxHashMap<SegmentId, SegmentSlot>,
    by_name: FxHashMap<Box<str>, Vec<SegmentSlot>>,
    open: Vec<SegmentSlot>,
    /// Bytes of all that are mounted.
    pub(super) mounted_bytes: u64,
    next_number: u32,
    /// Segments that went, the latest making of each, and when all its memory is quiet.
    gone: FxHashMap<SegmentId, (Incarnation, Moment)>,
}

impl Segments {
    /// Those that take new objects, in the order of their hosts.
    pub fn open(&self) -> &[SegmentSlot] {
        &self.open
    }

    /// The number of the next segment.
    pub(super) fn next_number(&self) -> SegmentNumber {
        SegmentNumber(self.next_number)
    }

    /// No lower number may be used again.
    pub(super) fn set_next_number(&mut self, number: u32) {
        self.next_number = number;
    }

    /// Those of that name.
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

    /// When the first of those that only rest, and hold so much, takes new objects.
    pub(super) fn quarantine_end(&self, length: u64) -> Option<Moment> {
        let resting = self.mounted().filter(|(_, segment)| segment.is_only_quarantined());
        let fitting = resting.filter(|(_, segment)| segment.allocator.length() >= length);
        fitting.filter_map(|(_, segment)| segment.quarantined_until).min()
    }

    /// Every number is below this.
    pub(super) fn slot_count(&self) -> usize {
        self.slots.len()
    }

    /// The mounted ones, but for those that nobody has announced since a restart.
    pub(super) fn claimed(&self) -> impl Iterator<Item = (SegmentSlot, &Segment)> {
        self.mounted().filter(|(_, segment)| segment.is_claimed())
    }

    /// The mounted ones.
    pub(super) fn mounted(&self) -> impl Iterator<Item = (SegmentSlot, &Segment)> {
        let numbered = self.slots.iter().enumerate();
        numbered
            .filter_map(|(slot, segment)| Some((SegmentSlot::from_index(slot), segment.as_ref()?)))
            .filter(|(_, segment)| segment.is_mounted())
    }

    /// Its number in the books.
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

    /// Until when somebody may still use what was granted in that memory before it went.
    fn busy_until(
        &mut self,
        now: Moment,
        id: SegmentId,
        incarnation: Incarnation,
    ) -> Option<Moment> {
        self.gone.retain(|_, (_, quiet)| !quiet.has_passed(now));
        let &(earlier, quiet) = self.gone.get(&id)?;
        // An owner that goes back to an earlier making of the memory has it rest as well.
        (incarnation <= earlier).then_some(quiet)
    }

    /// Nothing finds it any more; its number stays taken until [free_slot](free_slot).
    fn close(&mut self, slot: SegmentSlot) {
        let segment = self.at_mut(slot);
        segment.status = SegmentStatus::Unmounting;
        (segment.fenced, segment.writing, segment.hard_pinned) = (0, 0, 0);
        let (id, name) = (segment.spec.id, segment.spec.name.clone());
        let length = segment.spec.length;
        let (incarnation, quiet) = (segment.spec.incarnation, segment.busy_until);
        // Its books are of no more use, and may be large.
        segment.allocator = Allocator::new(0);
        self.mounted_bytes -= length;
        let gone = self.gone.entry(id).or_insert((incarnation, quiet));
        *gone = (incarnation.max(gone.0), quiet.max(gone.1));
        self.by_id.remove(&id);
        if let Some(named) = self.by_name.get_mut(name.as_str()) {
            named.retain(|&other| other != slot);
            if named.is_empty() {
                self.by_name.remove(name.as_str());
            }
        }
        self.refresh_open();
    }

    /// No copy names it any more.
    pub(super) fn free_slot(&mut self, slot: SegmentSlot) {
        self.slots[slot.index()] = None;
    }

    /// Looks again which segments take new objects.
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
    /// Takes the segment into the pool. Again with the same identity, incarnation and memory:
    /// nothing changes. With a later incarnation: what lay in the earlier one is gone. Memory that
    /// left the pool and comes back takes nothing new before the fences and writes that were
    /// granted in it have ended.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `SEGMENT_ALREADY_EXISTS`: another client or another
    /// memory has that id. `INVALID_PARAMS`: no length, or memory that overlaps another segment
    /// of the client or the end of the address space.
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
        let (dormant, awake): (Vec<_>, Vec<_>) = overlapping
            .map(|(slot, other)| (slot, other.is_unclaimed))
            .partition(|&(_, is_unclaimed)| is_unclaimed);
        if !awake.is_empty() {
            return refuse("the memory overlaps another segment of the client");
        }
        // Of what the client lent before the restart, it has other memory there now.
        for (slot, _) in dormant {
            self.drop_segment(slot);
        }
        let known = self.segments.busy_until(now, segment.id, segment.incarnation);
        let strange = self.recovery.unknown_grants_until;
        let quiet = known.max((!strange.has_passed(now)).then_some(strange));
        if let Some(quiet) = quiet {
            self.timers.push(quiet, Timer::QuarantineEnd(segment.id, segment.incarnation));
        }
        let number = self.segments.next_number();
        self.effects.record(|| Effect::Mounted { number, client, spec: segment.clone() });
        self.segments.insert(Segment {
            number,
            quarantined_until: quiet,
            busy_until: quiet.unwrap_or(now),
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

    /// Takes the segment out of the pool: at once, or after a grace in which it can be read but
    /// takes nothing new. A second call may shorten the grace, not lengthen it.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if it is somebody else's.
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
            return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, "the segment is somebody else's")
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

    /// What is known of a segment named by a [`Place`](super::Place) of a call just made.
    pub fn segment(&self, segment: SegmentSlot) -> SegmentView<'_> {
        self.segments.at(segment).view()
    }

    /// Every mounted segment, in the order of their names.
    pub fn list_segments(&self) -> Vec<SegmentView<'_>> {
        let mut views: Vec<_> =
            self.segments.claimed().map(|(_, segment)| segment.view()).collect();
        views.sort_by(|a, b| (&a.spec.name, a.spec.id).cmp(&(&b.spec.name, b.spec.id)));
        views
    }

    /// The timer of a segment rang: its grace is over.
    pub(super) fn end_grace(&mut self, id: SegmentId, incarnation: Incarnation) {
        let Some(slot) = self.segments.by_id(id) else { return };
        let segment = self.segments.at(slot);
        if segment.spec.incarnation == incarnation
            && segment.status == SegmentStatus::GracefullyUnmounting
        {
            self.drop_segment(slot);
        }
    }

    /// The timer of a segment rang: what was granted in its memory before has ended.
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

    /// The memory is gone, and with it every copy in it.
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
