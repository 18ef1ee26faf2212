//! What clients ask the master, and what it answers.

use std::time::Duration;

use mooncake_base::{ErrorCode, JobId, ReplicaId, SegmentId, TaskId, Version};
use mooncake_master::state::SegmentSpec;

/// A call.
#[derive(Debug, Clone)]
pub(crate) enum Call {
    Register,
    /// Known by that registration, as the caller thinks.
    Heartbeat(u64),
    Resume(SegmentSpec),
    Mount(SegmentSpec),
    /// These and no others are lent.
    All(Vec<SegmentId>),
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
    /// One more copy, in a segment of that name.
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
    Fetch,
    EndTask {
        id: TaskId,
        attempt: u64,
        failed: Vec<ReplicaId>,
    },
}

/// What came of it.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    Done,
    Failed(ErrorCode),
    /// Which master answers, whether it knows the caller, and by which registration.
    Session {
        master: u64,
        is_known: bool,
        registration: u64,
    },
    Started {
        version: Version,
        places: Vec<Place>,
    },
    Located {
        version: Version,
        length: u64,
        places: Vec<Place>,
        fence: Duration,
    },
    StillStands(bool),
    Task(TaskId),
    Job(JobId),
    Work(Vec<Work>),
}

/// A copy to be made.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) id: TaskId,
    pub(crate) attempt: u64,
    pub(crate) length: u64,
    pub(crate) source: Place,
    pub(crate) targets: Vec<Place>,
}

/// Where a copy lies, by names that last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) segment: SegmentId,
    pub(crate) offset: u64,
    pub(crate) replica: ReplicaId,
}

impl Call {
    /// Whether nothing may vanish by it but what must make room.
    pub(crate) fn is_about_tasks(&self) -> bool {
        use Call::{CancelDrain, Copy, Drain, EndTask, Fetch, Move};
        matches!(
            self,
            Copy { .. } | Move { .. } | Drain { .. } | CancelDrain { .. } | Fetch | EndTask { .. }
        )
    }

    /// Whether it says something of the caller's memory.
    pub(crate) fn is_announcement(&self) -> bool {
        matches!(self, Self::Resume(_) | Self::Mount(_) | Self::All(_) | Self::Unmount(_))
    }
}

/// A reply on its way.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    /// What of the truth the caller learns by it.
    pub(crate) facts: std::ops::Range<usize>,
}

/// The name of the key with that number.
pub(crate) fn key_name(key: u64) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}
