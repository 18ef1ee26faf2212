//! Transfers between two processes of one host.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use mooncake_base::{Clock, ErrorKind, SystemClock};
use mooncake_transfer_engine::{Opcode, TransferEntry, TransportKind};

use crate::{
    child::{ChildPeer, LENT_BYTES},
    pair::{AT_ONCE, Lent, held, move_one, pattern, runtime, soon, start},
};

#[test]
fn accesses_memory_of_another_process_without_a_socket() {
    let runtime = runtime();
    // With several transports the engine might also measure another one.
    let engine = start(Some(TransportKind::Shm), &runtime);
    let child = ChildPeer::start();
    let peer = engine.open(&child.segment, soon()).unwrap();
    assert_eq!(peer.transport(), Some(TransportKind::Shm));
    for address in [child.shared, child.user] {
        for length in [1, 4097, LENT_BYTES] {
            let mut bytes = pattern(length, 7);
            let wanted = bytes.clone();
            move_one(&engine, &peer, Opcode::Write, (held(&mut bytes), address)).unwrap();
            bytes.fill(0);
            move_one(&engine, &peer, Opcode::Read, (held(&mut bytes), address)).unwrap();
            assert!(bytes == wanted, "{length}");
        }
        let beyond = (held(&mut [1; 2]), address + LENT_BYTES as u64 - 1);
        move_one(&engine, &peer, Opcode::Write, beyond).unwrap_err();
    }
    let snapshot = engine.snapshot();
    let moved = snapshot.transports.iter().filter(|one| one.bytes_read + one.bytes_written > 0);
    let moved: Vec<_> = moved.map(|one| (one.kind, one.bytes_read, one.bytes_written)).collect();
    let all = 2 * (1 + 4097 + LENT_BYTES as u64);
    assert_eq!(moved, [(TransportKind::Shm, all, all)]);
}

/// The transports to another process.
const KINDS: [TransportKind; 2] = [TransportKind::Shm, TransportKind::Tcp];

#[test]
fn killed_peer_is_an_error_within_the_deadline() {
    let runtime = runtime();
    for kind in KINDS {
        let engine = start(Some(kind), &runtime);
        let mut child = ChildPeer::start();
        let peer = engine.open(&child.segment, soon()).unwrap();
        assert_eq!(peer.transport(), Some(kind));
        let mut bytes = vec![1; 1000];
        for address in [child.shared, child.user] {
            move_one(&engine, &peer, Opcode::Write, (held(&mut bytes), address)).unwrap();
        }
        child.kill();
        let start = Instant::now();
        for address in [child.shared, child.user, child.shared] {
            for opcode in [Opcode::Write, Opcode::Read] {
                move_one(&engine, &peer, opcode, (held(&mut bytes), address)).unwrap_err();
            }
        }
        // Opening a peer that is already dead fails, too.
        engine.open(&child.segment, soon()).unwrap_err();
        assert!(start.elapsed() < AT_ONCE, "{kind}: {:?}", start.elapsed());
        assert_eq!(peer.transport(), None);
    }
}

#[test]
fn peer_killed_mid_batch_ends_the_batch() {
    let runtime = runtime();
    for (kind, opcode) in
        KINDS.into_iter().flat_map(|kind| [(kind, Opcode::Read), (kind, Opcode::Write)])
    {
        let engine = start(Some(kind), &runtime);
        let mut child = ChildPeer::start();
        let peer = engine.open(&child.segment, soon()).unwrap();
        let addresses = [child.shared, child.user];
        let deadline = soon();
        let moved = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for address in addresses {
                let (engine, peer, moved) = (&engine, &peer, &moved);
                scope.spawn(move || {
                    let mut bytes = vec![1; LENT_BYTES];
                    loop {
                        let mut entries = [TransferEntry::new(held(&mut bytes), address)];
                        engine.transfer(peer, opcode, &mut entries, deadline);
                        if let Some(Err(_)) = entries[0].outcome {
                            break;
                        }
                        moved.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            while moved.load(Ordering::Relaxed) < 4 {
                assert!(!deadline.has_passed(SystemClock.now()), "nothing moves over {kind}");
                std::thread::yield_now();
            }
            child.kill();
        });
        assert!(!deadline.has_passed(SystemClock.now()), "{kind} {opcode:?}");
    }
}

#[test]
fn stopped_peer_costs_a_transfer_its_deadline() {
    let runtime = runtime();
    for kind in KINDS {
        let near = start(Some(kind), &runtime);
        let child = ChildPeer::start();
        let peer = near.open(&child.segment, soon()).unwrap();
        let mut bytes = vec![1; LENT_BYTES];
        move_one(&near, &peer, Opcode::Write, (held(&mut bytes), child.user)).unwrap();
        child.stop();
        // A region that was queried before is copied without the owner's help.
        let address = if kind == TransportKind::Shm { child.shared } else { child.user };
        if kind == TransportKind::Shm {
            move_one(&near, &peer, Opcode::Read, (held(&mut bytes), child.user)).unwrap();
        }
        for opcode in [Opcode::Read, Opcode::Write] {
            let begin = Instant::now();
            let mut entries = [TransferEntry::new(held(&mut bytes), address)];
            let deadline = SystemClock.now() + Duration::from_millis(300);
            near.transfer(&peer, opcode, &mut entries, deadline);
            let error = entries[0].outcome.take().unwrap().unwrap_err();
            let is_late = error.kind() == ErrorKind::Timeout;
            assert!(is_late || error.to_string().contains("deadline"), "{error}");
            assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
        }
    }
}

#[test]
fn withdrawal_waits_for_the_confirmation_of_peers() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let mut child = ChildPeer::start();
    for lent in [Lent::shared(&engine, 1 << 20), Lent::user(&engine, 1 << 20)] {
        child.touch(&engine, lent.base());
        let start = Instant::now();
        lent.withdraw().unwrap();
        assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    }
    // The peer is still attached.
    let lent = Lent::user(&engine, 1 << 20);
    child.touch(&engine, lent.base());
}

#[test]
fn withdrawn_memory_is_not_written_by_a_busy_peer() {
    let runtime = runtime();
    for only in [None, Some(TransportKind::Tcp)] {
        let engine = start(only, &runtime);
        let mut child = ChildPeer::start();
        let mut bytes = vec![0_u8; LENT_BYTES];
        let base = bytes.as_mut_ptr();
        for round in 0..4 {
            // SAFETY: the memory is `bytes`, which is live; no peer accesses it between rounds.
            unsafe { base.write_bytes(0, LENT_BYTES) };
            engine.regions().register(base as u64, LENT_BYTES as u64, "cpu:0").unwrap();
            child.begin_flood(&engine, base as u64, LENT_BYTES);
            let begin = Instant::now();
            let middle = base.wrapping_add(LENT_BYTES / 2);
            // SAFETY: as above; the peer writes single bytes of any value.
            while unsafe { middle.read_volatile() } <= round {
                assert!(begin.elapsed() < 2 * AT_ONCE, "nothing arrives over {only:?}");
            }
            engine.regions().unregister(base as u64).unwrap();
            // SAFETY: as above; the range is withdrawn, so no peer writes to it any more.
            let left = unsafe { std::slice::from_raw_parts(base, LENT_BYTES) }.to_vec();
            let count = child.await_refusal();
            assert!(count >= usize::from(round), "{count} over {only:?}");
            // SAFETY: as above.
            let now = unsafe { std::slice::from_raw_parts(base, LENT_BYTES) };
            assert!(left == now, "written after the withdrawal, over {only:?}");
        }
    }
}

/// Returns the number of open sockets of this process.
fn sockets() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    let links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
}

#[test]
fn killed_peers_keep_no_socket_once_another_is_opened() {
    let runtime = runtime();
    let engine = start(Some(TransportKind::Shm), &runtime);
    let live = ChildPeer::start();
    engine.open(&live.segment, soon()).unwrap();
    let before = sockets();
    for _ in 0..4 {
        let mut child = ChildPeer::start();
        // A store of the application may hold the peer for long.
        let peer = engine.open(&child.segment, soon()).unwrap();
        std::mem::forget(std::sync::Arc::clone(&peer));
        child.kill();
        let until = Instant::now() + AT_ONCE;
        while peer.transport().is_some() {
            assert!(Instant::now() < until, "the end of the link is noticed");
            std::thread::yield_now();
        }
    }
    assert_eq!(engine.snapshot().peers.len(), 2, "the last one is dropped at the next opening");
    let last = ChildPeer::start();
    let peer = engine.open(&last.segment, soon()).unwrap();
    assert_eq!(engine.snapshot().peers.len(), 2);
    assert_eq!(sockets(), before + 1);
    assert_eq!(peer.transport(), Some(TransportKind::Shm));
    assert!(engine.open(&live.segment, soon()).unwrap().transport().is_some());
}
