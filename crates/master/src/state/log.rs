//! What leaves the state and comes back at a restart: effects for the log, their replay, snapshots,
//! and events for subscribers.

pub(super) mod effect;
pub(super) mod events;
pub(super) mod replay;
pub(super) mod restore;
pub(super) mod snapshot;
pub(super) mod task_record;

use self::{effect::Effects, events::EventBuffer};
use super::Counters;

/// What the calls leave behind for others: effects for the log on disk, events for subscribers, and
/// counts for metrics.
#[derive(Debug, Default)]
pub struct Log {
    pub(super) effects: Effects,
    pub(super) events: EventBuffer,
    pub(super) counters: Counters,
}

impl Log {
    /// Returns the counts of events since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
}
