//! Tests of a whole directory: on the real file system, and on one that fails.

mod crash;
mod limits;
mod reading;
mod unreadable;

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::random::SplitMix64;

use super::*;
use crate::{
    OwnedName,
    file_system::{
        Mode,
        faulty::{Faults, FaultyFiles},
    },
};

const FAULTY_PATH: &str = "/records";

fn name(key: &[u8], version: u64) -> Name<'_> {
    Name { tenant: "default", key, version }
}

/// Returns the payload that every record of this name and length has.
fn payload(name: Name<'_>, length: usize) -> Vec<u8> {
    let sum =
        name.key.iter().fold(name.version, |sum, byte| sum.wrapping_mul(31) + u64::from(*byte));
    let mut random = SplitMix64::new(sum);
    let mut bytes = vec![0; length];
    bytes.chunks_mut(8).for_each(|chunk| {
        chunk.copy_from_slice(&random.number().to_le_bytes()[..chunk.len()]);
    });
    bytes
}

fn write(disk: &Disk, name: Name<'_>, length: usize) -> WriteOutcome {
    disk.write(&[Write { name, payload: &payload(name, length) }]).outcomes.remove(0)
}

/// Reads a record, and checks the bytes of one that is good.
fn read(disk: &Disk, name: Name<'_>) -> ReadOutcome {
    let Some(length) = disk.length(name) else { return ReadOutcome::Missing };
    let mut into = vec![0; length as usize];
    let outcome = disk.read(&mut [Read { name, into: &mut into }]).remove(0);
    if outcome == ReadOutcome::Good {
        assert!(into == payload(name, length as usize), "wrong bytes of {name:?}");
    }
    outcome
}

/// Tells whether the file system of a directory reads past its page cache.
fn has_direct_reads(directory: &Path) -> bool {
    RealFiles.open(&directory.join("extent-000000"), Mode::Direct).is_ok()
}

fn faulty(files: &FaultyFiles, capacity: u64) -> Result<Disk> {
    let options =
        Options { files: Arc::new(files.clone()), reads_in_flight: 1, ..Options::new(capacity) };
    Disk::open(Path::new(FAULTY_PATH), options)
}

#[test]
fn records_of_all_sizes_are_read_before_and_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let lengths = [0, 1, 100, 65_535, 65_536, 65_537, 262_145, 1 << 20, 3_000_001];
    let keys: Vec<_> = lengths.iter().map(|length| format!("key {length}").into_bytes()).collect();
    let open = || Disk::open(folder.path(), Options::new(128 << 20)).unwrap();
    let check = |disk: &Disk, is_sealed: bool| {
        let mut memory: Vec<_> = lengths.iter().map(|length| vec![0; length + 4096]).collect();
        let mut reads: Vec<_> = memory
            .iter_mut()
            .zip(&keys)
            .zip(lengths)
            .map(|((memory, key), length)| {
                let start = memory.as_ptr().align_offset(4096);
                Read { name: name(key, 1), into: &mut memory[start..start + length] }
            })
            .collect();
        assert_eq!(disk.read(&mut reads), vec![ReadOutcome::Good; lengths.len()]);
        for (read, length) in reads.iter().zip(lengths) {
            assert!(*read.into == payload(read.name, length), "{length}");
        }
        let in_place = disk.statistics().read_in_place;
        let expected = if is_sealed && has_direct_reads(folder.path()) { 2 } else { 0 };
        assert_eq!(in_place, expected, "64 KiB and 1 MiB go straight into aligned memory");
        for key in &keys {
            assert_eq!(read(disk, name(key, 1)), ReadOutcome::Good);
        }
    };
    let disk = open();
    for (key, length) in keys.iter().zip(lengths) {
        assert!(matches!(write(&disk, name(key, 1), length), WriteOutcome::Written(_)));
    }
    check(&disk, false);
    drop(disk);
    // Not closed: the records are found by their heads, and sealed.
    let disk = open();
    check(&disk, true);
    drop(disk);
    let disk = open();
    check(&disk, true);
    let mut found = Vec::new();
    disk.records(|name, length| found.push((name.key.to_vec(), length as usize))).unwrap();
    assert_eq!(found, keys.iter().cloned().zip(lengths).collect::<Vec<_>>());
}

#[test]
fn only_the_version_that_is_asked_for_is_returned() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Disk::open(folder.path(), Options::new(16 << 20)).unwrap();
    write(&disk, name(b"key", 1), 100);
    write(&disk, name(b"key", 3), 200);
    assert_eq!(read(&disk, name(b"key", 1)), ReadOutcome::Missing);
    assert_eq!(read(&disk, name(b"key", 3)), ReadOutcome::Good);
    assert_eq!(write(&disk, name(b"key", 2), 100), WriteOutcome::Superseded);
    let other = Name { tenant: "other", ..name(b"key", 3) };
    assert_eq!(read(&disk, other), ReadOutcome::Missing);
    let mut short = [0; 199];
    let wrong = disk.read(&mut [Read { name: name(b"key", 3), into: &mut short }]);
    assert_eq!(wrong, [ReadOutcome::Length(200)]);
    assert!(!disk.remove(name(b"key", 1)) && disk.remove(name(b"key", 3)));
    assert_eq!(read(&disk, name(b"key", 3)), ReadOutcome::Missing);
    assert_eq!(write(&disk, name(b"", 1), 1), WriteOutcome::TooLong);
    assert_eq!(write(&disk, name(b"key", 4), 2 << 20), WriteOutcome::TooLong);
}

#[test]
fn old_extents_are_used_again_and_what_was_read_stays() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Disk::open(folder.path(), Options::new(16 << 20)).unwrap();
    let mut live: BTreeMap<OwnedName, usize> = BTreeMap::new();
    for number in 0..600_u32 {
        let (key, length) = (number.to_le_bytes(), 20_000 + number as usize * 200);
        let name = name(&key, 1);
        let report = disk.write(&[Write { name, payload: &payload(name, length) }]);
        assert!(matches!(report.outcomes[0], WriteOutcome::Written(_)), "{report:?}");
        live.insert(name.to_owned(), length);
        for name in report.evicted {
            live.remove(&name).expect("it was there");
        }
        // One record in ten is read again and again, so that every extent has some of them.
        for number in (7..=number).step_by(10) {
            let is_early = number == 7;
            let outcome = read(&disk, self::name(&number.to_le_bytes(), 1));
            assert!(!is_early || outcome == ReadOutcome::Good, "{outcome:?}");
        }
    }
    let statistics = disk.statistics();
    assert!(statistics.allocated_bytes <= 16 << 20, "{statistics:?}");
    assert!(statistics.evicted > 200 && statistics.moved > 2, "{statistics:?}");
    for name in live.keys() {
        assert_eq!(read(&disk, name.borrow()), ReadOutcome::Good);
    }
    assert_eq!(disk.statistics().records, live.len() as u64);
}

#[test]
fn an_extent_waits_for_the_readers_of_old_places() {
    let folder = tempfile::tempdir().unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let gate = is_over.clone();
    let may_reuse: Gate = Arc::new(move |_, _| gate.load(Ordering::Relaxed));
    let options = Options { may_reuse, ..Options::new(16 << 20) };
    let disk = Disk::open(folder.path(), options).unwrap();
    let outcomes: Vec<_> =
        (0..40_u32).map(|number| write(&disk, name(&number.to_le_bytes(), 1), 600_000)).collect();
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == WriteOutcome::Full).count(), 24);
    is_over.store(true, Ordering::Relaxed);
    assert!(matches!(write(&disk, name(b"later", 1), 600_000), WriteOutcome::Written(_)));
}

#[test]
fn a_full_file_system_stops_writes_only_while_it_is_full() {
    let files = FaultyFiles::new(1);
    let disk = faulty(&files, 16 << 20).unwrap();
    assert!(matches!(write(&disk, name(b"first", 1), 100), WriteOutcome::Written(_)));
    files.set(Faults { free: Some(0), ..Faults::default() });
    for number in 0..10_u32 {
        // The directory goes on in the extents that it has.
        assert!(matches!(
            write(&disk, name(&number.to_le_bytes(), 1), 600_000),
            WriteOutcome::Written(_)
        ));
    }
    assert_eq!(read(&disk, name(&9_u32.to_le_bytes(), 1)), ReadOutcome::Good);

    let files = FaultyFiles::new(1);
    let disk = faulty(&files, 16 << 20).unwrap();
    files.set(Faults { free: Some(0), ..Faults::default() });
    assert_eq!(write(&disk, name(b"key", 1), 100), WriteOutcome::Full);
    files.set(Faults::default());
    assert!(matches!(write(&disk, name(b"key", 1), 100), WriteOutcome::Written(_)));
}

#[test]
fn foreign_data_shrinks_the_directory_to_a_quarter_at_most() {
    const EXTENT: u64 = 1 << 20;
    let files = FaultyFiles::new(1);
    let options = Options {
        files: Arc::new(files.clone()),
        free_bytes_min: 3 * EXTENT,
        ..Options::new(16 << 20)
    };
    let disk = Disk::open(Path::new(FAULTY_PATH), options).unwrap();
    let mut live = BTreeMap::new();
    let mut number = 0_u32;
    let mut write_some = |live: &mut BTreeMap<OwnedName, usize>| {
        for _ in 0..40 {
            number += 1;
            let key = number.to_le_bytes();
            let name = name(&key, 1);
            let report = disk.write(&[Write { name, payload: &payload(name, 600_000) }]);
            assert!(matches!(report.outcomes[0], WriteOutcome::Written(_)), "{report:?}");
            live.insert(name.to_owned(), 600_000);
            for name in report.evicted {
                live.remove(&name);
            }
        }
    };
    let trim = |live: &mut BTreeMap<OwnedName, usize>| {
        for name in disk.trim().unwrap() {
            live.remove(&name).expect("it was there");
        }
        for name in live.keys() {
            assert_eq!(read(&disk, name.borrow()), ReadOutcome::Good);
        }
        disk.statistics().allocated_bytes / EXTENT
    };
    write_some(&mut live);
    assert_eq!(trim(&mut live), 16);
    // Other data takes what should be free: as many extents go as make up for it.
    files.set(Faults { free: Some(0), ..Faults::default() });
    assert_eq!([(); 5].map(|()| trim(&mut live)), [15, 14, 13, 13, 13]);
    // It takes whatever there is: a quarter stays, and writes go on in it.
    for _ in 0..20 {
        files.set(Faults { free: Some(0), ..Faults::default() });
        trim(&mut live);
    }
    assert_eq!((trim(&mut live), live.is_empty()), (4, false));
    write_some(&mut live);
    assert_eq!((trim(&mut live), live.is_empty()), (4, false));
    // It goes away, and the directory grows again.
    files.set(Faults::default());
    write_some(&mut live);
    assert_eq!(trim(&mut live), 16);
    assert_eq!(disk.statistics().trimmed, 12);
}

#[test]
fn extents_are_given_back_to_the_low_watermark() {
    const EXTENT: u64 = 1 << 20;
    let files = FaultyFiles::new(1);
    let options = Options {
        files: Arc::new(files.clone()),
        free_bytes_min: 3 * EXTENT,
        free_bytes_low: 6 * EXTENT,
        ..Options::new(16 << 20)
    };
    let disk = Disk::open(Path::new(FAULTY_PATH), options).unwrap();
    for number in 0..40_u32 {
        write(&disk, name(&number.to_le_bytes(), 1), 600_000);
    }
    let trim = || {
        disk.trim().unwrap();
        disk.statistics().allocated_bytes / EXTENT
    };
    files.set(Faults { free: Some(3 * EXTENT), ..Faults::default() });
    assert_eq!(trim(), 16, "nothing is given back above the high watermark");
    files.set(Faults { free: Some(2 * EXTENT), ..Faults::default() });
    assert_eq!([(); 6].map(|()| trim()), [15, 14, 13, 12, 12, 12]);
}

#[test]
fn oldest_records_make_room_for_more_than_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { records_max: 20, ..Options::new(64 << 20) };
    let disk = Disk::open(folder.path(), options).unwrap();
    for number in 0..100_u32 {
        // Some fill extents, some fit into one.
        let length = if number < 50 { 600_000 } else { 100 };
        let outcome = write(&disk, name(&number.to_le_bytes(), 1), length);
        assert!(matches!(outcome, WriteOutcome::Written(_)), "{number}: {outcome:?}");
        let found = disk.statistics().records;
        assert!(found <= 20 && found > 0, "{number}: {found}");
        // A later version takes the place of its own.
        write(&disk, name(&number.to_le_bytes(), 2), length);
        assert_eq!(disk.statistics().records, found);
    }
    assert_eq!(read(&disk, name(&99_u32.to_le_bytes(), 2)), ReadOutcome::Good);
    assert_eq!(disk.length(name(&0_u32.to_le_bytes(), 2)), None);
}

#[test]
fn trimming_waits_for_the_readers_of_old_places() {
    let files = FaultyFiles::new(1);
    let is_over = Arc::new(AtomicBool::new(false));
    let gate = is_over.clone();
    let options = Options {
        files: Arc::new(files.clone()),
        free_bytes_min: 1 << 30,
        may_reuse: Arc::new(move |_, _| gate.load(Ordering::Relaxed)),
        ..Options::new(16 << 20)
    };
    files.set(Faults { free: Some(2 << 30), ..Faults::default() });
    let disk = Disk::open(Path::new(FAULTY_PATH), options).unwrap();
    for number in 0..10_u32 {
        write(&disk, name(&number.to_le_bytes(), 1), 600_000);
    }
    files.set(Faults { free: Some(0), ..Faults::default() });
    let dropped: usize = (0..5).map(|_| disk.trim().unwrap().len()).sum();
    assert_eq!((dropped, disk.statistics().trimmed), (2, 0));
    is_over.store(true, Ordering::Relaxed);
    disk.trim().unwrap();
    assert_eq!(disk.statistics().trimmed, 1);
}

#[test]
fn writes_and_reads_go_on_after_errors_of_the_device() {
    let files = FaultyFiles::new(1);
    let disk = faulty(&files, 16 << 20).unwrap();
    write(&disk, name(b"first", 1), 100);
    files.set(Faults { fails_writes: true, fails_reads: true, ..Faults::default() });
    assert!(matches!(write(&disk, name(b"key", 1), 100), WriteOutcome::Failed(_)));
    assert!(matches!(read(&disk, name(b"first", 1)), ReadOutcome::Failed(_)));
    disk.sync().unwrap_err();
    files.set(Faults::default());
    assert_eq!(read(&disk, name(b"first", 1)), ReadOutcome::Good);
    let end = Instant::now() + Duration::from_secs(5);
    while !matches!(write(&disk, name(b"key", 1), 100), WriteOutcome::Written(_)) {
        assert!(Instant::now() < end, "writes stay off");
        std::thread::yield_now();
    }
    // After a sync has failed, another one says nothing of what was written before.
    disk.sync().unwrap_err();
    let names: Vec<_> = (0..3_u32).map(u32::to_le_bytes).collect();
    let large = payload(name(b"", 1), 600_000);
    let writes: Vec<_> =
        names.iter().map(|key| Write { name: name(key, 1), payload: &large }).collect();
    let report = disk.write(&writes);
    let lost = [name(b"first", 1).to_owned(), name(b"key", 1).to_owned()];
    assert!(lost.iter().all(|name| report.evicted.contains(name)), "{report:?}");
}

#[test]
fn a_damaged_record_is_told_and_dropped() {
    for length in [100, 100_000] {
        let files = FaultyFiles::new(1);
        let disk = faulty(&files, 16 << 20).unwrap();
        write(&disk, name(b"key", 1), length);
        let path = files.paths().into_iter().find(|path| path.ends_with("extent-000000")).unwrap();
        files.flip(&path, if length == 100 { 4096 + 60 } else { 8192 + 99_999 });
        assert_eq!(read(&disk, name(b"key", 1)), ReadOutcome::Bad);
        assert_eq!(read(&disk, name(b"key", 1)), ReadOutcome::Missing);
        assert_eq!(disk.statistics().bad, 1);
    }
}

#[test]
fn a_payload_that_looks_like_records_is_not_taken_for_records() {
    let files = FaultyFiles::new(1);
    let disk = faulty(&files, 16 << 20).unwrap();
    // A whole extent of heads, each of which names the place where it lies.
    let mut forged = vec![0; 900 << 10];
    for at in (0..forged.len() - 4096).step_by(4096) {
        let mut record = Vec::new();
        let offset = 8192 + at as u64;
        crate::format::RecordHead::encode(name(b"victim", 9), 1, offset, b"forged", &mut record);
        record.extend_from_slice(b"forged");
        forged[at..at + record.len()].copy_from_slice(&record);
    }
    for number in 0..40_u32 {
        disk.write(&[Write { name: name(&number.to_le_bytes(), 1), payload: &forged }]);
    }
    write(&disk, name(b"last", 1), 10);
    drop(disk);
    files.kill();
    let disk = faulty(&files, 16 << 20).unwrap();
    assert_eq!(read(&disk, name(b"victim", 9)), ReadOutcome::Missing);
    assert_eq!(read(&disk, name(b"last", 1)), ReadOutcome::Good);
}
