//! Memory behind a file descriptor, which stands for a dma-buf.

use std::{ffi::c_int, ptr};

/// Bytes of a file, mapped while the value lives.
#[derive(Debug)]
pub(super) struct ExportedBytes {
    /// Address of the mapping, and its length.
    base: usize,
    length: usize,
    /// Offset of the bytes in the mapping.
    offset: usize,
}

impl ExportedBytes {
    /// Maps a file to the end of its bytes; None if that cannot be.
    pub(super) fn map(file: c_int, offset: u64, length: usize) -> Option<Self> {
        let offset = usize::try_from(offset).ok()?;
        let length = offset.checked_add(length)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base =
            unsafe { libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, file, 0) };
        let base = (base != libc::MAP_FAILED).then(|| base.expose_provenance())?;
        Some(Self { base, length, offset })
    }

    /// Returns the address of the first byte.
    pub(super) fn address(&self) -> u64 {
        (self.base + self.offset) as u64
    }
}

impl Drop for ExportedBytes {
    fn drop(&mut self) {
        let base = ptr::with_exposed_provenance_mut(self.base);
        // SAFETY: the mapping is this value's own, and nothing refers to it any more.
        unsafe { libc::munmap(base, self.length) };
    }
}
