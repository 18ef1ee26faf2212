//! Promotions: objects that only a disk has come back into memory, and no late byte spoils it.

use mooncake_base::Version;

use super::*;

/// The disk of client A.
const DISK: SegmentId = SegmentId::from_bits(77);

fn rules() -> Rules {
    let offload = Some(OffloadRules { queue_max: 100, ..OffloadRules::default() });
    Rules { offload, ..Rules::default() }
}

/// A pool of 4 MiB with a disk.
fn pool() -> Pool {
    pool_with(rules())
}

fn pool_with(rules: Rules) -> Pool {
    let mut pool = Pool::with(rules, 4);
    pool.state.record_effects();
    pool.state.disks().mount(A, disk(), 0, false).unwrap();
    pool
}

fn disk() -> DiskSpec {
    DiskSpec {
        id: DISK,
        incarnation: Incarnation(1),
        name: "host-a:1".to_owned(),
        address: "host-a:9".to_owned(),
        capacity: 1 << 30,
    }
}

impl Pool {
    /// Puts objects of a MiB, writes them to the disk and evicts them from memory.
    fn put_on_disk_only<const N: usize>(&mut self, keys: [&str; N]) -> [Version; N] {
        let versions = keys.map(|key| self.put(key, MIB).unwrap().version);
        self.state.disks().take_over(self.now, A, DISK, 100, u64::MAX).unwrap();
        let tenant = self.tenant.clone();
        for (key, version) in keys.into_iter().zip(versions) {
            let record = RecordName { tenant: &tenant, key: key.as_bytes(), version, length: MIB };
            assert!(self.state.disks().own(A, DISK).unwrap().record_added(self.now, &record));
        }
        self.wait(30);
        for number in 0..4 {
            self.put(&format!("filler{number}"), MIB).unwrap();
        }
        for number in 0..4 {
            self.remove(&format!("filler{number}"), true).unwrap();
        }
        for key in keys {
            assert_eq!(self.places(key), 0, "{key}");
        }
        versions
    }

    /// Returns in how many places of memory an object is.
    fn places(&mut self, key: &str) -> usize {
        self.locate(key, false, false).unwrap().places.len()
    }

    fn prefetch(&mut self, key: &str) -> Prefetch {
        PromotionCalls::new(self.state.tasks()).prefetch(self.now, &self.tenant, key.as_bytes())
    }

    fn promotions(&mut self) -> PromotionBatch {
        PromotionCalls::new(self.state.tasks()).fetch(self.now, A, DISK, 100, u64::MAX).unwrap()
    }

    /// Hands out what waits for the disk: the replicas to be written.
    fn fetch_replicas(&mut self) -> Vec<ReplicaId> {
        self.promotions().objects.iter().map(|object| object.places[0].replica).collect()
    }

    fn end_promotion(&mut self, replica: ReplicaId, is_written: bool) {
        PromotionCalls::new(self.state.tasks())
            .end(self.now, A, DISK, replica, is_written)
            .unwrap();
    }

    fn used(&self) -> u64 {
        self.state.totals().used
    }

    fn counters(&self) -> (u64, u64, u64, u64) {
        let counters = self.state.log().counters();
        let ended = counters.promotions_failed + counters.promotions_cancelled;
        (counters.promotions_admitted, counters.promotions_done, ended, counters.promotions_expired)
    }
}

#[test]
fn prefetched_object_comes_back_with_a_lease() {
    let mut pool = pool();
    let [version] = pool.put_on_disk_only(["k"]);
    assert_eq!(pool.prefetch("nothing"), Prefetch::Unneeded);
    assert_eq!(pool.prefetch("k"), Prefetch::Queued);
    assert_eq!(pool.prefetch("k"), Prefetch::Queued, "it waits already");
    assert!(pool.state.log_mut().take_offload_signal());
    let batch = pool.promotions();
    assert_eq!(batch.window, Rules::default().write_window);
    let [object] = &batch.objects[..] else { panic!("{batch:?}") };
    assert_eq!((&object.key[..], object.version, object.length), (&b"k"[..], version, MIB));
    assert_eq!(pool.prefetch("k"), Prefetch::Queued, "it is on its way");
    assert_eq!(pool.places("k"), 0, "nobody reads what is not written");
    pool.end_promotion(object.places[0].replica, true);
    assert_eq!(pool.places("k"), 1);
    assert_eq!(pool.prefetch("k"), Prefetch::Unneeded);
    fails(pool.remove("k", false), ErrorCode::OBJECT_HAS_LEASE);
    assert_eq!(pool.counters(), (1, 1, 0, 0));
    assert_eq!(pool.state.totals().promotions_underway, 0);
}

#[test]
fn memory_of_failed_promotion_waits_for_late_bytes() {
    let mut pool = pool();
    pool.put_on_disk_only(["k"]);
    pool.prefetch("k");
    let replica = pool.fetch_replicas()[0];
    let used = pool.used();
    pool.end_promotion(replica, false);
    pool.end_promotion(replica, true);
    assert_eq!((pool.places("k"), pool.used()), (0, used), "it is reported once");
    pool.now = pool.now + late_end();
    pool.advance_all();
    assert_eq!(pool.used(), used - MIB);
    assert_eq!(pool.counters(), (1, 0, 1, 0));
}

#[test]
fn promotion_ends_with_its_window() {
    let mut pool = pool();
    pool.put_on_disk_only(["k"]);
    pool.prefetch("k");
    let replica = pool.fetch_replicas()[0];
    let used = pool.used();
    pool.wait(23);
    assert_eq!(pool.counters(), (1, 0, 0, 1));
    assert_eq!(pool.prefetch("k"), Prefetch::Queued);
    let second = pool.fetch_replicas()[0];
    assert_ne!(replica, second);
    pool.end_promotion(replica, true);
    assert_eq!(pool.places("k"), 0, "the report is about another place");
    pool.end_promotion(second, true);
    assert_eq!((pool.places("k"), pool.used()), (1, used + MIB));
    pool.wait(60);
    assert_eq!(pool.used(), used);
}

#[test]
fn removed_and_replaced_objects_do_not_come_back() {
    let mut pool = pool();
    pool.put_on_disk_only(["gone", "new", "waits"]);
    let keys = ["gone", "new"];
    for key in keys {
        pool.prefetch(key);
    }
    let replicas = pool.fetch_replicas();
    pool.prefetch("waits");
    for key in ["gone", "waits"] {
        pool.remove(key, true).unwrap();
    }
    let second = pool.upsert("new", MIB).unwrap().version;
    for replica in replicas {
        pool.end_promotion(replica, true);
    }
    assert!(!pool.exists("gone"));
    let found = pool.locate("new", false, false).unwrap();
    assert_eq!((found.version, found.places.len()), (second, 1));
    assert_eq!(pool.used(), MIB, "memory that was written is free at once");
    assert_eq!(
        pool.promotions(),
        PromotionBatch { window: rules().write_window, ..PromotionBatch::default() }
    );
    assert_eq!(pool.counters(), (3, 0, 3, 0));
}

#[test]
fn queue_is_bounded_and_leaves_with_the_disk() {
    let promotion = PromotionRules { queue_max: 1, hits_min: None };
    let mut pool = pool_with(Rules { promotion, ..rules() });
    pool.put_on_disk_only(["a", "b"]);
    assert_eq!((pool.prefetch("a"), pool.prefetch("b")), (Prefetch::Queued, Prefetch::Refused));
    assert_eq!(pool.state.log().counters().promotions_refused, 1);
    let replica = pool.fetch_replicas()[0];
    assert_eq!(pool.prefetch("b"), Prefetch::Queued);
    pool.state.disks().unmount(pool.now, A, DISK, true).unwrap();
    assert_eq!(pool.state.totals().promotions_underway, 1, "bytes are still on their way");
    pool.advance_all();
    let report = PromotionCalls::new(pool.state.tasks()).end(pool.now, A, DISK, replica, true);
    fails(report, ErrorCode::SEGMENT_NOT_FOUND);
    pool.wait(60);
    assert_eq!((pool.state.totals().promotions_underway, pool.used()), (0, 0));
}

#[test]
fn eviction_makes_room_but_not_of_leased_objects() {
    let mut pool = pool();
    pool.put_on_disk_only(["k"]);
    for number in 0..4 {
        pool.put(&format!("new{number}"), MIB).unwrap();
        pool.locate(&format!("new{number}"), true, false).unwrap();
    }
    pool.prefetch("k");
    assert_eq!(pool.fetch_replicas(), []);
    assert_eq!(pool.state.log().counters().promotions_without_room, 1);
    pool.wait(30);
    pool.prefetch("k");
    let mut replicas = pool.fetch_replicas();
    if replicas.is_empty() {
        // What was evicted is in the log by now.
        let position = pool.state.log().log_position();
        pool.state.confirm_synced(position);
        replicas = pool.fetch_replicas();
    }
    pool.end_promotion(replicas[0], true);
    assert_eq!(pool.places("k"), 1);
}

#[test]
fn lost_segment_takes_promotions_with_it() {
    let mut pool = pool();
    pool.put_on_disk_only(["k"]);
    pool.prefetch("k");
    let replica = pool.fetch_replicas()[0];
    pool.mount(B, 2, 4).unwrap();
    pool.state.unmount(pool.now, A, SegmentId::from_bits(1), Duration::ZERO).unwrap();
    assert_eq!(pool.state.totals().promotions_underway, 0);
    pool.end_promotion(replica, true);
    pool.advance_all();
    pool.prefetch("k");
    let replica = pool.fetch_replicas()[0];
    pool.end_promotion(replica, true);
    assert_eq!((pool.places("k"), pool.used()), (1, MIB));
}

#[test]
fn second_read_brings_an_object_back_if_hits_count() {
    for (hits_min, expected) in [(None, 0), (Some(2), 1)] {
        let promotion = PromotionRules { hits_min, ..PromotionRules::default() };
        let mut pool = pool_with(Rules { promotion, ..rules() });
        pool.put_on_disk_only(["k"]);
        pool.locate("k", false, true).unwrap();
        pool.locate("k", false, false).unwrap();
        assert_eq!(pool.fetch_replicas(), [], "only reads count");
        pool.locate("k", false, true).unwrap();
        assert_eq!(pool.fetch_replicas().len(), expected, "{hits_min:?}");
    }
}

#[test]
fn restart_quarantines_memory_of_promotions() {
    let mut pool = pool();
    pool.put_on_disk_only(["k"]);
    pool.prefetch("k");
    pool.fetch_replicas();
    let mut effects = Vec::new();
    let now = pool.now;
    let mut cursor = pool.state.begin_snapshot(now, &mut effects);
    while !pool.state.snapshot_slice(&mut cursor, 100, &mut effects) {}
    let mut image = Image::default();
    image.replay(&effects).unwrap();
    pool.state = State::restore(rules(), 43, now, image, Duration::ZERO).0;
    pool.state.register(now, A, "host-a:1").unwrap();
    pool.state.register(now, B, "host-b:1").unwrap();
    pool.state.resume(A, &spec(A, 1, 1, 4)).unwrap();
    pool.wait(25);
    assert_eq!(pool.used(), MIB, "bytes may still arrive");
    pool.wait(10);
    assert_eq!(pool.used(), 0);
}

#[test]
fn copy_of_object_on_disk_brings_it_into_the_target() {
    let mut pool = pool();
    pool.put_on_disk_only(["copied", "moved"]);
    pool.mount(B, 2, 4).unwrap();
    let tenant = pool.tenant.clone();
    let targets = ["host-b:1".to_owned()];
    let copy = NewTask::Copy { key: b"copied", targets: &targets };
    let copy = pool.state.tasks().create_task(pool.now, &tenant, copy).unwrap();
    let moved = NewTask::Move { key: b"moved", source: "host-a:1", target: "host-b:1" };
    let moved = pool.state.tasks().create_task(pool.now, &tenant, moved).unwrap();
    let batch = pool.promotions();
    assert_eq!(batch.objects.len(), 2, "no client need fetch the tasks");
    for object in &batch.objects {
        let place = object.places[0];
        assert_eq!(pool.state.segment(place.segment).spec.id, SegmentId::from_bits(2));
        pool.end_promotion(place.replica, true);
    }
    for task in [copy, moved] {
        let view = pool.state.task(task).unwrap();
        assert_eq!(view.status, TaskStatus::Success, "{view:?}");
    }
    assert_eq!((pool.places("copied"), pool.places("moved")), (1, 1));
}

#[test]
fn task_tries_again_when_its_promotion_fails() {
    let mut pool = pool();
    pool.put_on_disk_only(["k"]);
    pool.mount(B, 2, 4).unwrap();
    let tenant = pool.tenant.clone();
    let targets = ["host-b:1".to_owned()];
    let copy = NewTask::Copy { key: b"k", targets: &targets };
    // A prefetch that runs does not bring it where the task wants it.
    pool.prefetch("k");
    let anywhere = pool.fetch_replicas()[0];
    let copy = pool.state.tasks().create_task(pool.now, &tenant, copy).unwrap();
    assert_eq!(pool.fetch_replicas(), []);
    pool.end_promotion(anywhere, false);
    pool.wait(1);
    assert!(pool.state.tasks().has_tasks(pool.now, A), "the owner of the disk is told");
    assert_eq!(pool.state.tasks().fetch_tasks(pool.now, A, 10, MIB).unwrap(), []);
    let second = pool.fetch_replicas()[0];
    pool.end_promotion(second, true);
    assert_eq!(pool.state.task(copy).unwrap().status, TaskStatus::Success);
}

#[test]
fn task_ends_where_the_owner_of_the_disk_fetches_nothing() {
    // What a task has that ran once.
    let tasks = TaskRules { pending_timeout: Duration::ZERO, ..TaskRules::default() };
    let mut pool = pool_with(Rules { tasks, ..rules() });
    pool.put_on_disk_only(["k"]);
    pool.mount(B, 2, 4).unwrap();
    let tenant = pool.tenant.clone();
    let targets = ["host-b:1".to_owned()];
    let copy = NewTask::Copy { key: b"k", targets: &targets };
    let copy = pool.state.tasks().create_task(pool.now, &tenant, copy).unwrap();
    for _ in 0..1000 {
        pool.wait(1);
        pool.state.tasks().fetch_tasks(pool.now, A, 10, MIB).unwrap();
    }
    let view = pool.state.task(copy).unwrap();
    assert_eq!(view.status, TaskStatus::Failed, "{view:?}");
    assert!(view.message.contains("did not bring the object into memory"), "{}", view.message);
}

#[test]
fn running_promotion_is_what_a_task_copies_from() {
    let mut pool = pool();
    pool.put_on_disk_only(["k"]);
    pool.prefetch("k");
    let anywhere = pool.fetch_replicas()[0];
    pool.mount(B, 2, 4).unwrap();
    let tenant = pool.tenant.clone();
    let targets = ["host-b:1".to_owned()];
    let copy = NewTask::Copy { key: b"k", targets: &targets };
    let copy = pool.state.tasks().create_task(pool.now, &tenant, copy).unwrap();
    pool.end_promotion(anywhere, true);
    let work = pool.state.tasks().fetch_tasks(pool.now, A, 10, MIB).unwrap().remove(0);
    assert_eq!(work.id, copy);
    let end = TaskEnd { id: work.id, attempt: work.attempt, failed_replicas: &[], why: "" };
    pool.state.tasks().end_task(pool.now, A, end).unwrap();
    assert_eq!(pool.places("k"), 2);
}

#[test]
fn drain_leaves_objects_without_other_memory_to_a_disk() {
    for (owner, expected) in [(B, JobStatus::Succeeded), (A, JobStatus::Failed)] {
        let mut pool = pool();
        pool.state.disks().unmount(pool.now, A, DISK, true).unwrap();
        pool.advance_all();
        let mut disk = disk();
        disk.incarnation = Incarnation(2);
        pool.state.disks().mount(owner, disk, 0, false).unwrap();
        let version = pool.put("k", MIB).unwrap().version;
        let tenant = pool.tenant.clone();
        let record = RecordName { tenant: &tenant, key: b"k", version, length: MIB };
        assert!(pool.state.disks().own(owner, DISK).unwrap().record_added(pool.now, &record));
        let segments = ["host-a:1".to_owned()];
        let new = NewJob { segments: &segments, targets: &[], concurrency: 2, may_evict: false };
        let job = pool.state.tasks().create_job(pool.now, new).unwrap();
        for _ in 0..60 {
            pool.wait(1);
            pool.state.tasks().fetch_tasks(pool.now, A, 10, MIB).unwrap();
        }
        let view = pool.state.job(job).unwrap();
        assert_eq!(view.status, expected, "{view:?}");
        let found = pool.locate("k", false, false).unwrap();
        let is_moved = expected == JobStatus::Succeeded;
        assert_eq!((found.places.len(), found.disk.is_some()), (usize::from(!is_moved), true));
    }
}
