//! Copies on disk with real clients: objects outlive their memory, and no read yields a wrong byte.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::{ErrorCode, Token};
use mooncake_master::{MasterConfig, config::StateDir};
use mooncake_proto::v1::response;
use mooncake_store_client::{
    BufferScope, ClientConfig, DiskConfig, Grid, GridDimension, GridParts, Parts,
};
use mooncake_testkit::{
    Cluster, ClusterSettings, Node, Random,
    cluster::{key, range},
    until,
};

const LIMIT: Duration = Duration::from_secs(60);

/// Lengths of small, packed, aligned, odd and long objects.
const LENGTHS: [usize; 8] = [1, 100, 4096, 65_535, 65_536, 300_001, 1 << 20, (17 << 20) + 12_345];

fn cluster(nodes: usize) -> Cluster {
    start(nodes, MasterConfig { has_offload: true, ..MasterConfig::embedded() })
}

fn start(nodes: usize, master: MasterConfig) -> Cluster {
    let segment_bytes = 128 << 20;
    let settings = ClusterSettings { nodes, segment_bytes, master, ..ClusterSettings::default() };
    Cluster::start(settings).expect("a cluster of one process starts")
}

fn with_disk(path: &Path) -> ClientConfig {
    with_capacity(path, 512 << 20)
}

fn with_capacity(path: &Path, capacity: u64) -> ClientConfig {
    let disk = DiskConfig { path: path.to_owned(), capacity: Some(capacity), uses_ring: None };
    ClientConfig { disks: vec![disk], ..ClientConfig::default() }
}

fn owner(cluster: &Cluster, path: &Path) -> Node {
    cluster.join_with(with_disk(path)).expect("the directory is free")
}

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

fn await_disk(by: &Node, name: &str) {
    until(LIMIT, "the object is on disk", || (copies(by, name).1 > 0).then_some(()));
}

/// Puts objects of all lengths and waits until they are on disk.
fn fill(by: &Node) -> Vec<(String, Vec<u8>)> {
    let objects: Vec<_> =
        LENGTHS.iter().map(|&length| (format!("o{length}"), value(length, length))).collect();
    for (name, value) in &objects {
        by.put(name, value).expect("there is room");
    }
    for (name, _) in &objects {
        await_disk(by, name);
    }
    objects
}

/// A pool whose objects have lost their memory.
struct OnDisk {
    cluster: Cluster,
    owner: Node,
    reader: Node,
    objects: Vec<(String, Vec<u8>)>,
}

fn only_on_disk(path: &Path) -> OnDisk {
    let mut cluster = cluster(1);
    let owner = owner(&cluster, path);
    let objects = fill(&cluster.nodes[0]);
    drop(cluster.nodes.remove(0));
    let reader = cluster.join(0).expect("a node joins");
    OnDisk { cluster, owner, reader, objects }
}

#[test]
fn objects_outlive_their_memory() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = cluster(1);
    let owner = owner(&cluster, directory.path());
    let objects = fill(&cluster.nodes[0]);
    assert_eq!(copies(&owner, &objects[0].0), (1, 1));
    drop(cluster.nodes.remove(0));
    let reader = cluster.join(0).unwrap();
    for (name, value) in &objects {
        assert_eq!(copies(&owner, name), (0, 1), "{name}");
        assert!(owner.get(name).unwrap().as_ref() == Some(value), "the owner reads {name}");
        assert!(reader.get(name).unwrap().as_ref() == Some(value), "another reads {name}");
    }
    let keys: Vec<_> = objects.iter().map(|(name, _)| key(name)).collect();
    assert!(reader.client.metrics().disk.remote_calls >= objects.len() as u64);
    assert_eq!(owner.client.metrics().disk.written.records, keys.len() as u64);
    assert_eq!(owner.client.metrics().disk.staged_bytes, 0, "all of it was given back");
}

#[test]
fn parts_and_grids_are_read_from_disk() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = cluster(1);
    // Lends memory, too, but too little for the last object: peers recognize its engine by that.
    let config = ClientConfig { segment_bytes: 16 << 20, ..with_disk(directory.path()) };
    let owner = cluster.join_with(config).unwrap();
    let objects = fill(&cluster.nodes[0]);
    drop(cluster.nodes.remove(0));
    let reader = cluster.join(0).unwrap();
    let (name, whole) = objects.last().unwrap();
    let name = key(name);
    for node in [&owner, &reader] {
        let memory = node.engine().allocate(4 << 20).unwrap();
        let offsets = [16 << 20, 5, 700_000, 5];
        let lengths = [1 << 20, 1000, 70_000, 9];
        let mut at = 3;
        let mut ranges = Vec::new();
        for length in lengths {
            ranges.push(range(&memory, at, length));
            at += length;
        }
        let parts = Parts { key: &name, offsets: &offsets.map(|at: u64| at), memory: &ranges };
        let read = node.client.read_parts(&[parts], BufferScope::Anywhere).remove(0).unwrap();
        assert!(read.iter().all(Result::is_ok), "{read:?}");
        let mut at = 3;
        for (offset, length) in offsets.into_iter().zip(lengths) {
            let mut bytes = vec![0; length];
            memory.read(at, &mut bytes).unwrap();
            assert!(bytes == whole[offset as usize..][..length], "{offset} {length}");
            at += length as u64;
        }
        let rows = GridDimension { count: 50, object_step: 200_000, memory_step: 64 };
        let rows = [rows].into_iter().collect();
        let grid = Grid::new(10, 64, rows, |length| range(&memory, 0, length)).unwrap();
        let wanted = GridParts { key: &name, grids: &[grid] };
        let read = node.client.read_grids(&[wanted], BufferScope::Anywhere, false, "").remove(0);
        assert_eq!(read.unwrap().nbytes, 50 * 64);
        for row in 0..50 {
            let mut bytes = [0; 64];
            memory.read(row * 64, &mut bytes).unwrap();
            assert!(bytes == whole[10 + row as usize * 200_000..][..64], "row {row}");
        }
    }
}

#[test]
fn copy_is_on_disk_soon_after_the_put() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(1);
    let _owner = owner(&cluster, directory.path());
    let node = &cluster.nodes[0];
    node.put("first", &[1; 100]).unwrap();
    await_disk(node, "first");
    let mut took: Vec<Duration> = (0..20)
        .map(|number| {
            let name = format!("k{number}");
            node.put(&name, &[number; 4096]).unwrap();
            let begin = Instant::now();
            await_disk(node, &name);
            begin.elapsed()
        })
        .collect();
    took.sort();
    assert!(took[10] < Duration::from_millis(100), "{took:?}");
}

#[test]
fn owner_in_the_process_of_the_master_does_not_poll() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(1);
    let empty_answers = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&empty_answers);
    let link = cluster.tampering_link(move |answer| {
        if let Some(response::Call::FetchOffloads(answer)) = &answer.call
            && answer.records.as_ref().is_none_or(|records| records.versions.is_empty())
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    let begin = Instant::now();
    let _owner = cluster.join_by(with_disk(directory.path()), link).unwrap();
    let is_told = || (empty_answers.load(Ordering::Relaxed) > 0).then_some(());
    until(LIMIT, "the master has nothing to write", is_told);
    assert!(begin.elapsed() >= Duration::from_millis(900), "after {:?}", begin.elapsed());
    cluster.nodes[0].put("k", b"value").unwrap();
    await_disk(&cluster.nodes[0], "k");
}

#[test]
fn owner_that_is_restarted_brings_its_records_back() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = cluster(1);
    let first = owner(&cluster, directory.path());
    let objects = fill(&cluster.nodes[0]);
    drop(cluster.nodes.remove(0));
    drop(first);
    let reader = cluster.join(0).unwrap();
    assert_eq!(reader.get(&objects[0].0).unwrap(), None, "its only holder is gone");
    let _second = owner(&cluster, directory.path());
    for (name, value) in &objects {
        await_disk(&reader, name);
        assert!(reader.get(name).unwrap().as_ref() == Some(value), "{name}");
    }
}

#[test]
fn removed_object_does_not_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(1);
    let first = owner(&cluster, directory.path());
    let node = &cluster.nodes[0];
    for name in ["kept", "removed", "replaced"] {
        node.put(name, name.as_bytes()).unwrap();
        await_disk(node, name);
    }
    until(LIMIT, "the object is removed", || {
        node.client.remove(&[key("removed")], true).remove(0).ok()
    });
    drop(first);
    let _second = owner(&cluster, directory.path());
    await_disk(node, "kept");
    assert_eq!(node.get("removed").unwrap(), None);
}

#[test]
fn damaged_record_is_a_miss_and_never_wrong_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let OnDisk { cluster: _cluster, owner, reader, objects } = only_on_disk(directory.path());
    for entry in fs::read_dir(directory.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_string_lossy().starts_with("extent-") {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            let mut at = 4096;
            while at < file.metadata().unwrap().len() {
                file.write_at(&[0xa5; 16], at + 77).unwrap();
                at += 32 << 10;
            }
        }
    }
    for (at, (name, value)) in objects.iter().enumerate() {
        let node = if at % 2 == 0 { &owner } else { &reader };
        let found = node.get(name).expect("a miss is no error");
        assert!(found.is_none_or(|found| found == *value), "{name}");
        if value.len() >= 64 << 10 {
            assert_eq!(node.get(name).unwrap(), None, "{name}");
            until(LIMIT, "the master knows that it is gone", || {
                (copies(node, name) == (0, 0)).then_some(())
            });
        }
    }
    assert!(owner.client.metrics().disk.lost > 0);
}

#[test]
fn full_directory_drops_old_objects_and_reads_stay_right() {
    const LENGTH: usize = 300_000;
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = cluster(1);
    let owner = cluster.join_with(with_capacity(directory.path(), 32 << 20)).unwrap();
    let reader = cluster.join(0).unwrap();
    let lender = cluster.nodes.remove(0);
    // A lease keeps an object in memory; these are only probed.
    for number in 0..200 {
        lender.put(&format!("k{number}"), &value(number, LENGTH)).unwrap();
        if number % 10 == 9 {
            await_disk(&lender, &format!("k{number}"));
        }
    }
    drop(lender);
    let mut found = 0;
    for number in 0..200 {
        let name = format!("k{number}");
        let node = if number % 2 == 0 { &owner } else { &reader };
        if let Some(bytes) = node.get(&name).expect("a miss is no error") {
            assert!(bytes == value(number, LENGTH), "{name}");
            found += 1;
        }
    }
    let metrics = owner.client.metrics().disk;
    assert!((40..120).contains(&found), "{found} of 32 MiB: {metrics:?}");
    assert!(metrics.evicted >= 80, "{metrics:?}");
    assert_eq!(metrics.lost, 0, "the master knows what was dropped");
}

#[test]
fn reads_end_when_the_owner_leaves() {
    let directory = tempfile::tempdir().unwrap();
    let OnDisk { cluster, owner, reader, objects } = only_on_disk(directory.path());
    let (name, value) = objects.last().unwrap();
    assert!(reader.get(name).unwrap().as_ref() == Some(value));
    owner.client.unmount_disks(Duration::ZERO).unwrap();
    assert_eq!(reader.get(name).unwrap(), None);
    let error = owner.client.unmount_disks(Duration::ZERO).unwrap_err();
    assert_eq!(error.code(), ErrorCode::SEGMENT_NOT_FOUND);
    let _second = cluster.join_with(with_disk(directory.path())).expect("it is free again");
    await_disk(&reader, name);
    assert!(reader.get(name).unwrap().as_ref() == Some(value));
}

#[test]
fn directory_leaves_once_the_master_knows() {
    let (directory, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let state_dir = StateDir::At(state.path().to_owned());
    let mut cluster =
        start(1, MasterConfig { has_offload: true, state_dir, ..MasterConfig::embedded() });
    let owner = owner(&cluster, directory.path());
    cluster.nodes[0].put("k", b"value").unwrap();
    await_disk(&owner, "k");
    cluster.stop_master();
    let error = owner.client.unmount_disks(Duration::ZERO).unwrap_err();
    assert!(error.remedy().contains("stays open"), "{error}");
    assert_eq!(owner.client.metrics().disk.directories.len(), 1, "it can be read");
    cluster.start_master().unwrap();
    until(LIMIT, "the directory has left", || {
        owner.client.metrics().disk.directories.is_empty().then_some(())
    });
}

#[test]
fn directory_in_use_is_refused_with_its_holder() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = cluster(0);
    let _owner = owner(&cluster, directory.path());
    let error = cluster.join_with(with_disk(directory.path())).unwrap_err();
    assert_eq!(error.code(), ErrorCode::FILE_LOCK_FAIL);
    let text = error.to_string();
    assert!(text.contains(&directory.path().display().to_string()), "{text}");
    assert!(text.contains(&std::process::id().to_string()), "{text}");
}

#[test]
fn copy_of_an_open_directory_is_refused() {
    let (directory, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let cluster = cluster(1);
    let owner = owner(&cluster, directory.path());
    cluster.nodes[0].put("k", b"value").unwrap();
    await_disk(&owner, "k");
    for entry in fs::read_dir(directory.path()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let error = cluster.join_with(with_disk(copy.path())).unwrap_err();
    assert_eq!(error.code(), ErrorCode::SEGMENT_ALREADY_EXISTS, "{error}");
    assert!(error.to_string().contains(&copy.path().display().to_string()), "{error}");
    assert_eq!(owner.get("k").unwrap().as_deref(), Some(&b"value"[..]));
}

#[test]
fn master_without_offload_refuses_a_disk() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = start(0, MasterConfig::embedded());
    let error = cluster.join_with(with_disk(directory.path())).unwrap_err();
    assert_eq!(error.code(), ErrorCode::UNABLE_OFFLOAD, "{error}");
    assert!(cluster.join(0).is_ok());
}

#[test]
fn records_of_a_pool_with_a_token_are_read_by_its_clients() {
    let directory = tempfile::tempdir().unwrap();
    let rpc_token = Some(Token::new("open sesame").unwrap());
    let master = MasterConfig { has_offload: true, rpc_token, ..MasterConfig::embedded() };
    let mut cluster = start(1, master);
    let _owner = owner(&cluster, directory.path());
    cluster.nodes[0].put("k", b"value").unwrap();
    await_disk(&cluster.nodes[0], "k");
    drop(cluster.nodes.remove(0));
    let reader = cluster.join(0).unwrap();
    assert_eq!(reader.get("k").unwrap().as_deref(), Some(&b"value"[..]));
}

#[test]
fn owner_goes_on_with_a_master_that_was_restarted() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = cluster(1);
    let _owner = owner(&cluster, directory.path());
    cluster.nodes[0].put("before", &[7; 5000]).unwrap();
    await_disk(&cluster.nodes[0], "before");
    cluster.start_master().unwrap();
    let node = &cluster.nodes[0];
    let mut number = 0;
    let name = until(LIMIT, "an object is on disk again", || {
        number += 1;
        let name = format!("after{number}");
        node.put(&name, &[8; 5000]).ok()?;
        (copies(node, &name).1 > 0).then_some(name)
    });
    assert_eq!(node.get(&name).unwrap(), Some(vec![8; 5000]));
}
