//! The disk of the master, and the planted bugs of its use.

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use mooncake_master::{Directory, LogFile, SimulatedDisk};

use crate::{plan::Bug, random::Random};

/// A disk that may be used as a defective master would use it.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    disk: SimulatedDisk,
    bug: Option<Bug>,
    is_damaged: Arc<AtomicBool>,
}

/// A file whose sync does nothing.
struct UnsyncedFile(Arc<dyn LogFile>);

impl Disk {
    pub(crate) fn new(bug: Option<Bug>) -> Self {
        Self { disk: SimulatedDisk::default(), bug, is_damaged: Arc::default() }
    }

    pub(crate) fn directory(&self) -> Directory {
        Directory::on(Arc::new(self.clone()))
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
        self.disk.create(name)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let file = self.disk.open(name)?;
        match self.bug {
            Some(Bug::ForgetsToSyncOldLogs) => Ok(Arc::new(UnsyncedFile(file))),
            _ => Ok(file),
        }
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

impl fmt::Debug for UnsyncedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl LogFile for UnsyncedFile {
    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        self.0.append(bytes)
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.0.truncate(length)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
