//! A disk that hangs, for tests.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::{Clock, SystemClock};

use super::{
    disk::{Disk, LogFile},
    simulated_disk::SimulatedDisk,
};

/// Forwards methods of a disk to the field `disk`.
macro_rules! forward {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $result {
            self.disk.$name($($argument),*)
        })*
    };
}

pub(super) use forward;

/// A disk whose writes and syncs hang while the gate says so.
#[derive(Debug, Default)]
pub(crate) struct HangingDisk {
    disk: SimulatedDisk,
    gate: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    hangs: AtomicBool,
    waiting: AtomicU64,
}

#[derive(Debug)]
struct HangingFile(Arc<dyn LogFile>, Arc<Gate>);

impl Gate {
    fn pass(&self) {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let end = SystemClock.now() + Duration::from_secs(60);
        while self.hangs.load(Ordering::Acquire) {
            assert!(!end.has_passed(SystemClock.now()), "not in time");
            std::thread::yield_now();
        }
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl LogFile for HangingFile {
    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        self.1.pass();
        self.0.append(bytes)
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.0.truncate(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.1.pass();
        self.0.sync()
    }
}

impl HangingDisk {
    /// Makes writes and syncs hang from now on, or ends that.
    pub(crate) fn hang(&self, hangs: bool) {
        self.gate.hangs.store(hangs, Ordering::Release);
    }

    /// Returns whether a thread waits for the disk.
    pub(crate) fn is_hanging(&self) -> bool {
        self.gate.waiting.load(Ordering::Acquire) > 0
    }
}

impl Disk for HangingDisk {
    forward! {
        list() -> io::Result<Vec<String>>;
        read(name: &str) -> io::Result<Vec<u8>>;
        rename(from: &str, to: &str) -> io::Result<()>;
        remove(name: &str) -> io::Result<()>;
        sync_directory() -> io::Result<()>;
        boot_id() -> [u8; 16];
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(HangingFile(self.disk.create(name)?, self.gate.clone())))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(HangingFile(self.disk.open(name)?, self.gate.clone())))
    }
}
