//! The status of each submitted batch.

use std::collections::{BTreeSet, HashMap};

use mooncake_base::{Moment, Result};

use crate::engine::batch::{BatchId, BatchStatus};

/// The batches of an engine, with a limit on results that are never taken.
#[derive(Debug)]
pub(super) struct CompletionTable {
    last: u64,
    entries: HashMap<BatchId, BatchState>,
    /// Completed batches whose result is still in the table.
    completed: BTreeSet<BatchId>,
    completed_max: usize,
}

#[derive(Debug)]
enum BatchState {
    Running { deadline: Moment },
    Completed(BatchStatus),
}

impl CompletionTable {
    pub(super) fn new(completed_max: usize) -> Self {
        Self { last: 0, entries: HashMap::new(), completed: BTreeSet::new(), completed_max }
    }

    /// Adds a running batch.
    pub(super) fn insert(&mut self, deadline: Moment) -> BatchId {
        self.last += 1;
        let batch = BatchId::from_number(self.last);
        self.entries.insert(batch, BatchState::Running { deadline });
        batch
    }

    /// Records the result of a batch; the oldest result is dropped above the limit.
    pub(super) fn complete(&mut self, batch: BatchId, status: BatchStatus) {
        // The waiter has given up and removed the batch.
        let Some(entry) = self.entries.get_mut(&batch) else { return };
        *entry = BatchState::Completed(status);
        self.completed.insert(batch);
        if self.completed.len() > self.completed_max
            && let Some(oldest) = self.completed.pop_first()
        {
            self.entries.remove(&oldest);
        }
    }

    /// Removes a batch that was never started, or that its waiter gave up.
    pub(super) fn remove(&mut self, batch: BatchId) {
        self.entries.remove(&batch);
    }

    /// Returns the status of a batch; a final status is removed.
    pub(super) fn take_status(&mut self, batch: BatchId) -> Result<BatchStatus> {
        match self.entries.remove(&batch) {
            None => Err(batch.unknown()),
            Some(running @ BatchState::Running { .. }) => {
                self.entries.insert(batch, running);
                Ok(BatchStatus::Running)
            }
            Some(BatchState::Completed(status)) => {
                self.completed.remove(&batch);
                Ok(status)
            }
        }
    }

    /// The deadline of a running batch.
    pub(super) fn deadline(&self, batch: BatchId) -> Option<Moment> {
        match self.entries.get(&batch)? {
            BatchState::Running { deadline } => Some(*deadline),
            BatchState::Completed(_) => None,
        }
    }

    /// Completes every running batch.
    pub(super) fn complete_all(&mut self, status: &BatchStatus) {
        let running: Vec<BatchId> = self
            .entries
            .iter()
            .filter(|(_, entry)| matches!(entry, BatchState::Running { .. }))
            .map(|(batch, _)| *batch)
            .collect();
        for batch in running {
            self.complete(batch, status.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(completions: &mut CompletionTable) -> BatchId {
        let batch = completions.insert(Moment::default());
        completions.complete(batch, BatchStatus::Done);
        batch
    }

    #[test]
    fn result_is_returned_once() {
        let mut completions = CompletionTable::new(4);
        let batch = completions.insert(Moment::default());
        assert!(matches!(completions.take_status(batch), Ok(BatchStatus::Running)));
        completions.complete(batch, BatchStatus::Done);
        assert!(matches!(completions.take_status(batch), Ok(BatchStatus::Done)));
        assert!(completions.take_status(batch).is_err());
        assert!(completions.take_status(BatchId::from_number(77)).is_err());
    }

    #[test]
    fn untaken_results_are_bounded_and_running_batches_stay() {
        let mut completions = CompletionTable::new(3);
        let running = completions.insert(Moment::default());
        let batches: Vec<_> = (0..10).map(|_| completed(&mut completions)).collect();
        assert!(batches[..7].iter().all(|batch| completions.take_status(*batch).is_err()));
        assert!(batches[7..].iter().all(|batch| completions.take_status(*batch).is_ok()));
        assert!(matches!(completions.take_status(running), Ok(BatchStatus::Running)));
        assert!(completions.completed.is_empty() && completions.entries.len() == 1);
    }

    #[test]
    fn results_taken_out_of_order_evict_no_others() {
        let mut completions = CompletionTable::new(3);
        let first = completed(&mut completions);
        for _ in 0..100 {
            let batch = completed(&mut completions);
            assert!(completions.take_status(batch).is_ok());
        }
        assert!(matches!(completions.take_status(first), Ok(BatchStatus::Done)));
    }
}
