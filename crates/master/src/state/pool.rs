//! The pool: segments, their free memory, and memory that must not be used again yet.

pub(super) mod allocation;
pub mod allocator;
pub(super) mod host;
pub(super) mod placement;
pub(super) mod quarantine;
pub(super) mod reserved;
pub(super) mod segment;
pub(super) mod unsynced;

use self::{
    placement::AllocationPolicy, quarantine::Quarantine, segment::Segments, unsynced::Unsynced,
};
use super::{ids::SegmentSlot, reclaim::Capture};

/// Segments and their memory. Each block of a segment is free, or belongs to one of these: an object,
/// an unfinished put, an attempt of a task, a search for memory, the quarantine, or the blocks that
/// wait for the log.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) segments: Segments,
    pub(super) placement: Box<dyn AllocationPolicy>,
    /// Candidate segments of one put; the buffer is reused.
    pub(super) candidates: Vec<SegmentSlot>,
    pub(super) quarantine: Quarantine,
    pub(super) unsynced: Unsynced,
    /// Set while a window is evicted.
    pub(super) capture: Option<Capture>,
}

impl Pool {
    pub(super) fn new(placement: Box<dyn AllocationPolicy>) -> Self {
        Self {
            segments: Segments::default(),
            placement,
            candidates: Vec::new(),
            quarantine: Quarantine::default(),
            unsynced: Unsynced::default(),
            capture: None,
        }
    }
}
