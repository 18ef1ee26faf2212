//! The claims that every transport fulfils.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_base::{Clock, EngineId, ErrorKind, SegmentId, SystemClock};
use mooncake_transfer_engine::{Opcode, TransferEntry, TransportKind};

use crate::pair::{AT_ONCE, Lent, Pair, foreign, held, pattern};

const MIB: usize = 1 << 20;

pub(crate) fn arrives_whole_at_every_size_and_alignment(pair: &Pair) {
    for lent in pair.lend(9 * MIB) {
        let before = pattern(9 * MIB, 1);
        pair.write(lent.base(), &mut before.clone()).unwrap();
        let mut expected = before;
        for (seed, length) in [1, 2, 63, 4096, 4097, 65_536, 65_537, MIB, 3 * MIB + 1, 8 * MIB]
            .into_iter()
            .enumerate()
        {
            for offset in [0, 1, 4095, MIB - 1] {
                let mut bytes = pattern(length + 3, seed + offset);
                pair.write(lent.base() + offset as u64, &mut bytes[3..]).unwrap();
                expected[offset..offset + length].copy_from_slice(&bytes[3..]);
                let mut back = vec![0; length + 2];
                pair.read(lent.base() + offset as u64, &mut back[1..=length]).unwrap();
                assert!(back[1..=length] == bytes[3..], "{length} at {offset}");
                assert_eq!((back[0], back[length + 1]), (0, 0), "bytes beside were touched");
            }
        }
        let mut all = vec![0; 9 * MIB];
        pair.read(lent.base(), &mut all).unwrap();
        assert!(all == expected, "bytes beside were touched");
    }
}

pub(crate) fn arrives_whole_in_a_batch_of_20000(pair: &Pair) {
    const COUNT: usize = 20_000;
    const LENGTH: usize = 129;
    for lent in pair.lend(COUNT * LENGTH) {
        let mut bytes = pattern(COUNT * LENGTH, 5);
        let wanted = bytes.clone();
        // In reverse order, so that adjacent entries are not merged trivially.
        let batch = |bytes: &mut [u8]| -> Vec<TransferEntry> {
            let entries = bytes.chunks_mut(LENGTH).enumerate();
            let mut entries: Vec<TransferEntry> = entries
                .map(|(i, part)| TransferEntry::new(held(part), lent.base() + (i * LENGTH) as u64))
                .collect();
            entries.reverse();
            entries
        };
        move_all(pair, Opcode::Write, batch(&mut bytes));
        let mut back = vec![0; COUNT * LENGTH];
        move_all(pair, Opcode::Read, batch(&mut back));
        assert!(back == wanted);
    }
}

fn move_all(pair: &Pair, opcode: Opcode, mut entries: Vec<TransferEntry>) {
    pair.near.transfer(&pair.peer, opcode, &mut entries, crate::pair::soon());
    assert!(entries.iter().all(|entry| matches!(entry.outcome, Some(Ok(())))));
}

pub(crate) fn refuses_a_range_outside_registered_memory(pair: &Pair) {
    for lent in pair.lend(64 << 10) {
        let (base, end) = (lent.base(), lent.base() + lent.length());
        let mut bytes = vec![1; 64 << 10];
        for (address, length) in
            [(end, 1), (end - 1, 2), (base - 1, 1), (base - 1, 2), (8, 1), (u64::MAX, 1)]
        {
            for opcode in [Opcode::Read, Opcode::Write] {
                let local = held(&mut bytes[..length]);
                let one = (local, address);
                let error = crate::pair::move_one(&pair.near, &pair.peer, opcode, one).unwrap_err();
                let (kind, text) = (error.kind(), error.to_string());
                let is_refusal =
                    matches!(kind, ErrorKind::TransferFailed | ErrorKind::InvalidArgument);
                assert!(is_refusal && text.contains(&format!("{address:#x}")), "{text}");
            }
        }
        pair.write(end - 1, &mut bytes[..1]).unwrap();
        pair.read(base, &mut bytes).unwrap();
    }
}

pub(crate) fn refuses_a_segment_of_an_engine_that_has_left(pair: &Pair) {
    let gone = SegmentId::of_engine(EngineId::random());
    for lent in pair.lend(MIB) {
        let mut bytes = pattern(MIB, 1);
        pair.write(lent.base(), &mut bytes.clone()).unwrap();
        for opcode in [Opcode::Read, Opcode::Write] {
            let mut move_in = |segment: SegmentId| {
                let mut entries = [TransferEntry::new(held(&mut bytes), lent.base())];
                let (owner, soon) = (segment.engine_mark(), crate::pair::soon());
                pair.near.transfer_to_owner(&pair.peer, owner, opcode, &mut entries, soon);
                entries[0].outcome.take().unwrap()
            };
            let connections = pair.near.snapshot().peers[0].connections;
            let error = move_in(gone).unwrap_err();
            assert!(error.to_string().contains("another engine"), "{error}");
            assert_eq!(pair.near.snapshot().peers[0].connections, connections, "none is closed");
            move_in(pair.segment).unwrap();
        }
        let mut back = vec![0; MIB];
        pair.read(lent.base(), &mut back).unwrap();
        assert!(back == pattern(MIB, 1), "nothing was written");
    }
}

pub(crate) fn refuses_bad_local_memory(pair: &Pair) {
    for lent in pair.lend(4 * MIB) {
        for length in [1, 5000, 4 * MIB] {
            for opcode in [Opcode::Read, Opcode::Write] {
                let one = (foreign(4096, length), lent.base());
                crate::pair::move_one(&pair.near, &pair.peer, opcode, one).unwrap_err();
            }
        }
        // The failures have not broken the path.
        let mut bytes = pattern(4 * MIB, 3);
        let wanted = bytes.clone();
        let range = foreign(bytes.as_mut_ptr() as usize, bytes.len());
        let one = (range, lent.base());
        crate::pair::move_one(&pair.near, &pair.peer, Opcode::Write, one).unwrap();
        let mut back = vec![0; 4 * MIB];
        pair.read(lent.base(), &mut back).unwrap();
        assert!(back == wanted);
    }
}

pub(crate) fn refuses_transfers_after_unregistering(pair: &Pair) {
    for lent in pair.lend(MIB) {
        let base = lent.base();
        let mut bytes = vec![1; 1000];
        pair.write(base, &mut bytes).unwrap();
        // Withdrawing fails if a peer has not confirmed within the time-out.
        lent.withdraw().unwrap();
        pair.write(base, &mut bytes).unwrap_err();
        pair.read(base, &mut bytes).unwrap_err();
    }
    let lent = Lent::user(&pair.far, MIB);
    pair.write(lent.base(), &mut [1]).unwrap();
    let error = pair.far.regions().unregister(lent.base() + 1).unwrap_err();
    assert!(error.to_string().contains("address="), "{error}");
    pair.far.regions().unregister(lent.base()).unwrap();
    pair.write(lent.base(), &mut [1]).unwrap_err();
    pair.far.regions().register(lent.base(), lent.length(), "*").unwrap();
    pair.write(lent.base(), &mut [7]).unwrap();
}

pub(crate) fn many_threads_share_an_engine(pair: &Pair) {
    const LENGTH: usize = 200_000;
    for lent in pair.lend(8 * LENGTH) {
        thread::scope(|scope| {
            for thread in 0..8 {
                let address = lent.base() + (thread * LENGTH) as u64;
                scope.spawn(move || {
                    for round in 0..20 {
                        let mut bytes = pattern(LENGTH, thread * 31 + round);
                        let wanted = bytes.clone();
                        pair.write(address, &mut bytes).unwrap();
                        bytes.fill(0);
                        pair.read(address, &mut bytes).unwrap();
                        assert!(bytes == wanted, "thread {thread} round {round}");
                    }
                });
            }
        });
    }
}

pub(crate) fn refuses_a_passed_deadline(pair: &Pair) {
    let [lent, _] = pair.lend(MIB);
    let mut bytes = vec![1; MIB];
    let mut entries = [TransferEntry::new(held(&mut bytes), lent.base())];
    pair.near.transfer(&pair.peer, Opcode::Write, &mut entries, SystemClock.now());
    let error = entries[0].outcome.take().unwrap().unwrap_err();
    assert!(error.to_string().contains("deadline"), "{error}");
}

pub(crate) fn failed_entries_leave_the_others_alone(pair: &Pair) {
    for lent in pair.lend(MIB) {
        let mut bytes = pattern(300, 9);
        let mut entries: Vec<TransferEntry> = bytes
            .chunks_mut(100)
            .zip([lent.base(), lent.base() + lent.length() - 99, lent.base() + 100])
            .map(|(part, address)| TransferEntry::new(held(part), address))
            .collect();
        entries.push(TransferEntry::new(foreign(8, 10), lent.base() + 500));
        pair.near.transfer(&pair.peer, Opcode::Write, &mut entries, crate::pair::soon());
        let went: Vec<bool> =
            entries.iter().map(|entry| matches!(entry.outcome, Some(Ok(())))).collect();
        assert_eq!(went, [true, false, true, false]);
        let mut back = vec![0; 200];
        pair.read(lent.base(), &mut back).unwrap();
        assert!(back[..100] == bytes[..100] && back[100..] == bytes[200..]);
    }
}

pub(crate) fn closed_peer_is_an_error_before_the_deadline(pair: &Pair) {
    let lent = pair.lend(MIB);
    for lent in &lent {
        pair.write(lent.base(), &mut [1]).unwrap();
    }
    pair.far.close(crate::pair::soon());
    for lent in &lent {
        let write = pair.write(lent.base(), &mut [1]).unwrap_err();
        let read = pair.read(lent.base(), &mut [1]).unwrap_err();
        for error in [write, read] {
            assert!(!error.to_string().contains("deadline"), "{error}");
        }
    }
}

/// Transfers of an engine that is closed end, also those that are about to connect anew.
pub(crate) fn closed_engine_ends_transfers_in_flight(pair: &Pair) {
    const THREADS: usize = 4;
    let [lent, _] = pair.lend(8 * MIB);
    let started = Barrier::new(THREADS + 1);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let mut bytes = vec![0; 8 * MIB];
                    pair.read(lent.base(), &mut bytes).unwrap();
                    started.wait();
                    while pair.read(lent.base(), &mut bytes).is_ok() {}
                })
            })
            .collect();
        started.wait();
        let begin = Instant::now();
        pair.near.close(crate::pair::soon());
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    });
}

/// Batches that are queued or in flight when the engine closes use no memory after that.
pub(crate) fn closed_engine_uses_no_memory_of_batches(pair: &Pair) {
    const ENTRIES: usize = 32;
    let lent = pair.lend(8 * MIB);
    let mut bytes = vec![0; 8 * MIB];
    for lent in lent.iter().cycle().take(8) {
        let entry = || TransferEntry::new(held(&mut bytes), lent.base());
        let entries: Vec<_> = std::iter::repeat_with(entry).take(ENTRIES).collect();
        let peer = std::sync::Arc::clone(&pair.peer);
        pair.near.submit(peer, Opcode::Read, entries, crate::pair::soon()).unwrap();
    }
    let begin = Instant::now();
    pair.near.close(crate::pair::soon());
    bytes.fill(3);
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    assert_eq!(pair.near.snapshot().workers, 0);
    assert!(bytes.iter().all(|byte| *byte == 3));
}

pub(crate) fn arrives_whole_in_batches_of_every_count(pair: &Pair) {
    const LENGTH: usize = 37;
    for lent in pair.lend(4097 * LENGTH) {
        for count in [1, 2, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097] {
            let mut bytes = pattern(count * LENGTH, count);
            let wanted = bytes.clone();
            let batch = |bytes: &mut [u8]| -> Vec<TransferEntry> {
                let entries = bytes.chunks_mut(LENGTH).enumerate();
                entries
                    .map(|(i, part)| {
                        TransferEntry::new(held(part), lent.base() + (i * LENGTH) as u64)
                    })
                    .collect()
            };
            move_all(pair, Opcode::Write, batch(&mut bytes));
            bytes.fill(0);
            move_all(pair, Opcode::Read, batch(&mut bytes));
            assert!(bytes == wanted, "{count}");
        }
    }
}

pub(crate) fn overlapping_entries_leave_bytes_of_either(pair: &Pair) {
    for lent in pair.lend(MIB) {
        let (mut ones, mut twos) = (vec![1; MIB], vec![2; MIB / 2]);
        let entries = vec![
            TransferEntry::new(held(&mut ones), lent.base()),
            TransferEntry::new(held(&mut twos), lent.base() + (MIB / 4) as u64),
        ];
        move_all(pair, Opcode::Write, entries);
        let mut back = vec![0; MIB];
        pair.read(lent.base(), &mut back).unwrap();
        let inside = MIB / 4..MIB / 4 + MIB / 2;
        assert!(back[inside.clone()].iter().all(|byte| matches!(byte, 1 | 2)));
        assert!(back[..inside.start].iter().chain(&back[inside.end..]).all(|byte| *byte == 1));
        // One remote range is read into two buffers.
        let mut other = vec![0; MIB];
        let entries = vec![
            TransferEntry::new(held(&mut ones), lent.base()),
            TransferEntry::new(held(&mut other), lent.base()),
        ];
        pair.write(lent.base(), &mut vec![9; MIB]).unwrap();
        move_all(pair, Opcode::Read, entries);
        assert!(ones.iter().chain(&other).all(|byte| *byte == 9));
    }
}

pub(crate) fn refuses_a_partly_registered_range(pair: &Pair) {
    const PART: usize = 64 << 10;
    let mut memory = pattern(4 * PART, 3);
    let before = memory.clone();
    let base = memory.as_mut_ptr() as u64;
    let regions = pair.far.regions();
    let part = PART as u64;
    // Two adjacent regions, and nothing before and after them.
    regions.register(base + part, part, "*").unwrap();
    regions.register(base + 2 * part, part, "*").unwrap();
    let mut bytes = vec![0xEE; 2 * PART];
    let mut refused =
        vec![(part - 1, 2), (0, 2 * PART), (2 * part, PART + 1), (3 * part - 1, 2), (3 * part, 1)];
    // RDMA devices know of no border between adjacent registrations, and upstream crosses it.
    if pair.peer.transport() != Some(TransportKind::Rdma) {
        refused.extend([(part, PART + 1), (2 * part - 1, 2)]);
    }
    for (from, length) in refused {
        for opcode in [Opcode::Read, Opcode::Write] {
            let one = (held(&mut bytes[..length]), base + from);
            crate::pair::move_one(&pair.near, &pair.peer, opcode, one).unwrap_err();
        }
    }
    for from in [part, 2 * part] {
        pair.read(base + from, &mut bytes[..PART]).unwrap();
    }
    regions.unregister(base + part).unwrap();
    regions.unregister(base + 2 * part).unwrap();
    assert!(memory == before, "nothing was written");
}

pub(crate) fn unregistering_ends_transfers_in_flight(pair: &Pair) {
    const LENGTH: usize = 4 * MIB;
    for opcode in [Opcode::Read, Opcode::Write] {
        for lent in pair.lend(LENGTH) {
            let base = lent.base();
            let (moved, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
            thread::scope(|scope| {
                let (moved, is_over) = (&moved, &is_over);
                let movers: Vec<_> = (0..3)
                    .map(|_| scope.spawn(|| move_until_refused(pair, opcode, base, moved, is_over)))
                    .collect();
                let deadline = Instant::now() + Duration::from_secs(60);
                while moved.load(Ordering::SeqCst) < 6 {
                    assert!(Instant::now() < deadline, "the transfers begin");
                    thread::yield_now();
                }
                let kept = match lent {
                    Lent::Shared(memory) => {
                        drop(memory);
                        None
                    }
                    Lent::User(engine, mut bytes) => {
                        engine.regions().unregister(base).unwrap();
                        bytes.fill(3);
                        Some(bytes)
                    }
                };
                is_over.store(true, Ordering::SeqCst);
                movers.into_iter().for_each(|mover| mover.join().unwrap());
                // Transfers in flight did not write after the memory was withdrawn.
                assert!(kept.is_none_or(|bytes| bytes.iter().all(|byte| *byte == 3)));
            });
        }
    }
}

fn move_until_refused(
    pair: &Pair,
    opcode: Opcode,
    base: u64,
    moved: &AtomicUsize,
    is_over: &AtomicBool,
) {
    let mut bytes = vec![7; 4 * MIB];
    loop {
        let was_over = is_over.load(Ordering::SeqCst);
        let one = (held(&mut bytes), base);
        let outcome = crate::pair::move_one(&pair.near, &pair.peer, opcode, one);
        assert!(!(was_over && outcome.is_ok()), "transfers after the withdrawal are refused");
        if outcome.is_err() {
            return;
        }
        moved.fetch_add(1, Ordering::SeqCst);
    }
}

pub(crate) fn sixty_four_threads_share_few_connections(pair: &Pair) {
    const LENGTH: usize = 30_000;
    let [lent, _other] = pair.lend(64 * LENGTH);
    thread::scope(|scope| {
        for thread in 0..64 {
            let address = lent.base() + (thread * LENGTH) as u64;
            scope.spawn(move || {
                let mut bytes = pattern(LENGTH, thread);
                let wanted = bytes.clone();
                for _ in 0..5 {
                    pair.write(address, &mut bytes).unwrap();
                    bytes.fill(0);
                    pair.read(address, &mut bytes).unwrap();
                    assert!(bytes == wanted, "{thread}");
                }
            });
        }
    });
    let snapshot = pair.near.snapshot();
    let pool = snapshot.peers[0].connections;
    assert!(pool.open <= 4 && pool.idle == pool.open, "{pool:?}");
    assert!(pair.far.snapshot().incoming.open <= 4);
}
