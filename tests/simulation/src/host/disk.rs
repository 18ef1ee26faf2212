//! The disk of the master: it loses what was not synced with the power, may refuse writes, and has the
//! planted bugs of its use.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
};

use mooncake_master::{Directory, LogFile, SimulatedDisk};

use crate::{plan::Bug, random::Random};

/// A disk that may refuse writes, and that may be used as a defective master would use it.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    disk: SimulatedDisk,
    bug: Option<Bug>,
    is_damaged: Arc<AtomicBool>,
    failure: Arc<AtomicU8>,
}

/// The reason for which a disk refuses writes and syncs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskFailure {
    /// There is no space (`ENOSPC`): nothing can be appended.
    Full,
    /// The device fails (`EIO`): what was written cannot be synced.
    Broken,
}

/// A file of the disk.
#[derive(Debug)]
struct File {
    file: Arc<dyn LogFile>,
    /// A sync does nothing.
    is_unsynced: bool,
    failure: Arc<AtomicU8>,
}

impl Disk {
    pub(crate) fn new(bug: Option<Bug>) -> Self {
        let (is_damaged, failure) = (Arc::default(), Arc::default());
        Self { disk: SimulatedDisk::default(), bug, is_damaged, failure }
    }

    pub(crate) fn directory(&self) -> Directory {
        Directory::on(Arc::new(self.clone()))
    }

    /// Refuses writes and syncs from now on, or takes them again.
    pub(crate) fn set_failure(&self, failure: Option<DiskFailure>) {
        let code = match failure {
            None => 0,
            Some(DiskFailure::Full) => 1,
            Some(DiskFailure::Broken) => 2,
        };
        self.failure.store(code, Ordering::Relaxed);
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
        let Some(first) = logs.first().filter(|_| logs.len() > 1) else { return false };
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

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(self.file(self.disk.create(name)?, false))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let is_unsynced = self.bug == Some(Bug::ForgetsToSyncOldLogs);
        Ok(self.file(self.disk.open(name)?, is_unsynced))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }

    fn sync_directory(&self) -> io::Result<()> {
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

impl File {
    fn check(&self, refused: u8) -> io::Result<()> {
        match self.failure.load(Ordering::Relaxed) {
            failure if failure != refused => Ok(()),
            1 => Err(io::ErrorKind::StorageFull.into()),
            _ => Err(io::Error::other("the device failed")),
        }
    }
}

impl LogFile for File {
    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        self.check(1)?;
        self.file.append(bytes)
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.file.truncate(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.check(2)?;
        match self.is_unsynced {
            true => Ok(()),
            false => self.file.sync(),
        }
    }
}
