//! The disk of the master: it loses what was not synced with the power, may refuse writes, and has the
//! planted bugs of its use.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use mooncake_base::sync::Mutex;
use mooncake_master::{Directory, LogFile, SimulatedDisk};

use crate::{plan::Bug, random::Random};

/// A disk that may refuse writes, and that may be used as a defective master would use it.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    disk: SimulatedDisk,
    bug: Option<Bug>,
    is_damaged: Arc<AtomicBool>,
    failure: Failure,
}

/// What a disk refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskFailure {
    /// There is no space (`ENOSPC`): nothing can be appended.
    Full,
    /// The device fails (`EIO`): what was written cannot be synced.
    Broken,
    /// Nothing can be appended, and no file can be removed (`EIO`).
    Stuck,
    /// No file can be removed (`EIO`); all else is taken.
    Undeletable,
    /// The file system became read-only (`EROFS`).
    ReadOnly,
}

/// A change of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Append,
    Sync,
    Truncate,
    Remove,
    /// A new or another name, or a sync of the names.
    Name,
}

/// The failure of a disk, shared by its files.
#[derive(Debug, Clone, Default)]
struct Failure(Arc<Mutex<Option<DiskFailure>>>);

impl Failure {
    /// Returns the error of a change that the disk refuses.
    fn check(&self, change: Change) -> io::Result<()> {
        use Change::{Append, Remove, Sync};
        let Some(failure) = *self.0.lock() else { return Ok(()) };
        let is_refused = match failure {
            DiskFailure::Full => change == Append,
            DiskFailure::Broken => change == Sync,
            DiskFailure::Stuck => matches!(change, Append | Remove),
            DiskFailure::Undeletable => change == Remove,
            DiskFailure::ReadOnly => true,
        };
        match failure {
            _ if !is_refused => Ok(()),
            DiskFailure::Full => Err(io::ErrorKind::StorageFull.into()),
            DiskFailure::ReadOnly => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            _ => Err(io::Error::other("the device failed")),
        }
    }
}

/// A file of the disk.
#[derive(Debug)]
struct File {
    file: Arc<dyn LogFile>,
    /// A sync does nothing.
    is_unsynced: bool,
    failure: Failure,
}

impl Disk {
    pub(crate) fn new(bug: Option<Bug>) -> Self {
        let (is_damaged, failure) = (Arc::default(), Failure::default());
        Self { disk: SimulatedDisk::default(), bug, is_damaged, failure }
    }

    pub(crate) fn directory(&self) -> Directory {
        Directory::on(Arc::new(self.clone()))
    }

    /// Refuses some changes from now on, or takes them again.
    pub(crate) fn set_failure(&self, failure: Option<DiskFailure>) {
        *self.failure.0.lock() = failure;
    }

    /// Returns whether bytes can be appended.
    pub(crate) fn takes_bytes(&self) -> bool {
        self.failure.check(Change::Append).is_ok()
    }

    fn file(&self, file: Arc<dyn LogFile>, is_unsynced: bool) -> Arc<dyn LogFile> {
        Arc::new(File { file, is_unsynced, failure: self.failure.clone() })
    }

    pub(crate) fn wipe(&self) {
        self.disk.wipe();
        self.is_damaged.store(false, Ordering::Relaxed);
    }

    pub(crate) fn lose_power(&self, random: &mut Random) {
        self.disk.lose_power(&mut |end| random.below(end));
    }

    /// Changes the last byte of the first log, unless it is the only one.
    pub(crate) fn damage_older_log(&self) -> bool {
        let logs = self.logs();
        let [first, _, ..] = logs.as_slice() else { return false };
        let damaged = self.disk.damage(first, |bytes| {
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
            }
        });
        self.is_damaged.store(damaged.is_ok(), Ordering::Relaxed);
        damaged.is_ok()
    }

    fn logs(&self) -> Vec<String> {
        let names = mooncake_master::Disk::list(&self.disk).unwrap_or_default();
        names.into_iter().filter(|name| name.starts_with("log-")).collect()
    }
}

impl mooncake_master::Disk for Disk {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = self.disk.list()?;
        if self.bug == Some(Bug::CutsLaterLogs) && self.is_damaged.load(Ordering::Relaxed) {
            let later: Vec<String> = self.logs().split_off(1);
            names.retain(|name| !later.contains(name));
        }
        Ok(names)
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        self.disk.read(name)
    }

    fn read_part(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        self.disk.read_part(name, offset, length)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        self.failure.check(Change::Name)?;
        Ok(self.file(self.disk.create(name)?, false))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let is_unsynced = self.bug == Some(Bug::ForgetsToSyncOldLogs);
        Ok(self.file(self.disk.open(name)?, is_unsynced))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.failure.check(Change::Name)?;
        self.disk.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.failure.check(Change::Remove)?;
        self.disk.remove(name)
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.failure.check(Change::Name)?;
        self.disk.sync_directory()
    }

    fn boot_id(&self) -> [u8; 16] {
        match self.bug {
            // Then every start looks like one after a kill.
            Some(Bug::TrustsUnsyncedLog) => [1; 16],
            _ => self.disk.boot_id(),
        }
    }
}

impl LogFile for File {
    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        self.failure.check(Change::Append)?;
        self.file.append(bytes)
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.failure.check(Change::Truncate)?;
        self.file.truncate(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.failure.check(Change::Sync)?;
        if self.is_unsynced { Ok(()) } else { self.file.sync() }
    }
}
