//! The inventory: the objects of the catalog in the memory of the pool, and what their changes need:
//! clients, timers, the log, and the rules.
//!
//! [`Pool`] and [`Catalog`] keep their own invariants and do not know each other. What changes both
//! is here: an object that gets or loses memory, is read, or is evicted. Puts, tasks, searches for
//! memory and clients are above the inventory; it does not know them.

use mooncake_base::Moment;

use crate::state::{
    Rules,
    catalog::Catalog,
    client::{Clients, recovery::Recovery},
    log::Log,
    pool::Pool,
    read::MaxGranted,
    reclaim::{Ahead, sweep::Sweeps},
    timer::Timers,
};

/// Objects and memory, with what their changes need.
#[derive(Debug)]
pub(crate) struct Inventory {
    pub(in crate::state) rules: Rules,
    pub(in crate::state) log: Log,
    pub(in crate::state) timers: Timers,
    pub(in crate::state) clients: Clients,
    pub(in crate::state) pool: Pool,
    pub(in crate::state) catalog: Catalog,
    pub(in crate::state) sweeps: Sweeps,
    pub(in crate::state) ahead: Ahead,
    /// Eviction ahead of need has started and has not reached its goal.
    pub(in crate::state) is_evicting: bool,
    pub(in crate::state) next_version: u64,
    pub(in crate::state) recovery: Recovery,
    /// Time of the last [`State::advance`](crate::state::State::advance).
    pub(in crate::state) advanced: Option<Moment>,
    pub(in crate::state) max_granted: MaxGranted,
}
