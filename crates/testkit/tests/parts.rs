//! Partial reads and writes of objects, in one call or in a session.

use std::slice::from_ref;

use mooncake_base::{ErrorCode, Result};
use mooncake_store_client::{BufferScope, Parts, ProbeTerms, PutOptions};
use mooncake_testkit::{
    Cluster, ClusterSettings, Random,
    cluster::{key, range},
};

fn cluster(nodes: usize, is_tcp_forced: bool) -> Cluster {
    Cluster::start(ClusterSettings { nodes, is_tcp_forced, ..ClusterSettings::default() })
        .expect("a cluster of one process starts")
}

fn code<T: std::fmt::Debug>(outcome: &Result<T>) -> ErrorCode {
    outcome.as_ref().expect_err("it must fail").code()
}

#[test]
fn reads_parts_of_many_objects_in_one_call() {
    for is_tcp_forced in [false, true] {
        let cluster = cluster(2, is_tcp_forced);
        let [a, b] = &cluster.nodes[..] else { panic!() };
        let mut random = Random::new();
        let (x, y) = (random.bytes(10_000), random.bytes(5_000));
        a.put("x", &x).unwrap();
        b.put("y", &y).unwrap();
        let memory = b.engine().allocate(1 << 20).unwrap();
        let (kx, ky, none) = (key("x"), key("y"), key("none"));
        let at = |offset, length| range(&memory, offset, length);
        let wanted = [
            Parts {
                key: &kx,
                offsets: &[9_000, 5, 9_999],
                memory: &[at(0, 1000), at(2000, 7), at(3000, 2)],
            },
            Parts { key: &ky, offsets: &[0, 0], memory: &[at(4000, 5000), at(0, 0)] },
            Parts { key: &none, offsets: &[0], memory: &[at(0, 1)] },
            Parts { key: &kx, offsets: &[u64::MAX, 100], memory: &[at(3000, 2), at(9000, 50)] },
            Parts { key: &kx, offsets: &[1], memory: &[] },
            Parts { key: &kx, offsets: &[], memory: &[] },
        ];
        let calls = b.client.metrics().calls.done;
        let read = b.client.read_parts(&wanted, BufferScope::Registered);
        assert_eq!(b.client.metrics().calls.done - calls, 1, "one call for all of it");
        let first = read[0].as_ref().unwrap();
        assert_eq!((first[0].clone().unwrap(), first[1].clone().unwrap()), (1000, 7));
        assert_eq!(code(&first[2]), ErrorCode::INVALID_PARAMS);
        assert!(matches!(read[1].as_ref().unwrap()[..], [Ok(5000), Ok(0)]));
        assert_eq!(code(&read[2]), ErrorCode::OBJECT_NOT_FOUND);
        let fourth = read[3].as_ref().unwrap();
        assert_eq!(code(&fourth[0]), ErrorCode::INVALID_PARAMS);
        assert_eq!(fourth[1].clone().unwrap(), 50);
        assert_eq!(code(&read[4]), ErrorCode::INVALID_PARAMS);
        assert!(read[5].as_ref().unwrap().is_empty());
        let bytes = |offset: usize, length: usize| {
            let mut bytes = vec![0; length];
            memory.read(offset as u64, &mut bytes).unwrap();
            bytes
        };
        assert_eq!(bytes(0, 1000), x[9_000..]);
        assert_eq!(bytes(2000, 7), x[5..12]);
        assert_eq!(bytes(4000, 5000), y);
        assert_eq!(bytes(9000, 50), x[100..150]);
    }
}

#[test]
fn rejects_unregistered_memory_where_required() {
    let cluster = cluster(2, false);
    let [node, other] = &cluster.nodes[..] else { panic!() };
    node.put("k", &[7; 4096]).unwrap();
    let inside = node.engine().allocate(4096).unwrap();
    let outside = other.engine().allocate(4096).unwrap();
    let k = key("k");
    for (memory, is_registered) in [(&inside, true), (&outside, false)] {
        let memory = [range(memory, 0, 4096)];
        let parts = [Parts { key: &k, offsets: &[0], memory: &memory }];
        assert!(
            node.client.read_parts(&parts, BufferScope::Anywhere)[0].as_ref().unwrap()[0].is_ok()
        );
        let read =
            node.client.read_parts(&parts, BufferScope::Registered).remove(0).unwrap().remove(0);
        assert_eq!(read.is_ok(), is_registered);
        if !is_registered {
            assert_eq!(code(&read), ErrorCode::INVALID_PARAMS);
        }
    }
}

#[test]
fn object_is_written_and_read_in_sessions() {
    let cluster = cluster(2, false);
    let [a, b] = &cluster.nodes[..] else { panic!() };
    let memory = a.engine().allocate(1 << 16).unwrap();
    let value = Random::new().bytes(3000);
    memory.write(0, &value).unwrap();
    let (k, options) = (key("k"), PutOptions::default());
    let part = |at: usize, length: usize| range(&memory, at, length);
    let write = |offset: u64, at, length| {
        let parts = [Parts { key: &k, offsets: &[offset], memory: &[part(at, length)] }];
        a.client.sessions().write(&parts).remove(0)
    };
    assert_eq!(code(&write(0, 0, 1)), ErrorCode::INVALID_PARAMS, "it has not begun");
    a.client.sessions().begin_writes(&[(k.clone(), 3000)], &options).remove(0).unwrap();
    let again = a.client.sessions().begin_writes(&[(k.clone(), 3000)], &options).remove(0);
    assert_eq!(code(&again), ErrorCode::INVALID_PARAMS);
    assert_eq!(write(1000, 1000, 2000).unwrap(), 2000);
    assert_eq!(code(&write(2999, 0, 2)), ErrorCode::INVALID_PARAMS, "it ends outside");
    assert_eq!(
        code(&b.client.sessions().begin_reads(from_ref(&k)).remove(0)),
        ErrorCode::REPLICA_IS_NOT_READY
    );
    assert_eq!(write(0, 0, 1000).unwrap(), 1000);
    a.client.sessions().end_writes(from_ref(&k)).remove(0).unwrap();
    assert_eq!(
        code(&a.client.sessions().end_writes(from_ref(&k)).remove(0)),
        ErrorCode::INVALID_PARAMS
    );
    assert_eq!(b.get("k").unwrap().unwrap(), value);
    let exists = a.client.sessions().begin_writes(&[(k.clone(), 1)], &options).remove(0);
    assert_eq!(code(&exists), ErrorCode::OBJECT_ALREADY_EXISTS);

    let read = |offset, at, length| {
        let parts = [Parts { key: &k, offsets: &[offset], memory: &[part(at, length)] }];
        a.client.sessions().read(&parts).remove(0)
    };
    assert_eq!(code(&read(0, 8000, 1)), ErrorCode::INVALID_PARAMS, "it has not begun");
    a.client.sessions().begin_reads(from_ref(&k)).remove(0).unwrap();
    assert_eq!(read(2000, 8000, 1000).unwrap(), 1000);
    assert_eq!(code(&read(2000, 8000, 1001)), ErrorCode::INVALID_PARAMS);
    let mut bytes = vec![0; 1000];
    memory.read(8000, &mut bytes).unwrap();
    assert_eq!(bytes, value[2000..]);
    a.client.sessions().end_reads(from_ref(&k));
    assert_eq!(code(&read(0, 8000, 1)), ErrorCode::INVALID_PARAMS);

    let gone = key("gone");
    a.client.sessions().begin_writes(&[(gone.clone(), 10)], &options).remove(0).unwrap();
    a.client.sessions().revoke_writes(from_ref(&gone)).remove(0).unwrap();
    assert!(a.client.exists(&[gone], ProbeTerms::default()).remove(0).unwrap().is_none());
}
