//! Tests of devices of which a part cannot be read or written: the rest is used.

use std::{collections::BTreeSet, path::PathBuf};

use super::*;

const CAPACITY: u64 = 16 << 20;
const EXTENT: u64 = 1 << 20;
const LENGTH: usize = 300_000;

/// A directory, and what is known of it.
struct Directory {
    files: FaultyFiles,
    disk: Disk,
    number: u32,
    live: BTreeSet<OwnedName>,
}

impl Directory {
    /// Returns a directory all of whose extents are in use.
    fn filled() -> Self {
        let files = FaultyFiles::new(1);
        let disk = faulty(&files, CAPACITY).unwrap();
        let mut directory = Self { files, disk, number: 0, live: BTreeSet::new() };
        directory.write(48);
        directory
    }

    /// Writes records, and forgets those that are reported to be gone.
    fn write(&mut self, count: u32) {
        for _ in 0..count {
            let outcome = self.write_one();
            assert!(matches!(outcome, WriteOutcome::Written(_)), "{}: {outcome:?}", self.number);
        }
    }

    fn write_one(&mut self) -> WriteOutcome {
        self.number += 1;
        let key = self.number.to_le_bytes();
        let name = name(&key, 1);
        let mut report = self.disk.write(&[Write { name, payload: &payload(name, LENGTH) }]);
        if matches!(report.outcomes[0], WriteOutcome::Written(_)) {
            self.live.insert(name.to_owned());
        }
        for name in report.evicted {
            assert!(self.live.remove(&name), "{name:?} was reported twice");
        }
        report.outcomes.remove(0)
    }

    /// Writes until one is written, which takes a second after a failure.
    fn write_after_pause(&mut self) {
        let end = Instant::now() + Duration::from_secs(5);
        while !matches!(self.write_one(), WriteOutcome::Written(_)) {
            assert!(Instant::now() < end, "writes stay off");
            std::thread::yield_now();
        }
    }

    /// Ends the process and opens the directory again.
    fn restart(mut self) -> Self {
        drop(self.disk);
        self.files.kill();
        self.disk = faulty(&self.files, CAPACITY).unwrap();
        self
    }

    /// Returns the live records that cannot be read; reads of the others are good.
    fn gone(&self) -> Vec<&OwnedName> {
        let is_gone = |name: &&OwnedName| match read(&self.disk, name.borrow()) {
            ReadOutcome::Good => false,
            ReadOutcome::Missing => true,
            outcome => panic!("{name:?}: {outcome:?}"),
        };
        self.live.iter().filter(is_gone).collect()
    }

    /// Returns the names that the directory lists.
    fn listed(&self) -> BTreeSet<OwnedName> {
        let mut listed = BTreeSet::new();
        let visit = |name: Name<'_>, _| assert!(listed.insert(name.to_owned()));
        self.disk.records(visit).unwrap();
        listed
    }
}

fn extent(number: u32) -> PathBuf {
    Path::new(FAULTY_PATH).join(format!("extent-{number:06}"))
}

#[test]
fn writes_go_on_past_an_extent_that_cannot_be_read() {
    let mut directory = Directory::filled();
    // The next one to be used again.
    directory.files.break_reads(&extent(1), 0..EXTENT);
    directory.write(90);
    let statistics = directory.disk.statistics();
    assert_eq!((statistics.failed, statistics.set_aside), (0, 1), "{statistics:?}");
    let gone = directory.gone().len() as u64;
    assert_eq!(gone, 3);
    assert_eq!((directory.disk.take_unnamed(), directory.disk.take_unnamed()), (gone, 0));
    let listed = directory.listed();
    assert_eq!(directory.live.difference(&listed).count() as u64, gone);
    assert_eq!(statistics.records, listed.len() as u64);
}

#[test]
fn writes_go_on_past_several_extents_that_cannot_be_read() {
    let mut directory = Directory::filled();
    for number in 1..7 {
        directory.files.break_reads(&extent(number), 0..EXTENT);
    }
    for _ in 0..90 {
        directory.write_after_pause();
    }
    let statistics = directory.disk.statistics();
    assert!((1..4).contains(&statistics.failed), "{statistics:?}");
    assert!(statistics.allocated_bytes <= CAPACITY, "{statistics:?}");
}

#[test]
fn an_extent_whose_head_cannot_be_read_is_used_again() {
    let mut directory = Directory::filled();
    for number in 0..16 {
        directory.files.break_reads(&extent(number), 0..512);
    }
    directory.write(90);
    let statistics = directory.disk.statistics();
    assert_eq!((statistics.failed, statistics.set_aside), (0, 0), "{statistics:?}");
    assert_eq!(directory.gone().len(), 0);
}

#[test]
fn records_of_a_list_that_cannot_be_read_are_reported_by_name() {
    let mut directory = Directory::filled();
    for number in 1..6 {
        directory.files.break_reads(&extent(number), EXTENT - 4096..EXTENT - 3584);
    }
    directory.write(90);
    assert_eq!((directory.gone().len(), directory.disk.take_unnamed()), (0, 0));
    assert!(directory.disk.statistics().set_aside > 0);
}

#[test]
fn a_record_that_cannot_be_moved_is_dropped_and_reported() {
    let mut directory = Directory::filled();
    let read_ones: Vec<_> = directory.live.iter().cloned().collect();
    for name in &read_ones {
        assert_eq!(read(&directory.disk, name.borrow()), ReadOutcome::Good);
    }
    for number in 0..16 {
        directory.files.break_reads(&extent(number), 10_000..10_512);
    }
    directory.write(9);
    let statistics = directory.disk.statistics();
    assert_eq!((statistics.failed, statistics.set_aside), (0, 0), "{statistics:?}");
    assert!(statistics.moved == 0 && statistics.evicted > 0, "{statistics:?}");
}

#[test]
fn a_directory_is_opened_without_its_unreadable_extents() {
    let directory = Directory::filled();
    let live = directory.live.len();
    // The first cannot be read at all; the second has no list any more, but its records.
    directory.files.break_reads(&extent(3), 0..EXTENT);
    directory.files.break_reads(&extent(4), EXTENT - 4096..EXTENT - 3584);
    let mut directory = directory.restart();
    assert_eq!(directory.disk.statistics().allocated_bytes, 16 * EXTENT);
    assert_eq!((directory.gone().len(), live), (3, 45));
    let listed = directory.listed();
    assert_eq!(directory.live.difference(&listed).count(), 3);
    directory.live = listed;
    directory.write(90);
    assert_eq!(directory.gone().len(), 0);
    assert!(directory.disk.statistics().allocated_bytes <= 16 * EXTENT);
}

#[test]
fn a_record_that_cannot_be_read_hides_none_behind_it() {
    let files = FaultyFiles::new(1);
    let disk = faulty(&files, CAPACITY).unwrap();
    let mut directory = Directory { files, disk, number: 0, live: BTreeSet::new() };
    directory.write(3);
    // The payload of the first record, in an extent that is not sealed.
    directory.files.break_reads(&extent(0), 10_000..10_512);
    let directory = directory.restart();
    assert_eq!(directory.gone(), [&name(&1_u32.to_le_bytes(), 1).to_owned()]);
}

#[test]
fn a_device_that_reads_nothing_for_a_time_costs_no_record() {
    let mut directory = Directory::filled();
    directory.files.set(Faults { fails_reads: true, ..Faults::default() });
    let failed = (0..9).any(|_| matches!(directory.write_one(), WriteOutcome::Failed(_)));
    assert!(failed);
    directory.disk.records(|_, _| ()).unwrap_err();
    directory.files.set(Faults::default());
    assert_eq!((directory.gone().len(), directory.disk.take_unnamed()), (0, 0));
    directory.write_after_pause();
    directory.write(90);
    assert_eq!(directory.gone().len(), 0);
}

#[test]
fn writes_go_on_past_an_extent_that_cannot_be_begun() {
    let mut directory = Directory::filled();
    directory.files.break_writes(&extent(0), 0..512);
    let failed = (0..9).any(|_| matches!(directory.write_one(), WriteOutcome::Failed(_)));
    assert!(failed);
    directory.write_after_pause();
    directory.write(90);
    let statistics = directory.disk.statistics();
    assert_eq!((statistics.failed, statistics.set_aside), (1, 1), "{statistics:?}");
    assert_eq!(directory.gone().len(), 0);
}

#[test]
fn writes_go_on_past_a_place_that_cannot_be_written() {
    let mut directory = Directory::filled();
    directory.files.break_writes(&extent(0), 400_000..400_512);
    while !matches!(directory.write_one(), WriteOutcome::Failed(_)) {
        assert!(directory.number < 60, "the place was written");
    }
    directory.write_after_pause();
    directory.write(30);
    assert_eq!(directory.disk.statistics().failed, 2, "two failures, then another extent");
    assert_eq!(directory.gone().len(), 0);
}

#[test]
fn a_device_that_writes_nothing_for_a_time_costs_few_records() {
    let mut directory = Directory::filled();
    let all: Vec<_> = (0..20).map(extent).collect();
    all.iter().for_each(|path| directory.files.break_writes(path, 0..512));
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until && directory.disk.statistics().failed < 4 {
        directory.write_one();
        std::thread::yield_now();
    }
    assert_eq!(directory.disk.statistics().failed, 4);
    assert!(directory.live.len() >= 45 - 3 * 3, "{}", directory.live.len());
}
