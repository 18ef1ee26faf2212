//! Memory of the host for allocators that are plugged into others by the addresses of two C
//! functions: what is allocated here can be shared with processes that are forked later.
#![allow(unsafe_code, reason = "maps and unmaps memory by address")]

use std::{collections::HashMap, ffi::c_void, ptr, sync::LazyLock};

use mooncake_base::sync::Mutex;
use pyo3::prelude::*;

/// What is allocated: the length by the address. Callers of `free` need not remember it.
static MAPPED: LazyLock<Mutex<HashMap<usize, usize>>> = LazyLock::new(Mutex::default);

/// The addresses of the two functions. They are called as pluggable allocators are: with a size, a
/// device and a stream, and with an address, a size, a device and a stream; only the size of the
/// first and the address of the second count.
#[pyfunction]
pub(crate) fn host_allocator() -> (usize, usize) {
    (allocate as *const () as usize, free as *const () as usize)
}

/// New memory of zeros, in whole pages; null if the size is none or there is no memory.
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

/// Gives memory back; what was not allocated here is left alone.
extern "C" fn free(address: *mut c_void, _size: isize, _device: i32, _stream: *mut c_void) {
    let Some(size) = MAPPED.lock().remove(&(address as usize)) else { return };
    // SAFETY: the table has this range only as long as it is mapped and its allocator's; whoever
    // frees it says by that that nobody uses it.
    unsafe { libc::munmap(address, size) };
}
