//! The status of each submitted batch.

use std::collections::HashMap;

use mooncake_base::{Error, Moment, Result};

use crate::engine::batch::{BatchId, BatchStatus};

/// The batches of an engine, with a limit on results that are not taken.
#[derive(Debug)]
pub(super) struct CompletionTable {
    last: u64,
    entries: HashMap<BatchId, BatchState>,
    entries_max: usize,
}

#[derive(Debug)]
enum BatchState {
    Running { deadline: Moment },
    Completed(BatchStatus),
}

impl CompletionTable {
    /// Creates a table for that many batches: those that run, and those whose result waits.
    pub(super) fn new(entries_max: usize) -> Self {
        Self { last: 0, entries: HashMap::new(), entries_max }
    }

    /// Adds a running batch.
    ///
    /// # Errors
    /// The table is full; the result of another batch must be taken first.
    pub(super) fn insert(&mut self, deadline: Moment) -> Result<BatchId> {
        if self.entries.len() >= self.entries_max {
            let text = "the results of too many batches wait: take those of earlier batches first";
            return Err(Error::invalid(text).with("batches_max", self.entries_max));
        }
        self.last += 1;
        let batch = BatchId::from_number(self.last);
        self.entries.insert(batch, BatchState::Running { deadline });
        Ok(batch)
    }

    /// Records the result of a batch.
    pub(super) fn complete(&mut self, batch: BatchId, status: BatchStatus) {
        // The waiter may have given up and removed the batch.
        if let Some(entry) = self.entries.get_mut(&batch) {
            *entry = BatchState::Completed(status);
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
            Some(BatchState::Completed(status)) => Ok(status),
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
        let batch = completions.insert(Moment::default()).unwrap();
        completions.complete(batch, BatchStatus::Done);
        batch
    }

    #[test]
    fn result_is_returned_once() {
        let mut completions = CompletionTable::new(4);
        let batch = completions.insert(Moment::default()).unwrap();
        assert!(matches!(completions.take_status(batch), Ok(BatchStatus::Running)));
        completions.complete(batch, BatchStatus::Done);
        assert!(matches!(completions.take_status(batch), Ok(BatchStatus::Done)));
        assert!(completions.take_status(batch).is_err());
        assert!(completions.take_status(BatchId::from_number(77)).is_err());
    }

    #[test]
    fn full_table_refuses_batches_and_keeps_results() {
        let mut completions = CompletionTable::new(3);
        let running = completions.insert(Moment::default()).unwrap();
        let batches = [(); 2].map(|()| completed(&mut completions));
        assert!(completions.insert(Moment::default()).is_err());
        assert!(matches!(completions.take_status(batches[0]), Ok(BatchStatus::Done)));
        let next = completed(&mut completions);
        assert!(completions.insert(Moment::default()).is_err());
        completions.complete(running, BatchStatus::Done);
        for batch in [running, batches[1], next] {
            assert!(matches!(completions.take_status(batch), Ok(BatchStatus::Done)));
        }
        assert!(completions.entries.is_empty());
    }

    #[test]
    fn result_of_a_batch_that_was_given_up_takes_no_place() {
        let mut completions = CompletionTable::new(1);
        let batch = completions.insert(Moment::default()).unwrap();
        completions.remove(batch);
        completions.complete(batch, BatchStatus::Done);
        completed(&mut completions);
    }
}
