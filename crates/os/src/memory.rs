//! Pages, and the memory that this process may still take.

mod cgroup;

use std::{fs, path::Path};

pub use self::cgroup::CgroupMemory;

/// Returns the number of bytes per page.
pub fn page_size() -> usize {
    // SAFETY: reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("every system has pages")
}

/// Returns the memory that this process may still take, in bytes, as limited by the machine and by
/// its control groups; 0 if the machine does not tell.
pub fn available_memory() -> u64 {
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    let of_machine = available.map_or(0, |kib| kib.saturating_mul(1024));
    cgroup_memory().map_or(of_machine, |group| group.available.min(of_machine))
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
        assert!(page_size().is_power_of_two());
    }
}
