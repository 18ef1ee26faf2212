//! Pages, copies that bypass the caches, and the memory that this process may still take.

mod cgroup;
pub mod nontemporal;

use std::{fs, path::Path};

pub use self::cgroup::CgroupMemory;

/// Returns the number of bytes per page.
pub fn page_size() -> usize {
    // SAFETY: reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("every system has pages")
}

/// Lets the kernel back a range by huge pages from now on, which saves page faults and address
/// translation. Only whole pages within the range are meant; the kernel may refuse, which leaves small pages.
pub fn prefer_huge_pages(address: usize, length: usize) {
    let page = page_size();
    let start = address.next_multiple_of(page);
    let length = (address + length).saturating_sub(start) / page * page;
    // SAFETY: the advice changes no byte and no mapping; a range that is not mapped is refused.
    unsafe { libc::madvise(start as *mut _, length, libc::MADV_HUGEPAGE) };
}

/// Returns the memory that this process may still take, in bytes, as limited by the machine and by
/// its control groups; 0 if the machine does not tell.
pub fn available_memory() -> u64 {
    let of_machine = of_machine("MemAvailable:").unwrap_or(0);
    cgroup_memory().map_or(of_machine, |group| group.available.min(of_machine))
}

/// Returns the memory that this process could take at most, in bytes: all of the machine's, or the
/// limit of its control groups; `None` if the machine does not tell.
pub fn memory_limit() -> Option<u64> {
    let of_machine = of_machine("MemTotal:")?;
    Some(cgroup_memory().map_or(of_machine, |group| group.limit.min(of_machine)))
}

/// Returns a field of the machine's memory statistics, in bytes.
fn of_machine(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()?.saturating_mul(1024))
}

/// Returns the memory that the control groups of this process leave to it; `None` without a limit.
pub fn cgroup_memory() -> Option<CgroupMemory> {
    cgroup::memory_of_groups(Path::new("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_memory_is_available() {
        assert!(available_memory() > 1 << 20);
        assert!(memory_limit().is_some_and(|limit| limit >= available_memory()));
        assert!(page_size().is_power_of_two());
    }
}
