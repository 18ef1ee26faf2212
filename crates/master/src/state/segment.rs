//! Segments: memory that clients lend to the pool.

use mooncake_base::{ClientId, Incarnation, SegmentId};

/// A segment within the state; good only until the state is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentRef(pub(super) u32);

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
    /// Readable, but takes no new objects; goes at the end of its grace.
    GracefullyUnmounting,
    /// Gone; the objects that were in it are being forgotten.
    Unmounting,
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
