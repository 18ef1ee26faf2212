//! The master's rules: which objects exist, where their copies lie, for how long, and who may be
//! given memory.
//!
//! A pure core: no clock, randomness, I/O, channel or await. `now` comes in, decisions come out,
//! and the same calls with the same seed give the same answers. One [`State`] is meant to stand
//! behind one lock; whatever could take long goes in slices.

pub mod allocator;
mod clear;
mod client;
mod drain;
mod effect;
mod events;
pub mod eviction;
mod eviction_queue;
mod group;
mod host;
mod ids;
mod key_arena;
mod lease;
mod mount_order;
mod object;
mod object_lifecycle;
mod pins;
pub mod placement;
mod put;
mod put_options;
mod quarantine;
mod query;
mod random;
mod read;
mod reclaim;
mod recovery;
mod replay;
mod restore;
mod rules;
mod segment;
mod snapshot;
mod sweep;
mod task;
mod task_record;
mod tenant;
mod timer;
mod write;

#[cfg(test)]
mod tests;

use mooncake_base::Moment;

pub(crate) use self::put::PutOwner;
use self::{
    client::Clients,
    drain::Jobs,
    effect::Effects,
    events::EventBuffer,
    eviction_queue::EvictionQueue,
    group::Groups,
    object::Objects,
    pins::Pins,
    placement::AllocationPolicy,
    quarantine::Quarantine,
    random::Random,
    read::MaxGranted,
    recovery::Recovery,
    sweep::Sweeps,
    task::Tasks,
    tenant::Tenants,
    timer::{Timer, Timers},
    write::Writes,
};
pub use self::{
    drain::{JobStatus, JobView, NewJob},
    effect::{DecodeError, Effect, LoggedCopy, LoggedPin, ObjectName, Value},
    events::ObjectEvent,
    ids::{KeyHash, ObjectSlot, SegmentSlot},
    object::ObjectState,
    put::{Place, Put, PutRef, Started},
    put_options::{PutOptions, SoftPin},
    query::{Listing, ObjectSummary, PAGE_MAX, Page, Removal, Selector},
    read::{FenceTicket, LocateOptions, Located, LocatedObject, Probed},
    recovery::RecoveryScope,
    replay::Image,
    restore::Restored,
    rules::{AllocationStrategy, EvictionKind, Rules, TaskRules, Watermark},
    segment::{SegmentNumber, SegmentSpec, SegmentStatus, SegmentView, Segments},
    snapshot::SnapshotCursor,
    task::{NewTask, TaskEnd, TaskKind, TaskStatus, TaskView, Work},
    tenant::TenantQuota,
};

/// How many things that are due one call of [`State::advance`] does.
const ADVANCE_SLICE: usize = 1024;

/// Everything the master knows.
#[derive(Debug)]
pub struct State {
    rules: Rules,
    clients: Clients,
    segments: Segments,
    objects: Objects,
    writes: Writes,
    groups: Groups,
    tasks: Tasks,
    jobs: Jobs,
    tenants: Tenants,
    pins: Pins,
    queue: EvictionQueue,
    placement: Box<dyn AllocationPolicy>,
    /// Segments that one put is offered; kept for the next.
    candidates: Vec<SegmentSlot>,
    quarantine: Quarantine,
    timers: Timers,
    sweeps: Sweeps,
    /// Eviction ahead of need has begun and not reached its end.
    is_evicting: bool,
    next_version: u64,
    recovery: Recovery,
    /// When time was last told to do its work.
    advanced: Option<Moment>,
    max_granted: MaxGranted,
    effects: Effects,
    events: EventBuffer,
    counters: Counters,
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
    /// Segments of before a restart that nobody has announced again, in no other sum but the keys.
    pub unclaimed_segments: u64,
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
    /// Copies and moves that were done.
    pub tasks_done: u64,
    /// Copies and moves that failed for good.
    pub tasks_failed: u64,
    /// Drains that left their segments empty.
    pub drains_done: u64,
    /// Drains that could not.
    pub drains_failed: u64,
    /// Drains that were cancelled.
    pub drains_cancelled: u64,
}

impl State {
    /// An empty pool. `seed` decides the random choices and the first version number; hand in a
    /// different one at each start, so that a version of an earlier master means nothing to this.
    pub fn new(rules: Rules, seed: u64) -> Self {
        let mut random = Random::new(seed);
        Self {
            clients: Clients::default(),
            segments: Segments::default(),
            objects: Objects::new(random.next()),
            writes: Writes::default(),
            groups: Groups::new(random.next()),
            tasks: Tasks::new(random.next()),
            jobs: Jobs::new(random.next()),
            tenants: Tenants::new(rules.is_multi_tenant),
            pins: Pins::default(),
            queue: EvictionQueue::new(eviction::policy(rules.eviction)),
            placement: placement::policy(rules.allocation, random.next()),
            candidates: Vec::new(),
            quarantine: Quarantine::default(),
            timers: Timers::default(),
            sweeps: Sweeps::default(),
            is_evicting: false,
            // 47 bits, which leaves room to count and for a replica's number beside it.
            next_version: (random.next() >> 17) + 1,
            recovery: Recovery::default(),
            advanced: None,
            max_granted: MaxGranted::default(),
            effects: Effects::default(),
            events: EventBuffer::default(),
            counters: Counters::default(),
            rules,
        }
    }

    /// Does what is due: clients, soft pins, graces, fences and unfinished puts that have run out,
    /// and eviction ahead of need. A bounded piece of it each time; cheap when nothing is due.
    /// Returns when something will be due next: not after `now` if there is more to do at once.
    ///
    /// To be called several times in a client's time to live: time in which it was not called is
    /// taken for a pause of the master, in which it could hear of nobody, and counts for no one.
    pub fn advance(&mut self, now: Moment) -> Option<Moment> {
        self.compensate_stall(now);
        self.lower_max_granted(now);
        for _ in 0..ADVANCE_SLICE {
            let did_one = self.fire_timer(now)
                | self.free_due_quarantine(now)
                | self.release_oldest_write(now);
            if !did_one {
                break;
            }
        }
        let sweep = self.sweep().then_some(now);
        let ahead = self.evict_ahead(now);
        let oldest = self.writes.oldest().map(|oldest| self.writes.at(oldest).started);
        let release = oldest.map(|started| started + self.rules.put_release);
        let due = [sweep, ahead, release, self.timers.next(), self.quarantine.next()];
        due.into_iter().flatten().min()
    }

    /// The rules it goes by.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Sums over the whole pool; takes as long as there are segments.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals {
            keys: self.objects.complete,
            soft_pinned_keys: self.pins.count(),
            clients: self.clients.count(),
            counters: self.counters,
            ..Totals::default()
        };
        totals.unclaimed_segments = self.recovery.segments;
        for (_, segment) in self.segments.claimed() {
            totals.segments += 1;
            totals.capacity += segment.spec.length;
            totals.used += segment.allocator.used();
            totals.writing += segment.writing;
            totals.fenced += segment.fenced;
        }
        totals
    }

    /// Bytes used and lent.
    fn sums(&self) -> (u64, u64) {
        let totals = self.totals();
        (totals.used, totals.capacity)
    }

    /// One timer that is due; whether there was one.
    fn fire_timer(&mut self, now: Moment) -> bool {
        let Some(timer) = self.timers.pop_due(now) else { return false };
        match timer {
            Timer::Client(client, registration) => self.check_client(now, client, registration),
            Timer::SoftPin(object, version) => self.check_pin(now, object, version),
            Timer::Unmount(segment, incarnation) => self.end_grace(segment, incarnation),
            Timer::QuarantineEnd(segment, incarnation) => {
                self.end_segment_quarantine(now, segment, incarnation)
            }
            Timer::Task(task, phase) => self.check_task(now, task, phase),
            Timer::Drain(job) => self.plan_job(now, job),
            Timer::Unclaimed(segment, incarnation) => {
                self.expire_unclaimed(now, segment, incarnation)
            }
        }
        true
    }
}
