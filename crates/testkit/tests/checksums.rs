//! Damaged copies: how a reader with checksums handles them.

use mooncake_base::{Clock, ErrorCode, SystemClock};
use mooncake_store_client::{BufferScope, ClientConfig, Parts, Place, PutOptions};
use mooncake_testkit::{
    Cluster, ClusterSettings, Node,
    cluster::{key, range},
};
use mooncake_transfer_engine::{Opcode, TransferEntry};

fn cluster(nodes: usize) -> Cluster {
    Cluster::start(ClusterSettings { nodes, ..ClusterSettings::default() })
        .expect("a cluster of one process starts")
}

/// Returns the places of the object's copies.
fn places(node: &Node, name: &str) -> Vec<Place> {
    node.client.describe(&[key(name)], false).remove(0).expect("it is there").places().to_vec()
}

/// Changes one byte of a copy without the master's knowledge.
fn damage(node: &Node, place: &Place) {
    let memory = node.engine().allocate(4096).expect("memory");
    memory.write(0, b"!").expect("it is ours");
    let deadline = SystemClock.now() + std::time::Duration::from_secs(10);
    let peer = node.engine().open(&place.segment.endpoint, deadline).expect("it lives");
    let at = place.segment.base + place.offset + place.length / 2;
    let mut pieces = [TransferEntry::new(range(&memory, 0, 1), at)];
    node.engine().transfer(&peer, Opcode::Write, &mut pieces, deadline);
    pieces[0].outcome.take().expect("it ran").expect("it was written");
}

#[test]
fn damaged_copy_is_skipped_and_counted() {
    let cluster = cluster(2);
    let value = vec![7; 200_000];
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    cluster.nodes[0].client.put_bytes(&key("k"), &value, &options).unwrap();
    let copies = places(&cluster.nodes[0], "k");
    assert_eq!(copies.len(), 2);
    damage(&cluster.nodes[0], &copies[0]);
    for node in &cluster.nodes {
        assert_eq!(node.get("k").unwrap().unwrap(), value);
    }
    // Each node reads its own copy first, so one of them read the damaged copy.
    let met: u64 = cluster.nodes.iter().map(|node| node.client.metrics().checksum_mismatches).sum();
    assert_eq!(met, 1);
}

#[test]
fn read_fails_if_all_copies_are_damaged() {
    let cluster = cluster(2);
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    cluster.nodes[0].client.put_bytes(&key("k"), &[7; 10_000], &options).unwrap();
    for place in places(&cluster.nodes[0], "k") {
        damage(&cluster.nodes[0], &place);
    }
    let error = cluster.nodes[1].get("k").unwrap_err();
    assert_eq!(error.code(), ErrorCode::CHECKSUM_MISMATCH, "{error}");
    assert!(error.to_string().contains("key=\"k\""), "{error}");
    assert_eq!(cluster.nodes[1].client.metrics().checksum_mismatches, 2);
}

#[test]
fn partial_reads_ignore_the_checksum() {
    let cluster = cluster(1);
    let node = &cluster.nodes[0];
    node.put("k", &[7; 1000]).unwrap();
    damage(node, &places(node, "k")[0]);
    let memory = node.engine().allocate(4096).unwrap();
    let memory = [range(&memory, 0, 1000)];
    let parts = [Parts { key: &key("k"), offsets: &[0], memory: &memory }];
    assert_eq!(node.client.read_parts(&parts, BufferScope::Anywhere)[0].as_ref().unwrap().len(), 1);
}

#[test]
fn reserved_object_has_no_checksum() {
    let cluster = cluster(1);
    assert!(cluster.nodes[0].client.config().has_checksums, "test nodes turn checksums on");
    assert!(!ClientConfig::default().has_checksums, "checksums are off by default");
    cluster.nodes[0].put("k", b"value").unwrap();
    let summed = cluster.nodes[0].client.describe(&[key("k")], false).remove(0).unwrap().checksum();
    assert!(summed.is_some());
    let reserved = cluster.nodes[0].client.reserve(&[(key("r"), 5)], &PutOptions::default());
    let reservation = reserved.into_iter().next().unwrap().unwrap().unwrap();
    cluster.nodes[0].client.publish(vec![reservation]).remove(0).unwrap();
    let bare = cluster.nodes[0].client.describe(&[key("r")], false).remove(0).unwrap().checksum();
    assert!(bare.is_none());
}
