//! Arguments and results of object calls.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use mooncake_base::{
    Error, ErrorCode, KeyRef, Moment, ObjectKey, ReplicaId, Result, SegmentId, Version,
};
use mooncake_transfer_engine::{LocalRange, RemoteRange};
use smallvec::SmallVec;

use crate::{fences::ReadFences, grid::Grid};

/// An object to put: its key and the memory that holds its bytes, in order.
#[derive(Debug, Clone, Copy)]
pub struct PutItem<'a> {
    /// The key.
    pub key: KeyRef<'a>,
    /// The memory ranges of the value. Their lengths add up to the object's length, which is at
    /// least 1.
    pub parts: &'a [LocalRange],
}

/// Options of a put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutOptions {
    /// Number of replicas, each on another segment. Default: 1.
    pub replicas: u32,
    /// Whether an existing object is replaced instead of kept. Default: no.
    pub is_upsert: bool,
    /// Whether eviction spares the objects for a while. Default: preserve.
    pub soft_pin: SoftPin,
    /// Duration of a soft pin; `None` (the default): the master's setting.
    pub soft_pin_ttl: Option<Duration>,
    /// Whether the objects are exempt from eviction. Default: no.
    pub is_hard_pinned: bool,
    /// Names of the segments to try first. Default: none.
    pub preferred_segments: Vec<String>,
    /// Whether this client's own segments are tried first. Default: no.
    pub prefers_own_segments: bool,
    /// Application-defined type of the bytes. Default: 0.
    pub data_type: u32,
    /// Group of each item, kept or evicted as a whole; empty (the default): no groups.
    pub groups: Vec<String>,
    /// Time after which the objects are removed; `None` (the default): never.
    pub ttl: Option<Duration>,
    /// Text stored beside each object: at most 32 names and values, 1 KiB in all. Default: none.
    pub tags: BTreeMap<String, String>,
    /// Version that each item replaces; empty (the default): no condition. Such a put has the
    /// outcome `Existed` if the object has another version, or is gone. Needs `is_upsert`.
    pub if_versions: Vec<Version>,
    /// Keys of objects of which none may be readable: nothing is put, and each item fails with
    /// `OBJECT_ALREADY_EXISTS`, if one is. They are keys of no item. A batch that takes several
    /// calls makes the check in each. Default: none.
    pub if_absent: Vec<ObjectKey>,
    /// An item fails with `OBJECT_ALREADY_EXISTS` and the value `beside` if an object is readable
    /// whose key is that of the item with one of these behind it. Default: none.
    pub absent_suffixes: Suffixes,
}

/// Ends of keys: at most 8 of at most 64 bytes, which the master checks. Clones are cheap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Suffixes(Arc<[Bytes]>);

impl Suffixes {
    /// Makes suffixes of these bytes.
    pub fn new(suffixes: impl IntoIterator<Item = Vec<u8>>) -> Self {
        Self(suffixes.into_iter().map(Bytes::from).collect())
    }

    pub(crate) fn to_wire(&self) -> Vec<Bytes> {
        self.0.to_vec()
    }
}

impl PutOptions {
    /// Returns the outcome of a put whose condition did not hold: the present object was kept.
    pub(crate) fn kept_if_refused(&self, outcome: Result<PutOutcome>) -> Result<PutOutcome> {
        match outcome {
            Err(error) if self.is_refusal(error.code()) => Ok(PutOutcome::Existed),
            outcome => outcome,
        }
    }

    /// Returns whether an error says that the condition of a put did not hold.
    pub(crate) fn is_refusal(&self, code: ErrorCode) -> bool {
        !self.if_versions.is_empty() && code == ErrorCode::OBJECT_ALREADY_EXISTS
    }
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
            ttl: None,
            tags: BTreeMap::new(),
            if_versions: Vec::new(),
            if_absent: Vec::new(),
            absent_suffixes: Suffixes::default(),
        }
    }
}

/// What the master knows of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectDetails {
    /// Version, which every put changes; `None` while the first put is unfinished.
    pub version: Option<Version>,
    /// Length in bytes.
    pub length: u64,
    /// Number of copies.
    pub replicas: u32,
    /// Application-defined type of the bytes.
    pub data_type: u32,
    /// Checksum that the writer gave.
    pub checksum: Option<u64>,
    /// Time until the object is removed; `None`: it does not expire.
    pub expires_in: Option<Duration>,
    /// Text stored beside the object.
    pub tags: BTreeMap<String, String>,
    /// Whether the object is exempt from eviction.
    pub is_hard_pinned: bool,
    /// Time that the soft pin lasts after each access, if there is one.
    pub soft_pin_ttl: Option<Duration>,
    /// Group with which it is kept or evicted; empty: none.
    pub group: Vec<u8>,
}

/// Effect of a put on an object's soft pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SoftPin {
    /// Leaves the soft pin unchanged.
    #[default]
    Preserve,
    /// Sets the soft pin.
    Enable,
    /// Removes the soft pin.
    Disable,
}

/// Result of a successful put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object is stored and readable.
    Stored {
        /// Number of replicas: at least 1, fewer than requested if some could not be written.
        replicas: u32,
        /// Version of the object.
        version: Version,
    },
    /// An object with this key existed and was kept.
    Existed,
}

/// A segment of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Segment id, chosen by the owner.
    pub id: SegmentId,
    /// `host:port` of the owning client.
    pub name: String,
    /// Engine name under which a transfer engine opens the segment.
    pub endpoint: String,
    /// Address of the first byte in the owner's address space.
    pub base: u64,
    /// Length in bytes.
    pub length: u64,
    /// `tcp`, `rdma`, …
    pub protocol: String,
    /// Whether it is a directory of records: the endpoint is then that of a record server, and places
    /// have no address.
    pub is_disk: bool,
}

/// A segment and its usage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentUse {
    /// The segment.
    pub segment: SegmentInfo,
    /// Bytes in use by objects.
    pub used: u64,
    /// Whether the segment accepts new objects.
    pub takes_objects: bool,
    /// Whether its owner has a connection to the master. Without one its objects cannot be read.
    pub is_connected: bool,
}

/// Location of one replica of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The segment.
    pub segment: Arc<SegmentInfo>,
    /// Offset within the segment.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// The replica's id.
    pub replica: ReplicaId,
}

impl Place {
    /// Returns the address of the first byte in the owner's address space.
    pub(crate) fn address(&self) -> u64 {
        // No overflow: both were checked against the segment's length when the response was read.
        self.segment.base + self.offset
    }
}

/// A located object: its replicas, and the time until which their places are valid.
#[derive(Debug, Clone)]
pub struct Located {
    pub(crate) key: ObjectKey,
    pub(crate) version: Version,
    pub(crate) length: u64,
    pub(crate) places: SmallVec<[Place; 1]>,
    pub(crate) checksum: Option<u64>,
    /// The value of the tag that the call named; empty if the object does not have it.
    pub(crate) tag: Box<str>,
    /// Whether the locate call leased the object. A repetition of the call does the same.
    pub(crate) has_lease: bool,
    /// Time of the locate call.
    pub(crate) requested_at: Moment,
    /// End of the fence. Bytes read before this time are valid without verification.
    pub(crate) fence: Moment,
    /// The fences of the locate call, released with the last of its objects.
    pub(crate) _fences: Option<Arc<ReadFences>>,
}

impl Located {
    /// The key.
    pub fn key(&self) -> &ObjectKey {
        &self.key
    }

    /// The version of the object; changes when the object is replaced.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The replicas.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// The checksum of the object, if the writer stored one.
    pub fn checksum(&self) -> Option<u64> {
        self.checksum
    }
}

/// A read of a located object: a span of bytes and its destination.
#[derive(Debug, Clone, Copy)]
pub struct Read<'a> {
    /// The object.
    pub located: &'a Located,
    /// The bytes to read.
    pub span: Span<'a>,
    /// Destination memory, filled in order. May be larger than the span.
    pub into: &'a [LocalRange],
}

impl<'a> Read<'a> {
    /// Reads the whole object.
    pub fn whole(located: &'a Located, into: &'a [LocalRange]) -> Self {
        Self { located, span: Span::Whole, into }
    }

    /// Reads `length` bytes from `offset` on.
    pub fn range(located: &'a Located, offset: u64, length: u64, into: &'a [LocalRange]) -> Self {
        Self { located, span: Span::Range { offset, length }, into }
    }

    /// Reads from each offset as many bytes as its destination is long.
    pub fn scattered(located: &'a Located, offsets: &'a [u64], into: &'a [LocalRange]) -> Self {
        Self { located, span: Span::Scattered(offsets), into }
    }

    /// Reads the ranges of grids, which name their own memory.
    pub fn grids(located: &'a Located, grids: &'a [Grid]) -> Self {
        Self { located, span: Span::Grids(grids), into: &[] }
    }
}

/// A selection of an object's bytes.
#[derive(Debug, Clone, Copy)]
pub enum Span<'a> {
    /// The whole object.
    Whole,
    /// A contiguous range.
    Range {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes; 0 reads nothing and succeeds.
        length: u64,
    },
    /// Many parts, given by their offsets. One destination per offset; each destination is filled.
    Scattered(&'a [u64]),
    /// Ranges at regular distances, each with its own memory.
    Grids(&'a [Grid]),
}

/// Parts of one object and the memory that each part is copied to or from.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    /// The object.
    pub key: &'a ObjectKey,
    /// Offset of each part within the object.
    pub offsets: &'a [u64],
    /// Memory of each part; its length is the part's length.
    pub memory: &'a [LocalRange],
}

/// Ranges of one object at regular distances, and the memory that they are copied to.
#[derive(Debug, Clone, Copy)]
pub struct GridParts<'a> {
    /// The object.
    pub key: &'a ObjectKey,
    /// The ranges.
    pub grids: &'a [Grid],
}

/// Memory that a call may access on behalf of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BufferScope<'a> {
    /// Any memory of the process.
    #[default]
    Anywhere,
    /// Only ranges registered with the engine.
    Registered,
    /// Only ranges registered with the engine, and of each object only memory within the buffer at
    /// its place in the list, if there is one: buffers that are parts of a registered range.
    RegisteredBuffers(&'a [Option<RemoteRange>]),
}

/// Existence of many objects.
#[derive(Debug, Clone)]
pub struct Presence {
    /// Whether each object exists and is complete, in key order; `None`: unknown.
    pub found: Vec<Option<bool>>,
    /// The first error, if some entries are unknown.
    pub failure: Option<Error>,
}

/// Whether there is a complete object with a key, and with which suffixes there are others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundKeys {
    /// There is one with the key itself.
    pub is_there: bool,
    /// The bit `1 << n` stands for suffix `n`; 0 if there is one with the key itself.
    pub suffixes: u32,
}

/// State of an object, obtained without locating it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectStatus {
    /// A writer has not finished the object yet.
    Writing,
    /// The object is readable.
    Complete {
        /// Length in bytes.
        length: u64,
    },
}

/// A selection of objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// All objects of the tenant.
    All,
    /// Objects whose key contains a match of the regular expression.
    Regex(String),
    /// Objects whose key starts with the prefix.
    Prefix(Vec<u8>),
}

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectSummary {
    /// The key.
    pub key: ObjectKey,
    /// Length in bytes.
    pub length: u64,
    /// Whether the object is readable.
    pub is_complete: bool,
    /// Number of replicas.
    pub replicas: u32,
    /// The replicas of these that are on disks.
    pub disk_replicas: u32,
}

/// What a probe does with the objects that exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbeTerms {
    /// Leases them.
    pub takes_lease: bool,
    /// Has the pool bring them into memory if only a disk has them. Does not wait for that, and does not
    /// ask for an object again that it has asked for lately.
    pub prefetches: bool,
}

/// Which objects a removal may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemovalTerms {
    /// Takes leased objects, and objects that are being copied.
    pub is_forced: bool,
    /// Leaves hard-pinned objects, forced or not.
    pub spares_hard_pinned: bool,
    /// Takes a single object in this version only.
    pub if_version: Option<Version>,
}

/// Number of selected objects that a removal took, and of those that it left by the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemovalCounts {
    /// Removed objects.
    pub removed: u64,
    /// Objects that stayed because of a lease.
    pub leased: u64,
    /// Hard-pinned objects that stayed.
    pub hard_pinned: u64,
    /// Objects that stayed because a client is copying them.
    pub being_copied: u64,
}

/// One page of a listing, in the byte order of the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectPage {
    /// The objects.
    pub objects: Vec<ObjectSummary>,
    /// Whether this is the last page.
    pub is_last: bool,
}

/// Status of the master.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MasterStatus {
    /// Version of the master.
    pub version: String,
    /// Time since the master started.
    pub uptime: Duration,
    /// Number of objects.
    pub keys: u64,
    /// Number of clients.
    pub clients: u64,
    /// Total size of all segments in bytes.
    pub capacity: u64,
    /// Bytes in use by objects.
    pub used: u64,
    /// Freed bytes in quarantine until a fence ends.
    pub fenced: u64,
    /// RPC address.
    pub rpc_address: String,
    /// Address of the admin pages; empty if there are none.
    pub admin_address: String,
    /// Address of the metadata store; empty if there is none.
    pub metadata_address: String,
}
