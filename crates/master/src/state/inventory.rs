//! The inventory: the objects of the catalog in the memory of the pool, and what their changes need:
//! clients, timers, the log, and the rules.
//!
//! [`Pool`] and [`Catalog`] keep their own invariants and do not know each other. What changes both
//! is here: an object that gets or loses memory, is read, or is evicted. Puts, tasks, searches for
//! memory and clients are above the inventory; it does not know them.

pub(in crate::state) mod ahead;
pub(in crate::state) mod clear;
pub(in crate::state) mod clients;
pub(in crate::state) mod disks;
pub(in crate::state) mod errors;
pub(in crate::state) mod eviction;
pub(in crate::state) mod expiry;
pub(in crate::state) mod lifecycle;
pub(in crate::state) mod memory_use;
pub(in crate::state) mod moves;
pub(in crate::state) mod new_copies;
pub(in crate::state) mod offloads;
pub(in crate::state) mod pins;
pub(in crate::state) mod promotion_candidates;
pub(in crate::state) mod promotions;
pub(in crate::state) mod quota;
pub(in crate::state) mod read;
pub(in crate::state) mod recovery;
pub(in crate::state) mod released;
pub(in crate::state) mod removal;
pub(in crate::state) mod sweep;
pub(in crate::state) mod usage;

use mooncake_base::Moment;

use crate::state::{
    catalog::Catalog,
    inventory::{
        ahead::Ahead, clients::Clients, moves::MovedAhead, offloads::Offloads,
        promotions::Promotions, recovery::Recovery, sweep::Sweeps,
    },
    ledger::{Log, max_granted::MaxGranted},
    pool::Pool,
    rules::Rules,
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
    pub(in crate::state) offloads: Offloads,
    pub(in crate::state) promotions: Promotions,
    pub(in crate::state) moved_ahead: MovedAhead,
    pub(in crate::state) ahead: Ahead,
    /// Eviction ahead of need has started and has not reached its goal.
    pub(in crate::state) is_evicting: bool,
    pub(in crate::state) next_version: u64,
    pub(in crate::state) recovery: Recovery,
    /// Time of the last [`State::advance`](crate::state::State::advance).
    pub(in crate::state) advanced: Option<Moment>,
    pub(in crate::state) max_granted: MaxGranted,
}

impl Inventory {
    /// Records effects from now on.
    pub(in crate::state) fn record_effects(&mut self) {
        self.log.effects.is_recording = true;
        self.max_granted.lease = self.max_granted.lease.max(self.rules.lease_ttl);
        self.max_granted.record(&mut self.log);
    }
}
