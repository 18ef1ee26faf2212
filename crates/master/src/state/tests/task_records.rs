//! Tasks and drain jobs across restarts of the master: they resume, or fail with a reason.

use super::*;
use crate::state::tests::{
    recovery,
    recovery::{Log, restarted},
    tasks::{drain, drain_with, on, segment_status, two},
};

/// Returns a pool after a restart, in which A and B have announced their segments.
fn back(pool: &mut Pool) -> Pool {
    let mut pool = restarted(pool);
    announce(&mut pool);
    pool
}

/// A and B announce the segments of before the restart.
fn announce(pool: &mut Pool) {
    for (client, id, name) in [(A, 1, "host-a:1"), (B, 2, "host-b:1")] {
        pool.state.register(pool.now, client, name).unwrap();
        pool.state.resume(client, &spec(client, id, 1, 4)).unwrap();
    }
    // Memory is quarantined until readers of before the restart are done.
    pool.wait(1);
}

#[test]
fn pending_task_resumes_when_clients_return() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let copied = pool.copy("k", &["host-b:1"]).unwrap();
    let made = pool.state.task(copied).unwrap();
    pool.wait(3);
    let mut pool = restarted(&mut pool);
    let view = pool.state.task(copied).unwrap();
    assert_eq!((view.kind, view.created, view.client), (made.kind, made.created, A));
    for _ in 0..100 {
        assert!(pool.fetch(A).is_empty(), "neither the copy nor the target is back");
        pool.now = pool.now + Duration::from_millis(100);
    }
    pool.state.resume(A, &spec(A, 1, 1, 4)).unwrap();
    pool.wait(3);
    assert!(pool.fetch(A).is_empty(), "the target is not back");
    pool.state.resume(B, &spec(B, 2, 1, 4)).unwrap();
    pool.work_off(2);
    assert_eq!(pool.status(copied).0, TaskStatus::Success, "waiting costs no retries");
    assert_eq!(pool.holders("k"), ["host-a:1", "host-b:1"]);
}

#[test]
fn attempt_dies_with_master_and_is_retried() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let id = pool.shift("k", "host-a:1", "host-b:1").unwrap();
    let first = pool.fetch(A).remove(0);
    let mut pool = back(&mut pool);
    fails(pool.done(A, &first), ErrorCode::TASK_NOT_FOUND);
    let second = pool.fetch(A).remove(0);
    assert_ne!(second.attempt, first.attempt);
    let places = [&first, &second].map(|work| work.targets[0].offset);
    assert_ne!(places[0], places[1], "the first may still be written");
    pool.done(A, &second).unwrap();
    fails(pool.done(A, &first), ErrorCode::TASK_NOT_FOUND);
    pool.wait(1);
    assert_eq!(
        (pool.status(id).0, pool.holders("k")),
        (TaskStatus::Success, vec!["host-b:1".to_owned()])
    );
    pool.wait(30);
    let totals = pool.state.totals();
    assert_eq!((totals.used, totals.fenced, totals.writing), (MIB, 0, 0));
}

#[test]
fn replica_ordinals_are_not_reused_after_restart() {
    let mut pool = two();
    let mut log = Log::begin(&mut pool);
    for key in ["x", "y", "z"] {
        pool.put_with(key, MIB / 2, false, &on("host-a:1")).unwrap();
    }
    for key in ["x", "y"] {
        pool.copy(key, &["host-b:1"]).unwrap();
    }
    let number = |work: &Work| work.targets[0].replica.0 as u32;
    let mut works = pool.fetch(A);
    works.sort_by_key(number);
    // The last task finishes first.
    works.iter().rev().for_each(|work| pool.done(A, work).unwrap());
    log.check(&mut pool);
    pool.state = log.restart(pool.now, &Rules::default());
    announce(&mut pool);
    pool.copy("z", &["host-b:1"]).unwrap();
    let next = pool.fetch(A).remove(0);
    assert!(works.iter().all(|work| number(work) < number(&next)), "{works:?} {next:?}");
}

#[test]
fn task_fails_when_object_does_not_return() {
    // Pending tasks have no timeout of their own here.
    let tasks = TaskRules { pending_timeout: Duration::ZERO, ..TaskRules::default() };
    let mut pool = Pool::with(Rules { tasks, ..Rules::default() }, 4);
    pool.mount(B, 2, 4).unwrap();
    pool.put_with("lost", MIB, false, &on("host-a:1")).unwrap();
    pool.put_with("removed", MIB, false, &on("host-b:1")).unwrap();
    let lost = pool.copy("lost", &["host-b:1"]).unwrap();
    let removed = pool.copy("removed", &["host-a:1"]).unwrap();
    pool.remove("removed", false).unwrap();
    let mut pool = restarted(&mut pool);
    assert_eq!(pool.status(removed).0, TaskStatus::Failed, "there is no such object");
    // A does not come back.
    pool.state.unregister(pool.now, A);
    let mut pool = restarted(&mut pool);
    pool.state.unregister(pool.now, A);
    pool.wait(31);
    for id in [lost, removed] {
        let (status, why) = pool.status(id);
        assert_eq!(status, TaskStatus::Failed);
        assert!(why.contains("lost"), "{why}");
    }
}

#[test]
fn task_of_missing_client_ends_with_recovery() {
    let tasks = TaskRules { pending_timeout: Duration::ZERO, ..TaskRules::default() };
    let mut pool = Pool::with(Rules { tasks, ..Rules::default() }, 4);
    pool.mount(B, 2, 4).unwrap();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let id = pool.copy("k", &["host-b:1"]).unwrap();
    let image = recovery::described(&pool);
    let rules = pool.state.rules().clone();
    (pool.state, _) = State::restore(rules, 9, pool.now, image, Duration::ZERO);
    pool.state.register(pool.now, B, "host-b:1").unwrap();
    pool.state.resume(B, &spec(B, 2, 1, 4)).unwrap();
    for _ in 0..31 {
        assert!(pool.fetch(B).is_empty());
        pool.wait(1);
    }
    let (status, why) = pool.status(id);
    assert_eq!((status, why.contains("lost")), (TaskStatus::Failed, true), "{why}");
}

#[test]
fn finished_tasks_and_retry_counts_survive_restart() {
    let tasks = TaskRules { retries_max: 1, finished_max: 2, ..TaskRules::default() };
    let mut pool = Pool::with(Rules { tasks, ..Rules::default() }, 4);
    pool.mount(B, 2, 4).unwrap();
    for key in ["good", "bad"] {
        pool.put_with(key, 1000, false, &on("host-a:1")).unwrap();
    }
    let good = pool.copy("good", &["host-b:1"]).unwrap();
    pool.work_off(1);
    let bad = pool.copy("bad", &["host-b:1"]).unwrap();
    let work = pool.fetch(A).remove(0);
    let failed: Vec<ReplicaId> = work.targets.iter().map(|place| place.replica).collect();
    pool.report(A, &work, &failed).unwrap();
    let before = pool.state.task(good).unwrap();
    let mut pool = back(&mut pool);
    let after = pool.state.task(good).unwrap();
    assert_eq!((after.status, &after.message), (before.status, &before.message));
    assert!(after.updated.since(before.updated) < Duration::from_millis(1));
    pool.wait(1);
    let work = pool.fetch(A).remove(0);
    let failed: Vec<ReplicaId> = work.targets.iter().map(|place| place.replica).collect();
    pool.report(A, &work, &failed).unwrap();
    let (status, why) = pool.status(bad);
    assert_eq!(status, TaskStatus::Failed);
    assert!(why.contains("2 attempts"), "the attempt before the restart counts: {why}");
    let mut pool = back(&mut pool);
    assert_eq!(pool.status(bad), (TaskStatus::Failed, why));
    pool.copy("good", &["host-b:1"]).unwrap();
    pool.work_off(1);
    assert!(pool.state.task(good).is_err() && pool.state.task(bad).is_ok(), "the oldest goes");
    let pool = back(&mut pool);
    assert!(pool.state.task(good).is_err() && pool.state.task(bad).is_ok());
}

#[test]
fn drain_resumes_and_segment_stays_drained() {
    let mut pool = two();
    for index in 0..20 {
        pool.put_with(&format!("k{index}"), 100_000, false, &on("host-a:1")).unwrap();
    }
    let job = drain(&mut pool, &["host-a:1"], &["host-b:1"]).unwrap();
    pool.advance_all();
    for work in pool.fetch(A) {
        pool.done(A, &work).unwrap();
    }
    assert_eq!(pool.fetch(A).len(), 2, "two moves are running");
    pool.wait(1);
    let before = pool.state.job(job).unwrap();
    assert_eq!((before.succeeded, before.moved_bytes), (2, 200_000));
    let mut pool = restarted(&mut pool);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.succeeded), (JobStatus::Running, 2));
    assert_eq!((view.segments, view.moved_bytes), (before.segments, 200_000));
    pool.work_off(5);
    assert_eq!(pool.state.job(job).unwrap().status, JobStatus::Running, "it waits for the owner");
    pool.state.resume(A, &spec(A, 1, 1, 4)).unwrap();
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Draining);
    pool.work_off(3);
    assert_eq!(pool.state.job(job).unwrap().failed, 0, "and for the target");
    pool.state.resume(B, &spec(B, 2, 1, 4)).unwrap();
    pool.work_off(10);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.succeeded, view.failed), (JobStatus::Succeeded, 20, 0));
    for index in 0..20 {
        assert_eq!(pool.holders(&format!("k{index}")), ["host-b:1"]);
    }
    let mut pool = back(&mut pool);
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Drained);
    let again = pool.state.job(job).unwrap();
    assert_eq!((again.status, again.succeeded), (JobStatus::Succeeded, 20));
    let started = pool.put_with("new", 1000, false, &on("host-a:1")).unwrap();
    let name = &pool.state.segment(started.places[0].segment).spec.name;
    assert_eq!(name, "host-b:1", "it still takes nothing new");
}

#[test]
fn permission_to_evict_survives_restart() {
    let mut pool = two();
    for index in 0..3 {
        pool.put_with(&format!("a{index}"), MIB, false, &on("host-a:1")).unwrap();
        pool.put_with(&format!("b{index}"), MIB, false, &on("host-b:1")).unwrap();
    }
    pool.wait(30);
    let job = drain_with(&mut pool, &["host-a:1"], &[], true).unwrap();
    let mut pool = back(&mut pool);
    pool.work_off(10);
    let view = pool.state.job(job).unwrap();
    assert_eq!((view.status, view.evicted, view.evicted_bytes), (JobStatus::Succeeded, 2, 2 * MIB));
    let pool = back(&mut pool);
    assert_eq!(pool.state.job(job).unwrap().evicted_bytes, 2 * MIB);
}

#[test]
fn drain_of_missing_segment_fails() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let cancelled = drain(&mut pool, &["host-a:1"], &[]).unwrap();
    pool.advance_all();
    pool.state.tasks().cancel_job(pool.now, cancelled).unwrap();
    let job = drain(&mut pool, &["host-b:1"], &[]).unwrap();
    pool.advance_all();
    let mut pool = restarted(&mut pool);
    pool.state.resume(A, &spec(A, 1, 1, 4)).unwrap();
    assert_eq!(segment_status(&pool, "host-a:1"), SegmentStatus::Ok);
    assert_eq!(pool.state.job(cancelled).unwrap().status, JobStatus::Canceled);
    // B has new memory.
    pool.mount(B, 3, 4).unwrap();
    pool.wait(31);
    let view = pool.state.job(job).unwrap();
    let is_over = matches!(view.status, JobStatus::Failed | JobStatus::Succeeded);
    assert!(is_over && !view.message.is_empty(), "{view:?}");
}

#[test]
fn copy_ordinal_is_new_after_restart() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..4 {
        pool.copy("k", &["host-b:1"]).unwrap();
        let work = pool.fetch(A).remove(0);
        pool.done(A, &work).unwrap();
        assert!(seen.insert(work.targets[0].replica), "{seen:?}");
        assert!(pool.state.clear_copies(pool.now, &pool.tenant, b"k", "host-b:1"));
        pool = back(&mut pool);
        pool.wait(11);
    }
}

#[test]
fn undecodable_record_is_skipped() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let good = pool.copy("k", &["host-b:1"]).unwrap();
    let mut image = recovery::described(&pool);
    let mut bytes = Vec::new();
    for (id, record) in [(1, &b""[..]), (2, b"\x09"), (3, b"\x01\x05\x00\xff"), (4, b"\x02\x00")] {
        Effect::Task { id, record: Some(record) }.encode(&mut bytes);
    }
    image.replay(&bytes).unwrap();
    let rules = pool.state.rules().clone();
    let (state, restored) = State::restore(rules, 9, pool.now, image, Duration::ZERO);
    assert_eq!((restored.tasks, restored.jobs, restored.conflicts), (1, 0, 4));
    assert_eq!(state.task(good).unwrap().status, TaskStatus::Pending);
}
