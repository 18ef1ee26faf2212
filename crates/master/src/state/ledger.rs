//! What leaves the state and comes back at a restart: effects for the log, their replay, snapshots,
//! and events for subscribers.

pub(in crate::state) mod counters;
pub(in crate::state) mod effect;
pub(in crate::state) mod events;
pub(in crate::state) mod lease_notes;
pub(in crate::state) mod max_granted;
pub(in crate::state) mod objects;
pub(in crate::state) mod replay;
pub(in crate::state) mod task_record;

use crate::state::ledger::{
    counters::Counters, effect::Effects, events::EventBuffer, lease_notes::NotedLeases,
};

impl Log {
    /// Returns the log position behind all effects so far: the number of bytes recorded.
    pub fn log_position(&self) -> u64 {
        self.effects.position()
    }

    /// Returns whether effects are recorded.
    pub(in crate::state) fn is_recording(&self) -> bool {
        self.effects.is_recording()
    }
}

/// What the calls leave behind for others: effects for the log on disk, events for subscribers, and
/// counts for metrics.
#[derive(Debug, Default)]
pub struct Log {
    pub(in crate::state) effects: Effects,
    pub(in crate::state) events: EventBuffer,
    pub(in crate::state) counters: Counters,
    /// Leases, for masters that may lead next.
    pub(in crate::state) leases: NotedLeases,
    /// Objects wait for disks since the owners of disks were last told.
    pub(in crate::state) has_offloads: bool,
}

impl Log {
    /// Returns whether the owners of disks are to be told that objects wait for them. Returns it once.
    pub fn take_offload_signal(&mut self) -> bool {
        std::mem::take(&mut self.has_offloads)
    }

    /// Returns the counts of events since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
}
