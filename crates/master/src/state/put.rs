//! Writing: start allocates, the client writes, end publishes or revoke gives back.

use std::time::Duration;

use mooncake_base::{ObjectKey, ReplicaId, Version};

use super::segment::SegmentRef;

/// What becomes of the soft pin of an object that is put.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SoftPin {
    /// The pin of the object that is replaced stays; a new object has none.
    #[default]
    Preserve,
    /// Pinned for that long after the last access; `None`: as long as the rules say.
    Enable(Option<Duration>),
    /// Not pinned.
    Disable,
}

/// How an object is to be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutOptions {
    /// Wished copies, at least 1. Fewer are made where there are not enough segments.
    pub replicas: u32,
    /// What becomes of the soft pin.
    pub soft_pin: SoftPin,
    /// Never evict it.
    pub is_hard_pinned: bool,
    /// Names of segments to try first, in this order. Unknown names are passed over.
    pub preferred_segments: Vec<String>,
    /// Try the segments of the writer's own host before others (after the preferred ones).
    pub is_same_node_preferred: bool,
    /// Kept and handed back.
    pub data_type: u8,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self {
            replicas: 1,
            soft_pin: SoftPin::Preserve,
            is_hard_pinned: false,
            preferred_segments: Vec::new(),
            is_same_node_preferred: false,
            data_type: 0,
        }
    }
}

/// One object to be put.
#[derive(Debug)]
pub struct Put<'a> {
    /// Its key.
    pub key: ObjectKey,
    /// Its length, at least 1 byte.
    pub length: u64,
    /// Objects of one group are evicted together or not at all; empty: no group.
    pub group: &'a [u8],
    /// How it is to be kept.
    pub options: &'a PutOptions,
    /// Replace an existing object (upsert) instead of refusing.
    pub is_replacing: bool,
}

/// A put that may be written now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The life of the object that this put would begin.
    pub version: Version,
    /// Where to write, one place a copy, at least one.
    pub places: Vec<Place>,
}

/// Where one copy lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The segment; ask [`State::segment`](super::State::segment) before the state is changed.
    pub segment: SegmentRef,
    /// From the segment's base.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The copy.
    pub replica: ReplicaId,
}
