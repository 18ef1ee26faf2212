//! What two processes of one host show each other.

use std::time::{Duration, Instant};

use mooncake_base::{Clock, SystemClock};
use mooncake_transfer_engine::{Opcode, Piece, TransportKind};

use crate::{
    child::{ChildPeer, LENT_BYTES},
    pair::{Lent, held, move_one, pattern, runtime, soon, start},
};

#[test]
fn memory_of_another_process_is_read_and_written_without_a_socket() {
    let runtime = runtime();
    let engine = start(None, &runtime);
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
    let moved = |kind| {
        let one = snapshot.transports.iter().find(|one| one.kind == kind).unwrap();
        (one.bytes_read, one.bytes_written)
    };
    let all = 2 * (1 + 4097 + LENT_BYTES as u64);
    assert_eq!(moved(TransportKind::Shm), (all, all));
    assert_eq!(moved(TransportKind::Tcp), (0, 0));
}

#[test]
fn the_death_of_a_peer_is_an_error_within_the_deadline() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let mut child = ChildPeer::start();
    let peer = engine.open(&child.segment, soon()).unwrap();
    let mut bytes = vec![1; 1000];
    for address in [child.shared, child.user] {
        move_one(&engine, &peer, Opcode::Write, (held(&mut bytes), address)).unwrap();
    }
    child.kill();
    let start = Instant::now();
    for address in [child.shared, child.user, child.shared] {
        move_one(&engine, &peer, Opcode::Write, (held(&mut bytes), address)).unwrap_err();
    }
    engine.open(&child.segment, soon()).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(peer.transport(), None);
}

#[test]
fn a_peer_that_dies_in_the_middle_ends_the_batch_and_nothing_hangs() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let mut child = ChildPeer::start();
    let peer = engine.open(&child.segment, soon()).unwrap();
    let addresses = [child.shared, child.user];
    let deadline = SystemClock.now() + Duration::from_secs(20);
    std::thread::scope(|scope| {
        for address in addresses {
            let (engine, peer) = (&engine, &peer);
            scope.spawn(move || {
                let mut bytes = vec![1; LENT_BYTES];
                loop {
                    let mut pieces = [Piece::new(held(&mut bytes), address)];
                    engine.transfer(peer, Opcode::Read, &mut pieces, deadline);
                    if let Some(Err(_)) = pieces[0].outcome {
                        break;
                    }
                }
            });
        }
        child.kill();
    });
    assert!(!deadline.has_passed(SystemClock.now()));
}

#[test]
fn memory_that_a_peer_has_attached_is_withdrawn_when_the_peer_has_confirmed() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let mut child = ChildPeer::start();
    for lent in [Lent::shared(&engine, 1 << 20), Lent::user(&engine, 1 << 20)] {
        child.touch(&engine, lent.base());
        let start = Instant::now();
        lent.withdraw().unwrap();
        assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
    }
    // And the peer is still attached.
    let lent = Lent::user(&engine, 1 << 20);
    child.touch(&engine, lent.base());
}

#[test]
fn a_peer_that_does_not_confirm_is_cut_off_at_the_deadline() {
    let runtime = runtime();
    let engine = start(None, &runtime);
    let mut child = ChildPeer::start();
    let lent = [Lent::user(&engine, 1 << 20), Lent::user(&engine, 1 << 20)];
    lent.iter().for_each(|lent| child.touch(&engine, lent.base()));
    child.stop();
    let [first, second] = lent;
    let start = Instant::now();
    let error = first.withdraw().unwrap_err();
    assert!(error.to_string().contains("did not leave"), "{error}");
    let waited = start.elapsed();
    assert!(waited >= Duration::from_secs(1) && waited < Duration::from_secs(3), "{waited:?}");
    // It is gone for the engine, so that the next one does not wait.
    let start = Instant::now();
    second.withdraw().unwrap();
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
}

#[test]
fn memory_is_withdrawn_from_under_a_process_that_writes_to_it_and_not_touched_afterwards() {
    let runtime = runtime();
    for only in [None, Some(TransportKind::Tcp)] {
        let engine = start(only, &runtime);
        let mut child = ChildPeer::start();
        let mut bytes = vec![0_u8; LENT_BYTES];
        let base = bytes.as_mut_ptr();
        for round in 0..4 {
            // SAFETY: the memory is `bytes`, which outlives this; nobody reaches it between rounds.
            unsafe { base.write_bytes(0, LENT_BYTES) };
            engine.regions().register(base as u64, LENT_BYTES as u64, "cpu:0").unwrap();
            child.begin_flood(&engine, base as u64, LENT_BYTES);
            let begin = Instant::now();
            let middle = base.wrapping_add(LENT_BYTES / 2);
            // SAFETY: as above; the peer writes single bytes, of which any value will do.
            while unsafe { middle.read_volatile() } <= round {
                assert!(begin.elapsed() < Duration::from_secs(20), "nothing arrives over {only:?}");
            }
            engine.regions().unregister(base as u64).unwrap();
            // SAFETY: as above; the range is withdrawn, so that nobody writes any more.
            let left = unsafe { std::slice::from_raw_parts(base, LENT_BYTES) }.to_vec();
            let count = child.await_refusal();
            assert!(count >= usize::from(round), "{count} over {only:?}");
            // SAFETY: as above.
            let now = unsafe { std::slice::from_raw_parts(base, LENT_BYTES) };
            assert!(left == now, "it was written after it was withdrawn, over {only:?}");
        }
    }
}
