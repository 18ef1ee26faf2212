//! What leaves the state and comes back at a restart: effects for the log, their replay, snapshots,
//! and events for subscribers.

pub(super) mod effect;
pub(super) mod events;
pub(super) mod replay;
pub(super) mod restore;
pub(super) mod snapshot;
pub(super) mod task_record;
