//! What callers say of copies, moves and drains, and what they are told.

use mooncake_base::{ClientId, JobId, ObjectKey, TaskId};

/// A copy or a move to be made. Segments go by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewTask {
    /// Copies of an object in more segments.
    Copy {
        /// The object.
        key: ObjectKey,
        /// Where copies are wanted, at least one. One that has a copy needs no other.
        targets: Vec<String>,
    },
    /// A copy of an object somewhere else.
    Move {
        /// The object.
        key: ObjectKey,
        /// Where the copy lies that goes.
        source: String,
        /// Where it goes.
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

/// What a task does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskKind {
    /// Adds copies.
    Copy,
    /// Adds a copy in the place of another.
    Move,
}

/// Where a task stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskStatus {
    /// It waits for its client, or to be tried again.
    Pending,
    /// Its client has it.
    Processing,
    /// It will not be done; the message says why.
    Failed,
    /// It is done.
    Success,
}

/// A task as the master tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskInfo {
    /// Its id.
    pub id: TaskId,
    /// What it does.
    pub kind: TaskKind,
    /// Where it stands.
    pub status: TaskStatus,
    /// When it was made, in milliseconds since the epoch.
    pub created_at_ms: u64,
    /// When it last changed.
    pub updated_at_ms: u64,
    /// Who carries it out, or did.
    pub client: ClientId,
    /// In words.
    pub message: String,
}

/// Where a drain stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainStatus {
    /// It was made.
    Created,
    /// It looks for what is to be moved.
    Planning,
    /// Objects are being moved.
    Running,
    /// Its segments are empty.
    Succeeded,
    /// Something could not be moved; the message says more.
    Failed,
    /// It was cancelled.
    Canceled,
}

/// A drain as the master tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainInfo {
    /// Its id.
    pub id: JobId,
    /// Where it stands.
    pub status: DrainStatus,
    /// When it was made, in milliseconds since the epoch.
    pub created_at_ms: u64,
    /// When it last changed.
    pub updated_at_ms: u64,
    /// The names of its segments.
    pub segments: Vec<String>,
    /// Copies that left.
    pub succeeded: u64,
    /// Copies that could not.
    pub failed: u64,
    /// Copies that something held up when they were last looked at.
    pub blocked: u64,
    /// Copies that are being moved.
    pub active: u64,
    /// Bytes that were moved.
    pub moved_bytes: u64,
    /// In words.
    pub message: String,
}
