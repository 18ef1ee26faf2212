//! A model check: random calls, with all invariants checked after each call.

mod promotions;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mooncake_base::Version;
use proptest::prelude::*;

use super::*;
use crate::state::{
    catalog::object::Flags,
    ids::{BlockId, Slot, TenantIndex},
    replica::Replica,
    tests::recovery::Log,
};

const KEYS: [&str; 6] = ["a", "b", "c", "g/1", "g/2", "g/3"];
const CLIENTS: [ClientId; 3] = [A, B, ClientId::from_bits(3)];

#[derive(Debug, Clone)]
enum Call {
    Start { client: usize, key: usize, length: u64, replaces: bool, pin: u8, replicas: u32 },
    End { nth: prop::sample::Index, fails: bool },
    Revoke { nth: prop::sample::Index, fails: bool },
    Locate { key: usize, has_lease: bool, has_fence: bool },
    Remove { key: usize, is_forced: bool },
    Expire { key: usize, ttl_ms: Option<u64> },
    RemoveAll { is_forced: bool },
    Wait { ms: u64 },
    Suspect { client: usize },
    Mount { client: usize },
    Unmount { client: usize, grace_ms: u64 },
    Leave { client: usize },
    Copy { key: usize, target: usize },
    Shift { key: usize, source: usize, target: usize },
    Fetch { client: usize },
    Report { nth: prop::sample::Index, fails: bool },
    Clear { key: usize, segment: usize },
    Drain { segment: usize },
    Cancel { nth: prop::sample::Index },
    MountDisk { client: usize, reports_all: bool },
    UnmountDisk { forgets: bool },
    HandOver,
    Write { nth: prop::sample::Index, fails: bool },
    Prefetch { key: usize },
    FetchPromotions,
    EndPromotion { nth: prop::sample::Index, fails: bool },
    Lose { key: usize },
    NameAll { loses: usize },
    Answer { waits: bool },
    Restart { comes_back: [bool; 3], hands_over: bool },
}

const HOSTS: [&str; 3] = ["host-a:1", "host-b:1", "host-c:1"];

fn call() -> impl Strategy<Value = Call> {
    let key = 0..KEYS.len();
    let client = 0..CLIENTS.len();
    let length = prop_oneof![4 => 1_u64..400_000, 1 => Just(4096_u64)];
    prop_oneof![
        8 => (client.clone(), key.clone(), length, any::<bool>(), 0_u8..6, 1_u32..4).prop_map(
            |(client, key, length, replaces, pin, replicas)| Call::Start {
                client, key, length, replaces, pin, replicas
            }
        ),
        8 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2))
            .prop_map(|(nth, fails)| Call::End { nth, fails }),
        1 => (any::<prop::sample::Index>(), any::<bool>())
            .prop_map(|(nth, fails)| Call::Revoke { nth, fails }),
        5 => (key.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(key, has_lease, has_fence)| Call::Locate { key, has_lease, has_fence }),
        3 => (key.clone(), any::<bool>())
            .prop_map(|(key, is_forced)| Call::Remove { key, is_forced }),
        2 => (key, prop::option::of(1_u64..4000))
            .prop_map(|(key, ttl_ms)| Call::Expire { key, ttl_ms }),
        1 => any::<bool>().prop_map(|is_forced| Call::RemoveAll { is_forced }),
        4 => prop_oneof![1_u64..3000, Just(31_000), Just(601_000)].prop_map(|ms| Call::Wait { ms }),
        1 => client.clone().prop_map(|client| Call::Suspect { client }),
        2 => client.clone().prop_map(|client| Call::Mount { client }),
        1 => (client.clone(), prop_oneof![Just(0), 1_u64..4000])
            .prop_map(|(client, grace_ms)| Call::Unmount { client, grace_ms }),
        1 => client.clone().prop_map(|client| Call::Leave { client }),
        3 => (0..KEYS.len(), client.clone()).prop_map(|(key, target)| Call::Copy { key, target }),
        2 => (0..KEYS.len(), client.clone(), client.clone())
            .prop_map(|(key, source, target)| Call::Shift { key, source, target }),
        5 => client.clone().prop_map(|client| Call::Fetch { client }),
        4 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2))
            .prop_map(|(nth, fails)| Call::Report { nth, fails }),
        1 => (0..KEYS.len(), 0..4_usize).prop_map(|(key, segment)| Call::Clear { key, segment }),
        1 => client.prop_map(|segment| Call::Drain { segment }),
        1 => any::<prop::sample::Index>().prop_map(|nth| Call::Cancel { nth }),
        2 => (0..CLIENTS.len(), any::<bool>())
            .prop_map(|(client, reports_all)| Call::MountDisk { client, reports_all }),
        1 => any::<bool>().prop_map(|forgets| Call::UnmountDisk { forgets }),
        6 => Just(Call::HandOver),
        8 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2))
            .prop_map(|(nth, fails)| Call::Write { nth, fails }),
        3 => (0..KEYS.len()).prop_map(|key| Call::Prefetch { key }),
        4 => Just(Call::FetchPromotions),
        4 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2))
            .prop_map(|(nth, fails)| Call::EndPromotion { nth, fails }),
        1 => (0..KEYS.len()).prop_map(|key| Call::Lose { key }),
        1 => (0..KEYS.len()).prop_map(|loses| Call::NameAll { loses }),
        2 => any::<bool>().prop_map(|waits| Call::Answer { waits }),
        1 => any::<([bool; 3], bool)>()
            .prop_map(|(comes_back, hands_over)| Call::Restart { comes_back, hands_over }),
    ]
}

fn options(pin: u8, replicas: u32) -> PutOptions {
    PutOptions {
        replicas,
        soft_pin: match pin {
            0 => SoftPin::Enable(Some(Duration::from_secs(3))),
            1 => SoftPin::Disable,
            _ => SoftPin::Preserve,
        },
        is_hard_pinned: pin == 5,
        ..PutOptions::default()
    }
}

/// The model's own knowledge.
struct Model {
    pool: Pool,
    /// Puts in progress, as their writers see them.
    started: Vec<(usize, usize, Started)>,
    /// When the fences of memory ranges end: (incarnation, base + offset, length).
    fences: HashMap<(u64, u64, u64), Moment>,
    /// The end of the lease of each key, and the leased version.
    leases: BTreeMap<usize, (Moment, Version)>,
    /// Keys of which the address was given away under the present lease.
    addresses: BTreeSet<usize>,
    /// When keys expire, and in which version.
    expiries: BTreeMap<usize, (Moment, Version)>,
    /// Tasks handed to clients, and drain jobs created.
    work: Vec<(ClientId, Work)>,
    jobs: Vec<JobId>,
    incarnation: u64,
    disk: DiskModel,
    log: Log,
}

/// A directory of records, as its owners see it.
#[derive(Default)]
struct DiskModel {
    owner: usize,
    incarnation: u64,
    /// Objects that were handed over and are not written yet.
    taken: Vec<(usize, Version, u64)>,
    /// Objects that the owner was told to bring into memory.
    promoted: Vec<promotions::Promoted>,
    /// What was written since the directory was mounted.
    written: BTreeSet<(usize, Version)>,
    /// The records. One that was removed or replaced stays.
    records: Vec<(usize, Version, u64)>,
}

const DISK: SegmentId = SegmentId::from_bits(99);

impl Model {
    fn new(
        eviction: EvictionKind,
        allocation: AllocationStrategy,
        is_on_eviction: bool,
        drops_when_full: bool,
    ) -> Self {
        let rules = Rules {
            eviction,
            allocation,
            is_multi_tenant: true,
            offload: Some(OffloadRules {
                queue_max: 8,
                adopts_records: false,
                is_on_eviction,
                drops_when_full,
                moves_max: 4,
            }),
            disk_away_ttl: Duration::from_secs(60),
            ..Rules::default()
        };
        let mut pool = Pool::with(rules, 1);
        pool.state.set_quota(&TenantId::default(), 2 * MIB).unwrap();
        pool.state.register(pool.now, CLIENTS[2], HOSTS[2]).unwrap();
        let log = Log::begin(&mut pool);
        let mut model = Self {
            pool,
            started: Vec::new(),
            fences: HashMap::new(),
            leases: BTreeMap::new(),
            addresses: BTreeSet::new(),
            expiries: BTreeMap::new(),
            work: Vec::new(),
            jobs: Vec::new(),
            incarnation: 1,
            disk: DiskModel::default(),
            log,
        };
        model.run_disk(Call::MountDisk { client: 0, reports_all: false });
        model
    }

    fn run(&mut self, call: Call) {
        match call {
            Call::Start { client, key, length, replaces, pin, replicas } => {
                self.start(client, key, length, replaces, &options(pin, replicas));
            }
            Call::End { nth, fails } | Call::Revoke { nth, fails } => {
                if !self.started.is_empty() {
                    let (client, key, started) =
                        self.started.swap_remove(nth.index(self.started.len()));
                    self.finish(matches!(call, Call::End { .. }), client, key, &started, fails);
                }
            }
            Call::Locate { key, has_lease, has_fence } => self.locate(key, has_lease, has_fence),
            Call::Remove { key, is_forced } => {
                let is_leased = self.lease_of(key).is_some();
                if self.pool.remove(KEYS[key], is_forced).is_ok() {
                    assert!(is_forced || !is_leased, "leased objects are not removed");
                    self.leases.remove(&key);
                }
            }
            Call::Expire { key, ttl_ms } => {
                let ttl = ttl_ms.map(Duration::from_millis);
                let (now, tenant) = (self.pool.now, &self.pool.tenant);
                let set = self.pool.state.puts().set_expiry(now, tenant, KEYS[key].as_bytes(), ttl);
                if let (Ok(version), Some(ttl)) = (&set, ttl) {
                    self.expiries.insert(key, (now + ttl, *version));
                } else if set.is_ok() {
                    self.expiries.remove(&key);
                }
            }
            Call::RemoveAll { is_forced } => {
                let mut removal = Removal::new(TenantId::default(), Selector::All, is_forced);
                while !self.pool.state.remove_matching(self.pool.now, &mut removal) {}
                if is_forced {
                    self.leases.clear();
                }
            }
            Call::Wait { ms } => self.wait(ms),
            Call::Suspect { client } => self.pool.state.suspect(self.pool.now, CLIENTS[client]),
            Call::Mount { client } => self.mount(client),
            Call::Unmount { client, grace_ms } => {
                let id = SegmentId::from_bits(client as u128 + 1);
                let grace = Duration::from_millis(grace_ms);
                let now = self.pool.now;
                if self.pool.state.unmount(now, CLIENTS[client], id, grace).is_ok() {
                    self.leases.clear();
                }
            }
            Call::Leave { client } => {
                self.pool.state.unregister(self.pool.now, CLIENTS[client]);
                self.leases.clear();
            }
            call => self.run_task(call),
        }
    }

    fn run_task(&mut self, call: Call) {
        let now = self.pool.now;
        let state = &mut self.pool.state;
        let tenant = &self.pool.tenant;
        match call {
            Call::Copy { key, target } => {
                let targets = [HOSTS[target].to_owned()];
                let new = NewTask::Copy { key: KEYS[key].as_bytes(), targets: &targets };
                let _ = state.tasks().create_task(now, tenant, new);
            }
            Call::Shift { key, source, target } => {
                let (source, target) = (HOSTS[source], HOSTS[target]);
                let new = NewTask::Move { key: KEYS[key].as_bytes(), source, target };
                let _ = state.tasks().create_task(now, tenant, new);
            }
            Call::Fetch { client } => {
                let client = CLIENTS[client];
                let Ok(work) = state.tasks().fetch_tasks(now, client, 2, 400_000) else { return };
                for work in work {
                    self.assert_unfenced(&self.stretches(&work.targets));
                    self.work.push((client, work));
                }
            }
            Call::Report { nth, fails } if !self.work.is_empty() => {
                let (client, work) = self.work.swap_remove(nth.index(self.work.len()));
                let failed: Vec<ReplicaId> =
                    work.targets.iter().take(usize::from(fails)).map(|p| p.replica).collect();
                let (id, attempt) = (work.id, work.attempt);
                let end = TaskEnd { id, attempt, failed_replicas: &failed, why: "" };
                let _ = state.tasks().end_task(now, client, end);
            }
            Call::Clear { key, segment } => {
                let name = HOSTS.get(segment).unwrap_or(&"");
                let is_cleared = state.clear_copies(now, tenant, KEYS[key].as_bytes(), name);
                assert!(!is_cleared || self.lease_of(key).is_none(), "leased copies stay");
                if is_cleared {
                    self.leases.remove(&key);
                }
            }
            Call::Drain { segment } => {
                let segments = [HOSTS[segment].to_owned()];
                let may_evict = self.jobs.len() % 2 == 1;
                let new = NewJob { segments: &segments, targets: &[], concurrency: 2, may_evict };
                self.jobs.extend(state.tasks().create_job(now, new));
            }
            Call::Cancel { nth } if !self.jobs.is_empty() => {
                let job = self.jobs.swap_remove(nth.index(self.jobs.len()));
                let _ = state.tasks().cancel_job(now, job);
            }
            Call::Answer { waits } => prepared::answer(state, waits),
            Call::Restart { comes_back, hands_over } => self.restart(comes_back, hands_over),
            call => self.run_disk(call),
        }
    }

    fn run_disk(&mut self, call: Call) {
        let (now, owner) = (self.pool.now, CLIENTS[self.disk.owner]);
        match call {
            Call::MountDisk { client, reports_all } => self.mount_disk(client, reports_all),
            Call::UnmountDisk { forgets } => {
                let unmounted = self.pool.state.disks().unmount(now, owner, DISK, forgets);
                if unmounted.is_ok() {
                    self.leases.clear();
                }
                if unmounted.is_ok() && forgets {
                    self.disk.records.clear();
                }
            }
            Call::HandOver => self.hand_over(owner),
            Call::Prefetch { .. } | Call::FetchPromotions | Call::EndPromotion { .. } => {
                self.run_promotion(owner, call);
            }
            call => {
                if self.pool.state.disks().own(owner, DISK).is_ok() {
                    self.report_disk(owner, call);
                }
            }
        }
    }

    fn mount_disk(&mut self, client: usize, reports_all: bool) {
        self.disk.incarnation += 1;
        let spec = DiskSpec {
            id: DISK,
            incarnation: Incarnation(self.disk.incarnation),
            name: HOSTS[client].to_owned(),
            address: HOSTS[client].to_owned(),
            capacity: 1 << 30,
        };
        if self.pool.state.disks().mount(CLIENTS[client], spec, 0, reports_all).is_ok() {
            self.disk.owner = client;
            self.disk.taken.clear();
            self.disk.written.clear();
        }
    }

    fn hand_over(&mut self, owner: ClientId) {
        let now = self.pool.now;
        let taken = self.pool.state.disks().take_over(now, owner, DISK, 3, 400_000);
        let Ok(offloaded) = taken else { return };
        for object in offloaded.objects {
            let key = KEYS.iter().position(|key| key.as_bytes() == object.key).unwrap();
            let until = now + offloaded.fence;
            for (start, end, incarnation) in self.stretches(&object.places) {
                let fence = self.fences.entry((incarnation, start, end)).or_insert(until);
                *fence = until.max(*fence);
            }
            self.disk.taken.push((key, object.version, object.length));
        }
    }

    /// What the owner of the disk reports.
    fn report_disk(&mut self, owner: ClientId, call: Call) {
        let now = self.pool.now;
        let tenant = self.pool.tenant.clone();
        let record = |&(key, version, length): &(usize, Version, u64)| RecordName {
            tenant: &tenant,
            key: KEYS[key].as_bytes(),
            version,
            length,
        };
        match call {
            Call::Write { nth, fails } if !self.disk.taken.is_empty() => {
                let taken = self.disk.taken.swap_remove(nth.index(self.disk.taken.len()));
                // The report ends the fence, and the reader knows that.
                self.fences.clear();
                let mut disk = self.pool.state.disks().own(owner, DISK).unwrap();
                if fails {
                    disk.record_refused(now, &record(&taken));
                } else {
                    self.disk.records.push(taken);
                    self.disk.written.insert((taken.0, taken.1));
                    disk.record_added(now, &record(&taken));
                }
            }
            Call::Lose { key } => {
                let records = std::mem::take(&mut self.disk.records);
                let (lost, kept): (Vec<_>, Vec<_>) =
                    records.into_iter().partition(|it| it.0 == key);
                self.disk.records = kept;
                let mut disk = self.pool.state.disks().own(owner, DISK).unwrap();
                for lost in &lost {
                    disk.record_lost(now, &record(lost));
                }
                self.leases.remove(&key);
            }
            Call::NameAll { loses } => {
                let (version, length) = self.readable_version(loses).unwrap_or((Version(0), 0));
                self.disk.records.retain(|it| it.0 != loses);
                let mut disk = self.pool.state.disks().own(owner, DISK).unwrap();
                for named in &self.disk.records {
                    disk.record_added(now, &record(named));
                }
                let mut next = 0;
                if disk.end_naming() {
                    while !disk.drop_unnamed(now, &mut next) {}
                } else {
                    // Told one by one instead.
                    disk.record_lost(now, &record(&(loses, version, length)));
                }
                // The master knows from its report that it was there.
                if self.disk.written.contains(&(loses, version)) {
                    disk.record_lost(now, &record(&(loses, version, length)));
                }
                self.leases.remove(&loses);
            }
            _ => {}
        }
    }

    /// A copy on disk is a record that was written in this version, and not lost.
    fn check_disk(&self) {
        let inventory = &self.pool.state.inventory;
        let mut copies = 0;
        for (key, name) in KEYS.iter().enumerate() {
            let objects = inventory.objects();
            let slot = objects.find(TenantIndex::DEFAULT, name.as_bytes());
            let Some(slot) = slot.filter(|&slot| inventory.disk_copy(slot).is_some()) else {
                continue;
            };
            copies += 1;
            let object = objects.at(slot);
            let is_meant = |record: &&(usize, Version, u64)| {
                **record == (key, object.version(), object.length)
            };
            assert!(self.disk.records.iter().any(|it| is_meant(&it)), "{name}: no such record");
        }
        let disks = inventory.disks().kept();
        let counted = disks.map(|(_, disk)| disk.objects).sum::<u64>();
        assert_eq!(counted, copies);
    }

    fn start(
        &mut self,
        client: usize,
        key: usize,
        length: u64,
        replaces: bool,
        options: &PutOptions,
    ) {
        let before = self.readable_version(key);
        let is_unreachable = self.is_unreachable(key);
        // A refusal shows the present use of the memory.
        self.pool.state.searches.refused = None;
        let given = self.given_addresses();
        let started = self.pool.start_with(CLIENTS[client], KEYS[key], length, replaces, options);
        assert_eq!(given, self.given_addresses(), "memory whose address was given away stays");
        let after = self.readable_version(key);
        assert_eq!(before, after, "what can be read stays until the put has ended");
        let started = match started {
            Ok(started) => started,
            Err(error) => return self.check_refusal(&error),
        };
        assert!(replaces || before.is_none() || is_unreachable);
        for (start, end, incarnation) in self.stretches(&started.places) {
            for (&(other, from, to), until) in &self.fences {
                let overlaps = other == incarnation && start < to && from < end;
                assert!(!overlaps || *until <= self.pool.now, "fenced memory was given away");
            }
        }
        self.started.push((client, key, started));
    }

    /// The replicas in memory of leased objects of which the address was given away.
    fn given_addresses(&self) -> Vec<(usize, Vec<Replica>)> {
        let objects = self.pool.state.inventory.objects();
        let given = self.addresses.iter().filter(|&&key| self.lease_of(key).is_some());
        let replicas = given.filter_map(|&key| {
            let slot = objects.find(TenantIndex::DEFAULT, KEYS[key].as_bytes())?;
            Some((key, objects.at(slot).replicas.to_vec()))
        });
        replicas.collect()
    }

    /// The bytes reported as held add up to all bytes in use.
    fn check_refusal(&self, error: &Error) {
        let text = error.to_string();
        let part = |name: &str| {
            let found = text.split_whitespace().find_map(|word| word.strip_prefix(name));
            found.map_or(0, |value| value.parse::<u64>().unwrap())
        };
        if !text.contains(" free=") {
            return;
        }
        let state = &self.pool.state;
        let open =
            state.inventory.segments().open().iter().map(|&slot| state.inventory.segment(slot));
        let all: u64 = open.clone().map(|segment| segment.allocator.length()).sum();
        let held = [
            "leased=",
            "soft_pinned=",
            "hard_pinned=",
            "writing=",
            "fenced=",
            "replaced=",
            "awaiting_sync=",
        ];
        let held: u64 = held.into_iter().map(part).sum();
        assert_eq!(part("free=") + part("evictable=") + held, all, "{text}");
        // A lease keeps the object's memory where there are no disks, or if its address was given away.
        let has_disks = !state.inventory.disks().is_empty();
        let open: Vec<SegmentSlot> = state.inventory.segments().open().to_vec();
        let mut leased = 0;
        for (key, name) in KEYS.iter().enumerate() {
            let Some(slot) = state.inventory.objects().find(TenantIndex::DEFAULT, name.as_bytes())
            else {
                continue;
            };
            let object = state.inventory.object(slot);
            let is_kept = !has_disks || self.addresses.contains(&key);
            if self.lease_of(key).is_some() && is_kept && !object.flags.has(Flags::HARD_PINNED) {
                let copies = object.replicas.iter();
                leased += object.length
                    * copies.filter(|copy| open.contains(&copy.segment)).count() as u64;
            }
        }
        assert!(part("leased=") >= leased, "{leased} bytes are leased: {text}");
    }

    fn finish(&mut self, is_end: bool, client: usize, key: usize, started: &Started, fails: bool) {
        let failed: Vec<ReplicaId> =
            started.places.iter().take(usize::from(fails)).map(|place| place.replica).collect();
        let put = PutRef {
            key: KEYS[key].as_bytes(),
            version: started.version,
            failed_replicas: &failed,
            checksum: None,
        };
        let (now, client) = (self.pool.now, CLIENTS[client]);
        let before = self.readable_version(key);
        let state = &mut self.pool.state;
        let result = if is_end {
            state.puts().put_end(now, client, &self.pool.tenant, put)
        } else {
            state.puts().put_revoke(now, client, &self.pool.tenant, put)
        };
        let after = self.readable_version(key);
        if result.is_err() || !is_end {
            assert_eq!(before, after, "a put that fails changes nothing");
        } else if let (Some((after, _)), Some((_, version))) = (after, self.leases.get_mut(&key)) {
            *version = after;
        } else {
            // The only replica that was written is in a segment that its owner has not claimed yet.
            self.leases.remove(&key);
        }
    }

    fn locate(&mut self, key: usize, has_lease: bool, has_fence: bool) {
        let Ok(located) = self.pool.locate(KEYS[key], has_lease, has_fence) else { return };
        let now = self.pool.now;
        if has_lease && self.lease_of(key).is_none() {
            self.addresses.remove(&key);
        }
        if has_lease && !has_fence {
            self.addresses.insert(key);
        }
        if has_lease {
            let until = now + self.pool.state.rules().lease_ttl;
            self.leases.insert(key, (until, located.version));
        }
        if has_fence {
            let until = now + self.pool.state.rules().fence(located.length);
            for (start, end, incarnation) in self.stretches(&located.places) {
                let fence = self.fences.entry((incarnation, start, end)).or_insert(until);
                *fence = until.max(*fence);
            }
        }
        for place in located.places.iter() {
            assert!(self.pool.state.verify(
                &self.pool.tenant,
                KEYS[key].as_bytes(),
                located.version,
                place.replica
            ));
        }
    }

    fn wait(&mut self, ms: u64) {
        let expired = self.pool.state.log().counters().clients_expired;
        let mounted = self.pool.state.totals().segments;
        let mut left = ms;
        while left > 0 {
            let step = left.min(1000);
            left -= step;
            self.pool.now = self.pool.now + Duration::from_millis(step);
            if ms < 3000 {
                for client in CLIENTS {
                    self.pool.state.heartbeat(self.pool.now, client);
                }
            }
            self.pool.advance_all();
        }
        let totals = self.pool.state.totals();
        if totals.counters.clients_expired != expired || totals.segments != mounted {
            self.leases.clear();
        }
    }

    fn mount(&mut self, client: usize) {
        let (now, id) = (self.pool.now, CLIENTS[client]);
        self.pool.state.register(now, id, ["host-a:1", "host-b:1", "host-c:1"][client]).unwrap();
        let mut segment = spec(id, client as u128 + 1, 1, 1);
        // Sometimes the owner has allocated new memory.
        if self.incarnation % 4 == 3 {
            segment.incarnation = Incarnation(self.incarnation);
        }
        self.incarnation += 1;
        if self.pool.state.mount(now, id, segment).is_ok() {
            // The content of the earlier incarnation is lost.
            let mut leases = std::mem::take(&mut self.leases);
            leases.retain(|key, _| self.readable_version(*key).is_some());
            self.leases = leases;
        }
    }

    /// The master dies or hands over, and another goes on from its log. Some of the clients come back.
    fn restart(&mut self, comes_back: [bool; 3], hands_over: bool) {
        let before = self.log.end(&mut self.pool, hands_over);
        let old = std::mem::replace(&mut self.pool.state, State::new(Rules::default(), 1));
        self.pool.state = self.log.restart(self.pool.now, old.rules());
        let now = self.pool.now;
        for (client, _) in CLIENTS.into_iter().zip(comes_back).filter(|(_, is_back)| *is_back) {
            self.pool.state.register(now, client, "host-d:1").unwrap();
            for segment in before.segments_of(client) {
                self.pool.state.resume(client, &segment).unwrap();
            }
        }
        let after = self.log.check(&mut self.pool);
        let [before, after] = [before, after].map(|books| books.without_waiting_tasks(&old));
        assert_eq!(after, before, "a restart changes nothing");
        if comes_back != [true; 3] {
            self.leases.clear();
        }
    }

    /// Returns version and length of the readable object under a key.
    fn readable_version(&mut self, key: usize) -> Option<(Version, u64)> {
        let slot = self.pool.state.inventory.find(
            self.pool.now,
            TenantIndex::DEFAULT,
            KEYS[key].as_bytes(),
        )?;
        let object = self.pool.state.inventory.object(slot);
        let is_seen = object.is_complete() && !self.pool.state.inventory.is_unclaimed(slot);
        is_seen.then(|| (object.version(), object.length))
    }

    fn is_unreachable(&self, key: usize) -> bool {
        let state = &self.pool.state;
        let slot = state.inventory.objects().find(TenantIndex::DEFAULT, KEYS[key].as_bytes());
        slot.is_some_and(|slot| state.inventory.is_unreachable(slot))
    }

    fn lease_of(&self, key: usize) -> Option<Version> {
        let &(until, version) = self.leases.get(&key)?;
        let expiry = self.expiries.get(&key).filter(|(_, expiring)| *expiring == version);
        let until = expiry.map_or(until, |&(expires, _)| until.min(expires));
        (until > self.pool.now).then_some(version)
    }

    /// Returns start and end of places, with the incarnation of their memory.
    fn stretches(&self, places: &[Place]) -> Vec<(u64, u64, u64)> {
        let stretch = |place: &Place| {
            let spec = self.pool.state.segment(place.segment).spec;
            let start = spec.base + place.offset;
            (start, start + place.length, spec.incarnation.0)
        };
        places.iter().map(stretch).collect()
    }

    fn check(&mut self) {
        let state = &self.pool.state;
        let mut held: BTreeMap<SegmentSlot, Vec<(u64, u64)>> = BTreeMap::new();
        let objects = ObjectSlot::range(0, state.inventory.objects().slot_count())
            .filter_map(|slot| state.inventory.objects().get(slot));
        let complete = objects.clone().filter(|object| object.is_complete()).count() as u64;
        let stored: u64 = objects.clone().map(|object| object.bytes()).sum();
        let writes = state.writes.iter();
        let put: u64 = writes.map(|write| write.length * write.replicas.len() as u64).sum();
        let copied: u64 = state.tasks.charges().map(|(_, bytes)| bytes).sum::<u64>()
            + state.inventory.promotions().running_bytes();
        let charged = state.quota(&self.pool.tenant).unwrap().charged;
        assert_eq!(charged, stored + put + copied, "what is charged is what there is");
        for object in objects.clone().filter(|object| object.is_complete()) {
            let ids: BTreeSet<u32> = object.replicas.iter().map(|copy| copy.ordinal).collect();
            assert_eq!(ids.len(), object.replicas.len(), "copies have numbers");
        }
        assert_eq!(complete, state.inventory.objects().complete);
        self.check_disk();
        let state = &self.pool.state;
        let copies = objects.flat_map(|object| object.replicas.iter());
        let written = state.writes.iter().flat_map(|write| write.replicas.iter());
        let written = written.chain(state.tasks.placed());
        let written = written.chain(state.inventory.promotions().placed());
        let blocks = copies.chain(written).map(|copy| (copy.segment, copy.block));
        let pool = state.inventory.pool();
        let resting = || pool.quarantined().map(|(_, slot, block)| (slot, block));
        let withheld = || pool.unsynced.blocks().chain(state.searches.blocks());
        for (slot, block) in blocks.chain(resting()).chain(withheld()).chain(pool.prepared()) {
            let segment = state.inventory.segment(slot);
            if segment.is_mounted() {
                let start = segment.allocator.offset(block);
                let end = start + segment.allocator.size(block);
                assert!(end <= segment.spec.length, "all lies inside");
                held.entry(slot).or_default().push((start, end));
            }
        }
        for (slot, segment) in state.inventory.segments().mounted() {
            let mut held = held.remove(&slot).unwrap_or_default();
            held.sort_unstable();
            assert!(held.windows(2).all(|pair| pair[0].1 <= pair[1].0), "nothing overlaps");
            let used: u64 = held.iter().map(|(start, end)| end - start).sum();
            assert_eq!(used, segment.allocator.used(), "used bytes are the sum of the blocks");
            let block_bytes = |blocks: &mut dyn Iterator<Item = (SegmentSlot, BlockId)>| {
                blocks
                    .filter(|(other, _)| *other == slot)
                    .map(|(_, block)| segment.allocator.size(block))
                    .sum::<u64>()
            };
            let written = state.writes.iter().flat_map(|write| write.replicas.iter());
            let written = written.chain(state.tasks.placed());
            let written = written.chain(state.inventory.promotions().placed());
            let mut written = written.map(|copy| (copy.segment, copy.block));
            assert_eq!(block_bytes(&mut written), segment.reserved().writing);
            assert_eq!(block_bytes(&mut resting()), segment.reserved().fenced);
            assert_eq!(block_bytes(&mut withheld()), segment.reserved().withheld);
            assert_eq!(block_bytes(&mut pool.prepared()), segment.reserved().prepared);
        }
        for (key, name) in KEYS.iter().enumerate() {
            let Some(version) = self.lease_of(key) else { continue };
            let now = self.pool.now;
            let slot = self.pool.state.inventory.find(now, TenantIndex::DEFAULT, name.as_bytes());
            let slot = slot.expect("leased objects do not vanish");
            assert_eq!(self.pool.state.inventory.object(slot).version(), version);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn invariants_hold_after_random_calls(
        calls in prop::collection::vec(call(), 1..120),
        eviction in prop_oneof![
            Just(EvictionKind::Adaptive),
            Just(EvictionKind::Lru),
            Just(EvictionKind::S3Fifo),
        ],
        allocation in prop_oneof![
            Just(AllocationStrategy::Random),
            Just(AllocationStrategy::FreeRatioFirst),
            Just(AllocationStrategy::LocalFirst),
        ],
        is_on_eviction in any::<bool>(),
        drops_when_full in any::<bool>(),
    ) {
        let mut model = Model::new(eviction, allocation, is_on_eviction, drops_when_full);
        for call in calls {
            model.run(call);
            model.check();
            model.log.check(&mut model.pool);
        }
        // At the end all memory is freed.
        for client in CLIENTS {
            model.pool.state.unregister(model.pool.now, client);
        }
        model.wait(601_000);
        let totals = model.pool.state.totals();
        prop_assert_eq!((totals.keys, totals.used, totals.soft_pinned_keys), (0, 0, 0));
        prop_assert_eq!(model.pool.state.tasks().tasks_underway(), (0, 0));
        prop_assert_eq!(model.pool.state.tasks().running_jobs(), 0);
        prop_assert_eq!(model.pool.state.inventory.catalog().queue.parked_bytes, 0);
    }
}
