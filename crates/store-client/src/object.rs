//! Objects as callers name, describe and find them.

use std::{sync::Arc, time::Duration};

use mooncake_base::{Error, KeyRef, Moment, ObjectKey, ReplicaId, SegmentId, Version};
use mooncake_transfer_engine::LocalRange;
use smallvec::SmallVec;

use crate::client::ReadFences;

/// An object to be put: its name and the memory that holds its bytes, in order.
#[derive(Debug, Clone, Copy)]
pub struct PutItem<'a> {
    /// The name.
    pub key: KeyRef<'a>,
    /// The bytes. Their lengths add up to the object's length, which is at least 1.
    pub parts: &'a [LocalRange],
}

/// How objects are put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutOptions {
    /// How many copies, each on another segment. Default: 1.
    pub replicas: u32,
    /// An object that exists is replaced instead of kept. Default: no.
    pub is_upsert: bool,
    /// Whether the objects are spared by eviction for a while. Default: preserve.
    pub soft_pin: SoftPin,
    /// How long a soft pin lasts; `None` (the default): as long as the master says.
    pub soft_pin_ttl: Option<Duration>,
    /// The objects are never evicted. Default: no.
    pub is_hard_pinned: bool,
    /// Names of segments to take first. Default: none.
    pub preferred_segments: Vec<String>,
    /// This client's own segments are taken first. Default: no.
    pub prefers_own_segments: bool,
    /// What the bytes are, as a number that only callers understand. Default: 0.
    pub data_type: u32,
    /// The group of each item, kept or evicted as a whole; empty (the default): no groups.
    pub groups: Vec<String>,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self {
            replicas: 1,
            is_upsert: false,
            soft_pin: SoftPin::Preserve,
            soft_pin_ttl: None,
            is_hard_pinned: false,
            preferred_segments: Vec::new(),
            prefers_own_segments: false,
            data_type: 0,
            groups: Vec::new(),
        }
    }
}

/// What a put does to the soft pin of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SoftPin {
    /// Leaves it as it was.
    #[default]
    Preserve,
    /// Sets it.
    Enable,
    /// Takes it away.
    Disable,
}

/// What became of a put that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// The bytes are readable now, in so many copies.
    Stored {
        /// At least 1; fewer than asked for if some could not be written.
        replicas: u32,
    },
    /// An object of that name was there and was kept.
    Existed,
}

/// A segment of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its id, made by its owner.
    pub id: SegmentId,
    /// `host:port` of its client.
    pub name: String,
    /// What a transfer engine opens to reach it.
    pub endpoint: String,
    /// First byte, as an address of its owner.
    pub base: u64,
    /// Length in bytes.
    pub length: u64,
    /// `tcp`, `rdma`, …
    pub protocol: String,
}

/// A segment with what the master knows of its use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentUse {
    /// The segment.
    pub segment: SegmentInfo,
    /// Bytes that objects hold.
    pub used: u64,
    /// Whether new objects may be put there.
    pub takes_objects: bool,
}

/// Where one copy of an object lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// In which segment.
    pub segment: Arc<SegmentInfo>,
    /// From the segment's first byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Which copy it is.
    pub replica: ReplicaId,
}

impl Place {
    /// The first byte, as an address of the owner.
    pub(crate) fn address(&self) -> u64 {
        // Both were checked against the segment's length when the answer was read.
        self.segment.base + self.offset
    }
}

/// An object that was found: where its copies are, and until when that can be relied on.
#[derive(Debug, Clone)]
pub struct Located {
    pub(crate) key: ObjectKey,
    pub(crate) version: Version,
    pub(crate) length: u64,
    pub(crate) places: SmallVec<[Place; 1]>,
    pub(crate) checksum: Option<u64>,
    /// When the master was asked.
    pub(crate) asked: Moment,
    /// Bytes that were read before this moment count without asking again.
    pub(crate) fence: Moment,
    /// Handed back to the master when nobody has the object to read any more.
    pub(crate) _fences: Option<Arc<ReadFences>>,
}

impl Located {
    /// Its name.
    pub fn key(&self) -> &ObjectKey {
        &self.key
    }

    /// Which life of the object this is.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Its copies.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// The checksum of its bytes, if its writer gave one.
    pub fn checksum(&self) -> Option<u64> {
        self.checksum
    }
}

/// A read: which bytes of a located object go where.
#[derive(Debug, Clone, Copy)]
pub struct Read<'a> {
    /// The object.
    pub located: &'a Located,
    /// Which of its bytes.
    pub span: Span<'a>,
    /// The memory they go into, filled in order. It may be larger than the span.
    pub into: &'a [LocalRange],
}

impl<'a> Read<'a> {
    /// The whole object.
    pub fn whole(located: &'a Located, into: &'a [LocalRange]) -> Self {
        Self { located, span: Span::Whole, into }
    }

    /// So many bytes from an offset on.
    pub fn range(located: &'a Located, offset: u64, length: u64, into: &'a [LocalRange]) -> Self {
        Self { located, span: Span::Range { offset, length }, into }
    }

    /// From each of the offsets as many bytes as its destination is long.
    pub fn scattered(located: &'a Located, offsets: &'a [u64], into: &'a [LocalRange]) -> Self {
        Self { located, span: Span::Scattered(offsets), into }
    }
}

/// Which bytes of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span<'a> {
    /// All of them.
    Whole,
    /// A part.
    Range {
        /// The first byte.
        offset: u64,
        /// How many; 0 reads nothing and succeeds.
        length: u64,
    },
    /// Many parts: the first byte of each. As many as there are destinations, each of which is
    /// filled.
    Scattered(&'a [u64]),
}

/// Parts of one object, and where each of them goes or comes from.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    /// The object.
    pub key: &'a ObjectKey,
    /// The first byte of each part, within the object.
    pub offsets: &'a [u64],
    /// The memory of each part, as long as it.
    pub memory: &'a [LocalRange],
}

/// Where the memory of the caller may lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BufferScope {
    /// Anywhere in the process.
    #[default]
    Anywhere,
    /// Only in ranges that were registered with the engine.
    Registered,
}

/// Of many objects whether each is there and complete.
#[derive(Debug, Clone)]
pub struct Presence {
    /// For each key, in their order; `None`: unknown.
    pub found: Vec<Option<bool>>,
    /// Why the first of those is unknown that are.
    pub failure: Option<Error>,
}

/// What is known of an object without locating it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectStatus {
    /// Somebody is writing it.
    Writing,
    /// It can be read.
    Complete {
        /// Its length in bytes.
        length: u64,
    },
}

/// Which objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// All of the tenant.
    All,
    /// Those whose key has a match of the expression anywhere.
    Regex(String),
    /// Those whose key begins so.
    Prefix(Vec<u8>),
}

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectSummary {
    /// Its name.
    pub key: ObjectKey,
    /// Its length in bytes.
    pub length: u64,
    /// Whether it can be read.
    pub is_complete: bool,
    /// How many copies it has.
    pub replicas: u32,
}

/// One page of a listing, in the byte order of the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectPage {
    /// The objects.
    pub objects: Vec<ObjectSummary>,
    /// Nothing comes after this page.
    pub is_last: bool,
}

/// What the master says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MasterStatus {
    /// Its version.
    pub version: String,
    /// How long it has been up.
    pub uptime: Duration,
    /// Objects it knows.
    pub keys: u64,
    /// Clients it knows.
    pub clients: u64,
    /// Bytes of all segments.
    pub capacity: u64,
    /// Bytes that objects hold.
    pub used: u64,
    /// Freed bytes that wait for the end of a fence.
    pub fenced: u64,
    /// Where it answers calls.
    pub rpc_address: String,
    /// Where its admin pages are; empty if it has none.
    pub admin_address: String,
    /// Where its metadata store is; empty if it has none.
    pub metadata_address: String,
}
