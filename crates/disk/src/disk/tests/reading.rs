//! Tests of reads: ranges, a ring and threads, little memory, and file systems that refuse.

use std::{sync::Barrier, thread};

use super::*;
use crate::{
    ReadMethod, ReadRequest,
    file_system::{File, Lock, Space},
    memory::SLOT_BYTES,
};

const LENGTHS: [usize; 8] = [1, 4096, 65_535, 65_536, 300_000, 1 << 20, 1_700_001, 3 << 20];

/// Returns the options of a ring, where there is one, and of threads, each with little memory.
fn methods() -> Vec<Options> {
    let few = Options { arena_bytes: 2 * SLOT_BYTES, ..Options::new(128 << 20) };
    let folder = tempfile::tempdir().unwrap();
    let ring = Options { read_method: ReadMethod::Ring, ..few.clone() };
    let threads = Options { read_method: ReadMethod::Threads, reads_in_flight: 4, ..few };
    match Disk::open(folder.path(), ring.clone()) {
        Ok(_) => vec![ring, threads],
        Err(error) => {
            println!("not tested with a ring: {error}");
            vec![threads]
        }
    }
}

fn key(length: usize) -> Vec<u8> {
    format!("{length}").into_bytes()
}

fn write_all_lengths(disk: &Disk) {
    for length in LENGTHS {
        let outcome = write(disk, name(&key(length), 1), length);
        assert!(matches!(outcome, WriteOutcome::Written(_)), "{outcome:?}");
    }
}

/// Reads a number of ranges at random into memory at random, and compares what is there.
fn check_ranges(disk: &Disk, seed: u64, count: usize) {
    let mut random = SplitMix64::new(seed);
    let ranges: Vec<_> = (0..count)
        .map(|_| {
            let length = LENGTHS[random.below(LENGTHS.len())];
            let start = random.below(length + 1);
            let start = [0, start, start / (256 << 10) * (256 << 10)][random.below(3)];
            let end = [length, start + random.below(length - start + 1)][random.below(2)];
            // Aligned to pages, to what memory of arrays is, and to nothing.
            (length, start..end, [0, 64, 512, 4096, 77][random.below(5)])
        })
        .collect();
    let keys: Vec<_> = ranges.iter().map(|(length, ..)| key(*length)).collect();
    let mut memory: Vec<_> =
        ranges.iter().map(|(_, range, _)| vec![0xEE; range.len() + 3 * 4096]).collect();
    let mut places = Vec::new();
    let mut requests: Vec<_> = memory
        .iter_mut()
        .zip(&ranges)
        .zip(&keys)
        .map(|((memory, (_, range, shift)), key)| {
            let start = memory.as_ptr().align_offset(4096) + shift;
            places.push(start);
            let into = (&mut memory[start..start + range.len()]).into();
            ReadRequest { name: name(key, 1), offset: range.start as u64, into }
        })
        .collect();
    assert_eq!(disk.read_batch(&mut requests), vec![ReadOutcome::Good; count]);
    drop(requests);
    for (((length, range, _), memory), start) in ranges.iter().zip(&memory).zip(places) {
        let expected = &payload(name(&key(*length), 1), *length)[range.clone()];
        assert!(memory[start..start + range.len()] == *expected, "{range:?} of {length}");
        let others = memory[..start].iter().chain(&memory[start + range.len()..]);
        assert!(others.copied().all(|byte| byte == 0xEE), "bytes around {range:?} of {length}");
    }
}

#[test]
fn ranges_are_read_by_a_ring_and_by_threads() {
    for options in methods() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::open(folder.path(), options.clone()).unwrap();
        assert_eq!(disk.read_method().method, options.read_method, "{}", disk.read_method());
        write_all_lengths(&disk);
        check_ranges(&disk, 1, 40);
        // What is synced is read past the page cache.
        disk.sync().unwrap();
        check_ranges(&disk, 2, 40);
        let statistics = disk.statistics();
        let has_direct = has_direct_reads(folder.path());
        assert_eq!(statistics.read_in_place > 0, has_direct, "{statistics:?}");
        assert_eq!((statistics.direct_refused, statistics.bad), (0, 0), "{statistics:?}");
        disk.close().unwrap();
        let disk = Disk::open(folder.path(), options).unwrap();
        check_ranges(&disk, 3, 40);
    }
}

/// Tells whether the page cache has a byte of the first extent. To ask may bring it there.
fn is_cached(directory: &Path, at: u64) -> bool {
    let file = std::fs::File::open(directory.join("extent-000000")).unwrap();
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    let read = rustix::io::preadv2(&file, &mut [io::IoSliceMut::new(&mut [0])], at, flags);
    read == Ok(1)
}

#[test]
fn page_cache_forgets_what_is_read_past_it() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Disk::open(folder.path(), Options::new(128 << 20)).unwrap();
    write(&disk, name(b"key", 1), 1 << 20);
    assert!(is_cached(folder.path(), 8192));
    disk.sync().unwrap();
    assert_eq!(read(&disk, name(b"key", 1)), ReadOutcome::Good);
    assert_eq!(is_cached(folder.path(), 8192), !has_direct_reads(folder.path()));
}

#[test]
fn callers_share_a_small_arena() {
    for options in methods() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::open(folder.path(), options).unwrap();
        write_all_lengths(&disk);
        disk.sync().unwrap();
        let start = Barrier::new(6);
        thread::scope(|scope| {
            for seed in 0..6 {
                let (disk, start) = (&disk, &start);
                scope.spawn(move || {
                    start.wait();
                    check_ranges(disk, seed, 12);
                });
            }
        });
    }
}

#[test]
fn only_blocks_of_the_range_have_to_hold() {
    let files = FaultyFiles::new(1);
    let disk = faulty(&files, 64 << 20).unwrap();
    write(&disk, name(b"key", 1), 700_000);
    let path = files.paths().into_iter().find(|path| path.ends_with("extent-000000")).unwrap();
    // In the second of three blocks.
    files.flip(&path, 8192 + 300_000);
    let mut into = vec![0; 262_144];
    let mut outcome = |offset: u64, length: usize| {
        let into = (&mut into[..length]).into();
        disk.read_batch(&mut [ReadRequest { name: name(b"key", 1), offset, into }]).remove(0)
    };
    assert_eq!(outcome(0, 262_144), ReadOutcome::Good);
    assert_eq!(outcome(524_288, 1), ReadOutcome::Good);
    assert_eq!(outcome(700_000, 0), ReadOutcome::Good);
    assert_eq!(outcome(700_000, 1), ReadOutcome::Length(700_000));
    assert_eq!(outcome(u64::MAX, 1), ReadOutcome::Length(700_000));
    assert_eq!(outcome(262_143, 2), ReadOutcome::Bad);
    assert_eq!(outcome(0, 1), ReadOutcome::Missing);
}

#[test]
fn a_ring_that_is_not_possible_is_an_error_with_a_remedy() {
    let files = Arc::new(FaultyFiles::new(1));
    let options = Options { files, ..Options::new(16 << 20) };
    let ring = Options { read_method: ReadMethod::Ring, ..options.clone() };
    let error = Disk::open(Path::new(FAULTY_PATH), ring).unwrap_err().to_string();
    assert!(error.contains("seccomp") && error.contains("MOONCAKE_OFFLOAD_USE_URING"), "{error}");
    let disk = Disk::open(Path::new(FAULTY_PATH), options).unwrap();
    let text = disk.read_method().to_string();
    assert!(text.contains("32 threads (io_uring cannot be used: "), "{text}");
}

#[test]
fn short_reads_are_continued() {
    let files = FaultyFiles::new(1);
    let disk = faulty(&files, 128 << 20).unwrap();
    write_all_lengths(&disk);
    files.set(Faults { is_short: true, ..Faults::default() });
    check_ranges(&disk, 1, 30);
    assert!(disk.statistics().continued > 0);
}

#[test]
fn reads_of_a_batch_are_in_flight_together() {
    let files = FaultyFiles::new(1);
    let options = Options { files: Arc::new(files.clone()), ..Options::new(128 << 20) };
    let disk = Disk::open(Path::new(FAULTY_PATH), options).unwrap();
    let keys: Vec<_> = (0..64_u32).map(u32::to_le_bytes).collect();
    for key in &keys {
        write(&disk, name(key, 1), 100);
    }
    let read_delay = Duration::from_millis(20);
    files.set(Faults { read_delay, ..Faults::default() });
    let mut memory = vec![[0; 100]; keys.len()];
    let mut reads: Vec<_> =
        keys.iter().zip(&mut memory).map(|(key, into)| Read { name: name(key, 1), into }).collect();
    let begun = Instant::now();
    assert_eq!(disk.read(&mut reads), vec![ReadOutcome::Good; keys.len()]);
    // Two rounds of 32 threads; one after the other they would take 64 times the delay.
    assert!(begun.elapsed() >= read_delay * 2 && begun.elapsed() < read_delay * 32);
}

/// A file system that says it reads at any address, and does not.
#[derive(Debug)]
struct WrongAlignment;

impl FileSystem for WrongAlignment {
    fn open(&self, path: &Path, mode: Mode) -> io::Result<Arc<dyn File>> {
        RealFiles.open(path, mode)
    }
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        RealFiles.create_dir(path)
    }
    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        RealFiles.list(directory)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealFiles.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        RealFiles.remove(path)
    }
    fn sync_dir(&self, directory: &Path) -> io::Result<()> {
        RealFiles.sync_dir(directory)
    }
    fn space(&self, directory: &Path) -> io::Result<Space> {
        RealFiles.space(directory)
    }
    fn direct_alignment(&self, _: &Path) -> Option<u64> {
        Some(1)
    }
    fn lock(
        &self,
        path: &Path,
        holder: &str,
    ) -> io::Result<std::result::Result<Box<dyn Lock>, String>> {
        RealFiles.lock(path, holder)
    }
}

#[test]
fn refused_direct_reads_go_through_the_page_cache() {
    for options in methods() {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { files: Arc::new(WrongAlignment), ..options };
        let disk = Disk::open(folder.path(), options).unwrap();
        write_all_lengths(&disk);
        disk.sync().unwrap();
        check_ranges(&disk, 1, 40);
        let refused = disk.statistics().direct_refused;
        assert_eq!(refused > 0, has_direct_reads(folder.path()), "{refused}");
    }
}
