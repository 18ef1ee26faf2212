//! A quick look at memory of the user: is it plain memory, all there, and ours to touch?
//!
//! Having the kernel make every page present says so for certain, and costs a tenth of the copy
//! that follows. Two questions that cost next to nothing say as much of memory that is in use: what
//! kind of mapping it lies in (which kernels since 6.11 answer for one address), and whether all of
//! its pages are there. A no is no verdict; it only means that one must ask the long way.

use std::{
    fs::File,
    io,
    ops::Range,
    os::fd::{AsRawFd, IntoRawFd},
    sync::atomic::{AtomicU64, Ordering},
};

use super::page_size;
use crate::fork;

/// The most bytes that one look is about.
pub(super) const CHECK_BYTES_MAX: usize = 2 << 20;

/// The part of `wanted` around an address, as whole pages, that can be read and written now: private
/// memory without a file, with all of its pages there. Other memory may end in a bus error, or
/// hide pages that end the process.
pub(super) fn accessible_part(address: usize, wanted: &Range<usize>) -> Option<Range<usize>> {
    let mapping = mapping_at(address)?;
    let page = page_size();
    let start = wanted.start.max(mapping.start) & !(page - 1);
    let end = wanted.end.min(mapping.end).checked_next_multiple_of(page)?;
    (start < end && are_resident(start, end - start)).then_some(start..end)
}

/// Whether all pages of a range that begins with a page are there, mapped here or not; `false` for
/// more than one look is about and a page.
pub(crate) fn are_resident(address: usize, length: usize) -> bool {
    let mut pages = [0_u8; CHECK_BYTES_MAX / 4096 + 1];
    let count = length.div_ceil(page_size());
    if count > pages.len() {
        return false;
    }
    // SAFETY: there is a byte for each of the pages; a range that is not mapped is refused.
    let failed = unsafe { libc::mincore(address as *mut _, length, pages.as_mut_ptr()) } != 0;
    !failed && pages[..count].iter().all(|page| page & 1 != 0)
}

/// Whether nothing at all is mapped at an address. What is mapped and may not be touched is there
/// too; and where the kernel does not tell, everything is.
pub(crate) fn is_unmapped(address: u64) -> bool {
    let page = page_size() as u64;
    let mut presence = 0_u8;
    // SAFETY: of one page the kernel writes one byte, and touches nothing of the page itself.
    let failed =
        unsafe { libc::mincore((address & !(page - 1)) as *mut _, 1, &raw mut presence) } != 0;
    failed && io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
}

/// `struct procmap_query` of the kernel.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    rights: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

/// `PROCMAP_QUERY`: `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong =
    (3 << 30) | ((size_of::<ProcmapQuery>() as libc::c_ulong) << 16) | 0x6611;

const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const SHARED: u64 = 8;

/// The mapping that an address lies in, if it is private memory without a file that can be read and
/// written.
fn mapping_at(address: usize) -> Option<Range<usize>> {
    let maps = maps_descriptor()?;
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        address: address as u64,
        ..ProcmapQuery::default()
    };
    // SAFETY: the kernel fills the description, which says how long it is, and nothing else.
    if unsafe { libc::ioctl(maps, PROCMAP_QUERY as _, &raw mut query) } != 0 {
        let error = io::Error::last_os_error();
        if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) {
            MAPS.store(pack(fork::generation(), Some(NONE)), Ordering::Relaxed);
        }
        return None;
    }
    let rights = query.rights & (READABLE | WRITABLE | SHARED);
    let is_plain = rights == READABLE | WRITABLE && query.inode == 0;
    is_plain.then_some(query.start as usize..query.end as usize)
}

/// The descriptor that answers for this process, and the generation of the process that it was
/// opened in: a fork must open its own.
static MAPS: AtomicU64 = AtomicU64::new(0);

/// In the place of a descriptor: there is none to be had.
const NONE: u32 = u32::MAX;

fn pack(generation: u64, file: Option<u32>) -> u64 {
    (generation << 32) | u64::from(file.map_or(0, |file| file.saturating_add(1)))
}

fn maps_descriptor() -> Option<i32> {
    let generation = fork::generation();
    let known = MAPS.load(Ordering::Relaxed);
    if known >> 32 == generation & u64::from(u32::MAX) && known as u32 != 0 {
        return i32::try_from(known as u32 - 1).ok();
    }
    // Kept open for as long as the process lives.
    let file = File::open("/proc/self/maps").ok();
    let number = file.as_ref().map_or(NONE, |file| file.as_raw_fd().unsigned_abs());
    let mine = pack(generation, Some(number));
    match MAPS.compare_exchange(known, mine, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => file.map(IntoRawFd::into_raw_fd),
        // Another thread was faster; the next look goes by its descriptor.
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(memory: &[u8]) -> Range<usize> {
        let start = memory.as_ptr() as usize;
        start..start + memory.len()
    }

    #[test]
    fn the_description_has_the_length_that_its_number_says() {
        assert_eq!(size_of::<ProcmapQuery>(), 104);
        assert_eq!(PROCMAP_QUERY, 0xC068_6611);
    }

    #[test]
    fn memory_in_use_is_plain_where_the_kernel_answers_and_other_memory_never_is() {
        let memory = vec![1_u8; 1 << 20];
        let range = whole(&memory);
        if mapping_at(range.start).is_none() {
            println!("skipped: this kernel does not tell of one mapping");
            return;
        }
        let found = accessible_part(range.start, &range).expect("it was just written");
        assert!(found.start <= range.start && found.end >= range.end, "{found:x?} {range:x?}");
        // Code is mapped and there, and not to be written.
        let code = pack as *const () as usize;
        assert_eq!(accessible_part(code, &(code..code + 1)), None);
        for nowhere in [0, 8, usize::MAX - 1] {
            assert_eq!(accessible_part(nowhere, &(nowhere..nowhere + 1)), None);
        }
    }

    #[test]
    fn what_is_reserved_is_mapped_and_what_is_nowhere_is_not() {
        let page = page_size();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping where the kernel likes, which nobody touches.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), page, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        assert!(!is_unmapped(base as u64) && !is_unmapped(base as u64 + page as u64 - 1));
        // SAFETY: the mapping is this test's own.
        unsafe { libc::munmap(base, page) };
        for nowhere in [0, 8, 1 << 63, u64::MAX] {
            assert!(is_unmapped(nowhere), "{nowhere:#x}");
        }
    }

    #[test]
    fn pages_that_are_not_there_are_not_plain() {
        const LENGTH: usize = 4 * CHECK_BYTES_MAX;
        let (rights, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping where the kernel likes, which nobody touches.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), LENGTH, rights, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let middle = base as usize + LENGTH / 2;
        assert_eq!(accessible_part(middle, &(middle..middle + CHECK_BYTES_MAX)), None);
        // SAFETY: the mapping is this test's own.
        unsafe { libc::munmap(base, LENGTH) };
    }
}
