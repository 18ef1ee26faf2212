//! Segments: memory that clients offer to the pool.

mod set;
mod table;

use mooncake_base::{ClientId, Incarnation, Moment, SegmentId};

pub(in crate::state) use self::set::SegmentSet;
pub use self::table::Segments;
use crate::state::{
    ids::SegmentSlot,
    pool::{
        Pool, allocator::Allocator, host::host_of, prepared::PreparedBlocks,
        reserved::ReservedBytes,
    },
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
    pub(in crate::state) reserved: ReservedBytes,
    pub(in crate::state) prepared: PreparedBlocks,
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
            prepared: PreparedBlocks::default(),
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

    /// Returns whether its replicas may take the place of others: it can be read and does not leave.
    pub(in crate::state) fn may_replace(&self) -> bool {
        self.is_readable() && self.status == SegmentStatus::Ok
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
        debug_assert!(
            self.reserved.sum() <= self.allocator.used(),
            "reserved bytes are allocated, and each for one reason"
        );
        self.allocator.length().saturating_sub(self.reserved.sum())
    }

    /// Returns the bytes that eviction cannot free.
    pub(in crate::state) fn reserved(&self) -> ReservedBytes {
        self.reserved
    }

    pub(in crate::state) fn view(&self) -> SegmentView<'_> {
        SegmentView {
            spec: &self.spec,
            client: self.client,
            status: self.status,
            used: self.allocator.used() - self.reserved.prepared,
            is_suspect: self.is_suspect,
        }
    }
}

impl Pool {
    /// Returns the segment of a [`Place`](crate::state::Place) of the last call.
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
