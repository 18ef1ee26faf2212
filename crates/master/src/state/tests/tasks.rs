//! Copies, moves, drains and clearing: created, carried out, failed, interrupted.

use super::*;

/// Returns a pool with segments of A and B. B also has a segment named `host-b:1`.
pub(super) fn two() -> Pool {
    let mut pool = Pool::new(4);
    pool.mount(B, 2, 4).unwrap();
    pool
}

pub(super) fn on(name: &str) -> PutOptions {
    PutOptions { preferred_segments: vec![name.to_owned()], ..PutOptions::default() }
}

impl Pool {
    pub(super) fn copy(&mut self, key: &str, targets: &[&str]) -> Result<TaskId> {
        let targets: Vec<String> = targets.iter().map(|&name| name.to_owned()).collect();
        let new = NewTask::Copy { key: key.as_bytes(), targets: &targets };
        self.state.tasks().create_task(self.now, &self.tenant, new)
    }

    pub(super) fn shift(&mut self, key: &str, source: &str, target: &str) -> Result<TaskId> {
        let new = NewTask::Move { key: key.as_bytes(), source, target };
        self.state.tasks().create_task(self.now, &self.tenant, new)
    }

    pub(super) fn fetch(&mut self, client: ClientId) -> Vec<Work> {
        self.state.tasks().fetch_tasks(self.now, client, 100, u64::MAX).unwrap()
    }

    pub(super) fn done(&mut self, client: ClientId, work: &Work) -> Result<()> {
        self.report(client, work, &[])
    }

    pub(super) fn report(
        &mut self,
        client: ClientId,
        work: &Work,
        failed: &[ReplicaId],
    ) -> Result<()> {
        let end = TaskEnd {
            id: work.id,
            attempt: work.attempt,
            failed_replicas: failed,
            why: if failed.is_empty() { "" } else { "the peer is gone" },
        };
        self.state.tasks().end_task(self.now, client, end)
    }

    pub(super) fn status(&self, id: TaskId) -> (TaskStatus, String) {
        let view = self.state.task(id).unwrap();
        (view.status, view.message)
    }

    /// Returns the names of the segments that hold a replica.
    pub(super) fn holders(&mut self, key: &str) -> Vec<String> {
        let Ok(found) = self.locate(key, false, false) else { return Vec::new() };
        let name = |place: &Place| self.state.segment(place.segment).spec.name.clone();
        let mut names: Vec<String> = found.places.iter().map(name).collect();
        names.sort();
        names
    }

    /// Lets clients carry out tasks until none are left, at most for that long.
    pub(super) fn work_off(&mut self, seconds: u64) {
        for _ in 0..seconds * 10 {
            for client in [A, B] {
                for work in self.fetch(client) {
                    self.done(client, &work).unwrap();
                }
            }
            self.now = self.now + Duration::from_millis(100);
            self.state.heartbeat(self.now, A);
            self.state.heartbeat(self.now, B);
            self.advance_all();
        }
    }
}

#[test]
fn reported_copy_adds_replica() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let id = pool.copy("k", &["host-b:1"]).unwrap();
    assert_eq!(pool.status(id).0, TaskStatus::Pending);
    assert!(
        pool.state.tasks().has_tasks(pool.now, A) && !pool.state.tasks().has_tasks(pool.now, B)
    );
    assert!(pool.fetch(B).is_empty(), "the holder of a copy carries it out");
    let work = pool.fetch(A).remove(0);
    assert_eq!((work.length, work.targets.len(), work.checksum), (MIB, 1, Some(7)));
    assert_eq!(pool.status(id).0, TaskStatus::Processing);
    assert_eq!(pool.holders("k"), ["host-a:1"], "an unwritten replica is not readable");
    fails(pool.done(B, &work), ErrorCode::ILLEGAL_CLIENT);
    pool.done(A, &work).unwrap();
    assert_eq!(pool.holders("k"), ["host-a:1", "host-b:1"]);
    assert_eq!(pool.status(id), (TaskStatus::Success, "Task completed successfully".to_owned()));
    fails(pool.done(A, &work), ErrorCode::TASK_NOT_FOUND);
    pool.state.unregister(pool.now, A);
    assert_eq!(pool.holders("k"), ["host-b:1"], "the loss of the first loses nothing");
}

#[test]
fn move_leaves_one_replica_and_quarantines_source() {
    let mut pool = two();
    pool.put_with("k", 4 * MIB, false, &on("host-a:1")).unwrap();
    pool.wait(30);
    pool.locate("k", false, true).unwrap();
    let id = pool.shift("k", "host-a:1", "host-b:1").unwrap();
    let work = pool.fetch(A).remove(0);
    pool.done(A, &work).unwrap();
    pool.state.heartbeat(pool.now + Duration::from_millis(1), B);
    pool.now = pool.now + Duration::from_millis(255);
    pool.advance_all();
    assert_eq!(
        (pool.holders("k"), pool.status(id).0),
        (vec!["host-b:1".into()], TaskStatus::Success)
    );
    assert_eq!(pool.state.totals().fenced, 4 * MIB);
    fails(
        pool.put_with("new", 4 * MIB, false, &on("host-a:1"))
            .map(|started| {
                let segment = pool.state.segment(started.places[0].segment);
                assert_ne!(segment.spec.name, "host-a:1", "a reader may still be at it");
            })
            .and_then(|()| pool.put_with("more", 4 * MIB, false, &on("host-a:1"))),
        ErrorCode::NO_AVAILABLE_HANDLE,
    );
    pool.wait(1);
    pool.put_with("more", 4 * MIB, false, &on("host-a:1")).unwrap();
}

#[test]
fn refuses_invalid_tasks_with_code() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    pool.start(A, "half", MIB).unwrap();
    fails(pool.copy("none", &["host-b:1"]), ErrorCode::OBJECT_NOT_FOUND);
    fails(pool.copy("half", &["host-b:1"]), ErrorCode::REPLICA_IS_NOT_READY);
    fails(pool.copy("k", &[]), ErrorCode::INVALID_PARAMS);
    fails(pool.copy("k", &["host-b:1", "nowhere"]), ErrorCode::SEGMENT_NOT_FOUND);
    fails(pool.shift("k", "host-a:1", "host-a:1"), ErrorCode::INVALID_PARAMS);
    fails(pool.shift("k", "host-b:1", "host-a:1"), ErrorCode::INVALID_PARAMS);
    fails(pool.shift("k", "host-a:1", "nowhere"), ErrorCode::SEGMENT_NOT_FOUND);
    fails(pool.shift("none", "host-a:1", "host-b:1"), ErrorCode::OBJECT_NOT_FOUND);
    fails(pool.state.task(TaskId::from_bits(1)), ErrorCode::TASK_NOT_FOUND);
    fails(
        pool.state.tasks().fetch_tasks(pool.now, ClientId::from_bits(9), 1, 1),
        ErrorCode::CLIENT_NOT_FOUND,
    );
}

#[test]
fn skips_target_that_has_replica() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let id = pool.copy("k", &["host-a:1"]).unwrap();
    assert!(pool.fetch(A).is_empty());
    assert_eq!(pool.status(id).0, TaskStatus::Success);
    assert_eq!(pool.holders("k"), ["host-a:1"]);
}

#[test]
fn copied_object_is_not_evicted_or_removed() {
    let mut pool = two();
    pool.put_with("k", 2 * MIB, false, &on("host-a:1")).unwrap();
    let id = pool.copy("k", &["host-b:1"]).unwrap();
    let work = pool.fetch(A).remove(0);
    fails(pool.remove("k", false), ErrorCode::OBJECT_HAS_REPLICATION_TASK);
    assert!(!pool.state.clear_copies(pool.now, &pool.tenant, b"k", ""));
    for index in 0..8 {
        pool.put(&format!("other{index}"), MIB).unwrap();
    }
    assert!(pool.exists("k"));
    pool.remove("k", true).unwrap();
    let fenced = pool.state.totals().fenced;
    assert_eq!(fenced, 2 * MIB, "the client may still read what it copies");
    pool.done(A, &work).unwrap();
    let (status, why) = pool.status(id);
    assert_eq!(status, TaskStatus::Failed);
    assert!(why.contains("removed"), "{why}");
    pool.wait(30);
    let totals = pool.state.totals();
    assert_eq!((totals.fenced, totals.writing), (0, 0));
}

#[test]
fn task_fails_when_object_was_replaced() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let id = pool.copy("k", &["host-b:1"]).unwrap();
    let later = pool.copy("k", &["host-b:1"]).unwrap();
    let work = pool.fetch(A);
    assert_eq!(work.len(), 1, "one at a time");
    let new = pool.put_with("k", MIB / 2, true, &on("host-a:1")).unwrap();
    pool.done(A, &work[0]).unwrap();
    assert!(pool.fetch(A).is_empty());
    for task in [id, later] {
        let (status, why) = pool.status(task);
        assert_eq!(status, TaskStatus::Failed);
        assert!(why.contains("replaced"), "{why}");
    }
    let found = pool.locate("k", false, false).unwrap();
    assert_eq!((found.version, found.places.len()), (new.version, 1));
}

#[test]
fn failed_task_is_retried_up_to_limit() {
    let rules =
        Rules { tasks: TaskRules { retries_max: 2, ..TaskRules::default() }, ..Rules::default() };
    let mut pool = Pool::with(rules, 4);
    pool.mount(B, 2, 4).unwrap();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let id = pool.copy("k", &["host-b:1"]).unwrap();
    for tries in 1..=3 {
        let work = pool.fetch(A).remove(0);
        let failed: Vec<ReplicaId> = work.targets.iter().map(|place| place.replica).collect();
        pool.report(A, &work, &failed).unwrap();
        if tries < 3 {
            assert_eq!(pool.status(id), (TaskStatus::Pending, "the peer is gone".to_owned()));
            assert!(!pool.state.tasks().has_tasks(pool.now, A), "not at once");
            pool.wait(2);
        }
    }
    let (status, why) = pool.status(id);
    assert_eq!(status, TaskStatus::Failed);
    assert!(why.contains("3 attempts") && why.contains("the peer is gone"), "{why}");
    assert!(pool.state.totals().fenced > 0, "a late byte may still arrive");
    pool.wait(35);
    assert_eq!(pool.state.totals().fenced, 0);
}

#[test]
fn pause_before_retry_doubles_from_250_ms_to_5_s() {
    let tasks =
        TaskRules { retries_max: 9, processing_timeout: Duration::ZERO, ..TaskRules::default() };
    let mut pool = Pool::with(Rules { tasks, ..Rules::default() }, 4);
    pool.mount(B, 2, 4).unwrap();
    pool.put_with("k", 1000, false, &on("host-a:1")).unwrap();
    pool.copy("k", &["host-b:1"]).unwrap();
    for pause_ms in [250, 500, 1000, 2000, 4000, 5000, 5000] {
        let work = pool.fetch(A).remove(0);
        let failed: Vec<ReplicaId> = work.targets.iter().map(|place| place.replica).collect();
        pool.report(A, &work, &failed).unwrap();
        pool.now = pool.now + Duration::from_millis(pause_ms - 1);
        assert!(!pool.state.tasks().has_tasks(pool.now, A), "before {pause_ms} ms");
        pool.now = pool.now + Duration::from_millis(1);
        assert!(pool.state.tasks().has_tasks(pool.now, A), "after {pause_ms} ms");
    }
}

#[test]
fn silent_client_loses_task_to_other_holder() {
    let mut pool = two();
    let both = PutOptions { replicas: 2, ..PutOptions::default() };
    pool.state.register(pool.now, ClientId::from_bits(3), "host-c:1").unwrap();
    let third = SegmentSpec { name: "host-c:1".into(), ..spec(B, 3, 1, 4) };
    pool.put_with("k", MIB, false, &both).unwrap();
    pool.state.mount(pool.now, ClientId::from_bits(3), third).unwrap();
    let id = pool.copy("k", &["host-c:1"]).unwrap();
    let first = if pool.state.tasks().has_tasks(pool.now, A) { A } else { B };
    let second = if first == A { B } else { A };
    let work = pool.fetch(first).remove(0);
    let begun = pool.now;
    while pool.status(id).0 == TaskStatus::Processing {
        pool.wait(1);
        pool.state.heartbeat(pool.now, ClientId::from_bits(3));
    }
    assert!(pool.now.since(begun) >= pool.state.rules().write_window);
    fails(pool.done(first, &work), ErrorCode::TASK_NOT_FOUND);
    pool.wait(2);
    let again = pool.fetch(second).remove(0);
    assert_ne!(again.attempt, work.attempt);
    pool.done(second, &again).unwrap();
    assert_eq!(pool.status(id).0, TaskStatus::Success);
    assert_eq!(pool.holders("k").len(), 3);
}

#[test]
fn expired_client_tasks_are_reassigned_or_fail() {
    let mut pool = two();
    let both = PutOptions { replicas: 2, ..PutOptions::default() };
    pool.put_with("both", MIB, false, &both).unwrap();
    pool.put_with("alone", MIB, false, &on("host-a:1")).unwrap();
    pool.state.register(pool.now, ClientId::from_bits(3), "host-c:1").unwrap();
    let third = SegmentSpec { name: "host-c:1".into(), ..spec(B, 3, 1, 4) };
    pool.state.mount(pool.now, ClientId::from_bits(3), third).unwrap();
    let tasks = ["both", "both", "alone"].map(|key| pool.copy(key, &["host-c:1"]).unwrap());
    pool.fetch(A);
    pool.state.unregister(pool.now, A);
    pool.wait(1);
    assert_eq!(pool.status(tasks[2]).0, TaskStatus::Failed);
    for work in pool.fetch(B) {
        pool.done(B, &work).unwrap();
    }
    pool.fetch(B);
    assert_eq!(pool.status(tasks[0]).0, TaskStatus::Success);
    assert_eq!(pool.holders("both"), ["host-b:1", "host-c:1"]);
    assert_eq!(pool.state.totals().writing, 0);
}

#[test]
fn full_target_evicts_and_pinned_target_is_retried() {
    let mut pool = two();
    pool.put_with("k", 2 * MIB, false, &on("host-a:1")).unwrap();
    for index in 0..4 {
        pool.put_with(&format!("old{index}"), MIB, false, &on("host-b:1")).unwrap();
    }
    let id = pool.copy("k", &["host-b:1"]).unwrap();
    let work = pool.fetch(A).remove(0);
    pool.done(A, &work).unwrap();
    assert_eq!(pool.status(id).0, TaskStatus::Success);
    let pinned = PutOptions { is_hard_pinned: true, ..on("host-b:1") };
    pool.state.clear_copies(pool.now, &pool.tenant, b"k", "host-b:1");
    for index in 0..4 {
        // The objects left after the copy evicted some.
        let _ = pool.remove(&format!("old{index}"), true);
    }
    pool.put_with("pin", 3 * MIB, false, &pinned).unwrap();
    let id = pool.copy("k", &["host-b:1"]).unwrap();
    assert!(pool.fetch(A).is_empty());
    let (status, why) = pool.status(id);
    assert_eq!(status, TaskStatus::Pending);
    assert!(why.contains("hard_pinned"), "{why}");
    pool.remove("pin", true).unwrap();
    pool.wait(1);
    let work = pool.fetch(A).remove(0);
    pool.done(A, &work).unwrap();
    assert_eq!(pool.status(id).0, TaskStatus::Success);
}

#[test]
fn task_limits_hold() {
    let rules = Rules {
        tasks: TaskRules {
            pending_max: 2,
            processing_max: 1,
            finished_max: 1,
            pending_timeout: Duration::from_secs(60),
            ..TaskRules::default()
        },
        ..Rules::default()
    };
    let mut pool = Pool::with(rules, 4);
    pool.mount(B, 2, 4).unwrap();
    let keys = ["a", "b", "c"];
    for key in keys {
        pool.put_with(key, MIB, false, &on("host-a:1")).unwrap();
    }
    let a = pool.copy("a", &["host-b:1"]).unwrap();
    let b = pool.copy("b", &["host-b:1"]).unwrap();
    fails(pool.copy("c", &["host-b:1"]), ErrorCode::TASK_PENDING_LIMIT_EXCEEDED);
    let work = pool.fetch(A);
    assert_eq!((work.len(), pool.state.tasks().tasks_underway()), (1, (1, 1)));
    assert!(pool.fetch(A).is_empty(), "one runs already");
    pool.done(A, &work[0]).unwrap();
    let c = pool.copy("c", &["host-b:1"]).unwrap();
    pool.wait(60);
    assert!(pool.state.task(a).is_err() && pool.state.task(b).is_err(), "the oldest is forgotten");
    let (status, why) = pool.status(c);
    assert_eq!(status, TaskStatus::Failed);
    assert!(why.contains("fetched"), "{why}");
}

#[test]
fn replica_ordinal_is_not_reused() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..4 {
        pool.copy("k", &["host-b:1"]).unwrap();
        let work = pool.fetch(A).remove(0);
        pool.done(A, &work).unwrap();
        let found = pool.locate("k", false, false).unwrap();
        seen.extend(found.places.iter().map(|place| place.replica));
        assert!(pool.state.clear_copies(pool.now, &pool.tenant, b"k", "host-b:1"));
        let gone = work.targets[0].replica;
        assert!(!pool.state.verify(&pool.tenant, b"k", found.version, gone));
    }
    assert_eq!(seen.len(), 5);
}

#[test]
fn clears_replicas_unless_leased() {
    let mut pool = two();
    let both = PutOptions { replicas: 2, ..PutOptions::default() };
    pool.put_with("k", MIB, false, &both).unwrap();
    let clear = |pool: &mut Pool, key: &str, segment: &str| {
        pool.state.clear_copies(pool.now, &pool.tenant, key.as_bytes(), segment)
    };
    pool.locate("k", true, false).unwrap();
    assert!(!clear(&mut pool, "k", ""), "leased");
    pool.wait(11);
    assert!(!clear(&mut pool, "k", "nowhere") && !clear(&mut pool, "none", ""));
    assert!(clear(&mut pool, "k", "host-a:1"));
    assert!(!clear(&mut pool, "k", "host-a:1"), "there is none there any more");
    assert_eq!(pool.holders("k"), ["host-b:1"]);
    assert!(clear(&mut pool, "k", "host-b:1"));
    assert!(!pool.exists("k"), "with the last copy it is gone");
    pool.put_with("k", MIB, false, &both).unwrap();
    assert!(clear(&mut pool, "k", ""));
    assert_eq!((pool.exists("k"), pool.state.totals().used), (false, 0));
}

pub(super) fn drain(pool: &mut Pool, segments: &[&str], targets: &[&str]) -> Result<JobId> {
    drain_with(pool, segments, targets, false)
}

pub(super) fn drain_with(
    pool: &mut Pool,
    segments: &[&str],
    targets: &[&str],
    may_evict: bool,
) -> Result<JobId> {
    let names = |names: &[&str]| -> Vec<String> { names.iter().map(|&n| n.to_owned()).collect() };
    let (segments, targets) = (names(segments), names(targets));
    let new = NewJob { segments: &segments, targets: &targets, concurrency: 2, may_evict };
    pool.state.tasks().create_job(pool.now, new)
}

pub(super) fn segment_status(pool: &Pool, name: &str) -> SegmentStatus {
    let all = pool.state.list_segments();
    all.iter().find(|view| view.spec.name == name).unwrap().status
}

#[test]
fn drain_empties_segment_without_losing_objects() {
    let mut pool = two();
    for index in 0..20 {
        pool.put_with(&format!("k{index}"), 100_000, false, &on("host-a:1")).unwrap();
    }
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    assert_eq!(pool.state.job(job).unwrap().status, JobStatus::Created);
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Draining);
    let other = drain(&mut pool, &["host-a:1"], &[]).unwrap_err();
    assert_eq!(other.code(), ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
    assert!(other.to_string().contains(&format!("segment=host-a:1 job={job}")), "{other}");
    pool.advance_all();
    assert_eq!(pool.state.tasks().tasks_underway().0, 2, "no more at once than may be");
    let written = pool.put_with("new", 1000, false, &on("host-a:1")).unwrap();
    let name = &pool.state.segment(written.places[0].segment).spec.name;
    assert_eq!(name, "host-b:1", "it takes nothing new");
    pool.work_off(5);
    let view = pool.state.job(job).unwrap();
    assert_eq!(
        (view.status, view.succeeded, view.failed, view.active),
        (JobStatus::Succeeded, 20, 0, 0)
    );
    assert_eq!(view.moved_bytes, 2_000_000);
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Drained);
    assert!(pool.state.list_segments().iter().any(|v| v.spec.name == "host-a:1" && v.used == 0));
    for index in 0..20 {
        assert_eq!(pool.holders(&format!("k{index}")), ["host-b:1"]);
    }
}

#[test]
fn drain_moves_object_written_meanwhile() {
    let mut pool = two();
    let started = pool.start_with(A, "late", MIB, false, &on("host-a:1")).unwrap();
    let job = drain(&mut pool, &["host-a:1"], &["host-b:1"]).unwrap();
    pool.work_off(2);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.blocked), (JobStatus::Running, 1));
    pool.end(A, "late", &started).unwrap();
    pool.work_off(3);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.blocked, view.succeeded), (JobStatus::Succeeded, 0, 1));
    assert_eq!(pool.holders("late"), ["host-b:1"]);
}

#[test]
fn drain_without_space_fails_and_reopens_segment() {
    let mut pool = two();
    let pinned = PutOptions { is_hard_pinned: true, ..on("host-b:1") };
    pool.put_with("pin", 3 * MIB, false, &pinned).unwrap();
    pool.put_with("large", 2 * MIB, false, &on("host-a:1")).unwrap();
    pool.put_with("small", 1000, false, &on("host-a:1")).unwrap();
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.work_off(20);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.succeeded, view.failed), (JobStatus::Failed, 1, 1));
    let why = "needed_bytes=2097152 free_bytes=1047576";
    assert!(view.message.starts_with("1 object could not be moved; "), "{view:?}");
    assert!(view.message.contains("allow the drain to evict"), "{view:?}");
    assert!(view.message.ends_with(why), "{view:?}");
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Ok);
    assert!(pool.exists("large"));
    let job = drain_with(&mut pool, &["host-a:1"], &[], true).unwrap();
    pool.work_off(20);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.evicted), (JobStatus::Failed, 0));
    assert!(view.message.contains("hard_pinned"), "{view:?}");
}

/// Returns two segments of 4 MiB: A holds three objects of 1 MiB, B two.
fn pool_with_room_for_two(rules: Rules) -> Pool {
    let mut pool = Pool::with(rules, 4);
    pool.mount(B, 2, 4).unwrap();
    for (key, host) in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")] {
        pool.put_with(key, MIB, false, &on(&format!("host-{host}:1"))).unwrap();
    }
    pool.wait(30);
    pool
}

#[test]
fn drain_moves_what_fits_and_evicts_nothing() {
    let mut pool = pool_with_room_for_two(Rules::default());
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.work_off(20);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.succeeded, view.failed), (JobStatus::Failed, 2, 1));
    assert!(view.message.contains("needed_bytes=1048576 free_bytes=0"), "{view:?}");
    for key in ["a1", "a2", "a3", "b1", "b2"] {
        assert!(pool.exists(key), "{key} was evicted");
    }
    assert_eq!((view.evicted, pool.state.totals().counters.evicted_keys), (0, 0));
}

#[test]
fn drain_leaves_room_up_to_watermark() {
    let watermark = Some(Watermark { high: 0.9, ratio: 0.05 });
    let mut pool = pool_with_room_for_two(Rules { watermark, ..Rules::default() });
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.work_off(20);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.succeeded, view.failed), (JobStatus::Failed, 1, 2));
    let free = "free_bytes=629145";
    assert!(view.message.contains(free), "3 of 3.6 MiB are used: {view:?}");
    assert_eq!(pool.state.totals().counters.evicted_keys, 0);
}

#[test]
fn drain_that_may_evict_reports_evictions() {
    let mut pool = pool_with_room_for_two(Rules::default());
    let job = drain_with(&mut pool, &["host-a:1"], &[], true).unwrap();
    pool.work_off(20);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.succeeded), (JobStatus::Succeeded, 3));
    assert_eq!((view.evicted, view.evicted_bytes), (1, MIB));
    let there = ["a1", "a2", "a3", "b1", "b2"].into_iter().filter(|key| pool.exists(key));
    assert_eq!(there.count(), 4);
}

#[test]
fn drained_segment_stays_drained_when_later_job_fails() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.work_off(3);
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Drained);
    let job = drain(&mut pool, &["host-a:1", "host-b:1"], &[]).unwrap();
    pool.work_off(1);
    let view = pool.state.job(job).unwrap();
    assert_eq!(
        (view.status, &view.message[..]),
        (JobStatus::Failed, "no other segment accepts objects")
    );
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Drained);
    assert_eq!(segment_status(&pool, "host-b:1"), SegmentStatus::Ok);
    let job = drain(&mut pool, &["host-a:1", "host-b:1"], &[]).unwrap();
    pool.state.tasks().cancel_job(pool.now, job).unwrap();
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Drained, "nor by a cancelled one");
}

#[test]
fn drain_without_destination_fails_at_once() {
    let mut pool = Pool::new(4);
    for index in 0..3 {
        pool.put(&format!("k{index}"), 1000).unwrap();
    }
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    let refused = pool.put("new", 1000).unwrap_err();
    assert!(refused.to_string().contains("all are being drained"), "{refused}");
    pool.advance_all();
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.failed), (JobStatus::Failed, 0));
    assert_eq!(view.message, "no other segment accepts objects");
    pool.put("new", 1000).unwrap();
    pool.mount(B, 2, 4).unwrap();
    pool.state.suspect(pool.now, B);
    let job = drain(&mut pool, &["host-a:1"], &["host-b:1"]).unwrap();
    pool.advance_all();
    assert_eq!(pool.state.job(job).unwrap().status, JobStatus::Failed, "the target is lost");
}

#[test]
fn drained_segment_can_be_drained_again() {
    let mut pool = two();
    for _ in 0..2 {
        let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
        pool.advance_all();
        assert_eq!(pool.state.job(job).unwrap().status, JobStatus::Succeeded);
        assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Drained);
    }
}

#[test]
fn cancelled_drain_reopens_segment() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.advance_all();
    let work = pool.fetch(A).remove(0);
    pool.state.tasks().cancel_job(pool.now, job).unwrap();
    pool.state.tasks().cancel_job(pool.now, job).unwrap();
    assert_eq!(pool.state.job(job).unwrap().status, JobStatus::Canceled);
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Ok);
    pool.done(A, &work).unwrap();
    pool.wait(1);
    assert_eq!(pool.holders("k"), ["host-b:1"], "what was being moved is moved");
    fails(pool.state.tasks().cancel_job(pool.now, JobId::from_bits(3)), ErrorCode::JOB_NOT_FOUND);
    fails(pool.state.job(JobId::from_bits(3)), ErrorCode::JOB_NOT_FOUND);
}

#[test]
fn refuses_invalid_drain_jobs() {
    let mut pool = two();
    fails(drain(&mut pool, &[], &[]), ErrorCode::INVALID_PARAMS);
    fails(drain(&mut pool, &["nowhere"], &[]), ErrorCode::SEGMENT_NOT_FOUND);
    fails(drain(&mut pool, &["host-a:1"], &["nowhere"]), ErrorCode::SEGMENT_NOT_FOUND);
    fails(drain(&mut pool, &["host-a:1"], &["host-a:1"]), ErrorCode::INVALID_PARAMS);
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Ok);
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.advance_all();
    let view = pool.state.job(job).unwrap();
    assert!((view.created, view.succeeded) == (pool.now, 0) && view.segments == ["host-a:1"]);
    assert_eq!(pool.state.job(job).unwrap().status, JobStatus::Succeeded, "nothing lay in it");
    fails(pool.state.tasks().cancel_job(pool.now, job), ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
}

#[test]
fn drain_drops_redundant_replica_without_target() {
    let mut pool = two();
    let both = PutOptions { replicas: 2, ..PutOptions::default() };
    pool.put_with("k", MIB, false, &both).unwrap();
    let job = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.work_off(2);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.succeeded, view.moved_bytes), (JobStatus::Succeeded, 1, 0));
    assert_eq!(pool.holders("k"), ["host-b:1"]);
}

#[test]
fn object_lost_during_copy_stays_lost() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let id = pool.copy("k", &["host-b:1"]).unwrap();
    let work = pool.fetch(A).remove(0);
    pool.state.unmount(pool.now, A, SegmentId::from_bits(1), Duration::ZERO).unwrap();
    pool.done(A, &work).unwrap();
    let (status, why) = pool.status(id);
    assert_eq!((status, why.contains("lost")), (TaskStatus::Failed, true), "{why}");
    assert!(!pool.exists("k"));
    pool.wait(30);
    assert_eq!(pool.state.totals().used, 0);
}
