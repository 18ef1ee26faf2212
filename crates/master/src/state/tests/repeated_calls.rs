//! Calls whose answer was lost: the client finds its puts, tasks and jobs again, also after a restart.

use super::*;
use crate::state::tests::{
    recovery::restarted,
    tasks::{drain, on, two},
};

const CALL: u64 = 5;

impl Pool {
    fn start_numbered(&mut self, client: ClientId, key: &str, request: u64) -> Result<Started> {
        let put = Put {
            key: KeyRef::new(key.as_bytes()).unwrap(),
            length: MIB,
            group: b"",
            options: &PutOptions::default(),
            is_replacing: false,
            if_version: None,
            request,
        };
        self.state.puts().put_start(self.now, client, &self.tenant, put)
    }

    fn unfinished(&self, client: ClientId, key: &str) -> Option<UnfinishedPut> {
        self.state.unfinished_put(client, &self.tenant, key.as_bytes())
    }

    fn copy_once(&mut self, key: &str, number: u64) -> Result<TaskId> {
        let targets = ["host-b:1".to_owned()];
        let new = NewTask::Copy { key: key.as_bytes(), targets: &targets };
        let item = CallItem { client: A, number };
        self.state.tasks().create_task_once(self.now, &self.tenant, new, Some(item))
    }

    fn drain_once(&mut self, number: u64) -> Result<JobId> {
        let segments = ["host-a:1".to_owned()];
        let new = NewJob { segments: &segments, targets: &[], concurrency: 1, may_evict: false };
        let item = CallItem { client: A, number };
        self.state.tasks().create_job_once(self.now, new, Some(item))
    }
}

#[test]
fn own_unfinished_put_is_named_to_its_client_only() {
    let mut pool = Pool::new(16);
    assert_eq!(pool.unfinished(A, "k"), None);
    let started = pool.start_numbered(A, "k", CALL).unwrap();
    let own = UnfinishedPut { version: started.version, request: CALL };
    fails(pool.start_numbered(A, "k", CALL + 1), ErrorCode::OBJECT_ALREADY_EXISTS);
    assert_eq!((pool.unfinished(A, "k"), pool.unfinished(B, "k")), (Some(own), None));
    assert_eq!(pool.state.unfinished_put(A, &TenantId::new("other"), b"k"), None);
    pool.end(A, "k", &started).unwrap();
    assert_eq!(pool.unfinished(A, "k"), None, "it is readable");
    let options = PutOptions::default();
    let upsert = pool.start_with(A, "k", MIB, true, &options).unwrap();
    assert_eq!(pool.unfinished(A, "k"), None, "the earlier value is readable");
    pool.revoke(A, "k", &upsert).unwrap();
    assert!(pool.exists("k"));
}

#[test]
fn unfinished_put_is_found_after_restart() {
    let mut pool = Pool::new(16);
    let started = pool.start_numbered(A, "k", CALL).unwrap();
    let mut pool = restarted(&mut pool);
    assert_eq!(pool.start_numbered(A, "k", CALL).unwrap(), started, "a repetition");
    fails(pool.start_numbered(A, "k", CALL + 1), ErrorCode::OBJECT_ALREADY_EXISTS);
    let own = UnfinishedPut { version: started.version, request: CALL };
    assert_eq!(pool.unfinished(A, "k"), Some(own));
    pool.end(A, "k", &started).unwrap();
}

#[test]
fn end_of_published_put_succeeds_again_with_its_key() {
    let mut pool = Pool::new(16);
    let started = pool.put("k", MIB).unwrap();
    pool.end(A, "k", &started).unwrap();
    fails(pool.end(A, "", &started), ErrorCode::OBJECT_NOT_FOUND);
    fails(pool.end(A, "other", &started), ErrorCode::OBJECT_NOT_FOUND);
    fails(pool.revoke(A, "k", &started), ErrorCode::OBJECT_NOT_FOUND);
    let mut pool = restarted(&mut pool);
    pool.end(A, "k", &started).unwrap();
    pool.state.resume(A, &spec(A, 1, 1, 16)).unwrap();
    pool.wait(60);
    pool.end(A, "k", &started).unwrap();
    let second = pool.upsert("k", MIB).unwrap();
    fails(pool.end(A, "k", &started), ErrorCode::OBJECT_NOT_FOUND);
    pool.end(A, "k", &second).unwrap();
    pool.remove("k", true).unwrap();
    fails(pool.end(A, "k", &second), ErrorCode::OBJECT_NOT_FOUND);
}

#[test]
fn repeated_item_creates_one_task() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let first = pool.copy_once("k", CALL).unwrap();
    assert_eq!(pool.copy_once("k", CALL).unwrap(), first);
    let second = pool.copy_once("k", CALL + 1).unwrap();
    assert_ne!(first, second);
    assert_eq!(pool.state.tasks().tasks_underway(), (2, 0));
    let mut pool = restarted(&mut pool);
    assert_eq!(pool.copy_once("k", CALL).unwrap(), first, "also after a restart");
    assert_eq!(pool.copy_once("k", CALL + 1).unwrap(), second);
    assert_eq!(pool.state.tasks().tasks_underway(), (2, 0));
    assert_ne!(pool.copy_once("k", CALL + 2).unwrap(), second, "another item");
}

#[test]
fn repeated_item_finds_finished_task() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let id = pool.copy_once("k", CALL).unwrap();
    let work = pool.fetch(A).remove(0);
    pool.done(A, &work).unwrap();
    assert_eq!(pool.copy_once("k", CALL).unwrap(), id);
    let mut pool = restarted(&mut pool);
    assert_eq!(pool.copy_once("k", CALL).unwrap(), id);
    assert_eq!(pool.state.task(id).unwrap().status, TaskStatus::Success);
}

#[test]
fn repeated_item_creates_one_job() {
    let mut pool = two();
    pool.put_with("k", MIB, false, &on("host-a:1")).unwrap();
    let job = pool.drain_once(CALL).unwrap();
    assert_eq!(pool.drain_once(CALL).unwrap(), job);
    fails(pool.drain_once(CALL + 1), ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
    fails(drain(&mut pool, &["host-a:1"], &[]), ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
    let mut pool = restarted(&mut pool);
    assert_eq!(pool.drain_once(CALL).unwrap(), job, "also after a restart");
    pool.state.tasks().cancel_job(pool.now, job).unwrap();
    let mut pool = restarted(&mut pool);
    assert_eq!(pool.drain_once(CALL).unwrap(), job, "also when it is over");
}
