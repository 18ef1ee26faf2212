//! Memory of the caller that operations read and write.

use std::{ops::Range, slice};

use mooncake_os::memory::nontemporal;

/// Copies of at least this length pass by the caches: their bytes are in no cache either, and a
/// non-temporal store does not read the lines that it overwrites.
const NONTEMPORAL_BYTES_MIN: usize = 1 << 20;

/// Copies bytes, past the caches if there are many. The ranges may overlap.
///
/// # Safety
/// Both ranges are mapped, the first is readable and the second writable, until this returns. There
/// is no Rust reference to the second.
pub(crate) unsafe fn copy_large(source: usize, target: usize, length: usize) {
    if length < NONTEMPORAL_BYTES_MIN {
        // SAFETY: promised by the caller.
        unsafe { nontemporal::copy_cached(source, target, length) };
        return;
    }
    // SAFETY: promised by the caller.
    unsafe { nontemporal::copy(source, target, length) };
    nontemporal::fence();
}

/// A range of memory that its owner lends until the operation is done.
#[derive(Debug, Clone, Copy)]
pub struct HostRange {
    address: usize,
    length: usize,
}

impl HostRange {
    /// An empty range.
    pub const EMPTY: Self = Self { address: 0, length: 0 };

    /// Names a range of memory.
    ///
    /// # Safety
    /// The memory is readable, and writable if an operation writes it, until the completion of
    /// every operation that was given the range is done. Nothing else accesses it meanwhile.
    pub unsafe fn new(address: usize, length: usize) -> Self {
        Self { address: if length == 0 { 0 } else { address }, length }
    }

    /// Returns the length in bytes.
    pub fn length(self) -> usize {
        self.length
    }

    /// Returns a part of the range.
    pub(crate) fn part(self, part: Range<usize>) -> Self {
        let (start, end) = (part.start.min(self.length), part.end.min(self.length));
        Self { address: self.address + start, length: end.saturating_sub(start) }
    }

    /// Returns the bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: the maker of the range keeps it readable until the operation is done, and only
        // operations that are not done hold one.
        unsafe { slice::from_raw_parts(self.address as *const u8, self.length) }
    }

    /// Lets `write` overwrite the bytes.
    pub(crate) fn fill<T>(self, write: impl FnOnce(&mut [u8]) -> T) -> T {
        if self.length == 0 {
            return write(&mut []);
        }
        // SAFETY: the maker of the range keeps it writable until the operation is done, and nothing
        // else accesses it meanwhile.
        write(unsafe { slice::from_raw_parts_mut(self.address as *mut u8, self.length) })
    }

    /// Overwrites the start of the range.
    pub(crate) fn write(self, bytes: &[u8]) {
        self.write_from(bytes.as_ptr() as usize, bytes.len());
    }

    /// Overwrites the start of the range by memory of this crate, or of the range itself, which stays
    /// mapped meanwhile.
    pub(crate) fn write_from(self, source: usize, length: usize) {
        let length = length.min(self.length);
        if length > 0 {
            // SAFETY: the maker of the range keeps it writable until the operation is done, and the
            // callers of this function keep the source.
            unsafe { copy_large(source, self.address, length) };
        }
    }
}

/// Where a group shows which slots are active: one 32-bit integer per slot.
#[derive(Debug)]
pub struct Mirror(HostRange);

impl Mirror {
    /// Names the memory of a mirror.
    ///
    /// # Safety
    /// As for [`HostRange::new`], until the mirror is dropped; readers may see old values.
    pub unsafe fn new(address: usize, slots: usize) -> Self {
        // SAFETY: the caller keeps the promise of `HostRange::new`.
        Self(unsafe { HostRange::new(address, slots * size_of::<i32>()) })
    }

    /// Shows which slots are active.
    pub(crate) fn show(&self, active: &[bool]) {
        let bytes: Vec<u8> =
            active.iter().flat_map(|&active| i32::from(active).to_ne_bytes()).collect();
        self.0.write(&bytes);
    }
}
