//! Copies, moves, drains and quotas with real clients: tasks complete, and no object is lost.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use mooncake_base::{ErrorCode, ErrorKind, Result, TaskId, TenantId};
use mooncake_master::MasterConfig;
use mooncake_store_client::{
    ClientConfig, DrainStatus, NewDrain, NewTask, PutOptions, TaskInfo, TaskStatus,
};
use mooncake_testkit::{Cluster, ClusterSettings, Node, Random, cluster::key, until};

const LIMIT: Duration = Duration::from_secs(60);

fn cluster(nodes: usize) -> Cluster {
    Cluster::start(ClusterSettings { nodes, ..ClusterSettings::default() })
        .expect("a cluster of one process starts")
}

/// Puts a value into a segment of the node.
fn put_on(node: &Node, name: &str, value: &[u8]) {
    let options = PutOptions {
        preferred_segments: vec![node.client.name().to_owned()],
        ..PutOptions::default()
    };
    node.client.put_bytes(&key(name), value, &options).expect("there is room");
}

fn names(nodes: &[&Node]) -> Vec<String> {
    nodes.iter().map(|node| node.client.name().to_owned()).collect()
}

fn copy(by: &Node, name: &str, targets: &[&Node]) -> Result<TaskId> {
    let task = NewTask::Copy { key: key(name), targets: names(targets) };
    by.client.create_tasks(&[task]).remove(0)
}

fn shift(by: &Node, name: &str, source: &Node, target: &Node) -> Result<TaskId> {
    let (source, target) = (source.client.name().to_owned(), target.client.name().to_owned());
    let task = NewTask::Move { key: key(name), source, target };
    by.client.create_tasks(&[task]).remove(0)
}

fn over(by: &Node, id: TaskId) -> TaskInfo {
    until(LIMIT, "the task is over", || {
        let info = by.client.tasks(&[id]).remove(0).expect("the task is remembered");
        matches!(info.status, TaskStatus::Success | TaskStatus::Failed).then_some(info)
    })
}

/// Returns the names of the segments that hold a copy.
fn holders(by: &Node, name: &str) -> Vec<String> {
    let found = by.client.describe(&[key(name)], false).remove(0).expect("the object is there");
    let mut names: Vec<_> = found.places().iter().map(|place| place.segment.name.clone()).collect();
    names.sort();
    names
}

#[test]
fn copied_object_survives_its_first_holder() {
    let mut cluster = cluster(3);
    let value = Random::new().bytes(20_000_000);
    put_on(&cluster.nodes[0], "k", &value);
    let [a, b, c] = &cluster.nodes[..] else { panic!() };
    // The creator of the task neither holds a copy nor receives one.
    let done = over(c, copy(c, "k", &[b]).unwrap());
    assert_eq!((done.status, done.client), (TaskStatus::Success, a.client.id()));
    assert_eq!(done.message, "Task completed successfully");
    assert!(done.created_at_ms > 1_600_000_000_000 && done.updated_at_ms >= done.created_at_ms);
    let mut both = names(&[a, b]);
    both.sort();
    assert_eq!(holders(c, "k"), both);
    cluster.nodes.remove(0);
    let c = &cluster.nodes[1];
    assert_eq!(c.get("k").unwrap().as_deref(), Some(&value[..]));
}

#[test]
fn moved_object_is_complete_at_its_target_only() {
    let cluster = cluster(2);
    let [a, b] = &cluster.nodes[..] else { panic!() };
    let value = Random::new().bytes(3_000_000);
    put_on(a, "k", &value);
    let done = over(b, shift(b, "k", a, b).unwrap());
    assert_eq!(done.status, TaskStatus::Success, "{done:?}");
    assert_eq!(holders(a, "k"), names(&[b]));
    assert_eq!(a.get("k").unwrap().unwrap(), value);
}

#[test]
fn tasks_are_executed_over_tcp() {
    let settings = ClusterSettings { nodes: 3, is_tcp_forced: true, ..Default::default() };
    let cluster = Cluster::start(settings).unwrap();
    let [a, b, c] = &cluster.nodes[..] else { panic!() };
    let value = Random::new().bytes(5_000_000);
    put_on(a, "k", &value);
    assert_eq!(over(a, copy(a, "k", &[b, c]).unwrap()).status, TaskStatus::Success);
    assert_eq!(holders(a, "k").len(), 3);
    b.client.remove(&[key("k")], true).remove(0).unwrap();
    put_on(c, "l", &value);
    assert_eq!(over(a, shift(a, "l", c, b).unwrap()).status, TaskStatus::Success);
    assert_eq!(a.get("l").unwrap().unwrap(), value);
}

#[test]
fn rejects_impossible_copies_with_their_codes() {
    let cluster = cluster(2);
    let [a, b] = &cluster.nodes[..] else { panic!() };
    put_on(a, "k", b"value");
    let code = |result: Result<TaskId>| result.unwrap_err().code();
    assert_eq!(code(copy(a, "none", &[b])), ErrorCode::OBJECT_NOT_FOUND);
    assert_eq!(code(copy(a, "k", &[])), ErrorCode::INVALID_PARAMS);
    assert_eq!(code(shift(a, "k", b, a)), ErrorCode::INVALID_PARAMS);
    assert_eq!(code(shift(a, "k", a, a)), ErrorCode::INVALID_PARAMS);
    let unknown = a.client.tasks(&[TaskId::from_bits(7)]).remove(0);
    assert_eq!(unknown.unwrap_err().code(), ErrorCode::TASK_NOT_FOUND);
}

#[test]
fn task_fails_with_a_reason_if_its_target_is_gone() {
    let mut cluster = cluster(2);
    put_on(&cluster.nodes[0], "k", &[7; 1000]);
    let b = &cluster.nodes[1];
    let id = copy(b, "k", &[b]).unwrap();
    cluster.nodes.truncate(1);
    let a = &cluster.nodes[0];
    let done = over(a, id);
    // The task may have completed before its target was gone.
    if done.status == TaskStatus::Failed {
        assert!(!done.message.is_empty());
    }
    assert_eq!(a.get("k").unwrap().unwrap(), [7; 1000]);
}

#[test]
fn drain_under_load_fails_no_read() {
    let cluster = cluster(3);
    let [a, b, c] = &cluster.nodes[..] else { panic!() };
    let value = |index: usize| Random::from_seed(index as u64).bytes(30_000 + index);
    for index in 0..200 {
        put_on(a, &format!("k{index}"), &value(index));
    }
    let (is_over, reads, writes) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for reader in [b, c] {
            scope.spawn(|| {
                let mut index = 0;
                while !is_over.load(Ordering::SeqCst) {
                    index = (index + 7) % 200;
                    let read = reader.get(&format!("k{index}")).unwrap();
                    assert_eq!(read.as_deref(), Some(&value(index)[..]), "k{index}");
                    reads.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        scope.spawn(|| {
            let options = PutOptions { is_upsert: true, ..PutOptions::default() };
            let mut round = 0_usize;
            while !is_over.load(Ordering::SeqCst) {
                round += 1;
                let name = key(&format!("w{}", round % 50));
                c.client.put_bytes(&name, &value(round % 50), &options).unwrap();
                writes.fetch_add(1, Ordering::SeqCst);
            }
        });
        let job = b
            .client
            .drain(&NewDrain { segments: names(&[a]), concurrency: 8, ..NewDrain::default() })
            .unwrap();
        assert!(matches!(job.status, DrainStatus::Created | DrainStatus::Planning));
        let last = until(LIMIT, "the drain is over", || {
            let info = b.client.drain_info(job.id).unwrap();
            matches!(info.status, DrainStatus::Succeeded | DrainStatus::Failed).then_some(info)
        });
        is_over.store(true, Ordering::SeqCst);
        assert_eq!((last.status, last.failed), (DrainStatus::Succeeded, 0), "{last:?}");
        assert!(last.succeeded >= 200 && last.moved_bytes >= 200 * 30_000, "{last:?}");
    });
    assert!(reads.load(Ordering::SeqCst) > 0 && writes.load(Ordering::SeqCst) > 0);
    let drained = b.client.segments().unwrap();
    let drained = drained.iter().find(|used| used.segment.name == a.client.name()).unwrap();
    assert!(!drained.takes_objects);
    for index in 0..200 {
        assert!(!holders(b, &format!("k{index}")).contains(&a.client.name().to_owned()));
        assert_eq!(b.get(&format!("k{index}")).unwrap().unwrap(), value(index));
    }
}

#[test]
fn clears_copies_by_segment() {
    let cluster = Cluster::start(ClusterSettings {
        nodes: 2,
        master: MasterConfig { lease_ttl: Duration::ZERO, ..MasterConfig::embedded() },
        ..ClusterSettings::default()
    })
    .unwrap();
    let [a, b] = &cluster.nodes[..] else { panic!() };
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    a.client.put_bytes(&key("k"), b"value", &options).unwrap();
    let clear = |name: &str, segment: &str| {
        a.client.clear_replicas(&[key(name)], segment).remove(0).unwrap()
    };
    assert!(clear("k", a.client.name()) && !clear("k", a.client.name()) && !clear("none", ""));
    assert_eq!(holders(b, "k"), names(&[b]));
    assert!(clear("k", ""));
    assert_eq!(b.get("k").unwrap(), None);
}

#[test]
fn master_that_ignores_tenants_is_refused_unless_told_otherwise() {
    let cluster = Cluster::start(ClusterSettings { nodes: 1, ..ClusterSettings::default() });
    let cluster = cluster.unwrap();
    let join = |name: &str, refuses_ignored_tenant| {
        let tenant = TenantId::new(name);
        cluster.join_with(ClientConfig {
            tenant,
            refuses_ignored_tenant,
            ..ClientConfig::default()
        })
    };
    let refused = join("one", true).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::UNAVAILABLE_IN_CURRENT_MODE);
    let kept = (join("one", false).unwrap(), join("", true).unwrap());
    assert_eq!(kept.0.client.status().unwrap().clients, 3, "the refused client has left");
}

#[test]
fn tenants_have_separate_keys_and_quotas() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("quotas.yaml");
    let policy =
        "version: 1\ntenants:\n  - name: one\n    quota: 3MB\n  - name: two\n    quota: 1MB\n";
    std::fs::write(&path, policy).unwrap();
    let cluster = Cluster::start(ClusterSettings {
        nodes: 1,
        master: MasterConfig {
            is_multi_tenant: true,
            tenant_policy: path.to_str().unwrap().to_owned(),
            ..MasterConfig::embedded()
        },
        ..ClusterSettings::default()
    })
    .unwrap();
    let member = |name: &str| {
        let tenant = TenantId::new(name);
        cluster.join_with(ClientConfig { tenant, ..ClientConfig::default() }).unwrap()
    };
    let (one, two, stranger) = (member("one"), member("two"), member("three"));
    one.put("k", &[1; 1000]).unwrap();
    two.put("k", &[2; 1000]).unwrap();
    assert_eq!(one.get("k").unwrap().unwrap(), [1; 1000]);
    assert_eq!(two.get("k").unwrap().unwrap(), [2; 1000]);
    assert_eq!(stranger.get("k").unwrap(), None);
    let refused = stranger.put("k", b"v").unwrap_err();
    assert_eq!(refused.code(), ErrorCode::TENANT_NOT_REGISTERED);
    let refused = two.put("large", &[0; 2_000_000]).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::TENANT_QUOTA_EXCEEDED);
    assert_eq!(refused.kind(), ErrorKind::QuotaExceeded);
    // The quota is used up and the objects have leases: only a removal frees memory.
    one.put("a", &[0; 2_000_000]).unwrap();
    let leased = one.client.locate(&[key("a"), key("k")]);
    assert!(leased.iter().all(Result::is_ok), "{leased:?}");
    let refused = one.put("b", &[0; 2_000_000]).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::TENANT_QUOTA_EXCEEDED);
    one.client.remove(&[key("a")], true).remove(0).unwrap();
    one.put("b", &[0; 2_000_000]).unwrap();
    assert!(two.get("k").unwrap().is_some(), "nothing of another tenant went for it");
}
