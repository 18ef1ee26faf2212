//! The inventory: the objects of the catalog in the memory of the pool, and what their changes need:
//! clients, timers, the log, and the rules.
//!
//! [`Pool`] and [`Catalog`] keep their own invariants and do not know each other. What changes both
//! is here: an object that gets or loses memory, is read, or is evicted. Puts, tasks, searches for
//! memory and clients are above the inventory; it does not know them.

pub(in crate::state) mod ahead;
pub(in crate::state) mod candidates;
pub(in crate::state) mod clear;
pub(in crate::state) mod clients;
pub(in crate::state) mod disks;
pub(in crate::state) mod errors;
pub(in crate::state) mod eviction;
pub(in crate::state) mod expiry;
pub(in crate::state) mod hold;
pub(in crate::state) mod lifecycle;
pub(in crate::state) mod memory;
pub(in crate::state) mod memory_use;
pub(in crate::state) mod mounted_disks;
pub(in crate::state) mod moves;
pub(in crate::state) mod new_copies;
pub(in crate::state) mod offloads;
pub(in crate::state) mod pins;
pub(in crate::state) mod prepared;
pub(in crate::state) mod promotion_candidates;
pub(in crate::state) mod promotions;
pub(in crate::state) mod puts;
pub(in crate::state) mod quota;
pub(in crate::state) mod read;
pub(in crate::state) mod recovery;
pub(in crate::state) mod released;
pub(in crate::state) mod releases;
pub(in crate::state) mod removal;
pub(in crate::state) mod restore;
pub(in crate::state) mod segments;
pub(in crate::state) mod sweep;
pub(in crate::state) mod usage;

use mooncake_base::Moment;

use crate::state::{
    catalog::{
        Catalog,
        group::Groups,
        object::{Object, Objects},
    },
    ids::{DiskSlot, ObjectSlot, SegmentSlot},
    inventory::{
        ahead::Ahead, clients::Clients, moves::MovedAhead, offloads::Offloads,
        promotions::Promotions, recovery::Recovery, sweep::Sweeps,
    },
    ledger::{Log, counters::Counters, effect::Effect, max_granted::MaxGranted},
    pool::{
        Pool,
        disks::{Disks, PoolDisk},
        segment::{Segment, Segments},
    },
    rules::Rules,
    timer::{Timer, Timers},
};

/// Objects and memory, with what their changes need.
#[derive(Debug)]
pub(crate) struct Inventory {
    rules: Rules,
    log: Log,
    timers: Timers,
    clients: Clients,
    pool: Pool,
    catalog: Catalog,
    sweeps: Sweeps,
    offloads: Offloads,
    promotions: Promotions,
    moved_ahead: MovedAhead,
    ahead: Ahead,
    /// Eviction ahead of need has started and has not reached its goal.
    is_evicting: bool,
    next_version: u64,
    recovery: Recovery,
    /// Time of the last [`State::advance`](crate::state::State::advance).
    advanced: Option<Moment>,
    max_granted: MaxGranted,
}

impl Inventory {
    /// Creates an inventory without objects and segments.
    pub(in crate::state) fn new(
        rules: Rules,
        pool: Pool,
        catalog: Catalog,
        next_version: u64,
    ) -> Self {
        Self {
            log: Log::default(),
            timers: Timers::default(),
            clients: Clients::default(),
            pool,
            catalog,
            sweeps: Sweeps::default(),
            offloads: Offloads::default(),
            promotions: Promotions::default(),
            moved_ahead: MovedAhead::default(),
            ahead: Ahead::default(),
            is_evicting: false,
            next_version,
            recovery: Recovery::default(),
            advanced: None,
            max_granted: MaxGranted::default(),
            rules,
        }
    }

    /// Records effects from now on.
    pub(in crate::state) fn record_effects(&mut self) {
        self.log.effects.is_recording = true;
        self.max_granted.lease = self.max_granted.lease.max(self.rules.lease_ttl);
        self.max_granted.record(&mut self.log);
    }

    /// Records an effect, if effects are recorded.
    pub(in crate::state) fn record<'a>(&mut self, effect: impl FnOnce() -> Effect<'a>) {
        self.log.effects.record(effect);
    }

    /// Records an effect that describes a part of the inventory and something else.
    pub(in crate::state) fn record_of<T>(
        &mut self,
        other: &T,
        effect: impl for<'a> FnOnce(&'a Self, &'a T) -> Option<Effect<'a>>,
    ) {
        if !self.log.effects.is_recording() {
            return;
        }
        // Taken out, since the effect borrows from the inventory.
        let mut effects = std::mem::take(&mut self.log.effects);
        if let Some(effect) = effect(self, other) {
            effects.record(|| effect);
        }
        self.log.effects = effects;
    }

    /// Sets a timer.
    pub(in crate::state) fn set_timer(&mut self, at: Moment, timer: Timer) {
        self.timers.push(at, timer);
    }

    /// Returns the counts of events, to add to them.
    pub(in crate::state) fn counters_mut(&mut self) -> &mut Counters {
        &mut self.log.counters
    }

    /// Returns what the changes left behind, to take it.
    pub(in crate::state) fn log_mut(&mut self) -> &mut Log {
        &mut self.log
    }

    /// Returns what the changes left behind for the log, for subscribers and for metrics.
    pub(in crate::state) fn log(&self) -> &Log {
        &self.log
    }

    /// Returns the rules in force.
    pub(in crate::state) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Returns the registered clients.
    pub(in crate::state) fn clients(&self) -> &Clients {
        &self.clients
    }

    /// Returns the memory, to look at it.
    pub(in crate::state) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the segments, to look at them.
    pub(in crate::state) fn segments(&self) -> &Segments {
        &self.pool.segments
    }

    /// Returns the disks, to look at them.
    pub(in crate::state) fn disks(&self) -> &Disks {
        &self.pool.disks
    }

    /// Returns a segment.
    pub(in crate::state) fn segment(&self, slot: SegmentSlot) -> &Segment {
        self.pool.segments.at(slot)
    }

    /// Returns a disk.
    pub(in crate::state) fn disk(&self, slot: DiskSlot) -> &PoolDisk {
        self.pool.disks.at(slot)
    }

    /// Returns an object.
    pub(in crate::state) fn object(&self, slot: ObjectSlot) -> &Object {
        self.catalog.objects.at(slot)
    }

    /// Returns the catalog, to look at it.
    pub(in crate::state) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Returns the objects, to look at them.
    pub(in crate::state) fn objects(&self) -> &Objects {
        &self.catalog.objects
    }

    /// Returns the groups of objects, to look at them.
    pub(in crate::state) fn groups(&self) -> &Groups {
        &self.catalog.groups
    }

    /// Returns the objects that wait for disks, to look at them.
    pub(in crate::state) fn offloads(&self) -> &Offloads {
        &self.offloads
    }

    /// Returns the version of the next put.
    pub(in crate::state) fn next_version(&self) -> u64 {
        self.next_version
    }

    /// Returns the upper bounds of the granted fences and leases.
    pub(in crate::state) fn max_granted(&self) -> &MaxGranted {
        &self.max_granted
    }

    /// Returns what is known of the time before a restart.
    pub(in crate::state) fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// Returns the objects that are brought into memory, to look at them.
    pub(in crate::state) fn promotions(&self) -> &Promotions {
        &self.promotions
    }

    /// Returns the queues of the objects that are brought into memory.
    pub(in crate::state) fn promotions_mut(&mut self) -> &mut Promotions {
        &mut self.promotions
    }

    /// Returns the queues of the objects that wait for disks.
    pub(in crate::state) fn offloads_mut(&mut self) -> &mut Offloads {
        &mut self.offloads
    }

    /// Returns the registered clients, for what they report of themselves.
    pub(in crate::state) fn clients_mut(&mut self) -> &mut Clients {
        &mut self.clients
    }

    /// Takes out a timer that is due.
    pub(in crate::state) fn pop_timer(&mut self, now: Moment) -> Option<Timer> {
        self.timers.pop_due(now)
    }

    /// Does what is due at each run of the timers: a pause of the master is compensated for, the bound
    /// of fences falls again, and memory is freed that waited for the log.
    pub(in crate::state) fn begin_advance(&mut self, now: Moment) {
        clients::compensate_stall(self, now);
        self.max_granted.lower(now, &mut self.log);
        self.pool.release_synced();
    }

    /// Returns when the next timer, quarantine or expiry is due.
    pub(in crate::state) fn next_due(&self) -> Option<Moment> {
        let (timers, quarantine) = (self.timers.next(), self.pool.quarantine.next());
        let due = [timers, quarantine, self.catalog.annotations.next_expiry()];
        due.into_iter().flatten().min()
    }
}
