//! The rules of the master: which objects exist, where their replicas lie, how long they stay, and
//! who may allocate memory.
//!
//! A pure core without clock, randomness, I/O, channels or await. `now` is an argument, decisions
//! are return values, and the same calls with the same seed give the same results. One [`State`] is
//! meant to be guarded by one lock; work that could take long is done in slices.

mod api;
mod calls;
mod catalog;
mod ids;
mod inventory;
mod lease;
mod ledger;
mod options;
mod pool;
mod random;
mod replica;
mod restore;
mod rules;
mod snapshot;
mod tags;
mod timer;

#[cfg(test)]
mod tests;

use mooncake_base::Moment;
use rustc_hash::FxHashMap;

pub use self::{
    api::{disk_of, disk_progress, sweep_leases},
    calls::{
        answers::{Answers, Begun, CallItem},
        disks::{
            DiskCalls, Offload, Offloaded,
            own_disk::{OwnDisk, RecordName},
        },
        lease_sweep::LeaseSweep,
        put::{Put, PutCalls, PutProgress, PutRef, PutStep, Started, UnfinishedPut},
        query::{
            Selector,
            listing::{Listing, ObjectSummary, PAGE_MAX, Page},
            removal::Removal,
        },
        reclaim::Pending,
        task::{
            NewTask, TaskCalls, TaskEnd, TaskKind, TaskStatus, TaskView, Work,
            drain::{JobStatus, JobView, NewJob},
            promotion::{PromotionBatch, PromotionCalls},
        },
        view::{CopyView, ObjectView},
    },
    catalog::{eviction, object::ObjectState, tenant::TenantQuota},
    ids::{DiskSlot, KeyHash, ObjectSlot, SegmentSlot},
    inventory::{
        clients::ExpiredClient,
        memory_use::MemoryUse,
        promotions::Prefetch,
        read::{DiskPlace, FenceTicket, LocateOptions, Located, LocatedObject, Probed},
        recovery::{AwaitedOwner, RecoveryScope},
        removal::{RemovalTerms, SparedObjects},
    },
    ledger::{
        Log,
        counters::Counters,
        effect::{DecodeError, Effect, LoggedCopy, LoggedPin, ObjectName, Value},
        events::ObjectEvent,
        lease_notes::LeaseNotes,
        replay::Image,
    },
    options::{PutOptions, SoftPin, Terms},
    pool::{
        allocation::Place,
        allocator,
        disks::{DiskSpec, DiskView},
        segment::{SegmentNumber, SegmentSpec, SegmentStatus, SegmentView, Segments},
    },
    restore::Restored,
    rules::{
        AllocationStrategy, EvictionKind, OffloadRules, PromotionRules, Rules, TaskRules, Watermark,
    },
    snapshot::{SnapshotCursor, log_rest},
    tags::Tags,
};
use crate::state::{
    calls::{
        clients::ClientCalls,
        put::write::Writes,
        reclaim::{Reclaimer, Searches},
        task::{Tasks, drain::Jobs},
    },
    catalog::{
        Catalog, annotations::Annotations, disk_copies::DiskCopies, group::Groups, object::Objects,
        order::EvictionQueue, pins::Pins, released::ReleasedObjects, tenant::Tenants,
    },
    inventory::{Inventory, ahead, expiry, memory, pins, recovery, segments, sweep},
    pool::{Pool, freed::FreedTo},
    random::Random,
    timer::Timer,
};

/// Due timers and releases that one call of [`State::advance`] handles.
const ADVANCE_SLICE: usize = 1024;

/// Steps after which one call of [`State::advance`] ends; about a millisecond.
const ADVANCE_STEPS: u64 = 4096;

/// Clients that one call of [`State::advance`] expires, each with all its segments and puts.
const EXPIRED_SLICE: u64 = 16;

/// The whole state of the master.
///
/// The parts keep their own invariants; the state owns them and the order between them. Calls about
/// puts and tasks are in [`PutCalls`] and [`TaskCalls`], the others are passed on from here.
#[derive(Debug)]
pub struct State {
    inventory: Inventory,
    searches: Searches,
    writes: Writes,
    tasks: Tasks,
    jobs: Jobs,
}

/// Sums over the whole pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Readable objects. Objects of a segment that just left the pool are counted until the sweep.
    pub keys: u64,
    /// Soft-pinned objects among them.
    pub soft_pinned_keys: u64,
    /// Registered clients.
    pub clients: u64,
    /// Mounted segments.
    pub segments: u64,
    /// Segments from before a restart whose owners have not announced them again. No other sum but
    /// `keys` includes them.
    pub unclaimed_segments: u64,
    /// Bytes that mounted segments offer.
    pub capacity: u64,
    /// Allocated bytes: objects, unfinished puts and quarantined memory.
    pub used: u64,
    /// Bytes of unfinished puts.
    pub writing: u64,
    /// Freed bytes that wait for the end of a fence.
    pub fenced: u64,
    /// Objects that wait to be brought into memory, and that are being written there.
    pub promotions_underway: u64,
    /// Freed bytes that wait until the log is on disk, or for the rest of the memory of a put.
    pub awaiting_sync: u64,
    /// Events since the start.
    pub counters: Counters,
}

impl State {
    /// Creates an empty pool. `seed` decides the random choices and the first version number. Use
    /// another seed at each start, so that a version of an earlier master is not valid here.
    pub fn new(rules: Rules, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let objects = Objects::new(random.next());
        let groups = Groups::new(random.next());
        let (tasks, jobs) = (Tasks::new(random.next()), Jobs::new(random.next()));
        let pool = Pool::new(pool::placement::policy(rules.allocation, random.next()));
        let catalog = Catalog {
            objects,
            groups,
            tenants: Tenants::new(rules.is_multi_tenant),
            pins: Pins::default(),
            queue: EvictionQueue::new(eviction::policy(rules.eviction)),
            annotations: Annotations::default(),
            released: ReleasedObjects::default(),
            disk_copies: DiskCopies::default(),
            copied: FxHashMap::default(),
        };
        // 47 bits leave room to count up, and for the ordinal of a replica beside the version.
        let next_version = (random.next() >> 17) + 1;
        Self {
            inventory: Inventory::new(rules, pool, catalog, next_version),
            searches: Searches::default(),
            writes: Writes::default(),
            tasks,
            jobs,
        }
    }

    /// Returns the calls about puts.
    pub fn puts(&mut self) -> PutCalls<'_> {
        PutCalls {
            inventory: &mut self.inventory,
            searches: &mut self.searches,
            writes: &mut self.writes,
        }
    }

    /// Returns the calls about tasks and drain jobs.
    pub fn tasks(&mut self) -> TaskCalls<'_> {
        TaskCalls {
            inventory: &mut self.inventory,
            searches: &mut self.searches,
            writes: &mut self.writes,
            tasks: &mut self.tasks,
            jobs: &mut self.jobs,
        }
    }

    /// Returns the calls about disks.
    pub fn disks(&mut self) -> DiskCalls<'_> {
        DiskCalls { inventory: &mut self.inventory }
    }

    /// Returns the calls about clients.
    pub(crate) fn clients(&mut self) -> ClientCalls<'_> {
        ClientCalls {
            inventory: &mut self.inventory,
            searches: &mut self.searches,
            writes: &mut self.writes,
            tasks: &mut self.tasks,
            jobs: &mut self.jobs,
        }
    }

    /// Handles what is due: expired clients and objects, soft pins, unmount graces, fences and unfinished puts,
    /// the rest of groups whose eviction began, and eviction ahead of need. Each call does a bounded
    /// amount of work and is cheap when nothing is due. Returns when the next call is needed, which
    /// is `now` if work is left.
    ///
    /// Call `advance` several times within the time to live of a client: a longer gap counts as a
    /// pause of the master, in which no heartbeat could arrive, and extends the time of every
    /// client.
    pub fn advance(&mut self, now: Moment) -> Option<Moment> {
        self.inventory.begin_advance(now);
        let Self { inventory, searches, .. } = self;
        Reclaimer { inventory, searches }.expire_searches(now);
        let (expired, steps) =
            (self.inventory.log().counters().clients_expired, self.searches.steps);
        for _ in 0..ADVANCE_SLICE {
            let did_one = self.fire_timer(now)
                | memory::free_due(&mut self.inventory, now)
                | self.puts().release_oldest_write(now)
                | self.inventory.evict_condemned(now, &mut FreedTo::Pool)
                | expiry::remove_expired(&mut self.inventory, now);
            let has_expired =
                self.inventory.log().counters().clients_expired - expired >= EXPIRED_SLICE;
            if !did_one || has_expired || self.searches.steps - steps > ADVANCE_STEPS {
                break;
            }
        }
        let has_condemned = self.inventory.groups().next_condemned().is_some();
        let sweep = (sweep::sweep(&mut self.inventory)
            | self.inventory.pool().has_synced()
            | has_condemned)
            .then_some(now);
        let ahead = ahead::evict_ahead(&mut self.inventory, now);
        let oldest = self.writes.oldest().map(|oldest| self.writes.at(oldest).window_began);
        let release = oldest.map(|started| started + self.inventory.rules().put_release);
        let due = [sweep, ahead, release, self.inventory.next_due()];
        due.into_iter().flatten().min()
    }

    /// Returns what the calls left behind for the log, for subscribers and for metrics.
    pub fn log(&self) -> &Log {
        self.inventory.log()
    }

    /// Returns what the calls left behind, to take it.
    pub fn log_mut(&mut self) -> &mut Log {
        self.inventory.log_mut()
    }

    /// Returns the rules in force.
    pub fn rules(&self) -> &Rules {
        self.inventory.rules()
    }

    /// Returns sums over the whole pool, in time proportional to the number of segments.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals {
            keys: self.inventory.objects().complete,
            soft_pinned_keys: self.inventory.catalog().soft_pinned(),
            clients: self.inventory.clients().count(),
            promotions_underway: self.inventory.promotions().underway(),
            counters: *self.inventory.log().counters(),
            ..Totals::default()
        };
        totals.unclaimed_segments = recovery::unclaimed_segments(&self.inventory);
        for (_, segment) in self.inventory.segments().claimed() {
            totals.segments += 1;
            totals.capacity += segment.spec.length;
            totals.used += segment.view().used;
            totals.writing += segment.reserved().writing;
            totals.fenced += segment.reserved().fenced;
            totals.awaiting_sync += segment.reserved().withheld;
        }
        totals
    }

    /// Fires one timer that is due. Returns whether there was one.
    fn fire_timer(&mut self, now: Moment) -> bool {
        let Some(timer) = self.inventory.pop_timer(now) else { return false };
        match timer {
            Timer::Client(client, registration) => {
                self.clients().check_client(now, client, registration)
            }
            Timer::SoftPin(object, version) => {
                pins::check_pin(&mut self.inventory, now, object, version)
            }
            Timer::Unmount(segment, incarnation) => self.clients().end_grace(segment, incarnation),
            Timer::QuarantineEnd(segment, incarnation) => {
                segments::end_quarantine(&mut self.inventory, now, segment, incarnation)
            }
            Timer::Task(task, phase) => self.tasks().check_task(now, task, phase),
            Timer::Promotion(replica) => PromotionCalls::new(self.tasks()).expire(now, replica),
            Timer::Drain(job) => self.tasks().plan_job(now, job),
            Timer::DiskAway(disk) => self.disks().expire(now, disk),
            Timer::Unclaimed(segment, incarnation) => {
                self.clients().expire_unclaimed(now, segment, incarnation)
            }
        }
        true
    }
}

/// Limits how many objects one call of [`State::advance`] sweeps after a segment has left the pool.
#[cfg(feature = "test-util")]
pub fn limit_sweeps(state: &mut State, objects: u32) {
    sweep::limit_slices(&mut state.inventory, objects);
}

/// Returns whether objects are left to sweep.
#[cfg(feature = "test-util")]
pub fn is_sweeping(state: &State) -> bool {
    sweep::is_sweeping(&state.inventory)
}

#[cfg(feature = "test-util")]
impl TaskCalls<'_> {
    /// Advances the number of the next replica that a task makes, as after that many replicas.
    pub fn skip_replica_ordinals(&mut self, count: u32) {
        let next = self.tasks.next_ordinal();
        // The numbers of puts are not among them.
        let skipped = match next.checked_add(count) {
            Some(number) => number,
            None => next.wrapping_add(count) + catalog::object::REPLICAS_MAX,
        };
        self.tasks.resume_ordinals(skipped);
    }
}
