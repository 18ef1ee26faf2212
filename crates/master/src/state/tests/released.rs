//! Objects released ahead of need: readable until their memory is given away, as if there were no
//! log, and never in memory that belongs to another object, whatever state of the log comes back.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::state::{
    ids::{Slot, TenantIndex},
    inventory::released::release,
};

/// Bytes of each object.
const BYTES: u64 = MIB / 16;

/// A pool with a log of which every state since the last sync may come back.
struct LoggedPool {
    pool: Pool,
    /// What is on disk.
    disk: Image,
    /// What was recorded since, call by call.
    since: Vec<Vec<u8>>,
    /// The version that was last written to a range of the segment.
    content: BTreeMap<u64, (u64, u64)>,
    syncs: u64,
    requests: u64,
}

impl LoggedPool {
    fn new(rules: Rules, mib: u64) -> Self {
        let mut pool = Pool::with(rules, mib);
        pool.state.record_effects();
        let mut disk = Image::default();
        let mut bytes = Vec::new();
        let mut cursor = pool.state.begin_snapshot(pool.now, &mut bytes);
        while !pool.state.snapshot_slice(&mut cursor, 64, &mut bytes) {}
        disk.replay(&bytes).unwrap();
        let (since, content) = (Vec::new(), BTreeMap::new());
        let mut pool = Self { pool, disk, since, content, syncs: 0, requests: 0 };
        pool.sync();
        pool
    }

    /// Syncs the log, also where nobody asked for it.
    fn sync(&mut self) {
        self.take();
        for effects in self.since.drain(..) {
            self.disk.replay(&effects).unwrap();
        }
        self.pool.state.confirm_synced(self.pool.state.log().log_position());
    }

    /// Ends a call: the service appends its effects, and asks for a sync where the state wants one.
    fn take(&mut self) {
        let mut effects = Vec::new();
        self.pool.state.log_mut().take_effects(&mut effects);
        if !effects.is_empty() {
            self.since.push(effects);
            self.requests += u64::from(self.pool.state.take_sync_request());
        }
    }

    /// Puts an object. Waits for the log if the put has to.
    fn put(&mut self, key: &str, length: u64, is_replacing: bool) -> Result<()> {
        let mut progress = PutProgress::default();
        let started = loop {
            let put = put(key, length, is_replacing);
            let Pool { state, now, tenant } = &mut self.pool;
            let step = state.puts().put_step(*now, A, tenant, &put, &mut progress);
            self.take();
            match step? {
                PutStep::Started(started) => break started,
                PutStep::Pending(Pending::Sync(_)) => {
                    self.syncs += 1;
                    self.sync();
                }
                PutStep::Pending(_) => {}
            }
        };
        for place in &started.places {
            let end = place.offset + place.length;
            self.content.retain(|&start, &mut (other, _)| other <= place.offset || end <= start);
            self.content.insert(place.offset, (end, started.version.0));
        }
        self.pool.end(A, key, &started)?;
        self.take();
        Ok(())
    }

    /// Every object that can be read, now and after a loss of power at any point, lies in memory
    /// that holds its bytes.
    fn check(&self) {
        let state = &self.pool.state;
        let mut image = self.disk.clone();
        self.check_image(&image);
        for effects in &self.since {
            image.replay(effects).unwrap();
            self.check_image(&image);
        }
        let catalog = state.inventory.catalog();
        let mut released = BTreeSet::new();
        let slots = ObjectSlot::range(0, catalog.objects.slot_count());
        for slot in slots {
            let Some(object) = catalog.objects.get(slot) else { continue };
            for place in
                state.inventory.pool().places(object.version, object.length, &*object.replicas)
            {
                let end = place.offset + object.length;
                assert_eq!(self.content.get(&place.offset), Some(&(end, object.version)));
            }
            if catalog.released.contains(slot) {
                assert!(object.is_complete());
                released.insert(object.version);
            }
        }
        assert_eq!(catalog.released.count(), released.len(), "only objects are released");
        let live: BTreeSet<u64> = versions(&image).map(|(version, ..)| version).collect();
        assert!(live.is_disjoint(&released), "the log has their release");
    }

    fn check_image(&self, image: &Image) {
        for (version, offset, length) in versions(image) {
            let found = self.content.get(&offset);
            assert_eq!(found, Some(&(offset + length, version)), "mixed bytes");
        }
    }

    /// Returns the keys that a restart would find.
    fn logged_keys(&self) -> BTreeSet<String> {
        let mut image = self.disk.clone();
        self.since.iter().for_each(|effects| image.replay(effects).unwrap());
        let keys = image.objects.iter().map(|(_, key, _)| key.to_vec());
        keys.map(|key| String::from_utf8(key).unwrap()).collect()
    }

    /// Fills the pool and puts on, until objects are released ahead. Returns their keys.
    fn released(mib: u64, key: impl Fn(u64) -> String) -> (Self, Vec<String>) {
        let mut pool = Self::new(Rules::default(), mib);
        let mut index = 0;
        let mut count = 0;
        while index < 4 * mib * MIB / BYTES && (count < 4 || index % 8 != 0) {
            pool.put(&key(index), BYTES, false).unwrap();
            count = pool.pool.state.inventory.catalog().released.count();
            index += 1;
        }
        pool.check();
        let logged = pool.logged_keys();
        let keys: Vec<String> = (0..index).map(key).collect();
        let found = keys.into_iter().filter(|key| pool.pool.exists(key) && !logged.contains(key));
        let found: Vec<String> = found.collect();
        assert!(found.len() >= 4, "{} objects were released", found.len());
        (pool, found)
    }
}

fn put<'a>(key: &'a str, length: u64, is_replacing: bool) -> Put<'a> {
    static OPTIONS: std::sync::LazyLock<PutOptions> = std::sync::LazyLock::new(PutOptions::default);
    Put {
        key: KeyRef::new(key.as_bytes()).unwrap(),
        length,
        group: key.split_once('/').map_or("", |(group, _)| group).as_bytes(),
        options: &OPTIONS,
        is_replacing,
        if_version: None,
        request: 0,
    }
}

/// Returns version, offset and length of the objects in an image.
fn versions(image: &Image) -> impl Iterator<Item = (u64, u64, u64)> {
    image.objects.iter().flat_map(|(_, _, object)| {
        let (version, length) = (object.version, object.length);
        object.copies.into_iter().map(move |copy| (version, copy.offset, length))
    })
}

#[test]
fn released_objects_count_and_read_like_others() {
    let (mut pool, released) = LoggedPool::released(16, |index| format!("k{index}"));
    let totals = pool.pool.state.totals();
    assert_eq!((totals.keys, totals.used), (16 * MIB / BYTES, 16 * MIB), "the pool is full");
    let listed = pool.pool.list(Selector::All, None, 0).0;
    let now = pool.pool.now;
    for key in &released {
        assert!(pool.pool.exists(key) && listed.contains(key));
        let view = pool.pool.state.view_object(now, &TenantId::default(), key.as_bytes()).unwrap();
        assert_eq!(view.copies.len(), 1);
    }
    // None of this was a use.
    assert_eq!(pool.pool.state.inventory.catalog().released.count(), released.len());
}

#[test]
fn use_takes_a_release_back() {
    type Use = fn(&mut Pool, &str);
    let uses: [Use; 6] = [
        |pool, key| drop(pool.locate(key, true, false).unwrap()),
        |pool, key| drop(pool.locate(key, false, true).unwrap()),
        |pool, key| drop(pool.locate(key, false, false).unwrap()),
        |pool, key| {
            assert_eq!(pool.state.probe(pool.now, &pool.tenant, key.as_bytes(), true).length, BYTES)
        },
        |pool, key| {
            let ttl = Some(Duration::from_secs(60));
            let tenant = pool.tenant.clone();
            pool.state.puts().set_expiry(pool.now, &tenant, key.as_bytes(), ttl).unwrap();
        },
        // A writer that is told that the object exists may count it as stored.
        |pool, key| drop(fails(pool.put(key, BYTES), ErrorCode::OBJECT_ALREADY_EXISTS)),
    ];
    for (index, use_of) in uses.into_iter().enumerate() {
        let (mut pool, released) = LoggedPool::released(4, |index| format!("k{index}"));
        let key = &released[1];
        use_of(&mut pool.pool, key);
        pool.take();
        assert!(pool.logged_keys().contains(key), "use {index}");
        pool.check();
        // The memory is not given away on the strength of the earlier release.
        pool.sync();
        pool.pool.wait(30);
        for index in 0..2 * 4 * MIB / BYTES {
            pool.put(&format!("other{index}"), BYTES, false).unwrap();
            pool.check();
        }
        assert!(!pool.pool.exists(key), "evicted later");
    }
}

#[test]
fn taken_back_object_keeps_its_terms() {
    let (mut pool, released) = LoggedPool::released(16, |index| format!("k{index}"));
    let (key, now) = (released[0].clone(), pool.pool.now);
    let tenant = pool.pool.tenant.clone();
    let ttl = Some(Duration::from_secs(60));
    pool.pool.state.puts().set_expiry(now, &tenant, key.as_bytes(), ttl).unwrap();
    pool.pool.state.inventory.stop_releases();
    pool.sync();
    // The same object is released and taken back again.
    let slot = pool.pool.state.inventory.objects().find(TenantIndex::DEFAULT, key.as_bytes());
    let (slot, inventory) = (slot.unwrap(), &mut pool.pool.state.inventory);
    release(inventory, slot);
    pool.take();
    assert!(!pool.logged_keys().contains(&key));
    pool.pool.locate(&key, true, false).unwrap();
    pool.take();
    pool.sync();
    let mut logged = pool.disk.objects.iter();
    let (_, _, live) = logged.find(|(_, k, _)| *k == key.as_bytes()).unwrap();
    assert!(live.annotation.as_ref().is_some_and(|annotation| annotation.expires.is_some()));
    assert_eq!(live.checksum, Some(7));
}

#[test]
fn use_of_a_member_takes_its_whole_group_back() {
    let (mut pool, released) = LoggedPool::released(16, |index| format!("g{}/{index}", index / 4));
    let group = |key: &str| key.split_once('/').unwrap().0.to_owned();
    let siblings: Vec<_> =
        released.iter().filter(|key| group(key) == group(&released[0])).collect();
    assert_eq!(siblings.len(), 4, "a group is released as a whole");
    pool.pool.locate(siblings[2], true, false).unwrap();
    pool.take();
    let logged = pool.logged_keys();
    assert!(siblings.iter().all(|&key| logged.contains(key)));
    // So does an object that joins it.
    let last = released.last().unwrap();
    pool.put(&format!("{}/new", group(last)), BYTES, false).unwrap();
    if pool.pool.exists(last) {
        assert!(pool.logged_keys().contains(last));
    }
    pool.check();
}

#[test]
fn removed_object_was_released_or_not() {
    let (mut pool, released) = LoggedPool::released(16, |index| format!("k{index}"));
    pool.sync();
    let position = pool.pool.state.log().log_position();
    pool.pool.remove(&released[0], true).unwrap();
    assert!(pool.pool.state.log().log_position() > position, "the caller waits for this record");
    pool.take();
    pool.put(&released[1].clone(), BYTES, true).unwrap();
    assert!(pool.pool.exists(&released[1]) && !pool.pool.exists(&released[0]));
    pool.sync();
    assert!(pool.logged_keys().contains(&released[1]));
    pool.check();
}

#[test]
fn snapshot_leaves_released_objects_out() {
    let (mut pool, released) = LoggedPool::released(16, |index| format!("k{index}"));
    let mut bytes = Vec::new();
    let mut cursor = pool.pool.state.begin_snapshot(pool.pool.now, &mut bytes);
    while !pool.pool.state.snapshot_slice(&mut cursor, 64, &mut bytes) {}
    // The log begins anew: it does not have the releases.
    (pool.disk, pool.since) = (Image::default(), Vec::new());
    pool.disk.replay(&bytes).unwrap();
    assert!(released.iter().all(|key| !pool.logged_keys().contains(key)));
    for index in 0..2 * released.len() {
        pool.put(&format!("other{index}"), BYTES, false).unwrap();
        pool.check();
    }
}

#[test]
fn victims_that_become_evictable_cost_no_sync_each() {
    let rules = Rules { lease_ttl: Duration::from_millis(300), ..Rules::default() };
    let mut pool = LoggedPool::new(rules, 16);
    let puts = 40 * 16 * MIB / BYTES;
    for index in 0..puts {
        pool.pool.now = pool.pool.now + Duration::from_millis(1);
        let (key, requests) = (format!("k{index}"), pool.requests);
        pool.put(&key, BYTES, false).unwrap();
        // The leases of these end while they are the next victims.
        if index % 3 == 0 {
            pool.pool.locate(&key, true, false).unwrap();
        }
        pool.take();
        if pool.requests > requests {
            pool.sync();
        }
    }
    // An eighth of the pool is released ahead, and more when half of it is used up.
    let least = puts / (16 * MIB / BYTES / 16);
    let syncs = pool.syncs + pool.requests;
    assert!(syncs <= least + 32, "{} waits and {} requests", pool.syncs, pool.requests);
    pool.check();
}

#[derive(Debug, Clone)]
enum Step {
    Put { key: u8, is_replacing: bool },
    Locate { key: u8, has_lease: bool, has_fence: bool },
    Probe { key: u8 },
    Remove { key: u8 },
    Expire { key: u8 },
    Sync,
}

fn step() -> impl Strategy<Value = Step> {
    let key = || 0_u8..160;
    prop_oneof![
        16 => (key(), prop::bool::weighted(0.1))
            .prop_map(|(key, is_replacing)| Step::Put { key, is_replacing }),
        2 => (key(), prop::bool::weighted(0.1), prop::bool::weighted(0.1)).prop_map(
            |(key, has_lease, has_fence)| Step::Locate { key, has_lease, has_fence }
        ),
        1 => key().prop_map(|key| Step::Probe { key }),
        1 => key().prop_map(|key| Step::Remove { key }),
        1 => key().prop_map(|key| Step::Expire { key }),
        1 => Just(Step::Sync),
    ]
}

fn name(key: u8) -> String {
    if key % 8 < 2 { format!("g{}/{key}", key / 8) } else { format!("k{key}") }
}

/// Does the same in a pool with a log and in one without.
fn run_both(step: &Step, with: &mut LoggedPool, without: &mut Pool) {
    // Puts wait for the log rather than evict another object, but not more often than this.
    with.pool.wait(1);
    without.wait(1);
    let now = with.pool.now;
    match *step {
        Step::Put { key, is_replacing } => {
            let key = name(key);
            let logged = with.put(&key, BYTES, is_replacing);
            let plain = without.put_with(&key, BYTES, is_replacing, &PutOptions::default());
            assert_eq!(logged.is_ok(), plain.is_ok(), "{key}: {logged:?} {plain:?}");
        }
        Step::Locate { key, has_lease, has_fence } => {
            let found = with.pool.locate(&name(key), has_lease, has_fence).is_ok();
            assert_eq!(found, without.locate(&name(key), has_lease, has_fence).is_ok());
        }
        Step::Probe { key } => {
            let tenant = TenantId::default();
            let [found, plain] = [&mut with.pool, without]
                .map(|pool| pool.state.probe(now, &tenant, name(key).as_bytes(), true).state);
            assert_eq!(found, plain);
        }
        Step::Remove { key } => {
            let found = with.pool.remove(&name(key), false).is_ok();
            assert_eq!(found, without.remove(&name(key), false).is_ok());
        }
        Step::Expire { key } => {
            let (tenant, ttl) = (TenantId::default(), Some(Duration::from_secs(20)));
            let [found, plain] = [&mut with.pool, without].map(|pool| {
                let key = name(key);
                pool.state.puts().set_expiry(now, &tenant, key.as_bytes(), ttl).is_ok()
            });
            assert_eq!(found, plain);
        }
        Step::Sync => with.sync(),
    }
    with.take();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn log_changes_no_hit_and_no_state_of_it_mixes_bytes(
        steps in prop::collection::vec(step(), 100..300),
        eviction in prop_oneof![
            Just(EvictionKind::Adaptive),
            Just(EvictionKind::Lru),
            Just(EvictionKind::S3Fifo),
        ],
    ) {
        let rules = Rules { eviction, ..Rules::default() };
        let mut with = LoggedPool::new(rules.clone(), 4);
        let mut without = Pool::with(rules, 4);
        with.pool.state.log_mut().enable_events();
        without.state.log_mut().enable_events();
        for step in &steps {
            run_both(step, &mut with, &mut without);
            with.check();
            let found: Vec<bool> = (0..160).map(|key| with.pool.exists(&name(key))).collect();
            let plain: Vec<bool> = (0..160).map(|key| without.exists(&name(key))).collect();
            prop_assert_eq!(found, plain, "{:?}", step);
            let events = with.pool.state.log_mut().take_events();
            prop_assert_eq!(events, without.state.log_mut().take_events());
            let (totals, plain) = (with.pool.state.totals(), without.state.totals());
            prop_assert_eq!(totals.counters.evicted_keys, plain.counters.evicted_keys);
        }
    }
}
