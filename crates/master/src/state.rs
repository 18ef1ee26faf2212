//! The master's rules: which objects exist, where their copies lie, for how long, and who may be
//! given memory.
//!
//! A pure core: no clock, randomness, I/O, channel or await. `now` comes in, decisions come out,
//! and the same calls with the same seed give the same answers. One [`State`] is meant to stand
//! behind one lock; whatever could take long goes in slices.

mod put;
mod query;
mod read;
mod rules;
mod segment;

use std::time::Duration;

use mooncake_base::{ClientId, Moment, ReplicaId, Result, SegmentId, TenantId, Version};

pub use self::{
    put::{Place, Put, PutOptions, SoftPin, Started},
    query::{Listing, ObjectState, ObjectSummary, PAGE_MAX, Page, Removal, Selector},
    read::{Grant, Located, LocatedObject, Probed},
    rules::{AllocationStrategy, EvictionKind, Rules, Watermark},
    segment::{SegmentRef, SegmentSpec, SegmentStatus, SegmentView},
};

/// Everything the master knows.
#[derive(Debug)]
pub struct State {
    rules: Rules,
}

/// Sums over the whole pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Objects with something to read. Those of a segment that just went are counted until they
    /// are swept.
    pub keys: u64,
    /// Of them, soft-pinned.
    pub soft_pinned_keys: u64,
    /// Registered clients.
    pub clients: u64,
    /// Mounted segments.
    pub segments: u64,
    /// Bytes lent to the pool.
    pub capacity: u64,
    /// Bytes given away: objects, objects being written, and memory under fences.
    pub used: u64,
    /// Of them, bytes of puts that have not ended.
    pub writing: u64,
    /// Of them, freed bytes that wait for the end of a fence.
    pub fenced: u64,
    /// What happened since the start.
    pub counters: Counters,
}

/// What happened since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Puts that found no room at first.
    pub evictions_attempted: u64,
    /// Of them, those that found it by evicting.
    pub evictions_succeeded: u64,
    /// Objects evicted.
    pub evicted_keys: u64,
    /// And their bytes, all copies counted.
    pub evicted_bytes: u64,
    /// Puts refused for want of room.
    pub puts_without_room: u64,
    /// Puts that got fewer copies than wished.
    pub puts_with_fewer_copies: u64,
    /// Unfinished puts displaced by another writer or the loss of their own.
    pub puts_displaced: u64,
    /// Unfinished puts whose space was taken back.
    pub puts_released: u64,
    /// Clients that were not heard of for too long.
    pub clients_expired: u64,
}

impl State {
    /// An empty pool. `seed` decides the random choices and the first version number; hand in a
    /// different one at each start, so that a version of an earlier master means nothing to this.
    pub fn new(rules: Rules, seed: u64) -> Self {
        let _ = seed;
        Self { rules }
    }

    /// The rules it goes by.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    // ------------------------------------------------------------ clients

    /// Makes the client known, or hears of it again under this name ("host:port").
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the name is longer than 1 KiB or 65536 clients are known.
    pub fn register(&mut self, now: Moment, client: ClientId, name: &str) -> Result<()> {
        let _ = (now, client, name);
        unimplemented!("comes with the clients")
    }

    /// Hears of the client. `false`: it is not known; it must register and mount again.
    pub fn heartbeat(&mut self, now: Moment, client: ClientId) -> bool {
        let _ = (now, client);
        unimplemented!("comes with the clients")
    }

    /// The connection of the client closed: until its next heartbeat its copies are not named to
    /// readers and its segments take nothing new. Nothing for an unknown client.
    pub fn suspect(&mut self, now: Moment, client: ClientId) {
        let _ = (now, client);
        unimplemented!("comes with the clients")
    }

    /// The client leaves in order: it neither reads nor writes any more. Its segments go, and the
    /// space of its unfinished puts as soon as no late byte of them can arrive. Whether it was known.
    pub fn unregister(&mut self, now: Moment, client: ClientId) -> bool {
        let _ = (now, client);
        unimplemented!("comes with the clients")
    }

    /// The process of the client is known to be dead: as [`unregister`](Self::unregister), but the
    /// space of its unfinished puts is free at once.
    pub fn declare_dead(&mut self, now: Moment, client: ClientId) -> bool {
        let _ = (now, client);
        unimplemented!("comes with the clients")
    }

    // ------------------------------------------------------------ segments

    /// Takes the segment into the pool. Again with the same identity, incarnation and memory:
    /// nothing changes. With a later incarnation: what lay in the earlier one is gone.
    ///
    /// # Errors
    /// `CLIENT_NOT_FOUND`: register first. `SEGMENT_ALREADY_EXISTS`: another client or another
    /// memory has that id. `INVALID_PARAMS`: no length, or memory that overlaps another segment
    /// of the client or the end of the address space.
    pub fn mount(&mut self, now: Moment, client: ClientId, segment: SegmentSpec) -> Result<()> {
        let _ = (now, client, segment);
        unimplemented!("comes with the segments")
    }

    /// Takes the segment out of the pool: at once, or after a grace in which it can be read but
    /// takes nothing new.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if it is somebody else's.
    pub fn unmount(
        &mut self,
        now: Moment,
        client: ClientId,
        segment: SegmentId,
        grace: Duration,
    ) -> Result<()> {
        let _ = (now, client, segment, grace);
        unimplemented!("comes with the segments")
    }

    /// What is known of a segment named by a [`Place`] of a call just made.
    pub fn segment(&self, segment: SegmentRef) -> SegmentView<'_> {
        let _ = segment;
        unimplemented!("comes with the segments")
    }

    /// Every mounted segment, in the order of their names.
    pub fn list_segments(&self) -> Vec<SegmentView<'_>> {
        unimplemented!("comes with the segments")
    }

    // ------------------------------------------------------------ writing

    /// Allocates the copies of an object and lets the client write them for the rules'
    /// `write_window`. Evicts what it needs to.
    ///
    /// # Errors
    /// `OBJECT_ALREADY_EXISTS` (unless replacing): there is such an object, or somebody is writing
    /// it. `NO_AVAILABLE_HANDLE`: no room; the context says what holds it, and has `retry_after_ms`
    /// if only the end of a fence is awaited. `CLIENT_NOT_FOUND`: register first.
    /// `INVALID_PARAMS`: no bytes, no copies, or too long a pin.
    pub fn put_start(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: Put<'_>,
    ) -> Result<Started> {
        let _ = (now, client, tenant, put);
        unimplemented!("comes with the puts")
    }

    /// Publishes what was written, in the place of what stood there. `put.failed_replicas` are
    /// given up; their memory rests until no late byte can arrive.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`: no such put (any more): it was displaced, released or revoked.
    /// `ILLEGAL_CLIENT`: somebody else's. `REPLICA_IS_GONE`: no copy is left.
    pub fn put_end(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: PutRef<'_>,
    ) -> Result<()> {
        let _ = (now, client, tenant, put);
        unimplemented!("comes with the puts")
    }

    /// Gives the space of an unfinished put back. `put.failed_replicas` names copies on which a
    /// write may still be under way: their memory rests until no late byte can arrive.
    ///
    /// # Errors
    /// As [`put_end`](Self::put_end).
    pub fn put_revoke(
        &mut self,
        now: Moment,
        client: ClientId,
        tenant: &TenantId,
        put: PutRef<'_>,
    ) -> Result<()> {
        let _ = (now, client, tenant, put);
        unimplemented!("comes with the puts")
    }

    // ------------------------------------------------------------ reading

    /// Says where the objects lie. The fence is sized by the bytes of all of them together.
    ///
    /// # Errors
    /// By object: `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: it is being written for the first
    /// time; `TRANSFER_FAIL`: each process that holds a copy has just lost its connection.
    pub fn locate<K: AsRef<[u8]>>(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        keys: &[K],
        grant: Grant,
    ) -> Located {
        let _ = (now, tenant, keys, grant);
        unimplemented!("comes with the reads")
    }

    /// Whether that copy of that version still stands, and did all the time since it was located.
    pub fn verify(
        &self,
        tenant: &TenantId,
        key: &[u8],
        version: Version,
        replica: ReplicaId,
    ) -> bool {
        let _ = (tenant, key, version, replica);
        unimplemented!("comes with the reads")
    }

    /// Whether there is such an object; grants the retention lease if asked to.
    pub fn probe(&mut self, now: Moment, tenant: &TenantId, key: &[u8], has_lease: bool) -> Probed {
        let _ = (now, tenant, key, has_lease);
        unimplemented!("comes with the reads")
    }

    // ------------------------------------------------------------ removing

    /// Removes the object.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`; `REPLICA_IS_NOT_READY`: it is being written for the first time, forced
    /// or not; `OBJECT_HAS_LEASE` unless forced.
    pub fn remove(
        &mut self,
        now: Moment,
        tenant: &TenantId,
        key: &[u8],
        is_forced: bool,
    ) -> Result<()> {
        let _ = (now, tenant, key, is_forced);
        unimplemented!("comes with the removals")
    }

    /// One slice of a removal of many; `true` when it is done.
    pub fn remove_matching(&mut self, now: Moment, removal: &mut Removal) -> bool {
        let _ = (now, removal);
        unimplemented!("comes with the removals")
    }

    /// One slice of a listing; `true` when its page is complete. Takes no lease.
    pub fn list_objects(&self, listing: &mut Listing) -> bool {
        let _ = listing;
        unimplemented!("comes with the queries")
    }

    // ------------------------------------------------------------ time

    /// Does what is due: clients, soft pins, graces, fences and unfinished puts that have run out,
    /// and eviction ahead of need. A bounded piece of it each time; cheap when nothing is due.
    /// Returns when something will be due next: not after `now` if there is more to do at once.
    pub fn advance(&mut self, now: Moment) -> Option<Moment> {
        let _ = now;
        unimplemented!("comes with the timers")
    }

    /// Sums over the whole pool; O(1).
    pub fn totals(&self) -> Totals {
        unimplemented!("comes with the sums")
    }
}

/// A put that was started, named by its writer.
#[derive(Debug, Clone, Copy)]
pub struct PutRef<'a> {
    /// The key.
    pub key: &'a [u8],
    /// What [`State::put_start`] answered.
    pub version: Version,
    /// Copies that could not be written.
    pub failed_replicas: &'a [ReplicaId],
    /// What readers may check the bytes against.
    pub checksum: Option<u64>,
}
