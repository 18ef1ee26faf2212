//! The segments that a client has mounted, with their memory.

use std::path::PathBuf;

use mooncake_base::{Moment, Result, SegmentId, sync::Mutex};
use mooncake_proto::v1;
use mooncake_transfer_engine::{FileMemory, LocalRange, MemoryHold, SharedMemory};

/// The mounted segments of one client.
#[derive(Debug, Default)]
pub(crate) struct Segments(pub(super) Mutex<Vec<MountedSegment>>);

/// A mounted segment: its description at the master, and the memory.
#[derive(Debug)]
pub(crate) struct MountedSegment {
    pub(super) segment: v1::Segment,
    pub(super) memory: Memory,
    /// End of the grace period, if the segment is being unmounted.
    pub(super) expires_at: Option<Moment>,
}

#[derive(Debug)]
pub(super) enum Memory {
    /// Memory allocated by the engine.
    Own(SharedMemory),
    /// A mapped part of a file.
    File(FileMemory, FilePart),
}

/// The location of a mapped part of a file.
#[derive(Debug, Clone)]
pub(super) struct FilePart {
    pub(super) path: PathBuf,
    pub(super) offset: u64,
    pub(super) location: String,
}

/// A part of an own segment, whose memory stays mapped while this lives: even if the segment is
/// unmounted or replaced, or the client is closed.
#[derive(Debug)]
pub(crate) struct HeldPart {
    range: LocalRange,
    _memory: MemoryHold,
}

impl HeldPart {
    /// The part as the local side of a transfer that returns before this is dropped.
    pub(crate) const fn range(&self) -> LocalRange {
        self.range
    }
}

impl Segments {
    /// Returns the descriptions of all segments.
    pub(crate) fn all(&self) -> Vec<v1::Segment> {
        self.0.lock().iter().map(|mounted| mounted.segment.clone()).collect()
    }

    /// Removes and returns the segments whose grace period is over.
    pub(super) fn take_expired(&self, now: Moment) -> Vec<MountedSegment> {
        let is_over = |mounted: &mut MountedSegment| {
            mounted.expires_at.is_some_and(|end| end.has_passed(now))
        };
        self.0.lock().extract_if(.., is_over).collect()
    }

    pub(super) fn set_expiry(&self, id: SegmentId, end: Moment) {
        let mut segments = self.0.lock();
        if let Some(mounted) = segments.iter_mut().find(|mounted| mounted.is(id)) {
            mounted.expires_at = Some(mounted.expires_at.map_or(end, |earlier| earlier.min(end)));
        }
    }

    /// Removes and returns all segments.
    pub(crate) fn take_all(&self) -> Vec<MountedSegment> {
        self.swap_matching(&|_| true, Vec::new())
    }

    pub(super) fn swap_matching(
        &self,
        is_match: &impl Fn(&MountedSegment) -> bool,
        by: Vec<MountedSegment>,
    ) -> Vec<MountedSegment> {
        let mut segments = self.0.lock();
        let replaced = segments.extract_if(.., |mounted| is_match(mounted)).collect();
        segments.extend(by);
        replaced
    }

    /// Returns the length and the file part (if any) of each matching segment that is not being
    /// unmounted.
    pub(super) fn backings(
        &self,
        is_match: &impl Fn(&MountedSegment) -> bool,
    ) -> Vec<(u64, Option<FilePart>)> {
        let segments = self.0.lock();
        let staying = segments.iter().filter(|mounted| mounted.expires_at.is_none());
        staying
            .filter(|mounted| is_match(mounted))
            .map(|mounted| match &mounted.memory {
                Memory::Own(_) => (mounted.segment.length, None),
                Memory::File(_, part) => (mounted.segment.length, Some(part.clone())),
            })
            .collect()
    }

    /// Returns the memory of this process that is lent; parts of files do not count.
    pub(super) fn own_bytes(&self) -> u64 {
        let own = |(bytes, part): (u64, Option<FilePart>)| part.map_or(bytes, |_| 0);
        self.backings(&|_| true).into_iter().map(own).fold(0, u64::saturating_add)
    }

    /// Returns the number of segments.
    pub(crate) fn count(&self) -> usize {
        self.0.lock().len()
    }

    /// Returns the ids of all segments.
    pub(crate) fn ids(&self) -> Vec<SegmentId> {
        self.0.lock().iter().filter_map(|m| SegmentId::from_bytes(&m.segment.id)).collect()
    }

    /// Holds a part of an own segment; `None` if the client has no such segment. The address comes
    /// from the client's own table, never from a message.
    ///
    /// # Errors
    /// The part is not inside the segment.
    pub(crate) fn hold(&self, id: SegmentId, offset: u64, length: u64) -> Option<Result<HeldPart>> {
        let segments = self.0.lock();
        let mounted = segments.iter().find(|mounted| mounted.is(id))?;
        let memory = match &mounted.memory {
            Memory::Own(memory) => memory.hold(),
            Memory::File(memory, _) => memory.hold(),
        };
        drop(segments);
        let range = memory.range(offset, length).map_err(|error| error.with("segment", id));
        Some(range.map(|range| HeldPart { range, _memory: memory }))
    }

    pub(super) fn take(&self, id: SegmentId) -> Option<MountedSegment> {
        let mut segments = self.0.lock();
        let at = segments.iter().position(|mounted| mounted.is(id))?;
        Some(segments.swap_remove(at))
    }
}

impl MountedSegment {
    fn is(&self, id: SegmentId) -> bool {
        SegmentId::from_bytes(&self.segment.id) == Some(id)
    }
}
