//! Objects that only a disk has come back into memory, with real clients.

use std::{path::Path, time::Duration};

use mooncake_master::MasterConfig;
use mooncake_store_client::{
    ClientConfig, DiskConfig, NewTask, PrefetchConfig, ProbeTerms, TaskStatus,
};
use mooncake_testkit::{Cluster, ClusterSettings, Node, Random, cluster::key, until};

const LIMIT: Duration = Duration::from_secs(60);

/// Lengths of small, odd, aligned and long objects.
const LENGTHS: [usize; 5] = [1, 4096, 300_001, 1 << 20, (17 << 20) + 12_345];

fn value(seed: usize, length: usize) -> Vec<u8> {
    Random::from_seed(seed as u64 + 1).bytes(length)
}

/// Returns how many copies of an object are in memory and on disk.
fn copies(by: &Node, name: &str) -> (usize, usize) {
    match by.client.describe(&[key(name)], false).remove(0) {
        Ok(found) => {
            let on_disk = found.places().iter().filter(|place| place.segment.is_disk).count();
            (found.places().len() - on_disk, on_disk)
        }
        Err(_) => (0, 0),
    }
}

/// A pool whose objects are on disk, and in no memory: the node that lent it has left.
struct OnDisk {
    cluster: Cluster,
    owner: Node,
    objects: Vec<(String, Vec<u8>)>,
}

fn only_on_disk(path: &Path, master: MasterConfig) -> OnDisk {
    let settings = ClusterSettings {
        segment_bytes: 128 << 20,
        master: MasterConfig { has_offload: true, ..master },
        ..ClusterSettings::default()
    };
    let mut cluster = Cluster::start(settings).expect("a cluster of one process starts");
    let capacity = Some(512 << 20);
    let disk = DiskConfig { path: path.to_owned(), capacity, uses_ring: None };
    let config = ClientConfig { disks: vec![disk], ..ClientConfig::default() };
    let owner = cluster.join_with(config).expect("the directory is free");
    let objects: Vec<_> =
        LENGTHS.iter().map(|&length| (format!("o{length}"), value(length, length))).collect();
    for (name, value) in &objects {
        cluster.nodes[0].put(name, value).expect("there is room");
    }
    for (name, _) in &objects {
        until(LIMIT, "the object is on disk", || (copies(&owner, name).1 > 0).then_some(()));
    }
    drop(cluster.nodes.remove(0));
    for (name, _) in &objects {
        assert_eq!(copies(&owner, name), (0, 1));
    }
    OnDisk { cluster, owner, objects }
}

fn probe(by: &Node, names: &[&str], prefetches: bool) {
    let keys: Vec<_> = names.iter().map(|name| key(name)).collect();
    let terms = ProbeTerms { takes_lease: false, prefetches };
    for found in by.client.exists(&keys, terms) {
        assert!(found.expect("the master answers").is_some());
    }
}

fn await_memory(by: &Node, name: &str) {
    until(LIMIT, "the object is in memory", || (copies(by, name).0 > 0).then_some(()));
}

#[test]
fn prefetching_probe_brings_objects_into_memory() {
    let directory = tempfile::tempdir().unwrap();
    let OnDisk { cluster, owner, objects } =
        only_on_disk(directory.path(), MasterConfig::embedded());
    let reader = cluster.join(64 << 20).unwrap();
    let names: Vec<_> = objects.iter().map(|(name, _)| &name[..]).collect();
    probe(&reader, &names, false);
    probe(&reader, &names[1..], true);
    for (name, value) in &objects[1..] {
        await_memory(&reader, name);
        assert_eq!(copies(&reader, name), (1, 1), "{name}");
        let loads = reader.client.metrics().disk.remote_calls;
        assert!(reader.get(name).unwrap().as_ref() == Some(value), "{name}");
        assert_eq!(reader.client.metrics().disk.remote_calls, loads, "memory is read");
    }
    assert_eq!(copies(&reader, names[0]), (0, 1), "nobody asked for it");
    let promoted = owner.client.metrics().disk;
    assert_eq!(promoted.promoted, objects.len() as u64 - 1);
}

#[test]
fn read_waits_a_little_for_what_was_prefetched() {
    let directory = tempfile::tempdir().unwrap();
    let OnDisk { cluster, owner: _owner, objects } =
        only_on_disk(directory.path(), MasterConfig::embedded());
    let prefetch = PrefetchConfig { get_wait: LIMIT, ..PrefetchConfig::default() };
    let config = ClientConfig { segment_bytes: 64 << 20, prefetch, ..ClientConfig::default() };
    let reader = cluster.join_with(config).unwrap();
    for (name, value) in &objects {
        probe(&reader, &[name], true);
        assert!(reader.get(name).unwrap().as_ref() == Some(value), "{name}");
    }
    assert_eq!(reader.client.metrics().disk.remote_calls, 0, "no read went to the disk");
}

#[test]
fn objects_for_which_there_is_no_memory_stay_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    let OnDisk { cluster, owner: _owner, objects } =
        only_on_disk(directory.path(), MasterConfig::embedded());
    // Lends nothing, and nobody else does.
    let reader = cluster.join(0).unwrap();
    for (name, value) in &objects {
        probe(&reader, &[name], true);
        assert!(reader.get(name).unwrap().as_ref() == Some(value), "{name}");
        assert_eq!(copies(&reader, name), (0, 1));
    }
    let counters = until(LIMIT, "the promotions end", || {
        let counters = cluster.totals().counters;
        (counters.promotions_without_room == objects.len() as u64).then_some(counters)
    });
    assert_eq!(counters.promotions_done, 0);
}

#[test]
fn second_read_promotes_if_the_master_is_told_to() {
    let directory = tempfile::tempdir().unwrap();
    let master = MasterConfig { promotes_on_hit: true, ..MasterConfig::embedded() };
    let OnDisk { cluster, owner: _owner, objects } = only_on_disk(directory.path(), master);
    let reader = cluster.join(64 << 20).unwrap();
    for (name, value) in &objects {
        for _ in 0..2 {
            assert_eq!(copies(&reader, name), (0, 1));
            assert!(reader.get(name).unwrap().as_ref() == Some(value), "{name}");
        }
        await_memory(&reader, name);
        assert!(reader.get(name).unwrap().as_ref() == Some(value), "{name}");
    }
}

#[test]
fn copy_task_of_object_on_disk_writes_into_its_target() {
    let directory = tempfile::tempdir().unwrap();
    let OnDisk { cluster, owner: _owner, objects } =
        only_on_disk(directory.path(), MasterConfig::embedded());
    let (_other, target) = (cluster.join(64 << 20).unwrap(), cluster.join(64 << 20).unwrap());
    let targets = vec![target.client.name().to_owned()];
    let new =
        objects.iter().map(|(name, _)| NewTask::Copy { key: key(name), targets: targets.clone() });
    let tasks = target.client.create_tasks(&new.collect::<Vec<_>>());
    let tasks: Vec<_> = tasks.into_iter().map(Result::unwrap).collect();
    until(LIMIT, "the tasks end", || {
        let tasks = target.client.tasks(&tasks);
        tasks.iter().all(|task| task.as_ref().unwrap().status == TaskStatus::Success).then_some(())
    });
    for (name, value) in &objects {
        let found = target.client.describe(&[key(name)], false).remove(0).unwrap();
        let place = found.places().iter().find(|place| !place.segment.is_disk).unwrap();
        assert_eq!(place.segment.name, target.client.name());
        assert!(target.get(name).unwrap().as_ref() == Some(value), "{name}");
    }
}
