//! A part of a file, mapped so that peers may access it like user memory.

use std::{
    fmt,
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
    path::Path,
    ptr,
    sync::Arc,
};

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_os::{fork, memory::page_size};

use super::{MemoryHold, address_quarantine};
use crate::transfer_entry::LocalRange;

/// A part of a file that stays registered with an engine while this lives.
///
/// Written bytes go into the file. If the file is truncated meanwhile, transfers fail and nothing
/// worse happens, since bytes go in and out by system calls.
pub struct FileMemory {
    mapping: Arc<FileMapping>,
    withdraw: Option<Box<dyn FnOnce(u64) + Send + Sync>>,
}

#[derive(Debug)]
pub(crate) struct FileMapping {
    base: usize,
    length: usize,
    _file: File,
    generation: u64,
}

impl FileMemory {
    /// Maps `length` bytes of a file starting at `offset`, which must be a multiple of the page
    /// size.
    ///
    /// # Errors
    /// The file cannot be opened for reading and writing, is too short, or cannot be mapped.
    pub(crate) fn map(path: &Path, offset: u64, length: u64) -> Result<Self> {
        let failed = |code, text: &'static str, error: io::Error| {
            Error::new(code, text).with("path", path.display()).caused_by(error)
        };
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(|error| {
            failed(ErrorCode::FILE_OPEN_FAIL, "the file cannot be opened", error)
        })?;
        let size = file.metadata().map(|metadata| metadata.len()).map_err(|error| {
            failed(ErrorCode::FILE_READ_FAIL, "the size of the file cannot be read", error)
        })?;
        let named = |text: &'static str| {
            Error::invalid(text)
                .with("path", path.display())
                .with("offset", offset)
                .with("length", length)
                .with("file_bytes", size)
        };
        if !offset.is_multiple_of(page_size() as u64) {
            return Err(named("the file offset is not a multiple of the page size"));
        }
        if length == 0 || offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(named("the file is shorter than the range"));
        }
        let (Ok(bytes), Ok(from)) = (usize::try_from(length), i64::try_from(offset)) else {
            return Err(named("the range exceeds the address space"));
        };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the system chooses; no reference into it is ever
        // created.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), from)
        };
        if base == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            return Err(failed(ErrorCode::FILE_OPEN_FAIL, "the file cannot be mapped", error));
        }
        let mapping = FileMapping {
            base: base as usize,
            length: bytes,
            _file: file,
            generation: fork::generation(),
        };
        Ok(Self { mapping: Arc::new(mapping), withdraw: None })
    }

    /// Sets the hook that runs, with the first address, before the memory is unmapped.
    pub(crate) fn on_drop(&mut self, withdraw: impl FnOnce(u64) + Send + Sync + 'static) {
        self.withdraw = Some(Box::new(withdraw));
    }

    pub(crate) const fn mapping(&self) -> &Arc<FileMapping> {
        &self.mapping
    }

    /// Keeps the memory mapped beyond the life of this object.
    pub fn hold(&self) -> MemoryHold {
        MemoryHold::file(&self.mapping)
    }

    /// First address in this process, by which peers address the memory.
    pub fn base(&self) -> u64 {
        self.mapping.base as u64
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.mapping.length as u64
    }
}

impl fmt::Debug for FileMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileMemory")
            .field("base", &format_args!("{:#x}", self.base()))
            .field("length", &self.length())
            .finish_non_exhaustive()
    }
}

impl Drop for FileMemory {
    fn drop(&mut self) {
        if let Some(withdraw) = self.withdraw.take() {
            withdraw(self.base());
        }
    }
}

impl FileMapping {
    /// A part of the mapping as local memory, for a copy that holds this mapping.
    ///
    /// # Panics
    /// If the part is not inside the mapping.
    pub(crate) fn range(&self, address: usize, length: usize) -> LocalRange {
        let offset = address.checked_sub(self.base);
        let is_inside =
            offset.is_some_and(|offset| length <= self.length && offset <= self.length - length);
        assert!(is_inside, "the part was checked against the mapping");
        // SAFETY: the caller holds this object, which owns the mapping, and no reference into it is
        // ever created.
        unsafe { LocalRange::volatile(address, length) }
    }

    pub(super) const fn bounds(&self) -> (usize, usize) {
        (self.base, self.length)
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        if fork::is_forked_since(self.generation) {
            return;
        }
        // SAFETY: this object owns the mapping, and its region was withdrawn before.
        unsafe { address_quarantine::quarantine(self.base, self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn file(bytes: u64) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"begin").unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    #[test]
    fn maps_only_bytes_that_the_file_has() {
        let file = file(3 * 4096);
        let mapped = FileMemory::map(file.path(), 4096, 8192).unwrap();
        assert_eq!(mapped.length(), 8192);
        for (offset, length) in [(4096, 8193), (1, 100), (0, 0), (u64::MAX - 4095, 8192)] {
            let error = FileMemory::map(file.path(), offset, length).unwrap_err();
            assert_eq!(error.code(), ErrorCode::INVALID_PARAMS, "{offset} {length}");
        }
        assert!(FileMemory::map(file.path(), 0, 100).is_ok(), "no whole pages are asked for");
    }

    #[test]
    fn error_names_a_missing_file() {
        let error = FileMemory::map(Path::new("/nowhere/at/all"), 0, 1).unwrap_err();
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    }
}
