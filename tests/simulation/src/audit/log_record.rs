//! What the master logged, so that the checkers can go back to what survived a loss of power.

use mooncake_base::Moment;
use mooncake_master::{LogSync, state::Effect};

use crate::{allocation_model::AllocationModel, simulator::Simulator};

/// Everything that was logged since the log began.
#[derive(Debug, Default)]
pub(crate) struct LogRecord {
    items: Vec<Item>,
    /// When the machine crashed, if the master has not started since.
    crashed: Option<Moment>,
}

#[derive(Debug)]
struct Item {
    /// The effects; `None`: the master started.
    effects: Option<Vec<u8>>,
    /// The number of the frame behind them.
    next_frame: u64,
    /// The number of entries of the history behind them.
    entries: usize,
}

impl LogRecord {
    pub(crate) fn append(&mut self, effects: Vec<u8>, next_frame: u64, entries: usize) {
        self.items.push(Item { effects: Some(effects), next_frame, entries });
    }

    pub(crate) fn lose_power(&mut self, now: Moment) {
        self.crashed = Some(now);
    }

    /// Forgets everything, because the log is lost.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Simulator {
    /// Takes the checkers back to what the started master found: all frames below `next_frame`.
    ///
    /// # Errors
    /// The log lost more than it may.
    pub(crate) fn check_recovered(&mut self, next_frame: u64) -> Result<(), String> {
        let record = &mut self.log_record;
        let kept = record.items.partition_point(|item| item.next_frame <= next_frame);
        let crashed = record.crashed.take();
        if kept < record.items.len() {
            let Some(crashed) = crashed else {
                return Err("a killed master lost changes that it had written".to_owned());
            };
            record.items.truncate(kept);
            let entries = record.items.last().map_or(0, |item| item.entries);
            let durable_after = match self.plan.log_sync {
                LogSync::Interval(interval) => interval,
                _ => std::time::Duration::ZERO,
            };
            self.outcome.undone += self.history.undo(entries, crashed, durable_after)?;
            self.rebuild_model()?;
            self.forget_lost_tasks();
        }
        self.model.restart();
        let record = &mut self.log_record;
        let entries = self.history.len();
        record.items.push(Item { effects: None, next_frame, entries });
        Ok(())
    }

    fn rebuild_model(&mut self) -> Result<(), String> {
        let mut model = AllocationModel::default();
        for item in &self.log_record.items {
            let Some(effects) = &item.effects else {
                model.restart();
                continue;
            };
            let mut applied = Ok(());
            let decoded = Effect::decode_all(effects, |effect| {
                if applied.is_ok() {
                    applied = model.apply(effect, &mut Vec::new());
                }
            });
            applied?;
            decoded.map_err(|error| format!("cannot decode an effect: {error:?}"))?;
        }
        // The count only grows.
        model.dropped = self.model.dropped;
        self.model = model;
        Ok(())
    }

    /// Forgets accepted tasks that were lost with the end of the log, if it may be lost.
    fn forget_lost_tasks(&mut self) {
        if self.plan.log_sync == LogSync::Always {
            return;
        }
        if let Some(state) = self.host.state() {
            self.accepted.tasks.retain(|id| state.task(*id).is_ok());
            self.accepted.jobs.retain(|id| state.job(*id).is_ok());
        }
    }
}
