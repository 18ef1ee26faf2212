//! The memory of an operation that peers read: what is lent, and the copies that they map or fetch.

use std::sync::Arc;

use mooncake_base::sync::Mutex;

use crate::{
    peer_memory::{Loan, LoanToken},
    staging::{StagedBuffer, StagedPlace, StagingMemory},
};

/// The contributions of this rank to the operations of a group.
#[derive(Debug)]
pub(crate) struct Contributions {
    memory: Arc<StagingMemory>,
    /// Ends the loans of an attempt.
    lent: LoanToken,
    staged: Mutex<Vec<Staged>>,
}

/// A contribution that members may still write from.
#[derive(Debug)]
struct Staged {
    attempt: u32,
    sequence: u64,
    buffer: StagedBuffer,
}

impl Contributions {
    pub(crate) fn new(memory: Arc<StagingMemory>) -> Self {
        Self { memory, lent: LoanToken::default(), staged: Mutex::default() }
    }

    /// Ends what was lent and staged in other attempts.
    pub(crate) fn begin_attempt(&self, attempt: u32) {
        self.lent.end();
        self.staged.lock().retain(|staged| staged.attempt == attempt);
    }

    pub(crate) fn lend(&self, bytes: &[u8]) -> Loan {
        self.lent.lend(bytes)
    }

    /// Ends the loans, before their memory changes.
    pub(crate) fn end_loans(&self) {
        self.lent.end();
    }

    /// Copies a contribution to memory that peers map or read; `None` if there is none for it.
    /// Returns its place, and its address if peers of other hosts may read it.
    pub(crate) fn stage(
        &self,
        attempt: u32,
        sequence: u64,
        bytes: &[u8],
    ) -> Option<(Option<StagedPlace>, Option<u64>)> {
        let buffer = self.memory.put(bytes)?;
        let places = (buffer.place(), buffer.registered_address());
        self.staged.lock().push(Staged { attempt, sequence, buffer });
        Some(places)
    }

    /// Uses the memory of contributions again that are of an operation before this one, in its view.
    pub(crate) fn reuse_before(&self, sequence: u64) {
        let mut staged = self.staged.lock();
        let earlier = staged.extract_if(.., |it| it.sequence < sequence);
        earlier.for_each(|it| it.buffer.reuse());
    }
}
