//! Disks: what is written to them stays readable without memory, and nothing comes back that is gone.

use mooncake_base::Version;

use super::*;

/// The disk of client A.
pub(super) const DISK: SegmentId = SegmentId::from_bits(77);

fn rules() -> Rules {
    let offload = Some(OffloadRules { queue_max: 100, ..OffloadRules::default() });
    Rules { offload, ..Rules::default() }
}

pub(super) fn disk(incarnation: u64) -> DiskSpec {
    DiskSpec {
        id: DISK,
        incarnation: Incarnation(incarnation),
        name: "host-a:1".to_owned(),
        address: "host-a:9".to_owned(),
        capacity: 1 << 30,
    }
}

/// A pool of 4 MiB with a disk.
fn pool() -> Pool {
    let mut pool = Pool::with(rules(), 4);
    pool.state.record_effects();
    pool.state.disks().mount(A, disk(1), 0, false).unwrap();
    pool
}

impl Pool {
    pub(super) fn own_disk(&mut self) -> OwnDisk<'_> {
        self.state.disks().own(A, DISK).unwrap()
    }

    /// Hands over what waits for the disk.
    pub(super) fn hand_over(&mut self) -> Vec<(Vec<u8>, u64)> {
        let fetched = self.state.disks().take_over(self.now, A, DISK, 100, u64::MAX).unwrap();
        fetched.objects.into_iter().map(|object| (object.key, object.version.0)).collect()
    }

    pub(super) fn report_record(
        &mut self,
        client: ClientId,
        key: &str,
        version: Version,
        length: u64,
    ) -> bool {
        let (tenant, key) = (self.tenant.clone(), key.as_bytes());
        let record = RecordName { tenant: &tenant, key, version, length };
        self.state.disks().own(client, DISK).unwrap().record_added(self.now, &record)
    }

    pub(super) fn lose(&mut self, key: &str, version: Version, was_written: bool) {
        let tenant = self.tenant.clone();
        let record = RecordName { tenant: &tenant, key: key.as_bytes(), version, length: 0 };
        let mut disk = self.state.disks().own(A, DISK).unwrap();
        if was_written {
            disk.record_lost(self.now, &record);
        } else {
            disk.record_refused(self.now, &record);
        }
    }

    /// Puts an object of a MiB and writes it to the disk.
    pub(super) fn put_on_disk(&mut self, key: &str) -> Version {
        let version = self.put(key, MIB).unwrap().version;
        self.hand_over();
        assert!(self.report_record(A, key, version, MIB));
        version
    }

    /// Evicts everything that may be evicted, by puts that are removed again.
    pub(super) fn fill(&mut self) {
        for number in 0..4 {
            self.put(&format!("filler{number}"), MIB).unwrap();
        }
        for number in 0..4 {
            self.remove(&format!("filler{number}"), true).unwrap();
        }
    }

    pub(super) fn restart(&mut self) {
        let rules = self.state.rules().clone();
        let mut effects = Vec::new();
        let now = self.now;
        let mut cursor = self.state.begin_snapshot(now, &mut effects);
        while !self.state.snapshot_slice(&mut cursor, 100, &mut effects) {}
        let mut image = Image::default();
        image.replay(&effects).unwrap();
        self.state = State::restore(rules, 43, now, image, Duration::ZERO).0;
        self.state.register(now, A, "host-a:1").unwrap();
        self.state.register(now, B, "host-b:1").unwrap();
        self.state.resume(A, &spec(A, 1, 1, 4)).unwrap();
    }
}

#[test]
fn evicted_object_stays_readable_from_disk() {
    let mut pool = pool();
    let version = pool.put_on_disk("k");
    let found = pool.locate("k", false, false).unwrap();
    assert_eq!((found.places.len(), found.disk.is_some()), (1, true));
    pool.fill();
    let found = pool.locate("k", false, true).unwrap();
    assert_eq!((found.places.len(), found.version), (0, version));
    let place = found.disk.unwrap();
    assert_eq!(disk_of(&pool.state, place.disk), &disk(1));
    assert!(pool.state.verify(&pool.tenant, b"k", version, place.replica));
    assert!(pool.exists("k"));
    assert_eq!(pool.list(Selector::All, None, 9).0, ["k"]);
    assert!(!pool.exists("filler0"));
}

#[test]
fn removed_and_replaced_records_are_stale() {
    let mut pool = pool();
    let first = pool.put_on_disk("k");
    let second = pool.upsert("k", MIB).unwrap().version;
    assert!(pool.locate("k", false, false).unwrap().disk.is_none(), "the record is of the first");
    assert!(!pool.report_record(A, "k", first, MIB));
    assert!(!pool.report_record(A, "k", second, MIB - 1), "another length");
    assert!(pool.report_record(A, "k", second, MIB));
    pool.remove("k", true).unwrap();
    assert!(!pool.report_record(A, "k", second, MIB));
    assert!(!pool.exists("k"));
}

#[test]
fn lost_record_leaves_memory_or_nothing() {
    let mut pool = pool();
    let version = pool.put_on_disk("k");
    pool.lose("k", version, true);
    assert!(pool.locate("k", false, false).unwrap().disk.is_none());
    assert!(pool.report_record(A, "k", version, MIB));
    pool.fill();
    pool.lose("k", Version(version.0 + 1), true);
    assert!(pool.exists("k"), "another version was lost");
    pool.lose("k", version, true);
    assert!(!pool.exists("k"));
    assert_eq!(pool.state.totals().keys, 0);
}

#[test]
fn refused_object_is_handed_over_again_and_then_left() {
    let mut pool = pool();
    let version = pool.put("k", MIB).unwrap().version;
    for _ in 0..3 {
        assert_eq!(pool.hand_over(), [(b"k".to_vec(), version.0)]);
        pool.lose("k", version, false);
    }
    assert_eq!(pool.hand_over(), []);
    assert_eq!(pool.state.log().counters().offloads_failed, 1);
    assert!(pool.exists("k"));
}

#[test]
fn object_in_a_lost_answer_is_handed_over_again() {
    let mut pool = pool();
    let version = pool.put("k", MIB).unwrap().version;
    // More often than the disk may fail to write it.
    for _ in 0..5 {
        assert_eq!(pool.hand_over(), [(b"k".to_vec(), version.0)]);
    }
    pool.state.disks().mount(A, disk(2), 0, false).unwrap();
    assert_eq!(pool.hand_over(), [(b"k".to_vec(), version.0)], "also after another mount");
    pool.lose("k", version, false);
    assert_eq!(pool.hand_over(), [(b"k".to_vec(), version.0)]);
    assert!(pool.report_record(A, "k", version, MIB));
    assert_eq!(pool.hand_over(), []);
}

#[test]
fn object_that_went_for_a_later_one_is_not_handed_over_again() {
    let mut pool = pool();
    let version = pool.put("k", MIB).unwrap().version;
    assert_eq!(pool.hand_over(), [(b"k".to_vec(), version.0)]);
    pool.lose("k", version, true);
    assert_eq!(pool.hand_over(), []);
    assert!(pool.exists("k"), "in memory");
    pool.lose("k", version, false);
    assert_eq!(pool.hand_over(), []);
}

#[test]
fn object_that_is_gone_is_not_handed_over() {
    let mut pool = pool();
    pool.put("removed", MIB).unwrap();
    pool.put("replaced", MIB).unwrap();
    pool.remove("removed", true).unwrap();
    let version = pool.upsert("replaced", MIB).unwrap().version;
    assert_eq!(pool.hand_over(), [(b"replaced".to_vec(), version.0)]);
}

#[test]
fn disk_outlives_its_owner() {
    let mut pool = pool();
    let version = pool.put_on_disk("k");
    pool.fill();
    pool.state.unregister(pool.now, A);
    assert!(!pool.exists("k"), "hidden while nobody has the disk open");
    let refused = pool.state.disks().mount(B, disk(0), 0, false);
    fails(refused, ErrorCode::SEGMENT_ALREADY_EXISTS);
    pool.state.disks().mount(B, disk(2), 0, false).unwrap();
    assert_eq!(pool.locate("k", false, false).unwrap().version, version);
    // A copy of the directory elsewhere, while B is well.
    pool.state.register(pool.now, A, "host-a:1").unwrap();
    let refused = pool.state.disks().mount(A, disk(3), 0, false);
    fails(refused, ErrorCode::SEGMENT_ALREADY_EXISTS);
    pool.state.suspect(pool.now, B);
    pool.state.disks().mount(A, disk(3), 0, false).unwrap();
    assert!(pool.exists("k"));
}

#[test]
fn new_value_takes_the_place_of_one_on_an_absent_disk() {
    let mut pool = pool();
    let first = pool.put_on_disk("k");
    pool.fill();
    pool.state.disks().unmount(pool.now, A, DISK, false).unwrap();
    let second = pool.put("k", MIB).unwrap().version;
    assert_ne!(first, second);
    pool.state.disks().mount(A, disk(2), 0, false).unwrap();
    assert!(!pool.report_record(A, "k", first, MIB));
    let found = pool.locate("k", false, false).unwrap();
    assert_eq!((found.version, found.disk), (second, None));
}

#[test]
fn copies_are_forgotten_with_their_disk() {
    for forgets in [true, false] {
        let mut pool = pool();
        pool.put_on_disk("disk only");
        pool.fill();
        pool.put_on_disk("both");
        pool.state.disks().unmount(pool.now, A, DISK, forgets).unwrap();
        if !forgets {
            pool.wait(1);
            assert_eq!(pool.state.disks().list().len(), 1);
            pool.now = pool.now + rules().disk_away_ttl;
        }
        pool.wait(1);
        assert_eq!(pool.state.disks().list().len(), 0);
        assert_eq!((pool.exists("disk only"), pool.exists("both")), (false, true));
        assert!(pool.locate("both", false, false).unwrap().disk.is_none());
        pool.state.disks().mount(A, disk(2), 0, false).unwrap();
        assert!(!pool.exists("disk only"));
    }
}

#[test]
fn restart_knows_what_is_on_disk() {
    let mut pool = pool();
    let version = pool.put_on_disk("disk only");
    pool.fill();
    pool.put_on_disk("both");
    pool.restart();
    assert!(!pool.exists("disk only"));
    pool.state.disks().mount(A, disk(2), 0, true).unwrap();
    assert_eq!(pool.locate("disk only", false, false).unwrap().version, version);
    assert!(pool.locate("both", false, false).unwrap().disk.is_some());
    // The owner names one record only: it lost the other.
    assert!(pool.report_record(A, "disk only", version, MIB));
    assert!(pool.own_disk().end_naming());
    let mut next = 0;
    while !pool.state.disks().own(A, DISK).unwrap().drop_unnamed(pool.now, &mut next) {}
    assert!(pool.locate("both", false, false).unwrap().disk.is_none());
    assert!(pool.exists("disk only"));
    assert!(!pool.own_disk().end_naming());
}

#[test]
fn objects_wait_until_their_memory_may_be_fenced() {
    let mut pool = pool();
    pool.state.confirm_durable(0);
    let version = pool.put("k", MIB).unwrap().version;
    assert_eq!(pool.hand_over(), [], "the bound of fences is not in the log");
    pool.state.confirm_durable(pool.state.log().log_position());
    assert_eq!(pool.hand_over(), [(b"k".to_vec(), version.0)]);
}

#[test]
fn owner_that_names_its_objects_anew_keeps_them() {
    let mut pool = pool();
    let version = pool.put_on_disk("k");
    pool.state.disks().mount(A, disk(2), 0, true).unwrap();
    assert!(pool.own_disk().end_naming());
    // Mounted again before the objects were looked through: the earlier call drops nothing.
    pool.state.disks().mount(A, disk(3), 0, true).unwrap();
    let now = pool.now;
    assert!(pool.own_disk().drop_unnamed(now, &mut 0));
    assert!(pool.locate("k", false, false).unwrap().disk.is_some());
    assert!(pool.report_record(A, "k", version, MIB));
    assert!(pool.own_disk().end_naming());
    assert!(pool.own_disk().drop_unnamed(now, &mut 0));
    assert!(pool.locate("k", false, false).unwrap().disk.is_some());
}

#[test]
fn unknown_records_are_adopted_only_on_request() {
    for adopts_records in [false, true] {
        let offload = Some(OffloadRules { adopts_records, ..OffloadRules::default() });
        let mut pool = Pool::with(Rules { offload, ..Rules::default() }, 4);
        pool.state.record_effects();
        pool.state.disks().mount(A, disk(1), 0, true).unwrap();
        let version = Version((1 << 47) + 1);
        assert_eq!(pool.report_record(A, "k", version, 5), adopts_records);
        assert_eq!(pool.exists("k"), adopts_records);
        assert!(!pool.report_record(A, "zero", version, 0));
        assert!(!pool.report_record(A, "high", Version(u64::MAX), 5));
        if adopts_records {
            assert_eq!(pool.locate("k", false, false).unwrap().version, version);
            let next = pool.upsert("k", MIB).unwrap().version;
            let later = Version(version.0 + (1 << 32));
            assert!(next > later, "records with versions in between may be reported yet");
            assert!(!pool.report_record(A, "k", version, 5), "replaced since");
        }
    }
}

#[test]
fn disk_needs_a_tier_and_an_owner() {
    let mut pool = Pool::new(4);
    fails(pool.state.disks().mount(A, disk(1), 0, false), ErrorCode::UNABLE_OFFLOAD);
    let mut pool = self::pool();
    let stranger = ClientId::from_bits(9);
    fails(pool.state.disks().mount(stranger, disk(1), 0, false), ErrorCode::CLIENT_NOT_FOUND);
    let fetched = pool.state.disks().take_over(pool.now, B, DISK, 1, 1);
    fails(fetched, ErrorCode::ILLEGAL_CLIENT);
    fails(pool.state.disks().own(B, DISK), ErrorCode::ILLEGAL_CLIENT);
    let unknown = SegmentId::from_bits(5);
    fails(pool.state.disks().own(A, unknown), ErrorCode::SEGMENT_NOT_FOUND);
    let empty = DiskSpec { id: unknown, capacity: 0, ..disk(1) };
    fails(pool.state.disks().mount(A, empty, 0, false), ErrorCode::INVALID_PARAMS);
}

#[test]
fn groups_on_disk_are_evicted_to_their_end() {
    let mut pool = pool();
    // A group that is evicted in slices, of which every other member is on disk.
    for number in 0..200 {
        let key = format!("g/{number}");
        let version = pool.put(&key, 4096).unwrap().version;
        pool.hand_over();
        if number % 2 == 0 {
            assert!(pool.report_record(A, &key, version, 4096));
        }
    }
    // Those that were handed over and not reported are fenced.
    pool.wait(3);
    for number in 0..4 {
        // Leased, so that the next one takes the memory of the group.
        let key = format!("filler{number}");
        pool.put(&key, if number < 3 { MIB - 4096 } else { 700 << 10 }).unwrap();
        pool.locate(&key, true, false).unwrap();
    }
    pool.wait(1);
    assert!(pool.exists("g/0") && pool.exists("g/198"));
    assert!(!pool.exists("g/1") && !pool.exists("g/199"));
}

#[test]
fn full_queue_leaves_objects_in_memory() {
    let offload = Some(OffloadRules { queue_max: 1, ..OffloadRules::default() });
    let mut pool = Pool::with(Rules { offload, ..Rules::default() }, 4);
    pool.state.disks().mount(A, disk(1), 0, false).unwrap();
    let version = pool.put("a", 10).unwrap().version;
    pool.put("b", 10).unwrap();
    assert_eq!(pool.hand_over().len(), 1);
    assert_eq!(pool.state.log().counters().offloads_refused, 1);
    assert!(pool.report_record(A, "a", version, 10));
    pool.put("c", 10).unwrap();
    assert_eq!(pool.hand_over().len(), 1);
}
