//! The seam between records and files: what a directory asks of its file system.
//!
//! [`RealFiles`] is the file system of the machine. Tests use one that fails, tears and forgets.

#[cfg(test)]
pub(crate) mod faulty;

use std::{
    fmt::Debug,
    fs::{self, DirBuilder, OpenOptions},
    io::{self, IoSliceMut, Read, Seek, Write},
    num::NonZeroU64,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    },
    path::Path,
    sync::Arc,
};

use mooncake_os::fork;
use rustix::fs::{Advice, AtFlags, CWD, FallocateFlags, FlockOperation, StatxFlags};

use crate::format::{UNIT_MAX, UNIT_MIN};

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// For reads through the page cache.
    Read,
    /// For reads and writes through the page cache.
    Write,
    /// The same, of a file that does not exist.
    Create,
    /// For reads past the page cache, whose address, offset and length are aligned.
    Direct,
}

/// The size of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// All of its bytes.
    pub total: u64,
    /// The bytes that this process may still use.
    pub free: u64,
}

/// Keeps other processes out of a directory until it is dropped.
pub trait Lock: Debug + Send + Sync {}

/// What a directory asks of its file system. Paths are those of the caller.
pub trait FileSystem: Debug + Send + Sync {
    /// Opens a file; a new one is readable by its owner only.
    ///
    /// # Errors
    /// Those of the system.
    fn open(&self, path: &Path, mode: Mode) -> io::Result<Arc<dyn File>>;

    /// Makes a directory, and those above it, for its owner only.
    ///
    /// # Errors
    /// Those of the system.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Returns the names in a directory.
    ///
    /// # Errors
    /// Those of the system.
    fn list(&self, directory: &Path) -> io::Result<Vec<String>>;

    /// Replaces a file by another of the same directory.
    ///
    /// # Errors
    /// Those of the system.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// Those of the system.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Waits until names in a directory are on the device.
    ///
    /// # Errors
    /// Those of the system.
    fn sync_dir(&self, directory: &Path) -> io::Result<()>;

    /// Returns the size of the file system of a directory.
    ///
    /// # Errors
    /// Those of the system.
    fn space(&self, directory: &Path) -> io::Result<Space>;

    /// Returns the alignment of direct reads of a file, or `None` if the file system reports none.
    fn direct_alignment(&self, path: &Path) -> Option<u64>;

    /// Locks a file, which is made if need be, and writes the holder into it. Without waiting.
    ///
    /// # Errors
    /// Those of the system; the text of the holder if another has the lock.
    fn lock(&self, path: &Path, holder: &str) -> io::Result<Result<Box<dyn Lock>, String>>;
}

/// An open file.
pub trait File: Debug + Send + Sync {
    /// Reads at an offset into the buffers in turn; may read less, and 0 bytes at the end.
    ///
    /// # Errors
    /// Those of the system.
    fn read_at(&self, into: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize>;

    /// Writes at an offset; may write less.
    ///
    /// # Errors
    /// Those of the system.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;

    /// Reserves the first bytes of the file on the device.
    ///
    /// # Errors
    /// Those of the system.
    fn allocate(&self, bytes: u64) -> io::Result<()>;

    /// Waits until what was written is on the device.
    ///
    /// # Errors
    /// Those of the system.
    fn sync(&self) -> io::Result<()>;

    /// Returns the length of the file.
    ///
    /// # Errors
    /// Those of the system.
    fn length(&self) -> io::Result<u64>;

    /// Lets the page cache forget the bytes before `end`, as far as they are on the device. A hint.
    fn forget_cached(&self, _end: u64) {}

    /// Returns the descriptor of a file of the system; others cannot be read by a ring.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Reads all bytes, also if the file system gives them in parts.
///
/// # Errors
/// Those of the system, and `UnexpectedEof` at the end of the file.
pub fn read_exact(file: &dyn File, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !into.is_empty() {
        match file.read_at(&mut [IoSliceMut::new(into)], offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                into = &mut into[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all bytes, also if the file system takes them in parts.
///
/// # Errors
/// Those of the system.
pub fn write_all(file: &dyn File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write_at(bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The file system of the machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealFiles;

impl FileSystem for RealFiles {
    fn open(&self, path: &Path, mode: Mode) -> io::Result<Arc<dyn File>> {
        let mut options = OpenOptions::new();
        options.read(true).mode(0o600);
        match mode {
            Mode::Read => {}
            Mode::Write => drop(options.write(true)),
            Mode::Create => drop(options.write(true).create_new(true)),
            Mode::Direct => drop(options.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32)),
        }
        Ok(Arc::new(options.open(path)?))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(directory)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, directory: &Path) -> io::Result<()> {
        fs::File::open(directory)?.sync_all()
    }

    fn space(&self, directory: &Path) -> io::Result<Space> {
        let found = rustix::fs::statvfs(directory)?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Ok(Space { total: bytes(found.f_blocks), free: bytes(found.f_bavail) })
    }

    fn direct_alignment(&self, path: &Path) -> Option<u64> {
        let found = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::DIOALIGN).ok()?;
        let (memory, offset) = (found.stx_dio_mem_align, found.stx_dio_offset_align);
        (memory != 0 && offset != 0).then(|| u64::from(memory.max(offset)))
    }

    fn lock(&self, path: &Path, holder: &str) -> io::Result<Result<Box<dyn Lock>, String>> {
        Ok(HeldLock::take(path, holder)?.map(|held| Box::new(held) as Box<dyn Lock>))
    }
}

/// A locked file. A forked child closes its copy at once: the child would share the lock, and hold it
/// when this process is dead.
#[derive(Debug)]
struct HeldLock {
    /// `None` once the lock is dropped.
    file: Option<fs::File>,
    fork_generation: u64,
}

impl HeldLock {
    fn take(path: &Path, holder: &str) -> io::Result<Result<Self, String>> {
        let mut options = OpenOptions::new();
        // The text is replaced only once the lock is held.
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let fork_generation = fork::generation();
        let file = options.open(path)?;
        fork::guard_descriptor(file.as_raw_fd());
        let held = Self { file: Some(file), fork_generation };
        let Some(mut file) = held.file.as_ref() else { return Ok(Ok(held)) };
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                file.take(1024).read_to_string(&mut text)?;
                return Ok(Err(text.trim().to_owned()));
            }
            Err(error) => return Err(error.into()),
        }
        // In this order a file system that is full has the space already.
        file.rewind()?;
        file.write_all(holder.as_bytes())?;
        file.set_len(holder.len() as u64)?;
        Ok(Ok(held))
    }
}

impl Lock for HeldLock {}

impl Drop for HeldLock {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        if fork::is_forked_since(self.fork_generation) {
            // Closed when the child began; the number may be that of another file by now.
            std::mem::forget(file);
            return;
        }
        fork::unguard(file.as_raw_fd());
        // A child that was made without the handlers of `fork` may share it. Fails for a descriptor that
        // is none of a file only.
        let _ = rustix::fs::flock(&file, FlockOperation::Unlock);
    }
}

impl File for fs::File {
    fn read_at(&self, into: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        Ok(rustix::io::preadv(self, into, offset)?)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, offset)
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        match rustix::fs::fallocate(self, FallocateFlags::empty(), 0, bytes) {
            // What such a file system stores is not reserved, but no less readable.
            Err(rustix::io::Errno::OPNOTSUPP) => self.set_len(bytes),
            outcome => Ok(outcome?),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn forget_cached(&self, end: u64) {
        // A file system that does not know the hint keeps them.
        let _ = rustix::fs::fadvise(self, 0, NonZeroU64::new(end), Advice::DontNeed);
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

/// Tells whether an error is that of a file system without space.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Returns the unit of a directory: what direct reads need, within what the format allows.
pub(crate) fn unit(reported: Option<u64>) -> u64 {
    match reported {
        Some(bytes) if bytes.is_power_of_two() => bytes.clamp(UNIT_MIN, UNIT_MAX),
        _ => UNIT_MIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_ends_while_another_process_has_the_descriptor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = HeldLock::take(&path, "first").unwrap().unwrap();
        let of_child = held.file.as_ref().unwrap().try_clone().unwrap();
        assert_eq!(HeldLock::take(&path, "second").unwrap().err().as_deref(), Some("first"));
        drop(held);
        HeldLock::take(&path, "second").unwrap().unwrap();
        drop(of_child);
    }

    #[test]
    fn the_unit_is_4096_if_the_file_system_reports_nothing() {
        let units = [None, Some(512), Some(8192), Some(3), Some(1 << 30)].map(unit);
        assert_eq!(units, [4096, 4096, 8192, 4096, UNIT_MAX]);
    }
}
