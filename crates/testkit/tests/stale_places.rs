//! Places in the memory of a process that has left, at an address that another process has taken.

use mooncake_base::{EngineId, ErrorCode, SegmentId};
use mooncake_proto::v1::{Segment, response::Call as Answer};
use mooncake_store_client::ClientConfig;
use mooncake_testkit::{Cluster, ClusterSettings, Node};

/// Starts a cluster with a node that has put an object.
fn cluster(is_tcp_forced: bool) -> Cluster {
    let settings = ClusterSettings { is_tcp_forced, ..ClusterSettings::default() };
    let cluster = Cluster::start(settings).expect("a cluster of one process starts");
    cluster.nodes[0].put("k", b"value").expect("64 MiB are free");
    cluster
}

/// Starts a node that takes the places in the memory of the first node for places in the memory of an
/// engine that was at the same address before.
fn node_with_stale_places(cluster: &Cluster) -> Node {
    let gone = EngineId::random();
    let rename = move |segments: &mut Vec<Segment>| {
        for segment in segments {
            segment.id = SegmentId::of_engine(gone).to_bytes().to_vec().into();
        }
    };
    let link = cluster.tampering_link(move |response| match &mut response.call {
        Some(Answer::Locate(located)) => rename(&mut located.segments),
        Some(Answer::PutStart(started)) => rename(&mut started.segments),
        _ => {}
    });
    let config = ClientConfig { segment_bytes: 0, ..ClientConfig::default() };
    cluster.join_by(config, link).expect("the node joins")
}

#[test]
fn reader_refuses_memory_of_the_process_that_came_after() {
    for is_tcp_forced in [false, true] {
        let cluster = cluster(is_tcp_forced);
        let error = node_with_stale_places(&cluster).get("k").unwrap_err();
        assert_eq!(error.code(), ErrorCode::TRANSFER_FAIL, "{error}");
        assert!(format!("{error:#}").contains("another engine"), "{error:#}");
        assert_eq!(cluster.nodes[0].get("k").unwrap().unwrap(), b"value");
    }
}

#[test]
fn writer_leaves_memory_of_the_process_that_came_after() {
    for is_tcp_forced in [false, true] {
        let cluster = cluster(is_tcp_forced);
        let error = node_with_stale_places(&cluster).put("other", b"other").unwrap_err();
        assert!(format!("{error:#}").contains("another engine"), "{error:#}");
        assert_eq!(cluster.nodes[0].get("other").unwrap(), None);
    }
}
