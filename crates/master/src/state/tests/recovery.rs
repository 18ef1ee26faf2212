//! Recovery: the log reproduces the same objects in the same places, at every step.

use std::collections::{BTreeMap, BTreeSet};

use mooncake_base::ObjectKey;

use super::*;
use crate::state::ledger::replay::{LiveObject, LoggedSegment};

/// The content of an image, in an order that does not depend on its history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogView {
    segments: BTreeMap<SegmentNumber, (ClientId, SegmentSpec, u8)>,
    disks: BTreeMap<SegmentNumber, (ClientId, DiskSpec)>,
    quotas: BTreeMap<Box<str>, u64>,
    objects: BTreeMap<(String, ObjectKey), LiveObject>,
    /// Puts that can still be finished.
    writes: BTreeMap<u64, (ClientId, ObjectKey, LiveObject)>,
    /// Tasks and drain jobs.
    records: BTreeMap<u128, Box<[u8]>>,
}

impl LogView {
    fn of(image: &Image) -> Self {
        let comparable = |value: &LiveObject| {
            let mut value = value.clone();
            let is_known = |number: &SegmentNumber| {
                image.segments.contains_key(number) || image.disks.contains_key(number)
            };
            value.copies.retain(|copy| is_known(&copy.segment));
            value.copies.sort();
            value
        };
        let mut objects = BTreeMap::new();
        for (tenant, key, value) in image.objects.iter() {
            let value = comparable(&value);
            if !value.copies.is_empty() {
                let tenant = image.objects.table.tenant_name(tenant).to_string();
                objects.insert((tenant, ObjectKey::new(key).unwrap()), value);
            }
        }
        let writes = image.writes.iter().filter(|(_, write)| !write.is_displaced);
        // The grace period restarts at recovery, so it is not compared.
        let segment = |s: &LoggedSegment| (s.client, s.spec.clone(), s.status);
        Self {
            segments: image.segments.iter().map(|(n, s)| (*n, segment(s))).collect(),
            disks: image
                .disks
                .iter()
                .map(|(number, disk)| (*number, (disk.client, disk.spec.clone())))
                .collect(),
            quotas: image.quotas.clone(),
            objects,
            records: image.tasks.clone(),
            writes: writes
                .map(|(version, write)| {
                    (*version, (write.client, write.key.clone(), comparable(&write.value)))
                })
                .collect(),
        }
    }

    pub(super) fn segments_of(&self, client: ClientId) -> Vec<SegmentSpec> {
        let own = self.segments.values().filter(|(owner, ..)| *owner == client);
        own.map(|(_, spec, _)| spec.clone()).collect()
    }

    /// At a restart, tasks may find that their object was replaced.
    pub(super) fn without_waiting_tasks(mut self, state: &State) -> Self {
        let is_over = |id: &u128| match state.task(TaskId::from_bits(*id)) {
            Ok(task) => matches!(task.status, TaskStatus::Success | TaskStatus::Failed),
            Err(_) => true,
        };
        self.records.retain(|id, _| is_over(id));
        self
    }
}

/// The log of a pool under test: replayed as it grows, and from snapshots taken meanwhile.
#[derive(Debug)]
pub(super) struct Log {
    image: Image,
    snapshot: Vec<u8>,
    cursor: SnapshotCursor,
    /// Effects since the snapshot started.
    since: Vec<u8>,
}

impl Log {
    pub(super) fn begin(pool: &mut Pool) -> Self {
        pool.state.record_effects();
        let mut snapshot = Vec::new();
        let cursor = pool.state.begin_snapshot(pool.now, &mut snapshot);
        Self { image: described(pool), snapshot, cursor, since: Vec::new() }
    }

    /// Compares the log with the state, and continues its snapshot by one object.
    pub(super) fn check(&mut self, pool: &mut Pool) -> LogView {
        let mut effects = Vec::new();
        pool.state.log_mut().take_effects(&mut effects);
        self.image.replay(&effects).unwrap();
        self.since.extend(effects);
        let replayed = LogView::of(&self.image);
        assert_eq!(replayed, LogView::of(&described(pool)), "the log has every change");
        if pool.state.snapshot_slice(&mut self.cursor, 1, &mut self.snapshot) {
            let mut image = Image::default();
            image.replay(&self.snapshot).unwrap();
            image.replay(&self.since).unwrap();
            assert_eq!(replayed, LogView::of(&image), "a snapshot taken meanwhile is as good");
            let mut copy = Image::default();
            self.image.encode(2, |bytes| copy.replay(bytes)).unwrap();
            assert_eq!(replayed, LogView::of(&copy), "an image that is encoded is as good");
            self.snapshot.clear();
            self.since.clear();
            self.cursor = pool.state.begin_snapshot(pool.now, &mut self.snapshot);
        }
        replayed
    }

    /// Compares the log with the state for the last time, and brings into it which memory must rest if the
    /// master hands over.
    pub(super) fn end(&mut self, pool: &mut Pool, hands_over: bool) -> LogView {
        let is_rest_logged = hands_over && log_rest(&mut pool.state, pool.now);
        let replayed = self.check(pool);
        if is_rest_logged {
            self.image.set_rest_logged();
        }
        replayed
    }

    /// Returns a state recovered from the log. An unfinished snapshot is lost with the master.
    pub(super) fn restart(&mut self, now: Moment, rules: &Rules) -> State {
        let (state, restored) =
            State::restore(rules.clone(), 7, now, self.image.clone(), Duration::ZERO);
        assert_eq!(restored.conflicts, 0);
        self.snapshot.clear();
        self.since.clear();
        self.cursor = state.begin_snapshot(now, &mut self.snapshot);
        state
    }
}

pub(super) fn described(pool: &Pool) -> Image {
    let mut bytes = Vec::new();
    let mut cursor = pool.state.begin_snapshot(pool.now, &mut bytes);
    while !pool.state.snapshot_slice(&mut cursor, 3, &mut bytes) {}
    let mut image = Image::default();
    image.replay(&bytes).unwrap();
    image
}

/// Returns a pool after its master died. No client has come back yet.
pub(super) fn restarted(pool: &mut Pool) -> Pool {
    restarted_from(pool, described(pool))
}

/// Returns a pool after its master died, of which another one knows so much.
pub(super) fn restarted_from(pool: &Pool, image: Image) -> Pool {
    let (state, restored) =
        State::restore(pool.state.rules().clone(), 9, pool.now, image, Duration::ZERO);
    assert_eq!(restored.conflicts, 0);
    let mut new = Pool { state, now: pool.now, tenant: pool.tenant.clone() };
    new.state.register(pool.now, A, "host-a:1").unwrap();
    new.state.register(pool.now, B, "host-b:1").unwrap();
    new
}

fn resume(pool: &mut Pool) {
    pool.state.resume(A, &spec(A, 1, 1, 16)).unwrap();
}

fn awaits(pool: &Pool, key: &str) -> bool {
    let keys = [key.as_bytes()];
    pool.state.recovery_wait(pool.now, &RecoveryScope::Keys(&pool.tenant, &keys)).is_some()
}

#[test]
fn versions_of_a_lost_run_are_not_used_again() {
    // Two masters begin from the same log, because the power loss took what the first one wrote.
    let mut pool = Pool::new(16);
    pool.put("k", MIB).unwrap();
    let image = described(&pool);
    let first_version = |seed: u64, lost_grants_max: Duration| {
        let rules = pool.state.rules().clone();
        State::restore(rules, seed, pool.now, image.clone(), lost_grants_max)
            .0
            .inventory
            .next_version()
    };
    let second = Duration::from_secs(1);
    let killed = first_version(1, Duration::ZERO);
    for seed in 1..20 {
        let gap = first_version(seed, second) - killed;
        assert!(gap >= 1 << 24, "{gap}: the first master was killed");
        let gap = first_version(seed, second).abs_diff(first_version(seed + 20, second));
        assert!(gap >= 1 << 24, "{gap}: the first master had lost power, too");
    }
}

#[test]
fn versions_of_a_lost_run_stay_unused_after_a_further_restart() {
    let mut pool = Pool::new(16);
    pool.put("k", MIB).unwrap();
    let mut image = described(&pool);
    let restore = |image: &Image, lost_grants_max: Duration| {
        let rules = pool.state.rules().clone();
        State::restore(rules, 3, pool.now, image.clone(), lost_grants_max).0
    };
    // The power loss takes what the first run wrote. The second one ends before its first put.
    let lost = restore(&image, Duration::ZERO).inventory.next_version();
    let mut second = restore(&image, Duration::from_secs(1));
    let mut effects = Vec::new();
    second.log_mut().take_effects(&mut effects);
    image.replay(&effects).unwrap();
    let third = restore(&image, Duration::ZERO).inventory.next_version();
    assert!(third > second.inventory.next_version(), "{third}");
    assert!(second.inventory.next_version() > lost + (1 << 24), "{lost}");
}

#[test]
fn versions_of_leaders_that_left_no_record_are_not_used_again() {
    let mut pool = Pool::new(16);
    pool.put("k", MIB).unwrap();
    let mut image = described(&pool);
    let first_version = |seed: u64, image: &Image| {
        let rules = pool.state.rules().clone();
        let restored = State::restore(rules, seed, pool.now, image.clone(), Duration::ZERO);
        restored.0.inventory.next_version()
    };
    let other_leader = first_version(1, &image);
    image.set_may_lack_versions();
    for seed in 1..20 {
        let gap = first_version(seed, &image) - other_leader;
        assert!(gap >= 1 << 24, "{gap}");
    }
}

#[test]
fn object_is_unclaimed_until_owner_announces() {
    let mut pool = Pool::new(16);
    let started = pool.put("k", MIB).unwrap();
    let mut pool = restarted(&mut pool);
    assert!(awaits(&pool, "k") && !awaits(&pool, "unknown"));
    assert_eq!(pool.probe("k"), ObjectState::Absent);
    assert_eq!(pool.list(Selector::All, None, 0), (vec![], true));
    assert_eq!((pool.state.totals().segments, pool.state.totals().unclaimed_segments), (0, 1));
    fails(pool.locate("k", true, true), ErrorCode::OBJECT_NOT_FOUND);
    resume(&mut pool);
    assert!(!awaits(&pool, "k"));
    let located = pool.locate("k", true, true).unwrap();
    assert_eq!((located.version, located.places), (started.version, started.places));
    assert_eq!((located.length, located.checksum), (MIB, Some(7)));
    assert_eq!((pool.state.totals().segments, pool.state.totals().unclaimed_segments), (1, 0));
}

#[test]
fn calls_wait_for_clients_that_hung_up_during_pause() {
    let mut pool = Pool::new(16);
    pool.put("k", MIB).unwrap();
    pool.state.advance(pool.now);
    let awaits_space =
        |pool: &Pool| pool.state.recovery_wait(pool.now, &RecoveryScope::Space).is_some();
    // Without a pause a closed connection is believed.
    pool.state.suspect(pool.now, A);
    assert!(!awaits(&pool, "k") && !awaits_space(&pool) && !pool.state.is_recovering(pool.now));
    pool.state.heartbeat(pool.now, A);
    pool.now = pool.now + Duration::from_secs(8);
    pool.state.suspect(pool.now, A);
    assert!(awaits(&pool, "k") && awaits_space(&pool) && pool.state.is_recovering(pool.now));
    assert!(!awaits(&pool, "unknown"));
    pool.state.heartbeat(pool.now, A);
    assert!(!awaits(&pool, "k") && !awaits_space(&pool) && !pool.state.is_recovering(pool.now));
    // A client that does not come back within the grace is not awaited any longer.
    pool.state.suspect(pool.now, A);
    let grace = pool.state.rules().resume_grace;
    pool.now = pool.now + grace.saturating_sub(Duration::from_millis(1));
    assert!(awaits(&pool, "k"));
    pool.now = pool.now + Duration::from_millis(1);
    assert!(!awaits(&pool, "k") && !awaits_space(&pool) && !pool.state.is_recovering(pool.now));
}

#[test]
fn new_incarnation_does_not_restore_objects() {
    let mut pool = Pool::new(16);
    pool.put("k", MIB).unwrap();
    let mut pool = restarted(&mut pool);
    let same = spec(A, 1, 1, 16);
    for other in [
        SegmentSpec { id: SegmentId::from_bits(9), ..same.clone() },
        SegmentSpec { incarnation: Incarnation(2), ..same.clone() },
        SegmentSpec { base: same.base + 4096, ..same.clone() },
        SegmentSpec { length: same.length * 2, ..same.clone() },
    ] {
        fails(pool.state.resume(A, &other), ErrorCode::SEGMENT_NOT_FOUND);
    }
    fails(pool.state.resume(B, &same), ErrorCode::SEGMENT_NOT_FOUND);
    assert!(!pool.exists("k"));
    // New memory at the same addresses shows that the earlier memory is lost.
    let other = SegmentSpec { id: SegmentId::from_bits(9), ..same.clone() };
    pool.state.mount(pool.now, A, other).unwrap();
    assert_eq!(pool.state.unclaimed_segments(), 0);
    fails(pool.state.resume(A, &same), ErrorCode::SEGMENT_NOT_FOUND);
}

#[test]
fn unclaimed_key_is_free_after_grace() {
    let mut pool = Pool::new(16);
    pool.state.mount(pool.now, B, spec(B, 2, 1, 16)).unwrap();
    for key in ["put", "upserted", "removed", "swept", "left"] {
        let preferred = vec!["host-a:1".to_owned()];
        let options = PutOptions { preferred_segments: preferred, ..PutOptions::default() };
        pool.put_with(key, MIB, false, &options).unwrap();
    }
    let mut pool = restarted(&mut pool);
    pool.state.resume(B, &spec(B, 2, 1, 16)).unwrap();
    assert!(awaits(&pool, "put"));
    pool.wait(5);
    assert!(!awaits(&pool, "put") && !pool.exists("put"));
    let put = pool.put("put", 2 * MIB).unwrap();
    let upserted = pool.upsert("upserted", 2 * MIB).unwrap();
    fails(pool.remove("removed", false), ErrorCode::OBJECT_NOT_FOUND);
    let swept = Selector::Prefix(Box::from(&b"swept"[..]));
    let mut removal = Removal::new(pool.tenant.clone(), swept, false);
    assert!(pool.state.remove_matching(pool.now, &mut removal) && removal.removed() == 0);
    resume(&mut pool);
    for (key, version) in [("put", put.version), ("upserted", upserted.version)] {
        let located = pool.locate(key, false, false).unwrap();
        assert_eq!((located.version, located.length), (version, 2 * MIB), "{key}");
    }
    assert_eq!(pool.list(Selector::All, None, 0).0, ["left", "put", "upserted"]);
}

#[test]
fn calls_wait_if_the_end_of_the_log_may_be_missing() {
    let mut pool = Pool::new(16);
    pool.put("k", MIB).unwrap();
    let rules = pool.state.rules().clone();
    let lost = Duration::from_secs(1);
    let (state, _) = State::restore(rules, 9, pool.now, described(&pool), lost);
    let mut pool = Pool { state, now: pool.now, tenant: pool.tenant.clone() };
    pool.state.register(pool.now, A, "host-a:1").unwrap();
    resume(&mut pool);
    assert!(awaits(&pool, "k") && pool.state.is_recovering(pool.now), "others may object");
    assert!(!awaits(&pool, "unknown"));
    pool.wait(5);
    assert!(!awaits(&pool, "k") && !pool.state.is_recovering(pool.now));
    assert!(pool.exists("k"));
}

#[test]
fn objects_of_a_refuted_log_are_dropped_with_their_segments() {
    let mut pool = Pool::new(16);
    pool.put("k", MIB).unwrap();
    let mut pool = restarted(&mut pool);
    resume(&mut pool);
    pool.state.mount(pool.now, B, spec(B, 2, 1, 16)).unwrap();
    assert_eq!(pool.state.drop_recovered(pool.now), 1);
    assert!(!pool.exists("k"));
    assert!(!pool.state.heartbeat(pool.now, A), "its owner registers again");
    assert!(pool.state.heartbeat(pool.now, B), "fresh memory is not concerned");
    assert_eq!(pool.state.drop_recovered(pool.now), 0);
    pool.state.register(pool.now, A, "host-a:1").unwrap();
    fails(pool.state.resume(A, &spec(A, 1, 1, 16)), ErrorCode::SEGMENT_NOT_FOUND);
}

#[test]
fn refuted_log_abandons_puts_of_clients_without_memory() {
    let mut pool = Pool::new(16);
    pool.start(B, "k", MIB).unwrap();
    let mut pool = restarted(&mut pool);
    pool.mount(B, 2, 16).unwrap();
    let later = pool.start(B, "later", MIB).unwrap();
    fails(pool.locate("k", true, true), ErrorCode::REPLICA_IS_NOT_READY);
    assert_eq!(pool.state.drop_recovered(pool.now), 1);
    fails(pool.locate("k", true, true), ErrorCode::OBJECT_NOT_FOUND);
    let again = pool.start(B, "k", MIB).unwrap();
    pool.end(B, "k", &again).unwrap();
    pool.end(B, "later", &later).unwrap();
}

#[test]
fn unclaimed_objects_are_dropped_in_the_end() {
    let mut pool = Pool::new(16);
    pool.put("k", MIB).unwrap();
    let mut pool = restarted(&mut pool);
    pool.wait(29);
    assert_eq!(pool.state.unclaimed_segments(), 1);
    pool.wait(1);
    let totals = pool.state.totals();
    assert_eq!((totals.unclaimed_segments, totals.keys), (0, 0));
    fails(pool.state.resume(A, &spec(A, 1, 1, 16)), ErrorCode::SEGMENT_NOT_FOUND);
}

#[test]
fn unfinished_put_can_end_after_restart() {
    let mut pool = Pool::new(16);
    let displaced = pool.start(A, "k", MIB).unwrap();
    pool.wait(30);
    let started = pool.start(B, "k", MIB).unwrap();
    let mut pool = restarted(&mut pool);
    resume(&mut pool);
    assert_eq!(pool.probe("k"), ObjectState::Writing);
    fails(pool.end(A, "k", &displaced), ErrorCode::OBJECT_NOT_FOUND);
    pool.end(B, "k", &started).unwrap();
    assert_eq!(pool.locate("k", false, false).unwrap().places, started.places);
}

#[test]
fn memory_is_not_reused_while_old_fences_last() {
    let mut pool = Pool::new(16);
    pool.put("k", 15 * MIB).unwrap();
    // A long read: the log must contain its fence.
    pool.locate("k", false, true).unwrap();
    let mut pool = restarted(&mut pool);
    resume(&mut pool);
    pool.remove("k", true).unwrap();
    fails(pool.put("l", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.wait(1);
    pool.put("l", 15 * MIB).unwrap();
}

#[test]
fn second_restart_lets_memory_rest_while_fences_last() {
    const SIZE: u64 = 2048;
    let mut pool = Pool::new(SIZE);
    pool.put("k", SIZE / 2 * MIB).unwrap();
    // A read under a fence of more than four seconds.
    pool.locate("k", false, true).unwrap();
    assert!(pool.state.rules().fence(SIZE / 2 * MIB) > Duration::from_secs(4));
    for _ in 0..2 {
        pool = restarted(&mut pool);
        pool.state.resume(A, &spec(A, 1, 1, SIZE)).unwrap();
        pool.wait(1);
    }
    pool.remove("k", true).unwrap();
    pool.wait(1);
    fails(pool.put("l", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.wait(16);
    pool.put("l", MIB).unwrap();
}

#[test]
fn quarantine_survives_restart() {
    let mut pool = Pool::new(16);
    let started = pool.start(A, "k", 15 * MIB).unwrap();
    let failed = [started.places[0].replica];
    let put =
        PutRef { key: b"k", version: started.version, failed_replicas: &failed, checksum: None };
    pool.state.puts().put_revoke(pool.now, A, &pool.tenant, put).unwrap();
    let mut pool = restarted(&mut pool);
    resume(&mut pool);
    pool.wait(2);
    pool.put("small", MIB / 2).unwrap();
    fails(pool.put("l", 15 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.wait(31);
    pool.put("l", 15 * MIB).unwrap();
}

#[test]
fn versions_are_not_reused_after_restart() {
    let mut pool = Pool::new(16);
    let before = pool.put("k", MIB).unwrap().version;
    let mut pool = restarted(&mut pool);
    resume(&mut pool);
    pool.wait(1);
    assert!(pool.put("l", MIB).unwrap().version > before);
}

#[test]
fn groups_pins_and_tenants_survive_restart() {
    let mut pool = Pool::new(16);
    let pinned = PutOptions {
        soft_pin: SoftPin::Enable(Some(Duration::from_secs(3))),
        is_hard_pinned: true,
        data_type: 3,
        ..PutOptions::default()
    };
    pool.put_with("g/1", MIB, false, &pinned).unwrap();
    pool.tenant = TenantId::new("other");
    pool.put("g/1", 2 * MIB).unwrap();
    let mut pool = restarted(&mut pool);
    resume(&mut pool);
    assert_eq!(pool.locate("g/1", false, false).unwrap().length, 2 * MIB);
    pool.tenant = TenantId::default();
    let located = pool.locate("g/1", false, false).unwrap();
    assert_eq!((located.length, located.data_type), (MIB, 3));
    assert_eq!(pool.state.totals().soft_pinned_keys, 1);
    let names: BTreeSet<_> = [0, 1]
        .map(|slot| pool.state.inventory.groups().name(ObjectSlot::new(slot)).map(<[u8]>::to_vec))
        .into_iter()
        .collect();
    assert_eq!(names, BTreeSet::from([Some(b"g".to_vec())]));
    let pinned: u64 =
        pool.state.inventory.segments().claimed().map(|(_, s)| s.reserved().hard_pinned).sum();
    assert_eq!(pinned, MIB);
    pool.wait(4);
    assert_eq!(pool.state.totals().soft_pinned_keys, 0);
}

#[test]
fn suspended_master_expires_no_client() {
    let mut pool = Pool::new(16);
    pool.put("k", MIB).unwrap();
    pool.wait(3);
    pool.now = pool.now + Duration::from_secs(30);
    pool.advance_all();
    assert!(pool.exists("k"), "no heartbeat could arrive meanwhile");
    // A client that does not come back expires.
    for _ in 0..11 {
        pool.now = pool.now + Duration::from_secs(1);
        pool.advance_all();
    }
    assert!(!pool.exists("k"));
    assert_eq!(pool.state.totals().counters.clients_expired, 2);
}

#[test]
fn pool_accepts_puts_soon_after_restart() {
    let mut pool = Pool::new(16);
    pool.put("k", 8 * MIB).unwrap();
    pool.locate("k", false, true).unwrap();
    // The writer may finish.
    pool.start(A, "l", MIB).unwrap();
    let mut pool = restarted(&mut pool);
    resume(&mut pool);
    // Each read grants a fence longer than the quarantine of the earlier memory.
    for _ in 0..10 {
        pool.now = pool.now + Duration::from_millis(100);
        pool.advance_all();
        pool.locate("k", false, true).unwrap();
    }
    pool.put("new", MIB).unwrap();
}
