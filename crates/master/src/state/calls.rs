//! Calls: puts, tasks, searches for memory, clients, lists.
//!
//! They are above the inventory, which does not know them.

pub(in crate::state) mod answers;
pub(in crate::state) mod clients;
pub(in crate::state) mod disks;
pub(in crate::state) mod lease_sweep;
pub(in crate::state) mod put;
pub(in crate::state) mod query;
pub(in crate::state) mod reclaim;
pub(in crate::state) mod task;
pub(in crate::state) mod view;
