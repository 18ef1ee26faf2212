//! The result of an operation.

use mooncake_base::Error;

/// What became of an operation.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Why the operation failed as a whole.
    pub error: Option<Error>,
    /// Slots that were lost while it ran.
    pub failed_slots: Vec<usize>,
    /// Slot that a receive got its message from.
    pub source: Option<usize>,
}
