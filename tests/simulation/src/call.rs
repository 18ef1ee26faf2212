//! Calls of clients to the master, and its replies: the simulated wire.

use std::time::Duration;

use mooncake_base::{ErrorCode, JobId, ReplicaId, SegmentId, TaskId, TenantId, Version};
use mooncake_master::state::{DiskSpec, SegmentSpec};
use mooncake_store_client::protocol::{Announcement, GrantedFence, HeartbeatAnswer, Registered};

use crate::directory::RecordName;

/// The bits of the request of a put that number the puts of one call.
const ITEM_BITS: u32 = 4;

#[derive(Debug, Clone)]
pub(crate) enum Call {
    Register,
    /// Carries the registration that the caller knows.
    Heartbeat(u64),
    Announce {
        segments: Vec<SegmentSpec>,
        kind: Announcement,
    },
    Unmount {
        segment: SegmentId,
        /// The segment can be read for so long.
        grace: Duration,
    },
    /// Starts puts, whose keys are those of one tenant.
    PutStart {
        puts: Vec<NewPut>,
        request: u64,
    },
    /// Asks for a new write window for unfinished puts.
    PutRenew {
        puts: Vec<WrittenPut>,
    },
    PutEnd {
        puts: Vec<WrittenPut>,
        /// The call names the keys, as a repetition does.
        has_keys: bool,
    },
    PutRevoke {
        puts: Vec<WrittenPut>,
    },
    Locate {
        key: u64,
    },
    Verify {
        key: u64,
        version: Version,
        replica: ReplicaId,
    },
    Remove {
        key: u64,
        is_forced: bool,
    },
    /// Removes all objects of a tenant.
    RemoveAll {
        tenant: u64,
        is_forced: bool,
    },
    /// Removes the objects whose keys begin as this one does.
    RemovePrefix {
        key: u64,
        is_forced: bool,
    },
    /// Describes an object in full.
    View {
        key: u64,
    },
    /// Lists the objects of a tenant.
    List {
        tenant: u64,
    },
    /// Asks for what the pages of operators show.
    Overview,
    /// Requests another copy in the segment named `target`.
    Copy {
        key: u64,
        target: String,
    },
    Move {
        key: u64,
        source: String,
        target: String,
    },
    Drain {
        segment: String,
        may_evict: bool,
    },
    CancelDrain {
        job: JobId,
    },
    FetchTasks,
    EndTask {
        id: TaskId,
        attempt: u64,
        failed: Vec<ReplicaId>,
    },
    /// Mounts a directory whose records take these bytes.
    MountDisk {
        spec: Box<DiskSpec>,
        used: u64,
    },
    UnmountDisk {
        disk: SegmentId,
        /// The objects in it lose these copies.
        is_forgotten: bool,
    },
    /// Takes objects over that are to be written to a directory.
    FetchOffloads {
        disk: SegmentId,
        limit: usize,
    },
    ReportRecords(Box<RecordReport>),
}

/// What the owner of a directory reports.
#[derive(Debug, Clone)]
pub(crate) struct RecordReport {
    pub(crate) disk: SegmentId,
    pub(crate) added: Vec<LongName>,
    pub(crate) refused: Vec<LongName>,
    pub(crate) dropped: Vec<LongName>,
    pub(crate) used: u64,
    /// All records were reported since the directory was mounted.
    pub(crate) is_complete: bool,
}

impl RecordReport {
    /// Creates an empty report.
    pub(crate) fn of(disk: SegmentId) -> Self {
        Self {
            disk,
            added: Vec::new(),
            refused: Vec::new(),
            dropped: Vec::new(),
            used: 0,
            is_complete: false,
        }
    }
}

/// A record and its length in words.
pub(crate) type LongName = (RecordName, u64);

/// A reply of the master.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    Done,
    Failed(ErrorCode),
    Registered(Registered),
    Heartbeat {
        answer: HeartbeatAnswer,
        has_tasks: bool,
    },
    /// The result for each announced segment.
    Announced(Vec<Result<(), ErrorCode>>),
    /// The result for each put to start.
    Starts(Vec<Start>),
    /// The result for each put to renew, to end or to revoke.
    Closed(Vec<Result<(), ErrorCode>>),
    Viewed(Box<Viewed>),
    Located {
        version: Version,
        length: u64,
        checksum: Option<u64>,
        places: Vec<Place>,
        /// The length of the fence, and the fence if it was granted to this reader alone.
        fence: Duration,
        granted: Option<GrantedFence>,
    },
    IsCurrent(bool),
    Task(TaskId),
    Job(JobId),
    FetchedTask(Vec<FetchedTask>),
    /// Objects to write to a directory, and how long their memory stays theirs.
    Offloads {
        objects: Vec<HandedOver>,
        window: Duration,
    },
    /// The numbers of the added records that nobody will ask for.
    Reported(Vec<usize>),
}

/// An object for a directory to take over.
#[derive(Debug, Clone)]
pub(crate) struct HandedOver {
    pub(crate) record: LongName,
    pub(crate) places: Vec<Place>,
}

/// A put to start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewPut {
    pub(crate) key: u64,
    pub(crate) length: u64,
    pub(crate) terms: PutTerms,
}

/// A started put that its writer renews, ends or revokes.
#[derive(Debug, Clone)]
pub(crate) struct WrittenPut {
    pub(crate) key: u64,
    pub(crate) version: Version,
    pub(crate) failed: Vec<ReplicaId>,
    /// Written replicas that words of an earlier attempt may still reach.
    pub(crate) late: Vec<ReplicaId>,
    pub(crate) checksum: Option<u64>,
}

/// What became of the start of a put.
#[derive(Debug, Clone)]
pub(crate) enum Start {
    Started {
        version: Version,
        places: Vec<Place>,
    },
    /// The put was refused, because an object exists or is being written.
    Existed {
        /// The version and the request of the unfinished put of the caller that prevents it. `None`:
        /// a value, or the put of another client.
        own: Option<(Version, u64)>,
        /// The version of the value of the key, if it has one.
        value: Option<Version>,
    },
    Failed(ErrorCode),
}

/// The options of a put.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PutTerms {
    pub(crate) replicas: u32,
    pub(crate) is_replacing: bool,
    /// Publish only in place of this version.
    pub(crate) if_version: Option<Version>,
    /// The object is removed this long after the put.
    pub(crate) ttl: Option<Duration>,
    /// The group with which the object is evicted.
    pub(crate) group: Option<u64>,
    pub(crate) has_tag: bool,
    pub(crate) has_checksum: bool,
    pub(crate) is_soft_pinned: bool,
}

/// What a description says of an object, as far as it is checked.
#[derive(Debug, Clone)]
pub(crate) struct Viewed {
    pub(crate) version: Option<Version>,
    pub(crate) length: u64,
    pub(crate) has_tag: bool,
    /// Copies whose segments have left the pool.
    pub(crate) gone: usize,
}

/// A fetched task: one source, and targets to copy to.
#[derive(Debug, Clone)]
pub(crate) struct FetchedTask {
    pub(crate) id: TaskId,
    pub(crate) attempt: u64,
    pub(crate) length: u64,
    pub(crate) source: Place,
    pub(crate) targets: Vec<Place>,
}

/// The place of a copy, valid across restarts of the master. Words are read and written at the
/// endpoint and the address; the segment tells replicas of one holder apart. The owner of a directory
/// finds a record by its name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) segment: SegmentId,
    /// The process at the endpoint.
    pub(crate) endpoint: u64,
    pub(crate) address: u64,
    pub(crate) replica: ReplicaId,
    pub(crate) is_on_disk: bool,
}

impl Call {
    /// True for calls that remove no object except by eviction.
    pub(crate) fn is_about_tasks(&self) -> bool {
        use Call::{CancelDrain, Copy, Drain, EndTask, FetchTasks, Move};
        matches!(
            self,
            Copy { .. }
                | Move { .. }
                | Drain { .. }
                | CancelDrain { .. }
                | FetchTasks
                | EndTask { .. }
        )
    }

    /// True for calls that carry a number, by which the master knows a repetition.
    pub(crate) fn is_numbered(&self) -> bool {
        use Call::{CancelDrain, Copy, Drain, EndTask, Move, Remove, Unmount};
        matches!(
            self,
            Unmount { .. }
                | Self::MountDisk { .. }
                | Self::UnmountDisk { .. }
                | Self::ReportRecords(_)
                | Remove { .. }
                | Self::RemoveAll { .. }
                | Self::RemovePrefix { .. }
                | Copy { .. }
                | Move { .. }
                | Drain { .. }
                | CancelDrain { .. }
                | EndTask { .. }
        )
    }

    /// True for calls that remove objects and do nothing else.
    pub(crate) fn is_removal(&self) -> bool {
        matches!(self, Self::Remove { .. } | Self::RemoveAll { .. } | Self::RemovePrefix { .. })
    }

    /// True for calls that may take long and need a permit.
    pub(crate) fn is_large(&self) -> bool {
        matches!(self, Self::RemoveAll { .. } | Self::RemovePrefix { .. } | Self::List { .. })
    }

    /// True for calls whose answer waits until all that it rests on is in the log.
    pub(crate) fn waits_for_log(&self) -> bool {
        use Call::{FetchOffloads, Heartbeat, List, Locate, Verify, View};
        !matches!(
            self,
            Locate { .. }
                | Verify { .. }
                | View { .. }
                | List { .. }
                | Heartbeat(_)
                | FetchOffloads { .. }
        )
    }

    /// True for calls by which a client stays registered.
    pub(crate) fn is_about_session(&self) -> bool {
        matches!(self, Self::Register | Self::Heartbeat(_) | Self::Announce { .. })
    }

    /// Returns the disk whose records the call reports.
    pub(crate) fn reported_disk(&self) -> Option<SegmentId> {
        if let Self::ReportRecords(report) = self { Some(report.disk) } else { None }
    }

    /// Returns the disk that the call mounts.
    pub(crate) fn mounted_disk(&self) -> Option<SegmentId> {
        if let Self::MountDisk { spec, .. } = self { Some(spec.id) } else { None }
    }

    /// Returns the keys of the puts to start.
    pub(crate) fn started_keys(&self) -> impl Iterator<Item = u64> {
        let puts = match self {
            Self::PutStart { puts, .. } => &puts[..],
            _ => &[],
        };
        puts.iter().map(|put| put.key)
    }

    /// Returns the started puts that the call is about.
    pub(crate) fn written_puts(&self) -> &[WrittenPut] {
        match self {
            Self::PutRenew { puts } | Self::PutEnd { puts, .. } | Self::PutRevoke { puts } => puts,
            _ => &[],
        }
    }

    /// Returns the key that the call is about, if it is one.
    pub(crate) fn key(&self) -> Option<u64> {
        match self {
            Self::Locate { key }
            | Self::Remove { key, .. }
            | Self::RemovePrefix { key, .. }
            | Self::View { key } => Some(*key),
            _ => None,
        }
    }

    /// Returns whether this reply is an answer, which the master keeps for repetitions. A call that
    /// failed as a whole has none. All but those about a segment or a disk are batches in the real
    /// protocol: their failures belong to items.
    pub(crate) fn is_answered_by(&self, reply: &Reply) -> bool {
        let fails_as_a_whole = matches!(
            self,
            Self::Unmount { .. }
                | Self::MountDisk { .. }
                | Self::UnmountDisk { .. }
                | Self::ReportRecords(_)
        );
        !(fails_as_a_whole && matches!(reply, Reply::Failed(_)))
    }

    /// True for calls about the caller's segments, which carry a sequence number.
    pub(crate) fn is_about_segments(&self) -> bool {
        matches!(self, Self::Announce { .. } | Self::Unmount { .. })
    }
}

impl WrittenPut {
    /// Names a put of which nothing else is known.
    pub(crate) fn of(key: u64, version: Version) -> Self {
        Self { key, version, failed: Vec::new(), late: Vec::new(), checksum: None }
    }
}

/// Returns the request of one put of a call that starts several.
pub(crate) fn item_request(request: u64, item: usize) -> u64 {
    request << ITEM_BITS | item as u64
}

/// Returns the request of the call that started a put.
pub(crate) fn call_request(item_request: u64) -> u64 {
    item_request >> ITEM_BITS
}

/// The number of a call, and the number below which its client waits for no call. Zero: the call
/// carries no number.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CallNumber {
    pub(crate) number: u64,
    pub(crate) answered_below: u64,
}

/// A call and what accompanies it. A repetition carries the same.
#[derive(Debug, Clone)]
pub(crate) struct CallRequest {
    pub(crate) call: Call,
    pub(crate) number: CallNumber,
    /// Orders the calls of the process about its segments.
    pub(crate) sequence: u64,
    /// The fences that the caller hands back.
    pub(crate) released: Vec<GrantedFence>,
}

/// A call in flight.
#[derive(Debug, Clone)]
pub(crate) struct CallMessage {
    /// The process and its operation.
    pub(crate) caller: (u64, u64),
    pub(crate) attempt: u64,
    pub(crate) request: CallRequest,
}

/// A reply in flight.
#[derive(Debug, Clone)]
pub(crate) struct ReplyMessage {
    pub(crate) reply: Reply,
    /// The history entries that the caller learns of.
    pub(crate) entries: std::ops::Range<usize>,
    /// The log position for which the reply waits.
    pub(crate) position: u64,
}

/// Returns the name of a key. Names begin alike in groups of four.
pub(crate) fn key_name(key: u64) -> Vec<u8> {
    format!("key-{}/{key}", key / 4).into_bytes()
}

/// Returns the key with this name.
pub(crate) fn key_number(name: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(name);
    text.rsplit('/').next().and_then(|number| number.parse().ok()).unwrap_or_default()
}

/// Returns the beginning that the names of the key's group share.
pub(crate) fn key_prefix(key: u64) -> Vec<u8> {
    format!("key-{}/", key / 4).into_bytes()
}

/// Returns the name of a tenant; the first one is the default tenant.
pub(crate) fn tenant_name(tenant: u64) -> TenantId {
    match tenant {
        0 => TenantId::default(),
        _ => TenantId::new(&format!("tenant-{tenant}")),
    }
}
