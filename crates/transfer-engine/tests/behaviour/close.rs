//! The close of an engine whose batches wait for a peer that does not answer.

use std::{sync::Arc, time::Instant};

use mooncake_transfer_engine::{
    BatchStatus, Engine, EngineConfig, Opcode, TransferEntry, TransportKind,
};

use crate::{
    child::{ChildPeer, LENT_BYTES},
    pair::{AT_ONCE, config, held, move_one, runtime, soon, start},
};

/// Submits a batch to a stopped peer, and returns once a worker has it in flight.
fn submit(
    engine: &Engine,
    child: &ChildPeer,
    opcode: Opcode,
    (bytes, address): (&mut [u8], u64),
    hint: Option<TransportKind>,
) {
    let peer = engine.open(&child.segment, soon()).unwrap();
    let entries = vec![TransferEntry::new(held(bytes), address)];
    engine.submit_hinted(peer, opcode, entries, soon(), hint).unwrap();
    let until = Instant::now() + AT_ONCE;
    loop {
        let snapshot = engine.snapshot();
        let pool = snapshot.peers[0].connections;
        let is_sending = hint.is_some() || pool.open == 0 || pool.idle < pool.open;
        if snapshot.batches.waiting == 0 && is_sending {
            return;
        }
        assert!(Instant::now() < until, "no worker takes the batch");
        std::thread::yield_now();
    }
}

fn close_at_once(engine: &Engine) {
    let begin = Instant::now();
    engine.close(soon());
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    assert_eq!(engine.snapshot().workers, 0, "no thread uses the memory of a batch");
}

/// The batch of a stopped peer ends with its engine: neither is the memory written after the close, nor do
/// bytes that come there after the close reach the peer.
fn check(kind: TransportKind, opcode: Opcode) {
    let runtime = runtime();
    let (engine, other) = (start(Some(kind), &runtime), start(Some(kind), &runtime));
    let child = ChildPeer::start();
    // A region that was not queried before is not accessed without the owner's help.
    let address = if kind == TransportKind::Shm { child.shared } else { child.user };
    let mut bytes = vec![1; LENT_BYTES];
    let peer = engine.open(&child.segment, soon()).unwrap();
    move_one(&engine, &peer, Opcode::Write, (held(&mut bytes[..64]), child.user)).unwrap();
    child.stop();
    submit(&engine, &child, opcode, (&mut bytes, address), None);
    close_at_once(&engine);
    bytes.fill(3);
    child.resume();
    // The peer has served what was sent before once it has answered another engine.
    let peer = other.open(&child.segment, soon()).unwrap();
    let mut there = vec![0; LENT_BYTES];
    move_one(&other, &peer, Opcode::Read, (held(&mut there), address)).unwrap();
    assert!(!there.contains(&3), "{kind}: bytes were sent after the close");
    assert!(bytes.iter().all(|byte| *byte == 3), "{kind}: bytes were received after the close");
}

#[test]
fn read_over_tcp_ends_with_its_engine() {
    check(TransportKind::Tcp, Opcode::Read);
}

#[test]
fn write_over_tcp_ends_with_its_engine() {
    check(TransportKind::Tcp, Opcode::Write);
}

#[test]
fn query_over_shm_ends_with_its_engine() {
    check(TransportKind::Shm, Opcode::Read);
}

#[test]
fn worker_that_opens_a_connection_ends_with_its_engine() {
    let runtime = runtime();
    let config = EngineConfig { connect_timeout: 2 * AT_ONCE, ..config(None) };
    let engine = Engine::start(config, runtime.handle().clone()).unwrap();
    let child = ChildPeer::start();
    let peer = engine.open(&child.segment, soon()).unwrap();
    assert_eq!(peer.transport(), Some(TransportKind::Shm));
    child.stop();
    // The stopped peer sends no greeting.
    let hint = Some(TransportKind::Tcp);
    submit(&engine, &child, Opcode::Read, (&mut vec![0; LENT_BYTES], child.user), hint);
    close_at_once(&engine);
}

#[test]
fn batch_of_an_evicted_peer_ends_with_its_engine() {
    let runtime = runtime();
    let config = EngineConfig { peers_max: 1, ..config(Some(TransportKind::Tcp)) };
    let engine = Engine::start(config, runtime.handle().clone()).unwrap();
    let (child, newer) = (ChildPeer::start(), ChildPeer::start());
    let peer = engine.open(&child.segment, soon()).unwrap();
    engine.open(&newer.segment, soon()).unwrap();
    assert_eq!(engine.snapshot().peers_evicted, 1);
    child.stop();
    let mut bytes = vec![1; LENT_BYTES];
    let entries = vec![TransferEntry::new(held(&mut bytes), child.user)];
    engine.submit(peer, Opcode::Read, entries, soon()).unwrap();
    let until = Instant::now() + AT_ONCE;
    while engine.snapshot().batches.waiting > 0 {
        assert!(Instant::now() < until, "no worker takes the batch");
        std::thread::yield_now();
    }
    close_at_once(&engine);
}

#[test]
fn waiting_caller_learns_that_the_engine_is_closed() {
    let runtime = runtime();
    let engine = start(Some(TransportKind::Tcp), &runtime);
    let child = ChildPeer::start();
    let peer = engine.open(&child.segment, soon()).unwrap();
    child.stop();
    let mut bytes = vec![1; LENT_BYTES];
    let entries = vec![TransferEntry::new(held(&mut bytes), child.user)];
    let batch = engine.submit(Arc::clone(&peer), Opcode::Read, entries, soon()).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| engine.wait(&[batch]));
        close_at_once(&engine);
        match waiter.join().unwrap() {
            Ok(ends) => match &ends[..] {
                [BatchStatus::Failed(error)] => {
                    assert!(error.to_string().contains("closed"), "{error}");
                }
                other => panic!("{other:?}"),
            },
            // The engine was closed before the wait began.
            Err(error) => assert!(error.to_string().contains("closed"), "{error}"),
        }
    });
}
