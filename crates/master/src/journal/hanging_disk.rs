//! A disk that hangs or fails, for tests.

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

pub(crate) use forward;

/// A disk whose writes and syncs hang or fail while the gate says so.
#[derive(Debug, Default)]
pub(crate) struct HangingDisk {
    disk: SimulatedDisk,
    gate: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    hangs: AtomicBool,
    hangs_syncs: AtomicBool,
    is_full: AtomicBool,
    is_read_only: AtomicBool,
    keeps_files: AtomicBool,
    forgets_names: AtomicBool,
    waiting: AtomicU64,
}

#[derive(Debug)]
struct HangingFile(Arc<dyn LogFile>, Arc<Gate>);

impl Gate {
    /// Waits while one of the flags is set.
    fn pass(&self, hangs: &[&AtomicBool]) {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let end = SystemClock.now() + Duration::from_secs(60);
        while hangs.iter().any(|hangs| hangs.load(Ordering::Acquire)) {
            assert!(!end.has_passed(SystemClock.now()), "not in time");
            std::thread::yield_now();
        }
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    fn write(&self) -> io::Result<()> {
        self.pass(&[&self.hangs]);
        self.change()?;
        if self.is_full.load(Ordering::Acquire) {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            Ok(())
        }
    }

    /// Changes something for which no space is needed.
    fn change(&self) -> io::Result<()> {
        if self.is_read_only.load(Ordering::Acquire) {
            Err(io::ErrorKind::ReadOnlyFilesystem.into())
        } else {
            Ok(())
        }
    }
}

impl LogFile for HangingFile {
    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        self.1.write()?;
        self.0.append(bytes)
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.1.change()?;
        self.0.truncate(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.1.pass(&[&self.1.hangs, &self.1.hangs_syncs]);
        self.1.change()?;
        self.0.sync()
    }
}

impl HangingDisk {
    /// Makes writes and syncs hang from now on, or ends that.
    pub(crate) fn hang(&self, hangs: bool) {
        self.gate.hangs.store(hangs, Ordering::Release);
    }

    /// Makes syncs hang from now on, while writes succeed, or ends that.
    pub(crate) fn hang_syncs(&self, hangs: bool) {
        self.gate.hangs_syncs.store(hangs, Ordering::Release);
    }

    /// Makes writes fail that need space, or ends that.
    pub(crate) fn fill(&self, is_full: bool) {
        self.gate.is_full.store(is_full, Ordering::Release);
    }

    /// Makes the removal of files fail, or ends that.
    pub(crate) fn keep_files(&self, keeps_files: bool) {
        self.gate.keeps_files.store(keeps_files, Ordering::Release);
    }

    /// Makes syncs of the directory fail, or ends that.
    pub(crate) fn forget_names(&self, forgets_names: bool) {
        self.gate.forgets_names.store(forgets_names, Ordering::Release);
    }

    /// Makes all changes fail, or ends that.
    pub(crate) fn set_read_only(&self, is_read_only: bool) {
        self.gate.is_read_only.store(is_read_only, Ordering::Release);
    }

    /// Crashes the machine: what was not synced is lost.
    pub(crate) fn lose_power(&self) {
        self.disk.lose_power(&mut |_| 0);
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
        read_part(name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>>;
        boot_id() -> [u8; 16];
    }

    fn sync_directory(&self) -> io::Result<()> {
        if self.gate.forgets_names.load(Ordering::Acquire) {
            Err(io::Error::other("the device failed"))
        } else {
            self.disk.sync_directory()
        }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.gate.change()?;
        self.disk.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.gate.change()?;
        if self.gate.keeps_files.load(Ordering::Acquire) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        self.disk.remove(name)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        self.gate.change()?;
        Ok(Arc::new(HangingFile(self.disk.create(name)?, self.gate.clone())))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(HangingFile(self.disk.open(name)?, self.gate.clone())))
    }
}
