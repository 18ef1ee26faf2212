//! Memory that processes of one host share: a sealed file without a name, which a peer opens through
//! the descriptor of its maker.
#![allow(unsafe_code, reason = "memory that two processes share")]

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr::{self, NonNull},
};

/// With these seals, touching the memory can never end in a bus error.
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// What a process does with shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    ReadAndWrite,
}

/// Memory that is mapped until the drop.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    memory: NonNull<u8>,
    length: usize,
    file: File,
}

// SAFETY: the mapping belongs to no thread; who accesses it says why that is sound.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes memory of zeros, which takes its pages at once: touching them cannot fail later.
    pub(crate) fn create(length: usize) -> io::Result<Self> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a constant that ends in zero; a new descriptor is the only effect.
        let file = unsafe { libc::memfd_create(c"mooncake-group".as_ptr(), flags) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above has just made the descriptor, and nothing else knows it.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(file) });
        let size = libc::off_t::try_from(length).map_err(io::Error::other)?;
        // SAFETY: takes memory for a file that this function owns.
        let failed = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size) };
        if failed != 0 {
            return Err(io::Error::from_raw_os_error(failed));
        }
        // SAFETY: adds seals to a file that this function owns.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Self::map(file, length, Use::ReadAndWrite)
    }

    /// Opens memory that another process has made.
    pub(crate) fn open(process: u32, descriptor: i32, access: Use) -> io::Result<Self> {
        let path = format!("/proc/{process}/fd/{descriptor}");
        let file = File::options().read(true).write(access == Use::ReadAndWrite).open(path)?;
        // SAFETY: reads a property of a descriptor that this function owns.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(io::Error::other("the file of the peer is no sealed memory"));
        }
        let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        Self::map(file, length, access)
    }

    fn map(file: File, length: usize, access: Use) -> io::Result<Self> {
        let rights = match access {
            Use::Read => libc::PROT_READ,
            Use::ReadAndWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: maps new memory, of the size of the file, which is sealed.
        let memory =
            unsafe { libc::mmap(ptr::null_mut(), length, rights, flags, file.as_raw_fd(), 0) };
        let memory = NonNull::new(memory).filter(|it| it.as_ptr() != libc::MAP_FAILED);
        let memory = memory.ok_or_else(io::Error::last_os_error)?.cast();
        Ok(Self { memory, length, file })
    }

    /// The descriptor that a peer opens.
    pub(crate) fn descriptor(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// The first byte, which lies at the start of a page.
    pub(crate) fn memory(&self) -> NonNull<u8> {
        self.memory
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the memory was mapped by `map` with this length, and nothing refers to it.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_not_opened() {
        let file = File::open("/proc/self/exe").unwrap();
        let own = std::process::id();
        SharedMemory::open(own, file.as_raw_fd(), Use::Read).unwrap_err();
        SharedMemory::open(own, -1, Use::Read).unwrap_err();
        // SAFETY: as in `create`; the file has no seals.
        let file = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: the call above has just made the descriptor.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        SharedMemory::open(own, file.as_raw_fd(), Use::Read).unwrap_err();
    }
}
