//! Arguments and results of copy, move and drain calls.

use mooncake_base::{ClientId, JobId, ObjectKey, TaskId};

/// A copy or move task to create. Segments are given by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewTask {
    /// Adds replicas of an object in further segments.
    Copy {
        /// The object.
        key: ObjectKey,
        /// Target segments, at least one. A target that already has a replica is skipped.
        targets: Vec<String>,
    },
    /// Moves a replica of an object to another segment.
    Move {
        /// The object.
        key: ObjectKey,
        /// Segment of the replica to move.
        source: String,
        /// Target segment.
        target: String,
    },
}

impl NewTask {
    /// The object.
    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::Copy { key, .. } | Self::Move { key, .. } => key,
        }
    }
}

/// Kind of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskKind {
    /// Adds replicas.
    Copy,
    /// Adds a replica and removes another.
    Move,
}

/// Status of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskStatus {
    /// The task waits for its client or for a retry.
    Pending,
    /// The client is executing the task.
    Processing,
    /// The task failed; the message gives the reason.
    Failed,
    /// The task is complete.
    Success,
}

/// A task as reported by the master.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskInfo {
    /// The id.
    pub id: TaskId,
    /// The kind of the task.
    pub kind: TaskKind,
    /// The current status.
    pub status: TaskStatus,
    /// Creation time in milliseconds since the Unix epoch.
    pub created_at_ms: u64,
    /// Time of the last change in milliseconds since the Unix epoch.
    pub updated_at_ms: u64,
    /// The client that executes or executed the task.
    pub client: ClientId,
    /// Human-readable details.
    pub message: String,
}

/// A drain job to create. Segments are given by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewDrain {
    /// Segments to drain, at least one.
    pub segments: Vec<String>,
    /// Target segments; empty for any.
    pub targets: Vec<String>,
    /// Number of objects that are moved at a time; 0 for 4.
    pub concurrency: u32,
    /// Evict other objects where a copy does not fit into free memory.
    pub may_evict: bool,
}

/// Status of a drain job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainStatus {
    /// The job was created.
    Created,
    /// The job is looking for replicas to move.
    Planning,
    /// Replicas are being moved.
    Running,
    /// The segments are empty.
    Succeeded,
    /// Some replicas could not be moved; the message has details.
    Failed,
    /// The job was cancelled.
    Canceled,
}

/// A drain job as reported by the master.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainInfo {
    /// The id.
    pub id: JobId,
    /// The current status.
    pub status: DrainStatus,
    /// Creation time in milliseconds since the Unix epoch.
    pub created_at_ms: u64,
    /// Time of the last change in milliseconds since the Unix epoch.
    pub updated_at_ms: u64,
    /// Names of the drained segments.
    pub segments: Vec<String>,
    /// Number of moved replicas.
    pub succeeded: u64,
    /// Number of replicas that could not be moved.
    pub failed: u64,
    /// Number of replicas that were blocked at the last look.
    pub blocked: u64,
    /// Number of replicas being moved now.
    pub active: u64,
    /// Number of moved bytes.
    pub moved_bytes: u64,
    /// Number of other objects that were evicted to make room for copies.
    pub evicted: u64,
    /// Bytes of these objects.
    pub evicted_bytes: u64,
    /// Human-readable details.
    pub message: String,
}
