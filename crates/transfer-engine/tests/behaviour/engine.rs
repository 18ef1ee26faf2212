//! Paths, peers, and shutdown of an engine.

use std::{
    ptr,
    time::{Duration, Instant},
};

use mooncake_base::{Clock, ErrorKind, SegmentId, SystemClock};
use mooncake_transfer_engine::{Engine, EngineConfig, Opcode, TransferEntry, TransportKind};
use tokio::runtime::Runtime;

use crate::pair::{AT_ONCE, Lent, Pair, config, held, move_one, runtime, soon, start};

#[test]
fn uses_the_cheapest_enabled_transport() {
    let runtime = runtime();
    let far = start(None, &runtime);
    let lent = Lent::shared(&far, 4096);
    let kinds = [TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp];
    for (count, expected) in kinds.into_iter().enumerate() {
        let config = EngineConfig {
            name: "127.0.0.1".to_owned(),
            disabled: kinds[..count].to_vec(),
            ..EngineConfig::default()
        };
        let near = Engine::start(config, runtime.handle().clone()).unwrap();
        let peer = near.open(far.segment_name(), soon()).unwrap();
        assert_eq!(peer.transport(), Some(expected));
        move_one(&near, &peer, Opcode::Write, (held(&mut [1; 9]), lent.base())).unwrap();
        let snapshot = near.snapshot();
        let served = snapshot.transports.iter().find(|one| one.bytes_written == 9).unwrap();
        assert_eq!((served.kind, served.entries, served.errors), (expected, 1, 0));
    }
}

#[test]
fn forced_tcp_leaves_only_tcp() {
    let runtime = runtime();
    let engine = start(Some(TransportKind::Tcp), &runtime);
    let other = start(None, &runtime);
    for (from, to) in [(&engine, &other), (&engine, &engine)] {
        let peer = from.open(to.segment_name(), soon()).unwrap();
        assert_eq!(peer.transport(), Some(TransportKind::Tcp));
    }
}

#[test]
fn opens_itself_by_name_and_one_peer_per_name() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let peer = engine.open(engine.segment_name(), soon()).unwrap();
    assert_eq!(peer.transport(), Some(TransportKind::Memory));
    let again = engine.open(engine.segment_name(), soon()).unwrap();
    assert!(std::sync::Arc::ptr_eq(&peer, &again));
    let lent = Lent::shared(&engine, 4096);
    move_one(&engine, &peer, Opcode::Write, (held(&mut [5; 5]), lent.base())).unwrap();
    let mut back = [0; 5];
    move_one(&engine, &peer, Opcode::Read, (held(&mut back), lent.base())).unwrap();
    assert_eq!(back, [5; 5]);
}

#[test]
fn missing_segment_is_an_error_in_time() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let start = Instant::now();
    for name in ["127.0.0.1:1", "", "garbage", "127.0.0.1"] {
        let error = engine.open(name, soon()).unwrap_err();
        assert!(!error.to_string().is_empty(), "{name}");
    }
    assert!(start.elapsed() < AT_ONCE);
    assert!(engine.snapshot().peers.is_empty());
}

#[test]
fn reconnects_to_a_peer_restarted_under_its_name() {
    let runtime = runtime();
    for kind in [None, Some(TransportKind::Shm), Some(TransportKind::Tcp)] {
        let near = start(kind, &runtime);
        let far = start(kind, &runtime);
        let (name, port) = (far.segment_name().to_owned(), far.rpc_port());
        let peer = near.open(&name, soon()).unwrap();
        let before = peer.descriptor();
        far.close(SystemClock.now() + Duration::from_secs(1));
        drop(far);
        let far = start_at(port, kind, &runtime);
        assert_eq!(far.segment_name(), name);
        let lent = Lent::shared(&far, 4096);
        move_one(&near, &peer, Opcode::Write, (held(&mut [1; 9]), lent.base())).unwrap();
        assert_ne!(peer.descriptor(), before);
    }
}

/// Starts an engine at the port of one that has been closed.
fn start_at(port: u16, only: Option<TransportKind>, runtime: &Runtime) -> Engine {
    let config =
        EngineConfig { name: format!("127.0.0.1:{port}"), is_port_fixed: true, ..config(only) };
    // A process that another test has just forked may still hold the port for a moment.
    let give_up = Instant::now() + AT_ONCE;
    loop {
        match Engine::start(config.clone(), runtime.handle().clone()) {
            Ok(far) => return far,
            Err(error) => assert!(Instant::now() < give_up, "{error}"),
        }
        std::thread::yield_now();
    }
}

#[test]
fn only_the_owner_of_a_segment_is_reached_after_a_restart() {
    let runtime = runtime();
    for kind in [None, Some(TransportKind::Shm), Some(TransportKind::Tcp)] {
        let near = start(kind, &runtime);
        let far = start(kind, &runtime);
        let (name, port, left) =
            (far.segment_name().to_owned(), far.rpc_port(), far.new_segment_id());
        let peer = near.open(&name, soon()).unwrap();
        far.close(SystemClock.now() + Duration::from_secs(1));
        drop(far);
        let far = start_at(port, kind, &runtime);
        let (came, lent) = (far.new_segment_id(), Lent::shared(&far, 4096));
        // The peer is not known to have left before a transfer finds out.
        for (segment, is_there) in [(came, true), (left, false), (came, true)] {
            let mut bytes = [7; 9];
            let mut entries = [TransferEntry::new(held(&mut bytes), lent.base())];
            let owner = segment.engine_mark();
            near.transfer_to_owner(&peer, owner, Opcode::Write, &mut entries, soon());
            assert_eq!(entries[0].outcome.take().unwrap().is_ok(), is_there, "{kind:?} {segment}");
        }
    }
}

#[test]
fn owner_whose_segments_carry_no_mark_is_accepted() {
    let runtime = runtime();
    for kind in [TransportKind::Memory, TransportKind::Shm, TransportKind::Tcp] {
        let (near, far) = (start(Some(kind), &runtime), start(Some(kind), &runtime));
        let peer = near.open(far.segment_name(), soon()).unwrap();
        let (lent, mut bytes) = (Lent::shared(&far, 4096), [7; 9]);
        let mut entries = [TransferEntry::new(held(&mut bytes), lent.base())];
        let owner = SegmentId::random().engine_mark();
        let served = near.transfer_to_owner(&peer, owner, Opcode::Write, &mut entries, soon());
        assert_eq!(served, Some(kind), "{:?}", entries[0].outcome);
    }
}

#[test]
fn forced_tcp_copies_only_within_one_engine() {
    let runtime = runtime();
    let other = start(Some(TransportKind::Tcp), &runtime);
    for copies_own in [false, true] {
        let config = EngineConfig {
            is_tcp_forced: true,
            copies_own,
            name: "127.0.0.1".to_owned(),
            ..EngineConfig::default()
        };
        let engine = Engine::start(config, runtime.handle().clone()).unwrap();
        let own_kind = if copies_own { TransportKind::Memory } else { TransportKind::Tcp };
        for (owner, kind) in [(&engine, own_kind), (&other, TransportKind::Tcp)] {
            let (lent, mut whole, mut bytes) = (Lent::shared(owner, 4096), *b"whole", [0; 5]);
            let peer = engine.open(owner.segment_name(), soon()).unwrap();
            let mut entries = [TransferEntry::new(held(&mut whole), lent.base())];
            assert_eq!(engine.transfer(&peer, Opcode::Write, &mut entries, soon()), Some(kind));
            move_one(&engine, &peer, Opcode::Read, (held(&mut bytes), lent.base())).unwrap();
            assert_eq!(&bytes, b"whole");
        }
    }
}

#[test]
fn closed_engine_refuses_calls_and_close_is_idempotent() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let peer = engine.open(engine.segment_name(), soon()).unwrap();
    let memory = engine.allocate(4096).unwrap();
    let begin = Instant::now();
    engine.close(soon());
    engine.close(soon());
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    assert_eq!(engine.open("127.0.0.1:1", soon()).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(engine.allocate(1).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(engine.regions().register(4096, 1, "*").unwrap_err().kind(), ErrorKind::Closed);
    let mut entries = [TransferEntry::new(held(&mut [1]), memory.base())];
    engine.transfer(&peer, Opcode::Write, &mut entries, soon());
    let error = entries[0].outcome.take().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    // The memory stays valid for its holder.
    memory.write(0, b"x").unwrap();
}

#[test]
fn dropping_the_last_clone_frees_the_ports() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let port = engine.rpc_port();
    let clone = engine.clone();
    drop(engine);
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    drop(clone);
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err());
}

#[test]
fn rejects_invalid_configurations() {
    let runtime = runtime();
    let bad = [
        EngineConfig { metadata: String::new(), ..EngineConfig::default() },
        EngineConfig { metadata: "foo://x".to_owned(), ..EngineConfig::default() },
        EngineConfig { name: "a b".to_owned(), ..EngineConfig::default() },
        EngineConfig { connections_per_peer: 0, ..EngineConfig::default() },
        EngineConfig { bind_address: Some("nowhere".to_owned()), ..EngineConfig::default() },
        EngineConfig {
            metadata: "http://127.0.0.1:1/metadata".to_owned(),
            ..EngineConfig::default()
        },
    ];
    for config in bad {
        let text = format!("{config:?}");
        assert!(Engine::start(config, runtime.handle().clone()).is_err(), "{text}");
    }
}

#[test]
fn forked_child_cannot_use_or_disturb_engines() {
    for pair in [Pair::over_memory(), Pair::over_shm(), Pair::over_tcp()] {
        let memory = pair.far.allocate(4096).unwrap();
        memory.write(0, b"parent").unwrap();
        // The path is open, and has been used.
        let mut bytes = [0; 6];
        pair.read(memory.base(), &mut bytes).unwrap();
        // SAFETY: the child does what a forked Python does: it uses inherited objects and exits.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let is_refused = pair.near.open("127.0.0.1:1", soon()).is_err()
                && pair.write(memory.base(), &mut [9; 6]).is_err()
                && pair.read(memory.base(), &mut [9; 6]).is_err();
            // SAFETY: the memory is mapped in the child, too, privately.
            unsafe { ptr::write_bytes(memory.base() as *mut u8, b'c', 6) };
            let Pair { near, far, peer, runtime, segment: _ } = pair;
            drop((peer, near, far, memory));
            // The runtime's threads do not exist in the child and cannot be joined.
            std::mem::forget(runtime);
            // SAFETY: ends the child at once, without the exit handlers of the test harness.
            unsafe { libc::_exit(if is_refused { 0 } else { 7 }) };
        }
        let mut status = -1;
        // SAFETY: waits for the child of this test; `status` is a live local.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        memory.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"parent");
        pair.write(memory.base(), &mut [1; 6]).unwrap();
        pair.read(memory.base(), &mut bytes).unwrap();
        assert_eq!(bytes, [1; 6]);
        assert!(pair.near.snapshot().peers[0].errors == 0, "the path is intact");
    }
}

#[test]
fn registering_touches_no_page() {
    const LENGTH: usize = 1 << 40;
    const INSPECTED: usize = 1 << 30;
    let runtime = runtime();
    let pair = Pair::over_memory();
    let engine = start(None, &runtime);
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
    let flags = flags | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: creates a new mapping at an address that the kernel chooses.
    let base = unsafe { libc::mmap(ptr::null_mut(), LENGTH, protection, flags, -1, 0) };
    assert_ne!(base, libc::MAP_FAILED, "mapping 1 TiB: {}", std::io::Error::last_os_error());
    let resident = || {
        let mut pages = vec![0_u8; INSPECTED / 4096];
        // SAFETY: the range is mapped, and `pages` has a byte for each of its pages.
        assert_eq!(unsafe { libc::mincore(base, INSPECTED, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    };
    let begin = Instant::now();
    for engine in [&engine, &pair.far] {
        engine.regions().register(base as u64, LENGTH as u64, "*").unwrap();
    }
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    assert_eq!(resident(), 0);
    pair.write(base as u64 + 4096, &mut [7; 9]).unwrap();
    let touched = resident();
    assert!((1..=512).contains(&touched), "{touched}: a page, or a huge one");
    for engine in [&engine, &pair.far] {
        engine.regions().unregister(base as u64).unwrap();
    }
    // SAFETY: mapped above and no longer referenced.
    assert_eq!(unsafe { libc::munmap(base, LENGTH) }, 0);
}
