//! A disk in memory that hangs on demand.

use std::{io, sync::Arc, time::Duration};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_master::{Disk, LogFile, SimulatedDisk};

/// How often a thread that waits for the disk looks at it, even without a notification.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A disk whose files can be neither written nor synced while it hangs.
#[derive(Debug, Default)]
pub struct HangingDisk {
    disk: SimulatedDisk,
    gate: Arc<DiskGate>,
}

#[derive(Debug, Default)]
struct DiskGate {
    state: Mutex<DiskGateState>,
    opened: Condvar,
}

#[derive(Debug, Default)]
struct DiskGateState {
    is_closed: bool,
    waiting: usize,
}

#[derive(Debug)]
struct HangingFile(Arc<dyn LogFile>, Arc<DiskGate>);

impl HangingDisk {
    /// Makes writes and syncs hang from now on, or ends that.
    pub fn hang(&self, hangs: bool) {
        self.gate.state.lock().is_closed = hangs;
        self.gate.opened.notify_all();
    }

    /// Returns whether a thread waits for the disk.
    pub fn is_hanging(&self) -> bool {
        self.gate.state.lock().waiting > 0
    }
}

impl DiskGate {
    fn pass(&self) {
        let mut state = self.state.lock();
        state.waiting += 1;
        while state.is_closed {
            self.opened.wait_for(&mut state, POLL_INTERVAL);
        }
        state.waiting -= 1;
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

impl Disk for HangingDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        self.disk.read(name)
    }

    fn read_part(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        self.disk.read_part(name, offset, length)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(HangingFile(self.disk.create(name)?, Arc::clone(&self.gate))))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(HangingFile(self.disk.open(name)?, Arc::clone(&self.gate))))
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
        self.disk.boot_id()
    }
}
