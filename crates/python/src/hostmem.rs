//! Host memory for allocators that other libraries plug in by the addresses of two C functions. The
//! memory can be shared with processes that are forked later.
#![allow(unsafe_code, reason = "maps and unmaps memory by address")]

use std::{collections::HashMap, ffi::c_void, ptr, sync::LazyLock};

use mooncake_base::sync::Mutex;
use pyo3::prelude::*;

/// Length of each allocation by its address. Callers of `free` need not know the length.
static MAPPED: LazyLock<Mutex<HashMap<usize, usize>>> = LazyLock::new(Mutex::default);

/// Returns the addresses of the two functions. Their signatures are those of pluggable allocators:
/// `(size, device, stream)` and `(address, size, device, stream)`; only the size of the first and
/// the address of the second are used.
#[pyfunction]
pub(crate) fn host_allocator() -> (usize, usize) {
    (allocate as *const () as usize, free as *const () as usize)
}

/// Returns zeroed memory in whole pages; null if the size is not positive or there is no memory.
extern "C" fn allocate(size: isize, _device: i32, _stream: *mut c_void) -> *mut c_void {
    let Some(size) = usize::try_from(size).ok().filter(|size| *size > 0) else {
        return ptr::null_mut();
    };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let address = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return ptr::null_mut();
    }
    MAPPED.lock().insert(address as usize, size);
    address
}

/// Frees memory; an address that was not allocated here is ignored.
extern "C" fn free(address: *mut c_void, _size: isize, _device: i32, _stream: *mut c_void) {
    let Some(size) = MAPPED.lock().remove(&(address as usize)) else { return };
    // SAFETY: an entry of the table is a mapping made by `allocate` and not yet unmapped, and this
    // call removed the entry. The caller of `free` guarantees that the memory is no longer in use.
    unsafe { libc::munmap(address, size) };
}
