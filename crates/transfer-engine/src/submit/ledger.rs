//! What is known of each submitted batch.

use std::collections::{BTreeSet, HashMap};

use mooncake_base::{Moment, Result};

use super::{BatchId, BatchStatus, unknown};

/// The batches of an engine, and a bound on the answers that nobody asks for.
#[derive(Debug)]
pub(super) struct Ledger {
    last: u64,
    entries: HashMap<BatchId, Entry>,
    /// Those that ended and whose answer is still here.
    ended: BTreeSet<BatchId>,
    ended_max: usize,
}

#[derive(Debug)]
enum Entry {
    Running { deadline: Moment },
    Ended(BatchStatus),
}

impl Ledger {
    pub(super) fn new(ended_max: usize) -> Self {
        Self { last: 0, entries: HashMap::new(), ended: BTreeSet::new(), ended_max }
    }

    /// A new batch.
    pub(super) fn enter(&mut self, deadline: Moment) -> BatchId {
        self.last += 1;
        let batch = BatchId(self.last);
        self.entries.insert(batch, Entry::Running { deadline });
        batch
    }

    /// Notes the end of a batch; the oldest answer goes if there are too many.
    pub(super) fn end(&mut self, batch: BatchId, status: BatchStatus) {
        // Nobody waits for a batch that was given up.
        let Some(entry) = self.entries.get_mut(&batch) else { return };
        *entry = Entry::Ended(status);
        self.ended.insert(batch);
        if self.ended.len() > self.ended_max
            && let Some(oldest) = self.ended.pop_first()
        {
            self.entries.remove(&oldest);
        }
    }

    /// Takes back a batch that was never begun.
    pub(super) fn forget(&mut self, batch: BatchId) {
        self.entries.remove(&batch);
    }

    /// How far a batch is; the answer of one that has ended is forgotten.
    pub(super) fn take(&mut self, batch: BatchId) -> Result<BatchStatus> {
        match self.entries.remove(&batch) {
            None => Err(unknown(batch)),
            Some(running @ Entry::Running { .. }) => {
                self.entries.insert(batch, running);
                Ok(BatchStatus::Running)
            }
            Some(Entry::Ended(status)) => {
                self.ended.remove(&batch);
                Ok(status)
            }
        }
    }

    /// By when a running batch is to end.
    pub(super) fn deadline(&self, batch: BatchId) -> Option<Moment> {
        match self.entries.get(&batch)? {
            Entry::Running { deadline } => Some(*deadline),
            Entry::Ended(_) => None,
        }
    }

    /// Ends everything that runs.
    pub(super) fn end_all(&mut self, status: &BatchStatus) {
        let running: Vec<BatchId> = self
            .entries
            .iter()
            .filter(|(_, entry)| matches!(entry, Entry::Running { .. }))
            .map(|(batch, _)| *batch)
            .collect();
        for batch in running {
            self.end(batch, status.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(ledger: &mut Ledger) -> BatchId {
        let batch = ledger.enter(Moment::default());
        ledger.end(batch, BatchStatus::Done);
        batch
    }

    #[test]
    fn an_answer_is_given_out_once() {
        let mut ledger = Ledger::new(4);
        let batch = ledger.enter(Moment::default());
        assert!(matches!(ledger.take(batch), Ok(BatchStatus::Running)));
        ledger.end(batch, BatchStatus::Done);
        assert!(matches!(ledger.take(batch), Ok(BatchStatus::Done)));
        assert!(ledger.take(batch).is_err());
        assert!(ledger.take(BatchId(77)).is_err());
    }

    #[test]
    fn answers_nobody_asks_for_are_bounded_and_running_batches_stay() {
        let mut ledger = Ledger::new(3);
        let running = ledger.enter(Moment::default());
        let batches: Vec<_> = (0..10).map(|_| ended(&mut ledger)).collect();
        assert!(batches[..7].iter().all(|batch| ledger.take(*batch).is_err()));
        assert!(batches[7..].iter().all(|batch| ledger.take(*batch).is_ok()));
        assert!(matches!(ledger.take(running), Ok(BatchStatus::Running)));
        assert!(ledger.ended.is_empty() && ledger.entries.len() == 1);
    }

    #[test]
    fn answers_taken_out_of_order_do_not_push_others_out() {
        let mut ledger = Ledger::new(3);
        let first = ended(&mut ledger);
        for _ in 0..100 {
            let batch = ended(&mut ledger);
            assert!(ledger.take(batch).is_ok());
        }
        assert!(matches!(ledger.take(first), Ok(BatchStatus::Done)));
    }
}
