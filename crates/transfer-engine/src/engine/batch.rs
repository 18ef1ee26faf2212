//! The ids of submitted batches, and their status.

use std::fmt;

use mooncake_base::{Clock, Error, ErrorCode, Moment, SystemClock};

use crate::transfer_entry::TransferEntry;

/// Identifies a submitted batch. An engine never reuses an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BatchId(u64);

impl BatchId {
    /// Converts a number that a caller got from [`BatchId::number`].
    pub const fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// The number of the batch, at least 1.
    pub const fn number(self) -> u64 {
        self.0
    }

    /// Returns the error for a batch that does not exist.
    pub(super) fn unknown(self) -> Error {
        let text = "no such batch was submitted, or its result was taken already";
        Error::new(ErrorCode::TASK_NOT_FOUND, text).with("batch", self)
    }
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Status of a submitted batch.
#[derive(Debug, Clone)]
pub enum BatchStatus {
    /// The batch is queued or in flight.
    Running,
    /// All entries were moved.
    Done,
    /// An entry failed, with the error of the first one. Other entries may have been moved.
    Failed(Error),
    /// The deadline passed before all entries were moved.
    TimedOut(Error),
}

impl BatchStatus {
    /// Returns whether the status is final.
    pub const fn has_ended(&self) -> bool {
        !matches!(self, Self::Running)
    }

    /// Returns the status of a batch whose entries were moved.
    pub(super) fn of(entries: &[TransferEntry], deadline: Moment) -> Self {
        let failed = |entry: &TransferEntry| match &entry.outcome {
            Some(Ok(())) => None,
            Some(Err(error)) => Some(error.clone()),
            None => Some(Error::internal("an entry was left without an outcome")),
        };
        match entries.iter().find_map(failed) {
            None => Self::Done,
            Some(error) if deadline.has_passed(SystemClock.now()) => Self::TimedOut(error),
            Some(error) => Self::Failed(error),
        }
    }
}
