//! Recovery reads the files piece by piece, whatever their size.

use std::{
    io,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::{super::hanging_disk::forward, *};

/// A disk that knows how much was read at a time.
#[derive(Debug, Default)]
struct MeteredDisk {
    disk: SimulatedDisk,
    /// Bytes of files that were read as a whole.
    whole: AtomicUsize,
    longest: AtomicUsize,
    all: AtomicUsize,
}

impl Disk for MeteredDisk {
    forward! {
        list() -> io::Result<Vec<String>>;
        create(name: &str) -> io::Result<Arc<dyn LogFile>>;
        open(name: &str) -> io::Result<Arc<dyn LogFile>>;
        rename(from: &str, to: &str) -> io::Result<()>;
        remove(name: &str) -> io::Result<()>;
        sync_directory() -> io::Result<()>;
        boot_id() -> [u8; 16];
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let bytes = self.disk.read(name)?;
        self.whole.fetch_add(bytes.len(), Ordering::Relaxed);
        Ok(bytes)
    }

    fn read_part(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let bytes = self.disk.read_part(name, offset, length)?;
        self.longest.fetch_max(bytes.len(), Ordering::Relaxed);
        self.all.fetch_add(bytes.len(), Ordering::Relaxed);
        Ok(bytes)
    }
}

#[test]
fn recovery_holds_a_frame_of_log_and_snapshot_at_a_time() {
    const KEYS: usize = 100;
    const PIECE_MAX: usize = 2 << 20;
    let disk = Arc::new(MeteredDisk::default());
    let open = || {
        let sync = LogSync::Interval(Duration::from_millis(20));
        Pool::try_open_on(Directory::on(disk.clone()), sync).unwrap()
    };
    let keys: Vec<String> = (0..KEYS).map(|number| format!("{number:060000}")).collect();
    let pool = open();
    keys.iter().for_each(|key| pool.put(key));
    pool.take_snapshot().unwrap();
    for key in &keys[..KEYS / 2] {
        pool.remove(key);
        pool.put(key);
    }
    drop(pool);
    let metered = |counter: &AtomicUsize| counter.swap(0, Ordering::Relaxed);
    let _ = (metered(&disk.whole), metered(&disk.longest), metered(&disk.all));
    let pool = open();
    let (longest, all) = (metered(&disk.longest), metered(&disk.all));
    assert!(all > 2 * KEYS * 60_000, "the snapshot and as much of the log: {all}");
    assert!(longest < PIECE_MAX, "longest={longest}");
    // Markers of a void timeline are files of a few bytes.
    assert!(metered(&disk.whole) < 1000);
    let mut found = pool.keys();
    found.sort();
    assert_eq!(found, keys);
}
