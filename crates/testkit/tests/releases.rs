//! Memory that is released while tasks copy from and to it: nothing crashes, and no bytes are wrong.
#![allow(clippy::unwrap_used, reason = "a test, also in the functions that it shares")]

use std::{path::Path, time::Duration};

use mooncake_base::{ObjectKey, SegmentId, requirement::is_long_run};
use mooncake_proto::v1::{request::Call, response::Call as Reply};
use mooncake_store_client::{ClientConfig, NewTask, PutOptions, TaskStatus};
use mooncake_testkit::{Cluster, ClusterSettings, Fault, Gate, Node, Random, cluster::key, until};

const LIMIT: Duration = Duration::from_secs(60);

/// Bytes of one object, and of the segment that a node lends.
const OBJECT_BYTES: usize = 4 << 20;
const SEGMENT_BYTES: u64 = 32 << 20;

/// The number of objects that are copied while their memory is released.
const OBJECTS: usize = 6;

/// The grace period, which ends while the copy runs.
const GRACE: Duration = Duration::from_millis(1);

/// The ways in which memory is released under a running copy.
#[derive(Debug, Clone, Copy)]
enum Release {
    Unmount,
    EndOfGrace,
    Close,
    /// The master forgets the client, which registers again with fresh memory.
    Register,
}

impl Release {
    /// Selects the call after whose answer the client frees the memory.
    fn last_call(self) -> impl Fn(&Call) -> bool + Send + 'static {
        move |call| match self {
            Self::Unmount | Self::EndOfGrace => matches!(call, Call::Unmount(_)),
            Self::Close => matches!(call, Call::Unregister(_)),
            Self::Register => matches!(call, Call::Mount(mount) if mount.is_all),
        }
    }
}

const RELEASES: [Release; 4] =
    [Release::Unmount, Release::EndOfGrace, Release::Close, Release::Register];

fn put_on(node: &Node, name: &str, value: &[u8]) {
    let options = PutOptions {
        preferred_segments: vec![node.client.name().to_owned()],
        ..PutOptions::default()
    };
    node.client.put_bytes(&key(name), value, &options).expect("there is room");
}

/// Mounts memory or a part of a file on a node.
fn lend(node: &Node, file: Option<&Path>) -> SegmentId {
    match file {
        None => node.client.mount(SEGMENT_BYTES).expect("memory can be lent")[0],
        Some(path) => {
            node.client.mount_file(path, 0, SEGMENT_BYTES, "cpu:0").expect("the file can be lent")
        }
    }
}

/// Starts copies of a node's objects, and releases the memory of one side while they run.
fn release_under_copies(cluster: &mut Cluster, round: usize) {
    let release = RELEASES[round % RELEASES.len()];
    let is_file = round / RELEASES.len() % 3 == 2;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("segment");
    std::fs::File::create(&path).unwrap().set_len(SEGMENT_BYTES).unwrap();
    let near = cluster.join_with(ClientConfig::default()).unwrap();
    let segment = lend(&near, is_file.then_some(&*path));
    let value = Random::new().bytes(OBJECT_BYTES);
    let names: Vec<_> = (0..OBJECTS).map(|index| format!("k{round}.{index}")).collect();
    let keys: Vec<_> = names.iter().map(|name| key(name)).collect();
    // Bytes are copied by plain instructions only between pages that were used before.
    let far = &cluster.nodes[0];
    names.iter().for_each(|name| put_on(far, name, &value));
    far.client.remove(&keys, true).into_iter().for_each(|removed| removed.unwrap());
    names.iter().for_each(|name| put_on(&near, name, &value));
    let gate = Gate::new();
    let is_fetch = |call: &Call| matches!(call, Call::FetchTasks(_));
    near.link.inject(1, Fault::HoldAnswer(gate.clone()), is_fetch);
    let targets = vec![far.client.name().to_owned()];
    let task = |key: &ObjectKey| NewTask::Copy { key: key.clone(), targets: targets.clone() };
    let tasks: Vec<_> = keys.iter().map(task).collect();
    let created = near.client.create_tasks(&tasks);
    assert!(created.iter().all(Result::is_ok), "{created:?}");
    gate.await_arrival(LIMIT);
    let release_gate = Gate::new();
    near.link.inject(1, Fault::HoldAnswer(release_gate.clone()), release.last_call());
    std::thread::scope(|scope| {
        let near = &near;
        let released = scope.spawn(move || match release {
            Release::Unmount => near.client.unmount(segment, Duration::ZERO).unwrap(),
            Release::EndOfGrace => near.client.unmount(segment, GRACE).unwrap(),
            Release::Close => near.client.close(),
            Release::Register => {}
        });
        if matches!(release, Release::Register) {
            cluster.start_master().unwrap();
        }
        release_gate.await_arrival(LIMIT);
        gate.open();
        // Not a wait for a condition: the release meets the copy at another point in each round.
        std::thread::park_timeout(Duration::from_micros(round as u64 * 370 % 3000));
        release_gate.open();
        released.join().unwrap();
    });
    if !matches!(release, Release::Close) {
        until(LIMIT, "the segment is gone", || {
            near.client.mounted().iter().all(|id| *id != segment).then_some(())
        });
    }
    // A copy that was made has the right bytes.
    let far = &cluster.nodes[0];
    for name in &names {
        if let Ok(Some(copy)) = far.get(name) {
            assert!(copy == value, "{name} after {release:?}");
        }
    }
    far.client.remove(&keys, true).into_iter().for_each(drop);
}

#[test]
fn memory_outlives_the_copies_of_tasks() {
    let rounds = if is_long_run() { 200 } else { 4 };
    let mut cluster = Cluster::start(ClusterSettings::default()).unwrap();
    for round in 0..rounds {
        release_under_copies(&mut cluster, round);
    }
}

#[test]
fn tasks_take_own_addresses_from_the_own_table() {
    let cluster = Cluster::start(ClusterSettings::default()).unwrap();
    // A master that names another address for the client's own memory.
    let link = cluster.tampering_link(|response| {
        if let Some(Reply::FetchTasks(tasks)) = &mut response.call {
            let own = tasks.segments.iter_mut().filter(|segment| segment.name == "near");
            own.for_each(|segment| segment.base = 1 << 20);
        }
    });
    let config = ClientConfig {
        name: "near".to_owned(),
        segment_bytes: SEGMENT_BYTES,
        ..ClientConfig::default()
    };
    let near = cluster.join_by(config, link).unwrap();
    let far = &cluster.nodes[0];
    let value = Random::new().bytes(100_000);
    put_on(&near, "k", &value);
    let task = NewTask::Copy { key: key("k"), targets: vec![far.client.name().to_owned()] };
    let id = near.client.create_tasks(&[task]).remove(0).unwrap();
    let done = until(LIMIT, "the task is over", || {
        let info = near.client.tasks(&[id]).remove(0).expect("the task is remembered");
        matches!(info.status, TaskStatus::Success | TaskStatus::Failed).then_some(info)
    });
    assert_eq!(done.status, TaskStatus::Success, "{done:?}");
    drop(near);
    assert!(far.get("k").unwrap().unwrap() == value);
}
