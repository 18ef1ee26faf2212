//! The memory limits of the control groups of this process, version 1 and 2.
//!
//! A group may be anywhere below the mount point: a service of systemd has a group of its own, and
//! a container without a namespace for groups sees the path on the host. Each group above limits
//! it, too.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The memory that the control groups of a process leave to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupMemory {
    /// The least limit of the groups, in bytes.
    pub limit: u64,
    /// The memory that the groups still permit, in bytes. Cached file pages that the kernel can drop
    /// at once count as available.
    pub available: u64,
}

/// The files and fields of one version of control groups.
#[derive(Debug, PartialEq, Eq)]
struct MemoryFiles {
    limit: &'static str,
    used: &'static str,
    /// The field of `memory.stat` with the cached file pages that were not used lately, in the group
    /// and below it.
    cached: &'static str,
}

const FILES_V1: MemoryFiles = MemoryFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: "total_inactive_file",
};
const FILES_V2: MemoryFiles =
    MemoryFiles { limit: "memory.max", used: "memory.current", cached: "inactive_file" };

/// The group of a process in one hierarchy.
#[derive(Debug, PartialEq, Eq)]
struct MemoryGroup {
    /// The mount point of the hierarchy, below the root directory.
    mount: PathBuf,
    /// The group below the mount point.
    path: PathBuf,
    files: &'static MemoryFiles,
}

/// Returns the memory that the groups of this process leave to it; `None` without a limit.
/// `root` is the root directory, under which `/proc` and `/sys` are.
pub(super) fn memory_of_groups(root: &Path) -> Option<CgroupMemory> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    memory_groups(&groups, &mounts).iter().filter_map(|group| group.memory(root)).reduce(least)
}

impl MemoryGroup {
    /// Returns the least memory that the group and the groups above it leave.
    fn memory(&self, root: &Path) -> Option<CgroupMemory> {
        let mount = root.join(&self.mount);
        let groups = self.path.ancestors().map(|path| mount.join(path));
        groups.filter_map(|folder| self.files.read(&folder)).reduce(least)
    }
}

impl MemoryFiles {
    /// Reads limit and use of the group in this folder; `None` without a limit.
    fn read(&self, folder: &Path) -> Option<CgroupMemory> {
        let number =
            |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        let (limit, used) = (number(self.limit)?, number(self.used)?);
        let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let cached = stat.lines().find_map(|line| {
            let (field, bytes) = line.split_once(' ')?;
            (field == self.cached).then(|| bytes.trim().parse::<u64>().ok())?
        });
        let used = used.saturating_sub(cached.unwrap_or(0));
        Some(CgroupMemory { limit, available: limit.saturating_sub(used) })
    }
}

fn least(one: CgroupMemory, other: CgroupMemory) -> CgroupMemory {
    CgroupMemory {
        limit: one.limit.min(other.limit),
        available: one.available.min(other.available),
    }
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
        let files = if is_v2 { &FILES_V2 } else { &FILES_V1 };
        Some(MemoryGroup { mount: mount.trim_start_matches('/').into(), path: path.into(), files })
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
        let is_wanted = if is_v2 {
            kind == "cgroup2"
        } else {
            kind == "cgroup" && options.split(',').any(|name| name == "memory")
        };
        is_wanted.then_some((mount.next()?, mount.next()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "29 22 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n\
        30 25 0:27 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
        31 25 0:28 /docker/abc /cg/memory ro shared:9 - cgroup cgroup rw,memory\n";

    /// Returns limit and available memory of a process in these groups.
    fn check(groups: &str, files: &[(&str, &str)]) -> Option<(u64, u64)> {
        let root = tempfile::tempdir().unwrap();
        let own = [("proc/self/cgroup", groups), ("proc/self/mountinfo", MOUNTS)];
        for (name, text) in own.iter().chain(files) {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        memory_of_groups(root.path()).map(|memory| (memory.limit, memory.available))
    }

    #[test]
    fn service_has_a_group_of_its_own() {
        let files = [
            ("sys/fs/cgroup/system.slice/a.service/memory.max", "1000"),
            ("sys/fs/cgroup/system.slice/a.service/memory.current", "300"),
            ("sys/fs/cgroup/memory.max", "100000"),
            ("sys/fs/cgroup/memory.current", "0"),
        ];
        assert_eq!(check("0::/system.slice/a.service", &files), Some((1000, 700)));
        assert_eq!(check("0::/other", &files), Some((100_000, 100_000)));
    }

    #[test]
    fn group_above_limits_the_group() {
        let files = [
            ("sys/fs/cgroup/a/b/memory.max", "max"),
            ("sys/fs/cgroup/a/b/memory.current", "10"),
            ("sys/fs/cgroup/a/memory.max", "50"),
            ("sys/fs/cgroup/a/memory.current", "60"),
        ];
        assert_eq!(check("0::/a/b", &files), Some((50, 0)));
        assert_eq!(check("0::/a/b", &files[..2]), None);
    }

    #[test]
    fn cached_files_count_as_available_in_version_2() {
        let group = |current| {
            [
                ("sys/fs/cgroup/a/memory.max", "1000"),
                ("sys/fs/cgroup/a/memory.current", current),
                (
                    "sys/fs/cgroup/a/memory.stat",
                    "anon 100\nfile 800\nshmem 50\nactive_file 150\ninactive_file 600\nslab 20",
                ),
            ]
        };
        assert_eq!(check("0::/a", &group("950")), Some((1000, 650)));
        // The two files are read one after the other, so the sum may be out of step.
        assert_eq!(check("0::/a", &group("500")), Some((1000, 1000)));
    }

    #[test]
    fn cached_files_below_a_group_count_in_version_1() {
        let files = [
            ("cg/memory/memory.limit_in_bytes", "1000"),
            ("cg/memory/memory.usage_in_bytes", "900"),
            ("cg/memory/memory.stat", "cache 500\ninactive_file 10\ntotal_inactive_file 400"),
        ];
        assert_eq!(check("8:memory:/docker/abc", &files), Some((1000, 500)));
    }

    #[test]
    fn version_1_is_read_below_the_mounted_part() {
        let groups = "9:cpu,cpuacct:/docker/abc\n8:memory:/docker/abc/own\n0::/";
        let files = [
            ("cg/memory/own/memory.limit_in_bytes", "300"),
            ("cg/memory/own/memory.usage_in_bytes", "100"),
            ("cg/memory/memory.limit_in_bytes", "9223372036854771712"),
            ("cg/memory/memory.usage_in_bytes", "100"),
        ];
        assert_eq!(check(groups, &files), Some((300, 200)));
        let outside = check("8:memory:/docker/other", &files);
        assert_eq!(outside, Some((9_223_372_036_854_771_712, 9_223_372_036_854_771_612)));
        assert_eq!(check("9:cpu,cpuacct:/docker/abc", &files), None);
    }

    #[test]
    fn machine_without_groups_has_no_limit() {
        assert_eq!(memory_of_groups(Path::new("/nowhere")), None);
    }
}
