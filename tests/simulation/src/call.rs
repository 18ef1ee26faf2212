//! Calls of clients to the master, and its replies.

use std::time::Duration;

use mooncake_base::{ErrorCode, JobId, ReplicaId, SegmentId, TaskId, Version};
use mooncake_master::state::SegmentSpec;
use mooncake_store_client::protocol::{Announcement, GrantedFence, HeartbeatAnswer, Registered};

#[derive(Debug, Clone)]
pub(crate) enum Call {
    Register,
    /// Carries the registration that the caller knows.
    Heartbeat(u64),
    Announce {
        segments: Vec<SegmentSpec>,
        kind: Announcement,
    },
    Unmount(SegmentId),
    PutStart {
        key: u64,
        length: u64,
        replicas: u32,
        is_replacing: bool,
        request: u64,
    },
    PutEnd {
        version: Version,
        failed: Vec<ReplicaId>,
        /// The name of the key, in a repetition.
        key: Option<Vec<u8>>,
    },
    PutRevoke {
        version: Version,
        failed: Vec<ReplicaId>,
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
    RemoveAll {
        is_forced: bool,
    },
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
}

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
    Started {
        version: Version,
        places: Vec<Place>,
    },
    /// A put of the key was refused, because an object exists or is being written.
    Existed {
        /// The version and the request of the unfinished put of the caller that prevents it. `None`:
        /// a value, or the put of another client.
        own: Option<(Version, u64)>,
    },
    Located {
        version: Version,
        length: u64,
        places: Vec<Place>,
        /// The length of the fence, and the fence if it was granted to this reader alone.
        fence: Duration,
        granted: Option<GrantedFence>,
    },
    IsCurrent(bool),
    Task(TaskId),
    Job(JobId),
    FetchedTask(Vec<FetchedTask>),
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

/// The place of a copy, valid across restarts of the master.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) segment: SegmentId,
    pub(crate) offset: u64,
    pub(crate) replica: ReplicaId,
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
        use Call::{CancelDrain, Copy, Drain, EndTask, Move, Remove, RemoveAll, Unmount};
        matches!(
            self,
            Unmount(_)
                | Remove { .. }
                | RemoveAll { .. }
                | Copy { .. }
                | Move { .. }
                | Drain { .. }
                | CancelDrain { .. }
                | EndTask { .. }
        )
    }

    /// True for calls that remove objects and do nothing else.
    pub(crate) fn is_removal(&self) -> bool {
        matches!(self, Self::Remove { .. } | Self::RemoveAll { .. })
    }

    /// Returns whether this reply is an answer, which the master keeps for repetitions. A call that
    /// failed as a whole has none. All but [`Call::Unmount`] are batches in the real protocol: their
    /// failures belong to items.
    pub(crate) fn is_answered_by(&self, reply: &Reply) -> bool {
        !matches!((self, reply), (Self::Unmount(_), Reply::Failed(_)))
    }

    /// True for calls about the caller's segments, which carry a sequence number.
    pub(crate) fn is_about_segments(&self) -> bool {
        matches!(self, Self::Announce { .. } | Self::Unmount(_))
    }
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
}

/// Returns the name of a key.
pub(crate) fn key_name(key: u64) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}
