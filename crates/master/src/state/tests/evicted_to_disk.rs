//! Objects that move down to a disk when their memory is needed.

use mooncake_base::Version;

use super::{
    disks::{DISK, disk},
    *,
};

fn rules(offload: OffloadRules) -> Rules {
    let offload = OffloadRules { is_on_eviction: true, ..offload };
    Rules { offload: Some(offload), ..Rules::default() }
}

/// A pool of so many MiB with a disk that takes objects when they are evicted.
fn pool_with(rules: Rules, mib: u64) -> Pool {
    let mut pool = Pool::with(rules, mib);
    pool.state.record_effects();
    pool.state.disks().mount(A, disk(1), 0, false).unwrap();
    pool
}

fn pool(mib: u64) -> Pool {
    pool_with(rules(OffloadRules::default()), mib)
}

impl Pool {
    /// Puts objects of a MiB, until memory is full.
    fn put_many(&mut self, prefix: &str, count: usize) -> Vec<(String, Version)> {
        let put = |number| {
            let key = format!("{prefix}{number}");
            let version = self.put(&key, MIB).unwrap().version;
            (key, version)
        };
        (0..count).map(put).collect()
    }

    /// Writes all objects that wait for the disk. Returns their keys.
    fn write_down(&mut self) -> Vec<String> {
        let handed = self.hand_over();
        let keys = handed.into_iter().map(|(key, version)| {
            let key = String::from_utf8(key).unwrap();
            assert!(self.report_record(A, &key, Version(version), MIB));
            key
        });
        keys.collect()
    }

    fn refuse_all(&mut self) -> usize {
        let handed = self.hand_over();
        for (key, version) in &handed {
            self.lose(std::str::from_utf8(key).unwrap(), Version(*version), false);
        }
        handed.len()
    }

    /// Begins a put that must wait for the disk.
    fn waits_for_disk(&mut self, key: &str, progress: &mut PutProgress) -> u64 {
        match self.step(key, MIB, progress).unwrap() {
            PutStep::Pending(Pending::Disks(seen)) => seen,
            step => panic!("{key}: {step:?}"),
        }
    }

    /// Goes on with a put, which must succeed, and ends it.
    fn goes_on(&mut self, key: &str, progress: &mut PutProgress) {
        match self.step(key, MIB, progress).unwrap() {
            PutStep::Started(started) => self.end(A, key, &started).unwrap(),
            step => panic!("{key}: {step:?}"),
        }
    }

    /// Puts an object and writes down what has to move first.
    fn put_through(&mut self, key: &str) -> Version {
        let mut progress = PutProgress::default();
        for _ in 0..100 {
            match self.step(key, MIB, &mut progress).unwrap() {
                PutStep::Started(started) => {
                    self.end(A, key, &started).unwrap();
                    return started.version;
                }
                PutStep::Pending(Pending::Disks(_)) => {
                    self.write_down();
                }
                step => panic!("{key}: {step:?}"),
            }
        }
        panic!("the put of {key} makes no progress");
    }

    fn places_of(&mut self, key: &str) -> (usize, bool) {
        let found = self.locate(key, false, false).unwrap();
        (found.places.len(), found.disk.is_some())
    }

    fn quota_of_default(&self) -> TenantQuota {
        self.state.quota(&self.tenant).unwrap()
    }
}

#[test]
fn put_waits_until_the_disk_has_its_victim() {
    let mut pool = pool(4);
    pool.put_many("k", 4);
    assert_eq!(pool.hand_over(), [], "nothing is written at the put");
    let mut progress = PutProgress::default();
    let seen = pool.waits_for_disk("new", &mut progress);
    assert!(pool.exists("k0"), "it stays readable meanwhile");
    let handed = pool.hand_over();
    assert_eq!(handed[0].0, b"k0", "the next victim first");
    assert_eq!(pool.waits_for_disk("new", &mut progress), seen, "nothing has been reported");
    let version = Version(handed[0].1);
    assert!(pool.report_record(A, "k0", version, MIB));
    assert!(disk_progress(&pool.state) > seen);
    pool.goes_on("new", &mut progress);
    assert_eq!(pool.places_of("k0"), (0, true));
    assert_eq!(pool.state.log().counters().evicted_without_disk, 0);
}

#[test]
fn all_objects_of_a_larger_pool_stay_readable() {
    let mut pool = pool(8);
    let versions: Vec<_> = (0..80).map(|n| pool.put_through(&format!("k{n}"))).collect();
    for (number, version) in versions.into_iter().enumerate() {
        assert_eq!(pool.locate(&format!("k{number}"), false, false).unwrap().version, version);
    }
    let counters = *pool.state.log().counters();
    assert_eq!(counters.evicted_without_disk, 0);
    assert!(counters.waits_for_disks < 50, "the next victims move ahead of need: {counters:?}");
}

#[test]
fn large_object_waits_for_a_window_of_small_ones() {
    let mut pool = pool(8);
    let keys: Vec<_> = pool.put_many("k", 8).into_iter().map(|(key, _)| key).collect();
    // The order of eviction names no neighbours first.
    for number in [1, 3, 5, 7, 0, 2, 4, 6] {
        pool.locate(&keys[number], false, false).unwrap();
    }
    let mut progress = PutProgress::default();
    for _ in 0..100 {
        match pool.step("large", 6 * MIB, &mut progress).unwrap() {
            PutStep::Started(started) => {
                pool.end(A, "large", &started).unwrap();
                break;
            }
            PutStep::Pending(Pending::Disks(_)) => assert!(!pool.write_down().is_empty()),
            PutStep::Pending(pending) => assert_eq!(pending, Pending::Yield),
        }
    }
    assert_eq!(pool.places_of("large").0, 1);
    keys.iter().for_each(|key| assert!(pool.exists(key), "{key}"));
}

#[test]
fn lease_does_not_keep_memory_of_what_a_disk_takes() {
    let mut pool = pool(4);
    let mut keys = Vec::new();
    for number in 0..40 {
        let key = format!("k{number}");
        pool.put_through(&key);
        pool.locate(&key, true, true).unwrap();
        pool.now = pool.now + Duration::from_millis(300);
        keys.push(key);
    }
    fails(pool.remove("k20", false), ErrorCode::OBJECT_HAS_LEASE);
    assert!(keys.iter().all(|key| pool.exists(key)));
}

#[test]
fn fence_and_given_address_keep_memory() {
    let mut pool = pool(4);
    for (key, _) in pool.put_many("k", 4) {
        let fenced = key == "k0";
        pool.locate(&key, true, fenced).unwrap();
    }
    // Only k0 could move down, after its fence.
    let refused = pool.step("new", MIB, &mut PutProgress::default());
    fails(refused, ErrorCode::NO_AVAILABLE_HANDLE);
    pool.now = pool.now + Duration::from_secs(1);
    let mut progress = PutProgress::default();
    pool.waits_for_disk("new", &mut progress);
    assert_eq!(pool.write_down(), ["k0"]);
    pool.goes_on("new", &mut progress);
    for key in ["k1", "k2", "k3"] {
        assert_eq!(pool.places_of(key), (1, false), "{key}");
    }
}

#[test]
fn put_is_tried_again_when_the_next_object_is_read() {
    let offload = Some(OffloadRules::default());
    let mut pool = pool_with(Rules { offload, ..Rules::default() }, 4);
    pool.put_many("k", 4);
    let handed = pool.hand_over();
    assert_eq!(handed.len(), 4);
    for (key, version) in handed {
        let key = String::from_utf8(key).unwrap();
        // Read while its disk reads it, so that neither ends the fence of the other.
        pool.locate(&key, true, true).unwrap();
        assert!(pool.report_record(A, &key, Version(version), MIB));
    }
    let error = fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE).to_string();
    assert!(error.contains("retry_after_ms="), "{error}");
    pool.now = pool.now + Duration::from_secs(3);
    pool.put("new", MIB).unwrap();
    assert!(pool.exists("k0"));
}

#[test]
fn lease_keeps_memory_without_disks() {
    let mut pool = Pool::with(rules(OffloadRules::default()), 4);
    for (key, _) in pool.put_many("k", 4) {
        pool.locate(&key, true, true).unwrap();
    }
    pool.now = pool.now + Duration::from_secs(2);
    fails(pool.put("new", MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    pool.state.disks().mount(A, disk(1), 0, false).unwrap();
    let mut progress = PutProgress::default();
    pool.waits_for_disk("new", &mut progress);
    pool.write_down();
    pool.goes_on("new", &mut progress);
    (0..4).for_each(|number| assert!(pool.exists(&format!("k{number}"))));
}

#[test]
fn written_through_object_gives_leased_memory_up() {
    let offload = Some(OffloadRules::default());
    let mut pool = pool_with(Rules { offload, ..Rules::default() }, 4);
    for (key, _) in pool.put_many("k", 4) {
        pool.locate(&key, true, true).unwrap();
    }
    pool.now = pool.now + Duration::from_secs(2);
    let mut progress = PutProgress::default();
    // All wait for the disk since their puts.
    pool.waits_for_disk("new", &mut progress);
    let written = pool.write_down();
    assert_eq!(written.len(), 4, "each once: {written:?}");
    pool.goes_on("new", &mut progress);
    assert!(pool.exists("k0"));
    assert_eq!(pool.write_down(), ["new"]);
    assert_eq!(pool.write_down(), [""; 0]);
}

#[test]
fn written_through_object_without_a_lease_is_dropped() {
    let offload = Some(OffloadRules::default());
    let mut pool = pool_with(Rules { offload, ..Rules::default() }, 4);
    pool.put_many("k", 4);
    pool.put("new", MIB).unwrap();
    assert!(!pool.exists("k0"), "puts wait for no disk");
}

#[test]
fn put_goes_on_when_the_disk_leaves() {
    type Leave = fn(&mut Pool);
    let ways: [Leave; 3] = [
        |pool| pool.state.suspect(pool.now, B),
        |pool| pool.state.disks().unmount(pool.now, B, DISK, false).unwrap(),
        |pool| assert!(pool.state.unregister(pool.now, B)),
    ];
    for leave in ways {
        let mut pool = Pool::with(rules(OffloadRules::default()), 4);
        pool.state.disks().mount(B, disk(1), 0, false).unwrap();
        pool.put_many("k", 4);
        let mut progress = PutProgress::default();
        let seen = pool.waits_for_disk("new", &mut progress);
        leave(&mut pool);
        assert!(disk_progress(&pool.state) > seen, "the put is woken");
        pool.goes_on("new", &mut progress);
        assert!(!pool.exists("k0"));
    }
}

#[test]
fn put_goes_on_when_the_disk_refuses() {
    let mut pool = pool(4);
    pool.put_many("k", 4);
    let mut progress = PutProgress::default();
    pool.waits_for_disk("new", &mut progress);
    let mut tries = 0;
    while pool.refuse_all() > 0 {
        tries += 1;
    }
    assert_eq!(tries, 3);
    pool.goes_on("new", &mut progress);
    assert!(!pool.exists("k0"));
    // The disk is tried again after some time.
    pool.put("second", MIB).unwrap();
    pool.now = pool.now + Duration::from_secs(4);
    let mut progress = PutProgress::default();
    pool.waits_for_disk("third", &mut progress);
    assert!(!pool.write_down().is_empty());
    pool.goes_on("third", &mut progress);
}

#[test]
fn put_goes_on_when_the_owner_reports_nothing() {
    for is_taken in [false, true] {
        let mut pool = pool(4);
        pool.put_many("k", 4);
        let mut progress = PutProgress::default();
        pool.waits_for_disk("new", &mut progress);
        if is_taken {
            assert!(!pool.hand_over().is_empty());
        }
        pool.now = pool.now + Duration::from_secs(1);
        pool.waits_for_disk("new", &mut progress);
        pool.now = pool.now + Duration::from_secs(2);
        pool.waits_for_disk("new", &mut progress);
        pool.goes_on("new", &mut progress);
        assert!(!pool.exists("k0"));
        // What was handed over is handed over again.
        pool.now = pool.now + Duration::from_secs(4);
        let mut progress = PutProgress::default();
        pool.waits_for_disk("later", &mut progress);
        assert!(pool.write_down().contains(&"k1".to_owned()));
        pool.goes_on("later", &mut progress);
    }
}

#[test]
fn object_that_no_disk_can_take_is_dropped() {
    let small = DiskSpec { capacity: MIB / 2, ..disk(1) };
    let mut pool = Pool::with(rules(OffloadRules::default()), 4);
    pool.state.disks().mount(A, small, 0, false).unwrap();
    pool.put_many("k", 4);
    pool.put("new", MIB).unwrap();
    assert!(!pool.exists("k0"));
    let mut pool = pool_with(rules(OffloadRules { moves_max: 0, ..OffloadRules::default() }), 4);
    pool.put_many("k", 4);
    pool.put("new", MIB).unwrap();
    assert!(!pool.exists("k0"), "nothing may wait because of eviction");
}

#[test]
fn full_queue_drops_or_lets_wait() {
    for drops_when_full in [false, true] {
        let offload = OffloadRules { moves_max: 1, drops_when_full, ..OffloadRules::default() };
        let mut pool = pool_with(rules(offload), 4);
        pool.put_many("k", 4);
        let mut first = PutProgress::default();
        pool.waits_for_disk("first", &mut first);
        // Used, so that it is not the next victim any more.
        pool.locate("k0", false, false).unwrap();
        let step = pool.step("second", MIB, &mut PutProgress::default()).unwrap();
        if drops_when_full {
            assert!(matches!(step, PutStep::Started(_)), "{step:?}");
            assert!(!pool.exists("k1"));
        } else {
            let PutStep::Pending(pending) = step else { panic!("{step:?}") };
            let error = pool.state.puts().pending_error(pending).to_string();
            assert!(error.contains("queue of a disk"), "{error}");
            assert_eq!(pool.write_down(), ["k0"]);
            pool.waits_for_disk("first", &mut first);
            assert_eq!(pool.write_down(), ["k1"]);
            pool.goes_on("first", &mut first);
            assert_eq!(pool.places_of("k1"), (0, true));
        }
    }
}

#[test]
fn removed_and_replaced_objects_do_not_come_back() {
    let mut pool = pool(4);
    pool.put_many("k", 4);
    let mut progress = PutProgress::default();
    pool.waits_for_disk("new", &mut progress);
    let handed = pool.hand_over();
    assert_eq!(handed[0].0, b"k0");
    pool.remove("k0", true).unwrap();
    assert!(!pool.report_record(A, "k0", Version(handed[0].1), MIB));
    assert!(!pool.exists("k0"));
    assert_eq!(pool.state.totals().keys, 3);
}

#[test]
fn value_replaced_while_it_moves_stays_the_new_one() {
    let mut pool = pool(4);
    pool.put_many("k", 4);
    pool.waits_for_disk("new", &mut PutProgress::default());
    let old = Version(pool.hand_over()[0].1);
    pool.remove("k3", true).unwrap();
    let new = pool.upsert("k0", MIB).unwrap().version;
    assert!(!pool.report_record(A, "k0", old, MIB));
    let found = pool.locate("k0", false, false).unwrap();
    assert_eq!((found.version, found.disk), (new, None));
}

#[test]
fn watermark_moves_objects_down() {
    let watermark = Some(Watermark { high: 0.75, ratio: 0.25 });
    let rules = Rules { watermark, ..rules(OffloadRules::default()) };
    let mut pool = pool_with(rules, 8);
    let keys = pool.put_many("k", 7);
    pool.advance_all();
    assert_eq!(pool.state.totals().used, 7 * MIB, "nothing is dropped");
    let written = pool.write_down();
    assert_eq!(written, ["k0", "k1", "k2"], "down to the low mark");
    assert_eq!(pool.state.totals().used, 4 * MIB);
    assert!(keys.iter().all(|(key, _)| pool.exists(key)));
}

#[test]
fn groups_move_down_whole() {
    let mut pool = pool(4);
    // A large group is evicted in slices.
    for number in 0..200 {
        pool.put(&format!("g/{number}"), 4096).unwrap();
    }
    pool.put_many("k", 3);
    for number in 0..3 {
        pool.locate(&format!("k{number}"), true, false).unwrap();
    }
    let mut progress = PutProgress::default();
    for _ in 0..200 {
        match pool.step("new", 700 << 10, &mut progress).unwrap() {
            PutStep::Started(started) => {
                pool.end(A, "new", &started).unwrap();
                break;
            }
            PutStep::Pending(Pending::Disks(_)) => {
                for (key, version) in pool.hand_over() {
                    let key = String::from_utf8(key).unwrap();
                    assert!(pool.report_record(A, &key, Version(version), 4096));
                }
            }
            PutStep::Pending(pending) => assert_eq!(pending, Pending::Yield),
        }
    }
    pool.advance_all();
    assert!(pool.exists("new"));
    (0..200).for_each(|number| assert_eq!(pool.places_of(&format!("g/{number}")), (0, true)));
}

#[test]
fn several_members_of_a_group_among_the_next_victims() {
    let mut pool = Pool::new(4);
    for number in 0..200 {
        pool.put(&format!("g/{number}"), 4096).unwrap();
    }
    for (key, _) in pool.put_many("k", 3) {
        pool.locate(&key, true, false).unwrap();
    }
    // Needs more than all of the group, so that its members go back to the order.
    fails(pool.put("new", 2 * MIB), ErrorCode::NO_AVAILABLE_HANDLE);
    (0..200).for_each(|number| assert_eq!(pool.places_of(&format!("g/{number}")), (1, false)));
}

#[test]
fn quota_moves_own_objects_down() {
    let rules = Rules { is_multi_tenant: true, ..rules(OffloadRules::default()) };
    let mut pool = pool_with(rules, 8);
    pool.state.set_quota(&TenantId::default(), 2 * MIB).unwrap();
    pool.put_many("k", 2);
    let mut progress = PutProgress::default();
    pool.waits_for_disk("new", &mut progress);
    assert_eq!(pool.write_down(), ["k0", "k1"], "one ahead of need");
    let quota = pool.quota_of_default();
    assert_eq!((quota.charged, quota.on_disk), (2 * MIB, 2 * MIB));
    pool.goes_on("new", &mut progress);
    assert_eq!(pool.places_of("k0"), (0, true));
    let quota = pool.quota_of_default();
    assert_eq!((quota.charged, quota.on_disk), (2 * MIB, 2 * MIB));
    pool.remove("k0", true).unwrap();
    assert_eq!(pool.quota_of_default().on_disk, MIB);
}

#[test]
fn tenant_with_objects_on_disk_keeps_its_quota() {
    let rules = Rules { is_multi_tenant: true, ..rules(OffloadRules::default()) };
    let mut pool = pool_with(rules, 4);
    pool.state.set_quota(&TenantId::default(), MIB).unwrap();
    pool.put("k", MIB).unwrap();
    let mut progress = PutProgress::default();
    pool.waits_for_disk("new", &mut progress);
    pool.write_down();
    pool.goes_on("new", &mut progress);
    pool.remove("new", true).unwrap();
    fails(pool.state.remove_quota(&TenantId::default()), ErrorCode::TENANT_NOT_EMPTY);
    pool.restart();
    pool.state.disks().mount(A, disk(2), 0, false).unwrap();
    assert_eq!(pool.quota_of_default().on_disk, MIB);
}

#[test]
fn memory_is_free_when_the_log_has_the_record() {
    let mut pool = pool(4);
    pool.state.confirm_durable(u64::MAX);
    pool.state.confirm_synced(0);
    pool.put_many("k", 4);
    let mut progress = PutProgress::default();
    pool.waits_for_disk("new", &mut progress);
    pool.write_down();
    let step = pool.step("new", MIB, &mut progress).unwrap();
    let PutStep::Pending(Pending::Sync(position)) = step else { panic!("{step:?}") };
    pool.state.confirm_synced(position);
    pool.goes_on("new", &mut progress);
}

#[test]
fn restart_keeps_objects_that_were_moving() {
    let mut pool = pool(4);
    let keys = pool.put_many("k", 4);
    pool.waits_for_disk("new", &mut PutProgress::default());
    let handed = pool.hand_over();
    assert!(pool.report_record(A, "k0", Version(handed[0].1), MIB));
    pool.restart();
    pool.state.disks().mount(A, disk(2), 0, false).unwrap();
    for (key, version) in keys {
        assert_eq!(pool.locate(&key, false, false).unwrap().version, version);
    }
}
