//! Log effects: every change of which objects exist and where they lie.
//!
//! The state appends effects while it changes; a replay in the same order yields the same objects
//! in the same places. Each effect names its object in full, so that replaying one that a snapshot
//! already contains makes no difference in the end. Leases, fences and the eviction order are not
//! logged.

mod codec;
pub(in crate::state) mod reader;
pub(in crate::state) mod writer;

use std::time::Duration;

use mooncake_base::{ClientId, ErrorCode};
use smallvec::SmallVec;

use crate::state::{
    ledger::Log,
    options::Terms,
    pool::{
        disks::DiskSpec,
        segment::{SegmentNumber, SegmentSpec},
    },
    tags::Tags,
};

/// A change of the state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect<'a> {
    /// A segment was mounted.
    Mounted {
        /// Number of the segment; never reused.
        number: SegmentNumber,
        /// Owner of the segment.
        client: ClientId,
        /// Description by the owner.
        spec: SegmentSpec,
    },
    /// The status of a segment changed.
    SegmentStatus {
        /// Number of the segment.
        number: SegmentNumber,
        /// Code of the status.
        status: u8,
        /// Grace of the status; zero: none.
        grace: Duration,
    },
    /// A segment left the pool with every replica in it.
    SegmentDropped {
        /// Number of the segment.
        number: SegmentNumber,
    },
    /// A put started and memory was allocated.
    Started {
        /// Version that identifies the put.
        version: u64,
        /// Client that writes.
        client: ClientId,
        /// Value to be published.
        value: Value<'a>,
        /// True if it replaces a value that is published meanwhile.
        is_replacing: bool,
        /// Request id of the client; 0: none.
        request: u64,
        /// What few puts ask for.
        terms: Option<Box<Terms>>,
    },
    /// A put ended: its value replaces the earlier one of the key.
    Published {
        /// Version of the put.
        version: u64,
        /// Ordinals of dropped replicas.
        failed: &'a [u8],
        /// Checksum for readers.
        checksum: Option<u64>,
        /// Time of the soft pin.
        pin: Option<Duration>,
    },
    /// A put can no longer end; its memory stays allocated.
    Displaced {
        /// Version of the put.
        version: u64,
    },
    /// A put was removed and its memory freed.
    WriteDropped {
        /// Version of the put.
        version: u64,
    },
    /// A whole object, as snapshots store it.
    ObjectSnapshot {
        /// Version of the object.
        version: u64,
        /// Value of the object.
        value: Value<'a>,
        /// Checksum for readers.
        checksum: Option<u64>,
        /// Time of the soft pin.
        pin: Option<Duration>,
    },
    /// An object was removed, evicted, or lost other than by the loss of its segment.
    Dropped {
        /// Name of the object.
        object: ObjectName<'a>,
    },
    /// An object got a replica.
    ReplicaAdded {
        /// Name of the object.
        object: ObjectName<'a>,
        /// New replica.
        copy: LoggedCopy,
    },
    /// An object lost a replica.
    ReplicaDropped {
        /// Name of the object.
        object: ObjectName<'a>,
        /// Ordinal of the replica.
        ordinal: u32,
    },
    /// The soft pin of an object started or ended.
    Pinned {
        /// Name of the object.
        object: ObjectName<'a>,
        /// Time that it lasts after an access; `None`: no pin.
        pin: Option<Duration>,
    },
    /// Expiry and tags of a version of an object, published or about to be.
    Annotated {
        /// Name of the object.
        object: ObjectName<'a>,
        /// When it expires, since 1970; `None`: never.
        expires: Option<Duration>,
        /// Text stored beside it.
        tags: Tags,
    },
    /// Memory rests after a restart, since a late write may reach it: it was freed, or puts may start in
    /// it before the log has them. A put that is logged in it ends this.
    Quarantined {
        /// Number of the segment.
        number: SegmentNumber,
        /// Offset from its base.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Length of the quarantine from now on; zero: it need not rest.
        time: Duration,
    },
    /// No active fence and no active lease is longer than this, until the next such effect.
    MaxGranted {
        /// Maximum length of a fence.
        fence: Duration,
        /// Maximum length of a lease.
        lease: Duration,
    },
    /// Versions and segment numbers below these may have been used.
    NextIds {
        /// Next version.
        version: u64,
        /// Next segment number.
        number: SegmentNumber,
    },
    /// The record of a task or drain job changed (encoded by `ledger/task_record.rs`).
    Task {
        /// Id of the task or job.
        id: u128,
        /// Record; `None`: forgotten.
        record: Option<&'a [u8]>,
    },
    /// A client opened a disk. A later effect with the same number replaces this one;
    /// [`SegmentDropped`](Self::SegmentDropped) ends it.
    DiskMounted {
        /// Number of the disk, from the numbers of segments; never reused.
        number: SegmentNumber,
        /// Client that opened it.
        client: ClientId,
        /// Description by the owner.
        spec: DiskSpec,
    },
    /// The quota of a tenant changed.
    Quota {
        /// Name of the tenant; empty: the default tenant.
        tenant: &'a str,
        /// Quota in bytes; `None`: no quota.
        bytes: Option<u64>,
    },
}

/// The value of an object, published or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value<'a> {
    /// Name of the tenant; empty: the default tenant.
    pub tenant: &'a str,
    /// Key of the object.
    pub key: &'a [u8],
    /// Length in bytes.
    pub length: u64,
    /// Replicas of the object.
    pub copies: SmallVec<[LoggedCopy; 1]>,
    /// Data type that the writer gave.
    pub data_type: u8,
    /// Whether the object is hard-pinned, that is, never evicted.
    pub is_hard_pinned: bool,
    /// Group that is evicted as a whole; empty: none.
    pub group: &'a [u8],
    /// Soft pin that the put requested; not used after the put has ended.
    pub pin: LoggedPin,
}

/// Soft pin that a put requests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LoggedPin {
    /// Keep the pin of the replaced object.
    #[default]
    Preserve,
    /// No pin.
    None,
    /// Pin for this long after the last access.
    For(Duration),
}

/// A replica in the log.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoggedCopy {
    /// Number of the segment.
    pub segment: SegmentNumber,
    /// Offset from its base.
    pub offset: u64,
    /// Ordinal of the replica.
    pub ordinal: u32,
}

/// Name and version of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectName<'a> {
    /// Name of the tenant; empty: the default tenant.
    pub tenant: &'a str,
    /// Key of the object.
    pub key: &'a [u8],
    /// Version of the object.
    pub version: u64,
}

/// Error for bytes that are damaged or of a later version of the master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeError {
    /// Position in the bytes.
    pub at: usize,
}

impl From<DecodeError> for mooncake_base::Error {
    fn from(error: DecodeError) -> Self {
        Self::new(ErrorCode::INTERNAL_ERROR, "the record is damaged or of a later version")
            .with("at", error.at)
    }
}

/// Effects since the last [`Log::take_effects`](crate::state::ledger::Log::take_effects). Costs nothing while recording is off.
#[derive(Debug, Default)]
pub(in crate::state) struct Effects {
    pub(in crate::state) is_recording: bool,
    bytes: Vec<u8>,
    count: u64,
    /// Bytes that were taken.
    taken: u64,
}

impl Effects {
    pub(in crate::state) fn is_recording(&self) -> bool {
        self.is_recording
    }

    /// Returns the log position behind all effects: the bytes recorded since the start.
    pub(in crate::state) fn position(&self) -> u64 {
        self.taken + self.bytes.len() as u64
    }

    /// Appends an effect; `effect` is called only while recording is on.
    pub(in crate::state) fn record<'a>(&mut self, effect: impl FnOnce() -> Effect<'a>) {
        if self.is_recording {
            effect().encode(&mut self.bytes);
            self.count += 1;
        }
    }
}

impl Log {
    /// Appends the effects since the last call to `into`. Returns their number.
    pub fn take_effects(&mut self, into: &mut Vec<u8>) -> u64 {
        self.effects.taken += self.effects.bytes.len() as u64;
        into.append(&mut self.effects.bytes);
        std::mem::take(&mut self.effects.count)
    }

    /// Returns the effects to take.
    #[cfg(any(test, feature = "test-util"))]
    pub fn pending_effects(&self) -> &[u8] {
        &self.effects.bytes
    }

    /// Returns whether there are effects to take.
    pub fn has_effects(&self) -> bool {
        self.effects.count > 0
    }
}
