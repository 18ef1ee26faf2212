//! Released read fences, and put starts whose responses are lost.

use std::time::Duration;

use mooncake_base::ErrorCode;
use mooncake_proto::v1::request::Call;
use mooncake_store_client::{ClientConfig, PutOutcome};
use mooncake_testkit::{Cluster, ClusterSettings, Fault, cluster::key};

const MIB: usize = 1 << 20;

/// Starts a cluster with one node, which lends 16 MiB and does not wait for fences.
fn small() -> Cluster {
    let settings = ClusterSettings { nodes: 0, ..ClusterSettings::default() };
    let mut cluster = Cluster::start(settings).expect("a cluster of one process starts");
    let config = ClientConfig {
        segment_bytes: 16 * MIB as u64,
        fenced_wait: Duration::ZERO,
        ..ClientConfig::default()
    };
    let node = cluster.join_with(config).expect("the node joins");
    cluster.nodes.push(node);
    cluster
}

#[test]
fn own_reads_do_not_delay_reuse_of_memory() {
    let cluster = small();
    let node = &cluster.nodes[0];
    let value = vec![1; 10 * MIB];
    for _ in 0..10 {
        node.put("k", &value).unwrap();
        assert_eq!(node.get("k").unwrap().unwrap().len(), value.len());
        node.client.remove(&[key("k")], true).remove(0).unwrap();
    }
}

#[test]
fn memory_is_quarantined_while_a_reader_holds_the_object() {
    let cluster = small();
    let node = &cluster.nodes[0];
    let value = vec![1; 10 * MIB];
    node.put("k", &value).unwrap();
    let located = node.client.locate(&[key("k")]).remove(0).unwrap();
    let other = located.clone();
    node.client.remove(&[key("k")], true).remove(0).unwrap();
    drop(located);
    let full = node.put("new", &value).unwrap_err();
    assert_eq!(full.code(), ErrorCode::NO_AVAILABLE_HANDLE, "{full}");
    drop(other);
    assert!(matches!(node.put("new", &value).unwrap(), PutOutcome::Stored { replicas: 1, .. }));
}

#[test]
fn put_start_is_idempotent_on_retry() {
    let cluster = small();
    let node = &cluster.nodes[0];
    node.link.inject(1, Fault::Repeat, |call| matches!(call, Call::PutStart(_)));
    assert!(matches!(node.put("k", b"value").unwrap(), PutOutcome::Stored { replicas: 1, .. }));
    assert_eq!(node.get("k").unwrap().unwrap(), b"value");
    assert_eq!(node.put("k", b"other").unwrap(), PutOutcome::Existed);
}
