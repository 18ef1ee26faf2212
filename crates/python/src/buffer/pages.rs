//! Private, anonymous pages that begin at a wanted alignment.
#![allow(unsafe_code, reason = "maps and unmaps pages")]

use std::ptr;

/// Private, anonymous pages, unmapped when dropped.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) address: usize,
    length: usize,
}

impl Pages {
    /// Maps zeroed pages that begin at a multiple of `alignment`, a power of two. `None` if there
    /// is no such memory.
    pub(super) fn map(length: usize, alignment: usize) -> Option<Self> {
        let page = mooncake_os::memory::page_size();
        let length = length.checked_next_multiple_of(page)?;
        let spare = if alignment > page { alignment } else { 0 };
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let total = length.checked_add(spare)?;
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), total, access, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return None;
        }
        let mapped = mapped as usize;
        let whole = Self { address: mapped, length: total };
        // Without room for the alignment at the end of the address space the mapping is returned.
        let address = mapped.checked_next_multiple_of(alignment)?;
        std::mem::forget(whole);
        let pages = Self { address, length };
        // The unaligned ends are unmapped, so that only what is used takes address space.
        drop(Self { address: mapped, length: address - mapped });
        let end = address + length;
        drop(Self { address: end, length: mapped + total - end });
        Some(pages)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: `map` mapped these whole pages for this value, and nothing refers to them:
            // a buffer outlives its views.
            unsafe { libc::munmap(self.address as *mut libc::c_void, self.length) };
        }
    }
}
