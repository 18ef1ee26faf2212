//! A quick check of user memory: is it private anonymous memory with all pages resident?
//!
//! Populating every page through the kernel is a definite answer and costs a tenth of the copy that
//! follows. For memory in use, two almost free questions are as good: in what kind of mapping the
//! address lies (kernels since 6.11 answer for a single address), and whether all of its pages are
//! resident. A negative result is not a verdict; it only means that the slow check is needed.

use std::{
    fs::File,
    io,
    ops::Range,
    os::fd::{AsRawFd, IntoRawFd},
    sync::atomic::{AtomicU64, Ordering},
};

use mooncake_os::{fork, memory::page_size};

/// Maximum number of bytes per check.
pub(super) const CHECK_BYTES_MAX: usize = 2 << 20;

/// Returns the part of `wanted` around an address, in whole pages, that can be read and written
/// now: private anonymous memory with all pages resident. Access to other memory may end in a bus
/// error, or hit guard pages that end the process.
pub(super) fn accessible_part(address: usize, wanted: &Range<usize>) -> Option<Range<usize>> {
    let mapping = mapping_at(address)?;
    let page = page_size();
    let start = wanted.start.max(mapping.start) & !(page - 1);
    let end = wanted.end.min(mapping.end).checked_next_multiple_of(page)?;
    (start < end && are_resident(start, end - start)).then_some(start..end)
}

/// Returns whether all pages of a page-aligned range are resident, mapped here or not. Returns
/// `false` for more than one check covers plus a page.
pub(crate) fn are_resident(address: usize, length: usize) -> bool {
    let mut pages = [0_u8; CHECK_BYTES_MAX / 4096 + 1];
    let count = length.div_ceil(page_size());
    if count > pages.len() {
        return false;
    }
    // SAFETY: the vector has a byte for each of the pages; a range that is not mapped is refused.
    let failed = unsafe { libc::mincore(address as *mut _, length, pages.as_mut_ptr()) } != 0;
    !failed && pages[..count].iter().all(|page| page & 1 != 0)
}

/// Returns whether nothing at all is mapped at an address. Memory that is mapped without rights
/// counts as mapped. If the kernel does not answer, every address counts as mapped.
pub(crate) fn is_unmapped(address: u64) -> bool {
    let page = page_size() as u64;
    let mut presence = 0_u8;
    // SAFETY: for one page the kernel writes one byte, and does not touch the page itself.
    let failed =
        unsafe { libc::mincore((address & !(page - 1)) as *mut _, 1, &raw mut presence) } != 0;
    failed && io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
}

/// Returns the NUMA node of the page at an address; None if it was never touched, or the kernel does not
/// tell.
pub(crate) fn node_of(address: u64) -> Option<u32> {
    let page = (address & !(page_size() as u64 - 1)) as usize;
    let (mut node, none) = (-1_i32, std::ptr::null::<i32>());
    // SAFETY: for one page of this process the kernel reads one address and writes one number, and does not
    // touch the page itself: no node is given to move it to.
    let failed = unsafe {
        libc::syscall(libc::SYS_move_pages, 0, 1_usize, &raw const page, none, &raw mut node, 0)
    } != 0;
    if failed { None } else { u32::try_from(node).ok() }
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

/// Returns the mapping at an address, if it is readable and writable private anonymous memory.
fn mapping_at(address: usize) -> Option<Range<usize>> {
    let query = query(address, &mut []).ok()?;
    let rights = query.rights & (READABLE | WRITABLE | SHARED);
    let is_plain = rights == READABLE | WRITABLE && query.inode == 0;
    is_plain.then_some(query.start as usize..query.end as usize)
}

/// Returns whether a part of the range maps a file, which somebody can shorten at any moment, or is
/// not mapped. Kernels before 6.11 do not tell, and the answer is `false`.
pub(super) fn may_vanish(range: Range<usize>) -> bool {
    lasting_end(range.clone()) < range.end
}

/// Returns the end of the mappings from the start of the range on that are those of no file, past the
/// range if the last of them is longer; the end of the range on kernels before 6.11, which do not tell.
pub(super) fn lasting_end(range: Range<usize>) -> usize {
    let mut at = range.start;
    while at < range.end {
        match query(at, &mut []) {
            Ok(found) if found.inode == 0 || is_kernel_file(at) => at = found.end as usize,
            Err(error) if is_unsupported(&error) => return range.end,
            Ok(_) | Err(_) => break,
        }
    }
    at
}

/// Returns whether an address lies in anonymous memory that the kernel keeps in a file of its own,
/// which nobody can shorten: memory shared with forked children, huge pages, System V segments.
fn is_kernel_file(address: usize) -> bool {
    // Room for each of the names and the zero that ends it. The kernel refuses longer names.
    let mut name = [0; 32];
    if query(address, &mut name).is_err() {
        return false;
    }
    let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    let name = &name[..length];
    name == b"/dev/zero (deleted)"
        || name == b"/anon_hugepage (deleted)"
        || name.starts_with(b"/SYSV")
}

/// Asks the kernel for the mapping at an address, and for its name unless `name` is empty.
fn query(address: usize, name: &mut [u8]) -> io::Result<ProcmapQuery> {
    let maps = maps_descriptor().ok_or(io::ErrorKind::Unsupported)?;
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        address: address as u64,
        name_size: name.len() as u32,
        name: if name.is_empty() { 0 } else { name.as_mut_ptr() as u64 },
        ..ProcmapQuery::default()
    };
    // SAFETY: the kernel fills the structure, whose size is given in it, and the name, whose room is
    // given in it and which is borrowed until the call returns. It writes nothing else.
    if unsafe { libc::ioctl(maps, PROCMAP_QUERY as _, &raw mut query) } == 0 {
        return Ok(query);
    }
    let error = io::Error::last_os_error();
    if is_unsupported(&error) {
        MAPS.store(pack(fork::generation(), Some(NONE)), Ordering::Relaxed);
    }
    Err(error)
}

/// Returns whether this kernel answers no query, as opposed to one query.
fn is_unsupported(error: &io::Error) -> bool {
    !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR | libc::ENAMETOOLONG))
}

/// The open `/proc/self/maps` descriptor, with the fork generation it was opened in: a forked child
/// must open its own.
static MAPS: AtomicU64 = AtomicU64::new(0);

/// Stored instead of a descriptor if none is available.
const NONE: u32 = u32::MAX;

fn pack(generation: u64, file: Option<u32>) -> u64 {
    (generation << 32) | u64::from(file.map_or(0, |file| file.saturating_add(1)))
}

/// Returns what [`pack`] stored in this generation, if it stored anything.
fn unpack(generation: u64, packed: u64) -> Option<u32> {
    let is_current = packed >> 32 == generation & u64::from(u32::MAX);
    if is_current { (packed as u32).checked_sub(1) } else { None }
}

fn maps_descriptor() -> Option<i32> {
    let generation = fork::generation();
    let known = MAPS.load(Ordering::Relaxed);
    if let Some(descriptor) = unpack(generation, known) {
        return i32::try_from(descriptor).ok();
    }
    // Stays open until the process ends.
    let file = File::open("/proc/self/maps").ok();
    let number = file.as_ref().map_or(NONE, |file| file.as_raw_fd().unsigned_abs());
    let mine = pack(generation, Some(number));
    match MAPS.compare_exchange(known, mine, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => file.map(IntoRawFd::into_raw_fd),
        // Another thread was faster.
        Err(current) => i32::try_from(unpack(generation, current)?).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Access, PageState, populate},
        *,
    };

    fn whole(memory: &[u8]) -> Range<usize> {
        let start = memory.as_ptr() as usize;
        start..start + memory.len()
    }

    #[test]
    fn query_size_matches_its_ioctl_number() {
        assert_eq!(size_of::<ProcmapQuery>(), 104);
        assert_eq!(PROCMAP_QUERY, 0xC068_6611);
    }

    /// Returns whether this kernel supports `PROCMAP_QUERY` (Linux 6.11 and later).
    fn has_procmap_query() -> bool {
        let maps = File::open("/proc/self/maps").expect("procfs is mounted");
        let mut query = ProcmapQuery {
            size: size_of::<ProcmapQuery>() as u64,
            address: &raw const maps as u64,
            ..ProcmapQuery::default()
        };
        // SAFETY: the kernel fills the structure, whose size is given in it, and nothing else.
        unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) == 0 }
    }

    #[test]
    fn slow_check_agrees_where_the_kernel_answers_no_query() {
        let memory = vec![1_u8; 1 << 20];
        let range = whole(&memory);
        for access in [Access::Read, Access::Write] {
            // `Unknown` on a kernel older than 5.14, where the kernel copies the bytes.
            assert_ne!(populate(range.start, range.len(), access), PageState::Bad);
            for nowhere in [0, 8, usize::MAX - 1] {
                assert_ne!(populate(nowhere, 1, access), PageState::Mapped, "{nowhere:#x}");
            }
        }
        let code = pack as *const () as usize;
        assert_ne!(populate(code, 1, Access::Write), PageState::Mapped);
    }

    #[test]
    fn memory_in_use_is_accessible_and_other_memory_is_not() {
        let memory = vec![1_u8; 1 << 20];
        let range = whole(&memory);
        match accessible_part(range.start, &range) {
            Some(found) => {
                assert!(has_procmap_query());
                assert!(found.start <= range.start && found.end >= range.end, "{found:x?}");
            }
            None => assert!(!has_procmap_query(), "resident memory was just written"),
        }
        // Code is mapped and resident, but not writable.
        let code = pack as *const () as usize;
        assert_eq!(accessible_part(code, &(code..code + 1)), None);
        for nowhere in [0, 8, usize::MAX - 1] {
            assert_eq!(accessible_part(nowhere, &(nowhere..nowhere + 1)), None);
        }
    }

    /// Maps a page with these flags; the test leaves it mapped.
    fn map(flags: i32, file: i32) -> usize {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), page_size(), rights, flags, file, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        base as usize
    }

    #[test]
    fn only_pages_of_files_may_vanish() {
        let page = page_size();
        let file = tempfile::tempfile().unwrap();
        file.set_len(page as u64).unwrap();
        for flags in [libc::MAP_SHARED, libc::MAP_PRIVATE] {
            let own = map(flags | libc::MAP_ANONYMOUS, -1);
            assert!(!may_vanish(own..own + page), "{flags}");
            let mapped = map(flags, file.as_raw_fd());
            assert_eq!(may_vanish(mapped..mapped + page), has_procmap_query(), "{flags}");
        }
        let on_stack = &raw const page as usize;
        assert!(!may_vanish(on_stack..on_stack + 8));
        let code = pack as *const () as usize;
        assert_eq!(may_vanish(code..code + 1), has_procmap_query());
        assert_eq!(may_vanish(8..9), has_procmap_query(), "nothing is mapped there");
    }

    #[test]
    fn reserved_memory_counts_as_mapped() {
        let page = page_size();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses, which no one touches.
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
    fn touched_page_has_a_node() {
        let memory = vec![1_u8; 4 * page_size()];
        let inside = memory.as_ptr() as u64 + page_size() as u64 + 7;
        // A container may not be permitted to ask.
        let own = node_of(inside);
        let folder = |node: u32| format!("/sys/devices/system/node/node{node}");
        let exists = |node| {
            !std::path::Path::new("/sys/devices/system/node").exists()
                || std::path::Path::new(&folder(node)).exists()
        };
        assert!(own.is_none_or(exists), "{own:?}");
        assert_eq!(node_of(0), None);
        let untouched = map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        assert_eq!(node_of(untouched as u64), None);
    }

    #[test]
    fn pages_that_are_not_resident_are_not_accessible() {
        const LENGTH: usize = 4 * CHECK_BYTES_MAX;
        let (rights, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address that the kernel chooses, which no one touches.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), LENGTH, rights, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let middle = base as usize + LENGTH / 2;
        assert_eq!(accessible_part(middle, &(middle..middle + CHECK_BYTES_MAX)), None);
        // SAFETY: the mapping is this test's own.
        unsafe { libc::munmap(base, LENGTH) };
    }
}
