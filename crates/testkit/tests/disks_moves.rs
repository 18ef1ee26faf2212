//! Objects that move down to disks when their memory is needed, with real clients.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use mooncake_master::MasterConfig;
use mooncake_store_client::{ClientConfig, DiskConfig, ProbeTerms};
use mooncake_testkit::{Cluster, ClusterSettings, Node, Random, cluster::key, until};

const LIMIT: Duration = Duration::from_secs(60);
const OBJECT_BYTES: usize = 1 << 20;

fn master() -> MasterConfig {
    MasterConfig { has_offload: true, offloads_on_eviction: true, ..MasterConfig::embedded() }
}

/// A pool of 16 MiB in one node.
fn cluster(master: MasterConfig) -> Cluster {
    let settings =
        ClusterSettings { nodes: 1, segment_bytes: 16 << 20, master, ..ClusterSettings::default() };
    Cluster::start(settings).expect("a cluster of one process starts")
}

fn owner(cluster: &Cluster, path: &Path, capacity: u64) -> Node {
    let disk = DiskConfig { path: path.to_owned(), capacity: Some(capacity), uses_ring: None };
    let config = ClientConfig { disks: vec![disk], ..ClientConfig::default() };
    cluster.join_with(config).expect("the directory is free")
}

fn value(number: usize) -> Vec<u8> {
    Random::from_seed(number as u64 + 1).bytes(OBJECT_BYTES)
}

/// Checks that all objects are readable. The master hides those of a disk whose owner a busy machine has
/// delayed.
fn check_all(node: &Node, count: usize) {
    for number in 0..count {
        let name = format!("k{number}");
        let found = until(LIMIT, &format!("{name} is readable"), || {
            node.get(&name).expect("the master answers")
        });
        assert!(found == value(number), "{name} has other bytes");
    }
}

#[test]
fn puts_of_ten_pools_under_leases_stay_readable() {
    for offloads_on_eviction in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let lease_ttl = Duration::from_secs(999_999);
        let master = MasterConfig {
            offloads_on_eviction,
            lease_ttl,
            is_soft_pin_evictable: false,
            offload_queue_max: 10_000,
            ..master()
        };
        let cluster = cluster(master);
        let _owner = owner(&cluster, directory.path(), 1 << 30);
        let node = &cluster.nodes[0];
        for number in 0..160 {
            let name = format!("k{number}");
            node.put(&name, &value(number)).unwrap();
            let terms = ProbeTerms { takes_lease: true, ..ProbeTerms::default() };
            let leased = node.client.exists(&[key(&name)], terms).remove(0).unwrap();
            assert!(leased.is_some(), "{name}");
        }
        check_all(node, 160);
    }
}

#[test]
fn writers_at_the_same_time_lose_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(master());
    let _owner = owner(&cluster, directory.path(), 1 << 30);
    let node = &cluster.nodes[0];
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= 100 {
                        return;
                    }
                    node.put(&format!("k{number}"), &value(number)).unwrap();
                }
            });
        }
    });
    check_all(node, 100);
}

#[test]
fn put_goes_on_without_the_owner() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(master());
    let owner = owner(&cluster, directory.path(), 1 << 30);
    let node = &cluster.nodes[0];
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let puts = scope.spawn(|| {
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) || count < 60 {
                node.put(&format!("k{count}"), &value(count)).expect("memory can take it");
                count += 1;
            }
            count
        });
        until(LIMIT, "objects are written", || {
            (owner.client.metrics().disk.written.records > 5).then_some(())
        });
        drop(owner);
        is_over.store(true, Ordering::Relaxed);
        let count = puts.join().unwrap();
        assert_eq!(node.get(&format!("k{}", count - 1)).unwrap(), Some(value(count - 1)));
    });
}

#[test]
fn small_directory_takes_what_it_can() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(master());
    let _owner = owner(&cluster, directory.path(), 32 << 20);
    let node = &cluster.nodes[0];
    for number in 0..120 {
        node.put(&format!("k{number}"), &value(number)).expect("memory can take it");
    }
    let found = (0..120).filter(|&number| {
        let found = node.get(&format!("k{number}")).expect("the master answers");
        found.is_some_and(|found| {
            assert!(found == value(number), "k{number}");
            true
        })
    });
    let found = found.count();
    assert!((24..=48).contains(&found), "{found}");
}

#[test]
fn objects_that_are_too_long_do_not_stop_others() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(master());
    // A record takes at most a sixteenth of the directory.
    let _owner = owner(&cluster, directory.path(), 128 << 20);
    let node = &cluster.nodes[0];
    let too_long = vec![7; 9 << 20];
    for number in 0..60 {
        if number % 10 == 5 {
            node.put(&format!("long{number}"), &too_long).unwrap();
            node.put(&format!("longer{number}"), &too_long).unwrap();
        }
        node.put(&format!("k{number}"), &value(number)).unwrap();
    }
    check_all(node, 60);
}

#[test]
fn removed_objects_do_not_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(master());
    let _owner = owner(&cluster, directory.path(), 1 << 30);
    let node = &cluster.nodes[0];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..80 {
                node.put(&format!("k{number}"), &value(number)).unwrap();
            }
        });
        // While the others move down.
        for number in (0..80).step_by(2) {
            until(LIMIT, "the object is removed", || {
                node.client.remove(&[key(&format!("k{number}"))], true).remove(0).ok()
            });
        }
    });
    for number in 0..80 {
        let found = node.get(&format!("k{number}")).expect("the master answers");
        assert_eq!(found.is_some(), number % 2 == 1, "k{number}");
        assert!(found.is_none_or(|found| found == value(number)), "k{number}");
    }
}

#[test]
fn restarted_master_knows_what_moved() {
    let directory = tempfile::tempdir().unwrap();
    let state = tempfile::tempdir().unwrap();
    let state_dir = mooncake_master::config::StateDir::At(state.path().to_owned());
    let mut cluster = cluster(MasterConfig { state_dir, ..master() });
    let _owner = owner(&cluster, directory.path(), 1 << 30);
    for number in 0..40 {
        cluster.nodes[0].put(&format!("k{number}"), &value(number)).unwrap();
    }
    cluster.start_master().unwrap();
    let node = &cluster.nodes[0];
    for number in 0..40 {
        let name = format!("k{number}");
        let found = until(LIMIT, "its owner is back", || node.get(&name).ok().flatten());
        assert!(found == value(number), "{name}");
    }
}
