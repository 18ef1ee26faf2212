//! What the master appended to its log, so that the checkers can go back to what survived a crash.

use mooncake_base::Moment;
use mooncake_master::{LogSync, state::Effect};

use crate::{audit::allocation_model::AllocationModel, simulator::Simulator};

/// The frame of effects that are appended and not written.
const UNWRITTEN: u64 = u64::MAX;

/// Everything that was appended since the log began.
#[derive(Debug, Default)]
pub(crate) struct LogRecord {
    items: Vec<Item>,
    /// When the master crashed last, and whether its machine did.
    crashed: Option<(Moment, bool)>,
    /// When the oldest effects that are not written were appended.
    waiting_since: Option<Moment>,
    /// When the log was synced last.
    synced: Moment,
    /// The log has failed, and was not restarted since.
    is_failed: bool,
    /// The items that a log holds that is being started anew.
    restart_at: Option<usize>,
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
    /// Records effects that were appended.
    pub(crate) fn append(&mut self, now: Moment, effects: Vec<u8>, entries: usize) {
        self.waiting_since.get_or_insert(now);
        self.items.push(Item { effects: Some(effects), next_frame: UNWRITTEN, entries });
    }

    /// Records that all effects are written before this frame.
    pub(crate) fn written(&mut self, next_frame: u64) {
        self.waiting_since = None;
        for item in self.items.iter_mut().rev() {
            if item.next_frame != UNWRITTEN {
                break;
            }
            item.next_frame = next_frame;
        }
    }

    /// Records that everything written before is on disk.
    pub(crate) fn synced(&mut self, now: Moment) {
        self.synced = now;
    }

    /// Records that the log has failed. Returns false if that is known.
    pub(crate) fn fail(&mut self) -> bool {
        self.waiting_since = None;
        !std::mem::replace(&mut self.is_failed, true)
    }

    /// Returns whether the log has failed, so that a crash loses everything.
    pub(crate) fn is_failed(&self) -> bool {
        self.is_failed
    }

    /// Returns since when something waits to be written.
    pub(crate) fn waiting_since(&self) -> Option<Moment> {
        self.waiting_since
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// Records that a new log begins with a snapshot of the first `items`.
    pub(crate) fn begin_anew(&mut self, items: usize) {
        self.restart_at = Some(items);
    }

    /// Records that the new log is complete up to this frame.
    pub(crate) fn restarted(&mut self, next_frame: u64) {
        let Some(first) = self.restart_at.take() else { return };
        self.items[..first].iter_mut().for_each(|item| item.next_frame = 0);
        self.items[first..].iter_mut().for_each(|item| item.next_frame = next_frame);
        self.is_failed = false;
    }

    /// Records that the master was killed, or that its machine crashed.
    pub(crate) fn crash(&mut self, now: Moment, is_power_loss: bool) {
        self.waiting_since = None;
        self.crashed = Some((now, is_power_loss));
    }

    /// Forgets everything, because the log is lost.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the versions of the puts that these items started.
    fn started(items: &[Item]) -> Vec<u64> {
        let mut versions = Vec::new();
        for effects in items.iter().filter_map(|item| item.effects.as_ref()) {
            // They were decoded when they were appended.
            let _ = Effect::decode_all(effects, |effect| {
                if let Effect::Started { version, .. } = effect {
                    versions.push(version);
                }
            });
        }
        versions
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
        if kept < record.items.len() {
            let (crashed, is_power_loss) = record.crashed.unwrap_or((self.now, false));
            let entries_before = |at: usize| match at {
                0 => 0,
                _ => record.items[at - 1].entries,
            };
            let unwritten = record.items.partition_point(|item| item.next_frame != UNWRITTEN);
            if !is_power_loss && kept < unwritten {
                return Err("a killed master lost changes that it had written".to_owned());
            }
            let unwritten = unwritten.max(kept);
            let synced = match self.plan.log_sync {
                LogSync::Interval(_) if is_power_loss => Some(record.synced),
                _ => None,
            };
            let certain = if synced.is_none() { kept } else { unwritten };
            let answered = LogRecord::started(&record.items[certain..]);
            let lost = answered.into_iter().find(|&version| self.history.is_start_known(version));
            if let Some(version) = lost {
                return Err(format!(
                    "the start of version {version} was answered before it was in the log, and is \
                     lost: its memory goes to another put while the first writes"
                ));
            }
            let (first, first_unwritten) = (entries_before(kept), entries_before(unwritten));
            record.items.truncate(kept);
            let history = &mut self.history;
            self.outcome.undone += history.undo(first_unwritten, crashed, None)?;
            self.outcome.undone += history.undo(first, crashed, synced)?;
            self.rebuild_model()?;
            self.forget_lost_tasks();
        }
        // What was recovered is synced before the master serves.
        (self.log_record.crashed, self.log_record.synced) = (None, self.now);
        self.model.restart();
        let record = &mut self.log_record;
        let entries = self.history.len();
        record.items.push(Item { effects: None, next_frame, entries });
        Ok(())
    }

    fn rebuild_model(&mut self) -> Result<(), String> {
        let mut model = AllocationModel::new(self.model.adopts_records);
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
        model.adopted = self.model.adopted;
        self.model = model;
        Ok(())
    }

    /// Forgets tasks that the lost end of the log had made, unless somebody was told of them and they
    /// must not be lost.
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
