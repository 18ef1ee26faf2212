//! What the log records: every change of what exists and where it lies, and nothing else.
//!
//! The state appends its effects while it changes; whoever replays them in their order gets the
//! same objects in the same places. Each names what it is about by
//! itself, so that replaying one that a snapshot already contains changes nothing in the end.
//! Leases, fences and the order of eviction are no effects.

pub(super) mod codec;

use crate::state::ids::TenantIndex;
use std::time::Duration;

use mooncake_base::{ClientId, ErrorCode, TenantId};
use smallvec::SmallVec;

use super::{
    State,
    object::{Object, Replica},
    segment::{SegmentNumber, SegmentSpec},
};

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect<'a> {
    /// A segment came into the pool. Its number is never used again.
    Mounted {
        /// What copies name it by.
        number: SegmentNumber,
        /// Its owner.
        client: ClientId,
        /// What its owner says of it.
        spec: SegmentSpec,
    },
    /// A segment went another step in its life; `status` by its code.
    SegmentStatus {
        /// Which.
        number: SegmentNumber,
        /// The step.
        status: u8,
        /// How long it may last; zero if for ever.
        grace: Duration,
    },
    /// A segment went, and every copy in it.
    SegmentDropped {
        /// Which.
        number: SegmentNumber,
    },
    /// A put began: its memory is given away.
    Started {
        /// The put, by which all later effects name it.
        version: u64,
        /// Who writes.
        client: ClientId,
        /// What it will be when it is published.
        value: Value<'a>,
        /// Whether it replaces what is published meanwhile.
        is_replacing: bool,
    },
    /// A put ended: its value stands under its key from now on, and nothing else does.
    Published {
        /// The put.
        version: u64,
        /// Copies that were given up, by their ordinals.
        failed: &'a [u8],
        /// What readers may check the bytes against.
        checksum: Option<u64>,
        /// The soft pin.
        pin: Option<Duration>,
    },
    /// A put can no longer be ended; its memory is still kept.
    Displaced {
        /// The put.
        version: u64,
    },
    /// A put is no more, and its memory is free.
    WriteDropped {
        /// The put.
        version: u64,
    },
    /// What stands under a key, all in one: how snapshots tell it.
    ObjectSnapshot {
        /// Which life of the object.
        version: u64,
        /// All of it.
        value: Value<'a>,
        /// What readers may check the bytes against.
        checksum: Option<u64>,
        /// The soft pin.
        pin: Option<Duration>,
    },
    /// An object is no more: removed, evicted, or lost otherwise than with its segment.
    Dropped {
        /// Which.
        object: ObjectName<'a>,
    },
    /// An object has one more copy.
    ReplicaAdded {
        /// Which.
        object: ObjectName<'a>,
        /// The copy.
        copy: LoggedCopy,
    },
    /// An object has one copy less.
    ReplicaDropped {
        /// Which.
        object: ObjectName<'a>,
        /// The copy.
        ordinal: u16,
    },
    /// The soft pin of an object began or ended.
    Pinned {
        /// Which.
        object: ObjectName<'a>,
        /// How long it lasts after an access; none: no more.
        pin: Option<Duration>,
    },
    /// Freed memory that a late write may reach must rest.
    Quarantined {
        /// Where.
        number: SegmentNumber,
        /// From its base.
        offset: u64,
        /// Bytes.
        length: u64,
        /// How long from now.
        time: Duration,
    },
    /// No fence and no lease that was granted and has not ended lasts longer than this, until told
    /// otherwise.
    MaxGranted {
        /// The longest fence.
        fence: Duration,
        /// The longest lease.
        lease: Duration,
    },
    /// Every version and every number of a segment below these may have been used.
    NextIds {
        /// The next version.
        version: u64,
        /// The next number.
        number: SegmentNumber,
    },
    /// How a task or a drain job stands, in words of their own (`state/record.rs`); none:
    /// forgotten.
    Task {
        /// Which.
        id: u128,
        /// What there is to know of it.
        record: Option<&'a [u8]>,
    },
    /// The quota of a tenant; none: without.
    Quota {
        /// Whose; empty: the default tenant.
        tenant: &'a str,
        /// Bytes.
        bytes: Option<u64>,
    },
}

/// What a key stands for, or will.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value<'a> {
    /// Whose; empty: the default tenant.
    pub tenant: &'a str,
    /// Under which key.
    pub key: &'a [u8],
    /// Bytes.
    pub length: u64,
    /// Where its copies lie.
    pub copies: SmallVec<[LoggedCopy; 1]>,
    /// What its writer says it is.
    pub data_type: u8,
    /// Never evicted.
    pub is_hard_pinned: bool,
    /// Evicted together with others of that name; empty: with none.
    pub group: &'a [u8],
    /// What becomes of the soft pin, as the put wished it; meaningless once it stands.
    pub pin: LoggedPin,
}

/// The soft pin that a put wished.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LoggedPin {
    /// That of the object it replaces.
    #[default]
    Preserve,
    /// None.
    None,
    /// So long after the last access.
    For(Duration),
}

/// One copy of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoggedCopy {
    /// In which segment.
    pub segment: SegmentNumber,
    /// From its base.
    pub offset: u64,
    /// Which of the copies it is.
    pub ordinal: u16,
}

/// One life of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectName<'a> {
    /// Whose; empty: the default tenant.
    pub tenant: &'a str,
    /// Under which key.
    pub key: &'a [u8],
    /// Which life.
    pub version: u64,
}

/// Bytes that are no effects: damaged, or written by a later version of the master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeError {
    /// Where in the bytes.
    pub at: usize,
}

impl From<DecodeError> for mooncake_base::Error {
    fn from(error: DecodeError) -> Self {
        Self::new(ErrorCode::INTERNAL_ERROR, "the record is damaged or of a later version")
            .with("at", error.at)
    }
}

/// The effects since they were last taken. Costs nothing while nobody records.
#[derive(Debug, Default)]
pub(super) struct Effects {
    is_recording: bool,
    bytes: Vec<u8>,
    count: u64,
}

impl Effects {
    pub(super) fn is_recording(&self) -> bool {
        self.is_recording
    }

    /// Appends an effect, which is made only if somebody records.
    pub(super) fn record<'a>(&mut self, effect: impl FnOnce() -> Effect<'a>) {
        if self.is_recording {
            effect().encode(&mut self.bytes);
            self.count += 1;
        }
    }
}

impl State {
    /// Keeps a record of effects from now on.
    pub fn record_effects(&mut self) {
        self.effects.is_recording = true;
        self.max_granted.lease = self.max_granted.lease.max(self.rules.lease_ttl);
        let (fence, lease) = (self.max_granted.fence, self.max_granted.lease);
        self.effects.record(|| Effect::MaxGranted { fence, lease });
    }

    /// Moves the effects since the last call, in their order, to the end of `into`; says how many.
    pub fn take_effects(&mut self, into: &mut Vec<u8>) -> u64 {
        into.append(&mut self.effects.bytes);
        std::mem::take(&mut self.effects.count)
    }

    /// Whether there are effects to take.
    pub fn has_effects(&self) -> bool {
        self.effects.count > 0
    }

    /// A copy in the words of the log.
    pub(super) fn logged_copy(&self, replica: &Replica) -> LoggedCopy {
        let segment = self.segments.at(replica.segment);
        LoggedCopy {
            segment: segment.number,
            offset: segment.allocator.offset(replica.block),
            ordinal: replica.ordinal,
        }
    }

    /// Copies in the words of the log, those that were lost left out.
    pub(super) fn logged_copies(&self, replicas: &[Replica]) -> SmallVec<[LoggedCopy; 1]> {
        let standing = replicas.iter().filter(|copy| self.segments.at(copy.segment).is_mounted());
        standing.map(|copy| self.logged_copy(copy)).collect()
    }
}

impl super::object::Objects {
    /// An object in the words of the log.
    pub(super) fn logged_name<'a>(&'a self, object: &'a Object) -> ObjectName<'a> {
        ObjectName {
            tenant: self.logged_tenant(object.tenant),
            key: self.key(object),
            version: object.version,
        }
    }

    /// A tenant in the words of the log: the default one has no name there.
    pub(super) fn logged_tenant(&self, tenant: TenantIndex) -> &str {
        match self.tenant_name(tenant).as_str() {
            TenantId::DEFAULT => "",
            name => name,
        }
    }
}
