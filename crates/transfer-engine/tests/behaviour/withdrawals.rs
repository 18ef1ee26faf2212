//! Unregistering memory that peers keep using: they are told or cut off, all at the same time.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use mooncake_base::{ErrorCode, ErrorKind};
use mooncake_transfer_engine::{Engine, EngineConfig, SegmentDescriptor};

use crate::{
    child::ChildPeer,
    pair::{AT_ONCE, Lent, config, runtime, soon},
};

const MIB: usize = 1 << 20;

/// The opcodes of upstream's frames.
const READ: u8 = 0;
const WRITE: u8 = 1;

/// The wait for users of memory in these tests.
const TIMEOUT: Duration = Duration::from_secs(2);

fn engine(runtime: &tokio::runtime::Runtime) -> Engine {
    let config = EngineConfig { withdraw_timeout: TIMEOUT, ..config(None) };
    Engine::start(config, runtime.handle().clone()).unwrap()
}

/// A peer over TCP that has begun a request in upstream's frames and stalls in the middle of it.
fn stalled_peer(engine: &Engine, operation: u8, lent: &Lent) -> TcpStream {
    let segment = engine.metadata().resolve(engine.segment_name(), soon()).unwrap();
    let SegmentDescriptor { tcp_data_host, tcp_data_port, .. } = segment;
    let mut stream = TcpStream::connect((tcp_data_host, tcp_data_port)).unwrap();
    stream.set_read_timeout(Some(AT_ONCE)).unwrap();
    let mut frame = [0; 24];
    frame[..8].copy_from_slice(&lent.length().to_le_bytes());
    frame[8..16].copy_from_slice(&lent.base().to_le_bytes());
    frame[16] = operation;
    stream.write_all(&frame).unwrap();
    match operation {
        READ => stream.read_exact(&mut [0; 9]).unwrap(),
        _ => stream.write_all(&[7; 9]).unwrap(),
    }
    stream
}

/// Waits until the first byte was written.
fn await_write(bytes: &[u8]) {
    let begin = Instant::now();
    // SAFETY: the reference is valid; a peer changes the byte meanwhile.
    while unsafe { bytes.as_ptr().read_volatile() } == 0 {
        assert!(begin.elapsed() < AT_ONCE, "nothing arrives");
        std::thread::yield_now();
    }
}

#[test]
fn stalled_tcp_peers_are_cut_off_by_unregistering() {
    let runtime = runtime();
    let engine = engine(&runtime);
    for operation in [READ, WRITE] {
        // Large enough that a read does not fit into the buffers of the sockets.
        let Lent::User(_, bytes) = Lent::user(&engine, 64 * MIB) else { unreachable!() };
        let lent = Lent::User(engine.clone(), bytes);
        let Lent::User(_, bytes) = &lent else { unreachable!() };
        let mut stream = stalled_peer(&engine, operation, &lent);
        if operation == WRITE {
            await_write(bytes);
        }
        let begin = Instant::now();
        engine.regions().unregister(lent.base()).unwrap();
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
        let before = bytes.to_vec();
        // The connection is closed: what else the peer sends goes nowhere.
        let _ = stream.write_all(&vec![9; MIB]);
        let closed = std::io::copy(&mut stream, &mut std::io::sink());
        let is_closed = closed.as_ref().is_ok_and(|sent| *sent < 64 * MIB as u64)
            || closed.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset);
        assert!(is_closed, "operation {operation}");
        assert!(*bytes == before, "written after the withdrawal");
        let again = engine.regions().unregister(lent.base()).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::NotFound);
    }
}

#[test]
fn stalled_tcp_peer_costs_other_peers_nothing() {
    let runtime = runtime();
    let engine = engine(&runtime);
    let mut child = ChildPeer::start();
    let (lent, other) = (Lent::user(&engine, MIB), Lent::user(&engine, MIB));
    [&lent, &other].into_iter().for_each(|lent| child.touch(&engine, lent.base()));
    let stream = stalled_peer(&engine, WRITE, &lent);
    let Lent::User(_, bytes) = &lent else { unreachable!() };
    await_write(bytes);
    // The peer in shared memory confirms at once, long before the other one is cut off.
    engine.regions().unregister(lent.base()).unwrap();
    drop(stream);
    // It is still attached: it is asked to leave the other range, and does.
    child.stop();
    let error = engine.regions().unregister(other.base()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::OBJECT_REPLICA_BUSY, "{error}");
}

#[test]
fn memory_is_busy_until_a_silent_peer_is_gone() {
    let runtime = runtime();
    let engine = engine(&runtime);
    let mut child = ChildPeer::start();
    let lent = [Lent::user(&engine, MIB), Lent::user(&engine, MIB)];
    lent.iter().for_each(|lent| child.touch(&engine, lent.base()));
    child.stop();
    let busy = |lent: &Lent| {
        let start = Instant::now();
        let error = engine.regions().unregister(lent.base()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::OBJECT_REPLICA_BUSY, "{error}");
        assert!(error.to_string().contains("did not leave"), "{error}");
        start.elapsed()
    };
    let waited = busy(&lent[0]);
    assert!(waited >= TIMEOUT && waited < AT_ONCE, "{waited:?}");
    // Nobody waits for this peer again, but it may still access what it knows.
    for lent in [&lent[1], &lent[0]] {
        let waited = busy(lent);
        assert!(waited < TIMEOUT, "{waited:?}");
    }
    child.kill();
    for lent in &lent {
        let begin = Instant::now();
        while let Err(error) = engine.regions().unregister(lent.base()) {
            assert_eq!(error.code(), ErrorCode::OBJECT_REPLICA_BUSY, "{error}");
            assert!(begin.elapsed() < AT_ONCE, "{error}");
            std::thread::yield_now();
        }
    }
}
