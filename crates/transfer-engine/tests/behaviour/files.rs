//! Mapped files as memory of an engine.

use std::sync::atomic::{AtomicBool, Ordering};

use mooncake_transfer_engine::{LocalRange, Opcode, TransferEntry};

use crate::pair::{Pair, held, move_one, pattern, soon};

const LENGTH: usize = 8 << 20;

#[test]
fn shortened_file_fails_copies_and_crashes_nothing() {
    let pair = Pair::over_memory();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LENGTH as u64).unwrap();
    let lent = pair.far.map_file(file.path(), 0, LENGTH as u64, "cpu:0").unwrap();
    let held_file = lent.hold();
    let as_local = held_file.range(0, LENGTH as u64).unwrap();
    let shared = pair.far.allocate(LENGTH as u64).unwrap();
    let copy = |local: LocalRange, remote: u64, opcode| {
        move_one(&pair.near, &pair.peer, opcode, (local, remote))
    };
    let bytes = pattern(LENGTH, 1);
    let (mut back, is_over) = (vec![0; LENGTH], AtomicBool::new(false));
    // Pages of the shared memory that were used twice are copied by plain instructions.
    for _ in 0..2 {
        copy(held(&mut bytes.clone()), shared.base(), Opcode::Write).unwrap();
    }
    let failed = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                file.as_file().set_len(0).unwrap();
                file.as_file().set_len(LENGTH as u64).unwrap();
            }
        });
        let mut failed = 0;
        for _ in 0..60 {
            let outcomes = [
                copy(held(&mut bytes.clone()), lent.base(), Opcode::Write),
                copy(held(&mut back), lent.base(), Opcode::Read),
                copy(as_local, shared.base(), Opcode::Write),
                copy(as_local, shared.base(), Opcode::Read),
            ];
            failed += outcomes.iter().filter(|outcome| outcome.is_err()).count();
        }
        is_over.store(true, Ordering::SeqCst);
        failed
    });
    assert!(failed > 0, "the file was shortened during copies");
    // The file has its length again.
    copy(held(&mut bytes.clone()), shared.base(), Opcode::Write).unwrap();
    copy(as_local, shared.base(), Opcode::Read).unwrap();
    copy(held(&mut back), lent.base(), Opcode::Read).unwrap();
    assert!(back == bytes);
    assert!(std::fs::read(file.path()).unwrap() == bytes, "bytes are in the file");
}

#[test]
fn held_memory_outlives_its_engine_memory() {
    let pair = Pair::over_memory();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LENGTH as u64).unwrap();
    let lent = pair.far.map_file(file.path(), 0, LENGTH as u64, "cpu:0").unwrap();
    let (shared, target) = (pair.far.allocate(4096).unwrap(), pair.far.allocate(8192).unwrap());
    shared.write(0, &[7; 4096]).unwrap();
    let (held_file, held_memory) = (lent.hold(), shared.hold());
    let base = shared.base();
    drop((lent, shared));
    let mut entries = [
        TransferEntry::new(held_memory.range(0, 4096).unwrap(), target.base()),
        TransferEntry::new(held_file.range(4096, 4096).unwrap(), target.base() + 4096),
    ];
    pair.near.transfer(&pair.peer, Opcode::Write, &mut entries, soon());
    assert!(entries.iter().all(|entry| matches!(entry.outcome, Some(Ok(())))), "{entries:?}");
    let mut back = [0; 4096];
    target.read(0, &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
    // Peers no longer reach it, and a part outside is refused.
    pair.read(base, &mut back).unwrap_err();
    for (offset, length) in [(4096, 1), (1, 4096), (0, 4097), (u64::MAX, 1)] {
        assert!(held_memory.range(offset, length).is_err(), "{offset}+{length}");
    }
}
