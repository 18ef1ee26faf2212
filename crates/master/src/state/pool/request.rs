//! Requests for memory: how much, and in which segments.

use crate::state::{
    ids::{ObjectSlot, SegmentSlot},
    options::PutOptions,
    pool::segment::SegmentSet,
};

/// An allocation of replicas.
#[derive(Debug)]
pub(in crate::state) struct AllocRequest<'a> {
    pub(in crate::state) length: u64,
    pub(in crate::state) replicas: u32,
    /// Segments to use.
    pub(in crate::state) filter: SegmentFilter<'a>,
    /// The writer's host; empty if unknown.
    pub(in crate::state) host: &'a str,
    pub(in crate::state) options: &'a PutOptions,
    /// The object that is replaced; never evicted for this request.
    pub(in crate::state) spared: Option<ObjectSlot>,
}

/// Filter over the segments that accept objects.
#[derive(Debug, Clone, Copy)]
pub(in crate::state) enum SegmentFilter<'a> {
    /// All segments.
    All,
    /// These segments.
    Only(&'a [SegmentSlot]),
    /// All segments but these.
    Except(&'a [SegmentSlot]),
    /// All segments but those of peers that the writer could not reach.
    Avoiding(&'a SegmentSet),
}

impl SegmentFilter<'_> {
    pub(in crate::state) fn admits(&self, segment: SegmentSlot) -> bool {
        match self {
            Self::All => true,
            Self::Only(these) => these.contains(&segment),
            Self::Except(these) => !these.contains(&segment),
            Self::Avoiding(these) => !these.contains(segment),
        }
    }
}
