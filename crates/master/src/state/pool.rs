//! The pool: segments, their free memory, and memory that must not be used again yet.

pub(in crate::state) mod allocation;
pub mod allocator;
pub(in crate::state) mod disks;
pub(in crate::state) mod freed;
pub(in crate::state) mod host;
pub(in crate::state) mod placement;
pub(in crate::state) mod prepared;
pub(in crate::state) mod quarantine;
pub(in crate::state) mod request;
pub(in crate::state) mod reserved;
pub(in crate::state) mod segment;
pub(in crate::state) mod unsynced;

use crate::state::{
    ids::SegmentSlot,
    pool::{
        disks::Disks, placement::AllocationPolicy, prepared::Preparation, quarantine::Quarantine,
        segment::Segments, unsynced::Unsynced,
    },
};

/// Segments and their memory. Each block of a segment is free, or belongs to one of these: an object,
/// an unfinished put, an attempt of a task, a search for memory, the quarantine, the blocks that wait
/// for the log, or those that are prepared for puts.
#[derive(Debug)]
pub(in crate::state) struct Pool {
    pub(in crate::state) segments: Segments,
    pub(in crate::state) disks: Disks,
    pub(in crate::state) placement: Box<dyn AllocationPolicy>,
    /// Candidate segments of one put; the buffer is reused.
    pub(in crate::state) candidates: Vec<SegmentSlot>,
    pub(in crate::state) quarantine: Quarantine,
    pub(in crate::state) unsynced: Unsynced,
    pub(in crate::state) preparation: Preparation,
}

impl Pool {
    pub(in crate::state) fn new(placement: Box<dyn AllocationPolicy>) -> Self {
        Self {
            segments: Segments::default(),
            disks: Disks::default(),
            placement,
            candidates: Vec::new(),
            quarantine: Quarantine::default(),
            unsynced: Unsynced::default(),
            preparation: Preparation::default(),
        }
    }
}
