//! The memory limits of the control groups of this process, version 1 and 2.
//!
//! A group may be anywhere below the mount point: a service of systemd has a group of its own, and
//! a container without a namespace for groups sees the path on the host. Each group above limits
//! it, too.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The files that tell limit and use of a group, by version.
const FILES_V1: [&str; 2] = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
const FILES_V2: [&str; 2] = ["memory.max", "memory.current"];

/// The group of a process in one hierarchy.
#[derive(Debug, PartialEq, Eq)]
struct MemoryGroup {
    mount: PathBuf,
    /// The group below the mount point.
    path: PathBuf,
    files: [&'static str; 2],
}

/// Returns the memory that the groups of this process still permit; `None` without a limit.
pub(super) fn available_memory() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let read = |path: &Path| fs::read_to_string(path).ok();
    memory_groups(&groups, &mounts).iter().filter_map(|group| available_in(group, &read)).min()
}

/// Returns the least memory that is left in the group and the groups above it.
fn available_in(group: &MemoryGroup, read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let number = |path: PathBuf| read(&path)?.trim().parse::<u64>().ok();
    let left = |path: &Path| {
        let folder = group.mount.join(path);
        let [limit, used] = group.files;
        Some(number(folder.join(limit))?.saturating_sub(number(folder.join(used))?))
    };
    group.path.ancestors().filter_map(left).min()
}

/// Finds the groups that limit memory in `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn memory_groups(groups: &str, mounts: &str) -> Vec<MemoryGroup> {
    let group_of = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_v2 = number == "0" && controllers.is_empty();
        let is_v1 = controllers.split(',').any(|name| name == "memory");
        let (root, mount) = (is_v1 || is_v2).then(|| mount_of(mounts, is_v2)).flatten()?;
        // A path outside of the mounted part is not visible here; the part's own limit is.
        let path = Path::new(path).strip_prefix(root).unwrap_or_else(|_| Path::new(""));
        let files = if is_v2 { FILES_V2 } else { FILES_V1 };
        Some(MemoryGroup { mount: mount.into(), path: path.into(), files })
    };
    groups.lines().filter_map(group_of).collect()
}

/// Returns the mounted part and the mount point of the hierarchy that limits memory.
fn mount_of(mounts: &str, is_v2: bool) -> Option<(&str, &str)> {
    mounts.lines().find_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1)?);
        let is_wanted = match is_v2 {
            true => kind == "cgroup2",
            false => kind == "cgroup" && options.split(',').any(|name| name == "memory"),
        };
        is_wanted.then_some((mount.next()?, mount.next()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str = "29 22 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "30 25 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
        31 25 0:28 /docker/abc /sys/fs/cgroup/memory ro shared:9 - cgroup cgroup rw,memory\n";

    /// Returns the memory left, by the numbers in these files.
    fn check(groups: &str, mounts: &str, files: &[(&str, &str)]) -> Option<u64> {
        let read = |path: &Path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| format!("{text}\n"))
        };
        memory_groups(groups, mounts).iter().filter_map(|group| available_in(group, &read)).min()
    }

    #[test]
    fn service_has_a_group_of_its_own() {
        let own = "/sys/fs/cgroup/system.slice/a.service/memory";
        let files = [
            (&*format!("{own}.max"), "1000"),
            (&*format!("{own}.current"), "300"),
            ("/sys/fs/cgroup/memory.max", "100000"),
            ("/sys/fs/cgroup/memory.current", "0"),
        ];
        assert_eq!(check("0::/system.slice/a.service\n", V2, &files), Some(700));
        assert_eq!(check("0::/other\n", V2, &files), Some(100_000));
    }

    #[test]
    fn group_above_limits_the_group() {
        let files = [
            ("/sys/fs/cgroup/a/b/memory.max", "max"),
            ("/sys/fs/cgroup/a/b/memory.current", "10"),
            ("/sys/fs/cgroup/a/memory.max", "50"),
            ("/sys/fs/cgroup/a/memory.current", "60"),
        ];
        assert_eq!(check("0::/a/b\n", V2, &files), Some(0));
        assert_eq!(check("0::/a/b\n", V2, &files[..2]), None);
    }

    #[test]
    fn version_1_is_read_below_the_mounted_part() {
        let groups = "9:cpu,cpuacct:/docker/abc\n8:memory:/docker/abc/own\n0::/\n";
        let own = "/sys/fs/cgroup/memory/own/memory";
        let files = [
            (&*format!("{own}.limit_in_bytes"), "300"),
            (&*format!("{own}.usage_in_bytes"), "100"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "100"),
        ];
        assert_eq!(check(groups, V1, &files), Some(200));
        let elsewhere = "8:memory:/docker/other\n";
        assert_eq!(check(elsewhere, V1, &files), Some(9_223_372_036_854_771_612));
    }
}
