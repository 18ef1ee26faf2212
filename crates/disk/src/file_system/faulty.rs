//! A file system in memory that fails as real ones do, by a seed.
//!
//! What was written and not synced may be lost at a loss of power: each sector by itself, in any
//! order. Reads and writes may be short. Errors are switched on by tests.

use std::{
    collections::BTreeMap,
    io::{self, IoSliceMut},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mooncake_base::{random::SplitMix64, sync::Mutex};

use super::{File, FileSystem, Lock, Mode, Space};

/// What reaches a device as a whole or not at all.
const SECTOR: usize = 512;

/// Errors and events to come.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Faults {
    /// Reads and writes give a part of what was asked for.
    pub(crate) is_short: bool,
    /// Writes fail with EIO.
    pub(crate) fails_writes: bool,
    /// Reads fail with EIO.
    pub(crate) fails_reads: bool,
    /// How long each read takes.
    pub(crate) read_delay: Duration,
    /// The bytes that files may still take.
    pub(crate) free: Option<u64>,
    /// The number of writes and syncs until the power is lost.
    pub(crate) writes_until_loss: Option<u64>,
}

#[derive(Debug, Default, Clone)]
struct Content {
    durable: Vec<u8>,
    current: Vec<u8>,
}

/// A part of a file that the device cannot read, or cannot write.
#[derive(Debug, Clone)]
struct Broken {
    path: PathBuf,
    bytes: Range<u64>,
    is_for_writes: bool,
}

#[derive(Debug)]
struct FaultyState {
    broken: Vec<Broken>,
    files: BTreeMap<PathBuf, Content>,
    faults: Faults,
    random: SplitMix64,
    is_off: bool,
    is_locked: bool,
}

/// The file system; copies of it share one state.
#[derive(Debug, Clone)]
pub(crate) struct FaultyFiles(Arc<Mutex<FaultyState>>);

impl FaultyFiles {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(FaultyState {
            broken: Vec::new(),
            files: BTreeMap::new(),
            faults: Faults::default(),
            random: SplitMix64::new(seed),
            is_off: false,
            is_locked: false,
        })))
    }

    pub(crate) fn set(&self, faults: Faults) {
        self.0.lock().faults = faults;
    }

    pub(crate) fn faults(&self) -> Faults {
        self.0.lock().faults
    }

    /// Makes reads of a part of a file fail from now on, also after a restart.
    pub(crate) fn break_reads(&self, path: &Path, bytes: Range<u64>) {
        let broken = Broken { path: path.into(), bytes, is_for_writes: false };
        self.0.lock().broken.push(broken);
    }

    /// Makes writes of a part of a file fail from now on.
    pub(crate) fn break_writes(&self, path: &Path, bytes: Range<u64>) {
        let broken = Broken { path: path.into(), bytes, is_for_writes: true };
        self.0.lock().broken.push(broken);
    }

    /// Switches the power off and on: each sector that was not synced is kept or lost.
    pub(crate) fn lose_power(&self) {
        let FaultyState { files, random, is_off, faults, is_locked, .. } = &mut *self.0.lock();
        for content in files.values_mut() {
            content.durable.resize(content.current.len(), 0);
            let sectors = content.durable.chunks_mut(SECTOR).zip(content.current.chunks(SECTOR));
            for (durable, current) in sectors {
                if durable != current && random.below(2) == 0 {
                    durable.copy_from_slice(current);
                }
            }
            content.current.clone_from(&content.durable);
        }
        (*is_off, *is_locked, *faults) = (false, false, Faults::default());
    }

    /// Ends the process: what it wrote stays.
    pub(crate) fn kill(&self) {
        let mut state = self.0.lock();
        state.is_off = false;
        state.is_locked = false;
        state.faults = Faults::default();
    }

    /// Changes a bit of a file.
    pub(crate) fn flip(&self, path: &Path, at: usize) {
        let mut state = self.0.lock();
        let content = state.files.get_mut(path).expect("the file exists");
        content.current[at] ^= 1;
        content.durable = content.current.clone();
    }

    /// Returns what a file holds.
    pub(crate) fn bytes(&self, path: &Path) -> Vec<u8> {
        self.0.lock().files.get(path).expect("the file exists").current.clone()
    }

    /// Replaces what a file holds, on the device too.
    pub(crate) fn replace(&self, path: &Path, bytes: Vec<u8>) {
        let content = Content { durable: bytes.clone(), current: bytes };
        self.0.lock().files.insert(path.into(), content);
    }

    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.0.lock().files.keys().cloned().collect()
    }
}

impl FaultyState {
    /// Counts a write or sync towards the loss of power.
    fn count(&mut self) -> io::Result<()> {
        match &mut self.faults.writes_until_loss {
            Some(0) => self.is_off = true,
            Some(count) => *count -= 1,
            None => {}
        }
        if self.is_off || self.faults.fails_writes { Err(eio()) } else { Ok(()) }
    }

    fn is_broken(&self, path: &Path, bytes: Range<u64>, is_write: bool) -> bool {
        self.broken.iter().any(|broken| {
            broken.is_for_writes == is_write
                && broken.path == path
                && broken.bytes.start < bytes.end
                && bytes.start < broken.bytes.end
        })
    }

    fn grow(&mut self, path: &Path, bytes: usize) -> io::Result<()> {
        let content = self.files.get_mut(path).ok_or(io::ErrorKind::NotFound)?;
        let more = bytes.saturating_sub(content.current.len());
        if let Some(free) = &mut self.faults.free {
            *free = free.checked_sub(more as u64).ok_or(io::ErrorKind::StorageFull)?;
        }
        if more > 0 {
            content.current.resize(bytes, 0);
        }
        Ok(())
    }
}

fn eio() -> io::Error {
    io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error())
}

#[derive(Debug)]
struct Held(FaultyFiles);

impl Lock for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.0.lock().is_locked = false;
    }
}

impl FileSystem for FaultyFiles {
    fn open(&self, path: &Path, mode: Mode) -> io::Result<Arc<dyn File>> {
        let mut state = self.0.lock();
        let is_there = state.files.contains_key(path);
        match mode {
            Mode::Direct => return Err(io::ErrorKind::InvalidInput.into()),
            Mode::Create if is_there => return Err(io::ErrorKind::AlreadyExists.into()),
            Mode::Create => drop(state.files.insert(path.into(), Content::default())),
            _ if !is_there => return Err(io::ErrorKind::NotFound.into()),
            _ => {}
        }
        Ok(Arc::new(FaultyFile { files: self.clone(), path: path.into() }))
    }

    fn create_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        let state = self.0.lock();
        let names = state.files.keys().filter(|path| path.parent() == Some(directory));
        Ok(names.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.0.lock();
        state.count()?;
        let content = state.files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        state.files.insert(to.into(), content);
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.0.lock();
        let content = state.files.remove(path).ok_or(io::ErrorKind::NotFound)?;
        if let Some(free) = &mut state.faults.free {
            *free += content.current.len() as u64;
        }
        Ok(())
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }

    fn space(&self, _: &Path) -> io::Result<Space> {
        let free = self.0.lock().faults.free.unwrap_or(1 << 40);
        Ok(Space { total: 1 << 40, free })
    }

    fn direct_alignment(&self, _: &Path) -> Option<u64> {
        None
    }

    fn lock(&self, _: &Path, _: &str) -> io::Result<Result<Box<dyn Lock>, String>> {
        let mut state = self.0.lock();
        if state.is_locked {
            return Ok(Err("another test".to_owned()));
        }
        state.is_locked = true;
        Ok(Ok(Box::new(Held(self.clone()))))
    }
}

#[derive(Debug)]
struct FaultyFile {
    files: FaultyFiles,
    path: PathBuf,
}

impl File for FaultyFile {
    fn read_at(&self, into: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        let until = Instant::now() + self.files.0.lock().faults.read_delay;
        while Instant::now() < until {
            thread::park_timeout(until.saturating_duration_since(Instant::now()));
        }
        let length: usize = into.iter().map(|slice| slice.len()).sum();
        let mut state = self.files.0.lock();
        if state.is_broken(&self.path, offset..offset + length as u64, false) {
            return Err(eio());
        }
        let FaultyState { files, faults, random, is_off, .. } = &mut *state;
        if *is_off || faults.fails_reads {
            return Err(eio());
        }
        let content = files.get(&self.path).ok_or(io::ErrorKind::NotFound)?;
        let mut rest = content.current.get(offset as usize..).unwrap_or_default();
        if faults.is_short && rest.len() > 1 {
            rest = &rest[..1 + random.below(rest.len() - 1)];
        }
        let mut read = 0;
        for slice in into {
            let count = slice.len().min(rest.len());
            slice[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            read += count;
        }
        Ok(read)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut state = self.files.0.lock();
        state.count()?;
        if state.is_broken(&self.path, offset..offset + bytes.len() as u64, true) {
            return Err(eio());
        }
        let is_part = state.faults.is_short && bytes.len() > 1;
        let count = if is_part { 1 + state.random.below(bytes.len() - 1) } else { bytes.len() };
        let start = offset as usize;
        state.grow(&self.path, start + count)?;
        let content = state.files.get_mut(&self.path).ok_or(io::ErrorKind::NotFound)?;
        content.current[start..start + count].copy_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.files.0.lock();
        state.count()?;
        state.grow(&self.path, bytes as usize)
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.files.0.lock();
        state.count()?;
        let content = state.files.get_mut(&self.path).ok_or(io::ErrorKind::NotFound)?;
        content.durable.clone_from(&content.current);
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        let state = self.files.0.lock();
        let content = state.files.get(&self.path).ok_or(io::ErrorKind::NotFound)?;
        Ok(content.current.len() as u64)
    }
}
