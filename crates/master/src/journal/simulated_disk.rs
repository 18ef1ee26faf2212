//! A disk in memory that loses power: what was not synced is lost in part or as a whole, as a real
//! file system may lose it.

use std::{collections::BTreeMap, io, sync::Arc};

use mooncake_base::sync::Mutex;

use super::disk::{Disk, LogFile};

/// A disk in memory. Clones are the same disk.
#[derive(Debug, Clone, Default)]
pub struct SimulatedDisk(Arc<Mutex<Content>>);

#[derive(Debug, Default)]
struct Content {
    files: Vec<FileContent>,
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    /// Changes of names since the last sync of the directory.
    changes: Vec<NameChange>,
    boots: u64,
}

#[derive(Debug, Default)]
struct FileContent {
    bytes: Vec<u8>,
    /// How many of them are on the disk.
    durable: usize,
    /// What is on the disk, if the file was shortened since the last sync.
    before: Option<Vec<u8>>,
}

#[derive(Debug)]
enum NameChange {
    Create(String, usize),
    Rename(String, String, usize),
    Remove(String),
}

/// A handle of a file.
#[derive(Debug)]
struct Handle {
    content: Arc<Mutex<Content>>,
    file: usize,
}

impl SimulatedDisk {
    /// Crashes the machine. `below(n)` returns any number in `0..n` and decides what survives; with
    /// zeros, nothing but what was synced does.
    pub fn lose_power(&self, below: &mut dyn FnMut(u64) -> u64) {
        let content = &mut *self.0.lock();
        content.boots += 1;
        for file in &mut content.files {
            file.lose_power(below);
        }
        for change in std::mem::take(&mut content.changes) {
            if below(2) == 0 {
                continue;
            }
            match change {
                NameChange::Create(name, file) => {
                    content.durable_names.insert(name, file);
                }
                NameChange::Rename(from, to, file) => {
                    content.durable_names.remove(&from);
                    content.durable_names.insert(to, file);
                }
                NameChange::Remove(name) => {
                    content.durable_names.remove(&name);
                }
            }
        }
        content.names = content.durable_names.clone();
    }

    /// Loses all files, as with the disk.
    pub fn wipe(&self) {
        let content = &mut *self.0.lock();
        content.names.clear();
        content.durable_names.clear();
        content.changes.clear();
    }

    /// Changes the bytes of a file on the disk.
    ///
    /// # Errors
    /// There is no such file.
    pub fn damage(&self, name: &str, damage: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        let content = &mut *self.0.lock();
        let file = content.find(name)?;
        let file = &mut content.files[file];
        damage(&mut file.bytes);
        file.sync();
        Ok(())
    }
}

impl FileContent {
    fn truncate(&mut self, length: usize) {
        if length < self.durable {
            self.before = Some(self.bytes[..self.durable].to_vec());
            self.durable = 0;
        }
        self.bytes.truncate(length);
    }

    fn sync(&mut self) {
        (self.durable, self.before) = (self.bytes.len(), None);
    }

    fn lose_power(&mut self, below: &mut dyn FnMut(u64) -> u64) {
        // A file that was shortened may have its old length and content again.
        if let Some(before) = self.before.take()
            && below(2) == 0
        {
            self.bytes = before;
        } else {
            let kept = self.durable + below((self.bytes.len() - self.durable) as u64 + 1) as usize;
            self.bytes.truncate(kept);
            if kept > self.durable && below(4) == 0 {
                // Pages reach the disk in any order; those that did not are zero.
                let from = self.durable + below((kept - self.durable) as u64) as usize;
                let to = from + below((kept - from) as u64 + 1) as usize;
                self.bytes[from..to].fill(0);
            }
        }
        self.sync();
    }
}

impl Content {
    fn find(&self, name: &str) -> io::Result<usize> {
        self.names.get(name).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl SimulatedDisk {
    fn handle(&self, file: usize) -> Arc<dyn LogFile> {
        Arc::new(Handle { content: self.0.clone(), file })
    }
}

impl Disk for SimulatedDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.0.lock().names.keys().cloned().collect())
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let content = self.0.lock();
        Ok(content.files[content.find(name)?].bytes.clone())
    }

    fn read_part(&self, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let content = self.0.lock();
        let bytes = &content.files[content.find(name)?].bytes;
        let start = bytes.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
        let end = bytes.len().min(start.saturating_add(length));
        Ok(bytes[start..end].to_vec())
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let content = &mut *self.0.lock();
        if let Ok(file) = content.find(name) {
            content.files[file].truncate(0);
            return Ok(self.handle(file));
        }
        let file = content.files.len();
        content.files.push(FileContent::default());
        content.names.insert(name.to_owned(), file);
        content.changes.push(NameChange::Create(name.to_owned(), file));
        Ok(self.handle(file))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let file = self.0.lock().find(name)?;
        Ok(self.handle(file))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let content = &mut *self.0.lock();
        let file = content.find(from)?;
        content.names.remove(from);
        content.names.insert(to.to_owned(), file);
        content.changes.push(NameChange::Rename(from.to_owned(), to.to_owned(), file));
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let content = &mut *self.0.lock();
        content.find(name)?;
        content.names.remove(name);
        content.changes.push(NameChange::Remove(name.to_owned()));
        Ok(())
    }

    fn sync_directory(&self) -> io::Result<()> {
        let content = &mut *self.0.lock();
        content.changes.clear();
        content.durable_names = content.names.clone();
        Ok(())
    }

    fn boot_id(&self) -> [u8; 16] {
        u128::from(self.0.lock().boots + 1).to_le_bytes()
    }
}

impl LogFile for Handle {
    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        self.content.lock().files[self.file].bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn truncate(&self, length: u64) -> io::Result<()> {
        self.content.lock().files[self.file].truncate(length as usize);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.content.lock().files[self.file].sync();
        Ok(())
    }
}
