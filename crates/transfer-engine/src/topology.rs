//! Which network devices are near which memory, as the kernel tells or as a file says.

use std::{
    fs,
    path::{Path, PathBuf},
};

use mooncake_base::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize, Serializer, ser::SerializeMap};

/// Where the kernel tells.
const SYS: &str = "/sys";

/// The longest file that is read as a topology.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The vendor and the classes of PCI devices that are GPUs of the kind whose memory is named
/// `cuda:N` (display controllers: VGA and 3D).
const GPU_VENDOR: &str = "0x10de";
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// For each location of memory, the network devices beside it and the others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    locations: Vec<(String, Affinity)>,
}

/// The devices as one location sees them; as JSON a pair of lists.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
struct Affinity(Vec<String>, Vec<String>);

/// A device and where it is attached.
#[derive(Debug)]
struct Device {
    name: String,
    /// Its folder below `/sys/devices`, which shows the bridges above it.
    path: PathBuf,
    node: u32,
}

impl Topology {
    /// This machine's, with the network devices named in a list with commas; all if it is empty.
    pub fn local(wanted: &str) -> Self {
        Self::discover(Path::new(SYS), wanted)
    }

    /// That of a machine whose `/sys` lies in a folder.
    pub fn discover(sys: &Path, wanted: &str) -> Self {
        let wanted: Vec<_> = wanted.split(',').map(str::trim).filter(|n| !n.is_empty()).collect();
        let mut nics = devices(&sys.join("class/infiniband"), "device");
        nics.retain(|nic| wanted.is_empty() || wanted.contains(&nic.name.as_str()));
        let mut locations = Vec::new();
        for node in nodes(&sys.join("devices/system/node")) {
            locations.push((format!("cpu:{node}"), Affinity::split(&nics, |nic| nic.node == node)));
        }
        for (number, gpu) in gpus(&sys.join("bus/pci/devices")).iter().enumerate() {
            let nearest = nics.iter().map(|nic| gpu.distance(nic)).min();
            let near = Affinity::split(&nics, |nic| Some(gpu.distance(nic)) == nearest);
            locations.push((format!("cuda:{number}"), near));
        }
        Self { locations }
    }

    /// Reads what [`Topology::to_json`] writes, also written by hand.
    ///
    /// # Errors
    /// It is no object of pairs of lists of names.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        let bad = |source| {
            let text = "a topology is an object of pairs of lists, like \
                        {\"cpu:0\": [[\"mlx5_0\"], []]}";
            Error::invalid(text).caused_by(source)
        };
        // By way of a map that sorts, so that a key that stands twice is one.
        let map: std::collections::BTreeMap<String, Affinity> =
            serde_json::from_slice(text).map_err(bad)?;
        let mut locations: Vec<_> = map.into_iter().collect();
        locations.sort_by_cached_key(|(name, _)| natural_order(name));
        Ok(Self { locations })
    }

    /// Reads a file in that form.
    ///
    /// # Errors
    /// It cannot be read, is larger than 1 MiB, or is no topology.
    pub fn from_file(path: &Path) -> Result<Self> {
        let unreadable = |source: std::io::Error| {
            let text = "the file of the topology cannot be read";
            Error::new(ErrorCode::FILE_READ_FAIL, text)
                .with("path", path.display())
                .caused_by(source)
        };
        if fs::metadata(path).map_err(unreadable)?.len() > FILE_BYTES_MAX {
            return Err(Error::invalid("a topology has at most 1 MiB").with("path", path.display()));
        }
        let text = fs::read(path).map_err(unreadable)?;
        Self::from_json(&text).map_err(|error| error.with("path", path.display()))
    }

    /// The established JSON: `{"cpu:0": [[devices beside it], [the others]], …}`.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and lists are always JSON")
    }

    /// The locations and, for each, the devices beside it and the others.
    pub fn locations(&self) -> impl Iterator<Item = (&str, &[String], &[String])> {
        self.locations.iter().map(|(name, near)| (name.as_str(), &near.0[..], &near.1[..]))
    }
}

impl Serialize for Topology {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.locations.len()))?;
        for (name, near) in &self.locations {
            map.serialize_entry(name, near)?;
        }
        map.end()
    }
}

impl Affinity {
    fn split(nics: &[Device], is_near: impl Fn(&Device) -> bool) -> Self {
        let (near, far): (Vec<_>, Vec<_>) = nics.iter().partition(|nic| is_near(nic));
        let names = |nics: Vec<&Device>| nics.into_iter().map(|nic| nic.name.clone()).collect();
        Self(names(near), names(far))
    }
}

impl Device {
    /// How far another one is: on another node at first, then by the bridges between them.
    fn distance(&self, other: &Self) -> (bool, usize) {
        let both = self.path.components().zip(other.path.components());
        let shared = both.take_while(|(a, b)| a == b).count();
        let count = |path: &Path| path.components().count() - shared;
        (self.node != other.node, count(&self.path) + count(&other.path))
    }
}

/// The devices of a folder of links; `inner` leads from each to the device itself.
fn devices(folder: &Path, inner: &str) -> Vec<Device> {
    let found = entries(folder).into_iter().map(|(name, path)| {
        let path = path.join(inner);
        Device { name, node: node_of(&path), path: fs::canonicalize(&path).unwrap_or(path) }
    });
    let mut devices: Vec<_> = found.collect();
    devices.sort_by_cached_key(|device| natural_order(&device.name));
    devices
}

/// In the order of their addresses, which is the one that `CUDA_DEVICE_ORDER=PCI_BUS_ID` gives.
fn gpus(folder: &Path) -> Vec<Device> {
    let mut found = devices(folder, "");
    found.retain(|device| {
        let word = |name: &str| fs::read_to_string(device.path.join(name)).unwrap_or_default();
        let class = word("class");
        word("vendor").trim() == GPU_VENDOR && GPU_CLASSES.iter().any(|is| class.starts_with(is))
    });
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// The NUMA nodes. A kernel without NUMA lists none; its memory is all in one place.
fn nodes(folder: &Path) -> Vec<u32> {
    let names = entries(folder).into_iter().map(|(name, _)| name);
    let mut nodes: Vec<u32> =
        names.filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
    nodes.sort_unstable();
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// The node a device is on; -1 stands for one that does not matter.
fn node_of(device: &Path) -> u32 {
    let text = fs::read_to_string(device.join("numa_node"));
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let named = |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
    entries.filter_map(|entry| entry.ok().and_then(named)).collect()
}

/// Names in the order of people: `mlx5_2` before `mlx5_10`.
fn natural_order(name: &str) -> (String, u64) {
    let letters = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (letters.to_owned(), name[letters.len()..].parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A `/sys` in a folder of its own.
    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new(nodes: u32) -> Self {
            let sys = Self(tempfile::tempdir().unwrap());
            for node in 0..nodes {
                fs::create_dir_all(sys.path(&format!("devices/system/node/node{node}"))).unwrap();
            }
            fs::create_dir_all(sys.path("devices/system/node/power")).unwrap();
            sys
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        /// A PCI device at the end of a path of bridges.
        fn device(&self, path: &str, node: i32, class: &str, vendor: &str) -> PathBuf {
            let folder = self.path(&format!("devices/{path}"));
            fs::create_dir_all(&folder).unwrap();
            for (name, text) in [
                ("numa_node", node.to_string()),
                ("class", class.into()),
                ("vendor", vendor.into()),
            ] {
                fs::write(folder.join(name), text + "\n").unwrap();
            }
            let bus = self.path("bus/pci/devices");
            fs::create_dir_all(&bus).unwrap();
            symlink(&folder, bus.join(path.rsplit('/').next().unwrap())).unwrap();
            folder
        }

        fn nic(&self, name: &str, path: &str, node: i32) {
            let folder = self.device(path, node, "0x020700", "0x15b3");
            let own = folder.join("infiniband").join(name);
            fs::create_dir_all(&own).unwrap();
            symlink(&folder, own.join("device")).unwrap();
            fs::create_dir_all(self.path("class/infiniband")).unwrap();
            symlink(&own, self.path(&format!("class/infiniband/{name}"))).unwrap();
        }

        fn gpu(&self, path: &str, node: i32) {
            self.device(path, node, "0x030200", "0x10de");
        }

        fn topology(&self, wanted: &str) -> Vec<(String, Vec<String>, Vec<String>)> {
            let topology = Topology::discover(self.0.path(), wanted);
            let json = topology.to_json();
            assert_eq!(Topology::from_json(json.as_bytes()).unwrap(), topology, "{json}");
            let owned = topology.locations();
            owned.map(|(name, a, b)| (name.to_owned(), a.to_vec(), b.to_vec())).collect()
        }
    }

    fn row(name: &str, near: &[&str], far: &[&str]) -> (String, Vec<String>, Vec<String>) {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        (name.to_owned(), owned(near), owned(far))
    }

    #[test]
    fn a_machine_without_devices_has_its_memory() {
        assert_eq!(Sys::new(0).topology(""), [row("cpu:0", &[], &[])]);
        assert_eq!(Sys::new(2).topology("x"), [row("cpu:0", &[], &[]), row("cpu:1", &[], &[])]);
        let nowhere = Topology::discover(Path::new("/nowhere"), "");
        assert_eq!(nowhere.to_json(), "{\n  \"cpu:0\": [\n    [],\n    []\n  ]\n}");
    }

    #[test]
    fn network_devices_belong_to_the_node_they_are_on() {
        let sys = Sys::new(2);
        sys.nic("mlx5_10", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
        sys.nic("mlx5_2", "pci0000:00/0000:00:02.0/0000:02:00.0", -1);
        sys.nic("mlx5_3", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
        assert_eq!(
            sys.topology(""),
            [
                row("cpu:0", &["mlx5_2", "mlx5_10"], &["mlx5_3"]),
                row("cpu:1", &["mlx5_3"], &["mlx5_2", "mlx5_10"]),
            ]
        );
        let rows = [row("cpu:0", &["mlx5_2"], &["mlx5_3"]), row("cpu:1", &["mlx5_3"], &["mlx5_2"])];
        assert_eq!(sys.topology("mlx5_3, mlx5_2,,none"), rows);
    }

    #[test]
    fn a_gpu_is_nearest_to_what_shares_its_bridge() {
        let sys = Sys::new(2);
        sys.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
        sys.nic("mlx5_1", "pci0000:00/0000:00:02.0/0000:02:00.0/0000:03:00.0", 0);
        sys.nic("mlx5_2", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
        sys.gpu("pci0000:00/0000:00:02.0/0000:02:01.0/0000:04:00.0", 0);
        sys.gpu("pci0000:80/0000:80:02.0/0000:82:00.0", 1);
        // A display of another vendor, and a device of this one that is no GPU.
        sys.device("pci0000:00/0000:00:1f.0", 0, "0x030000", "0x1a03");
        sys.device("pci0000:00/0000:00:1e.0", 0, "0x068000", "0x10de");
        let found = sys.topology("");
        assert_eq!(found.len(), 4);
        assert_eq!(found[2], row("cuda:0", &["mlx5_1"], &["mlx5_0", "mlx5_2"]));
        assert_eq!(found[3], row("cuda:1", &["mlx5_2"], &["mlx5_0", "mlx5_1"]));
    }

    #[test]
    fn a_file_is_read_and_a_wrong_one_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("topology.json");
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            Topology::from_file(&path)
        };
        let given = read(r#"{"cuda:0": [["a"], []], "cpu:10": [[], ["a"]], "cpu:2": [[], []]}"#);
        let given = given.unwrap();
        let names: Vec<_> = given.locations().map(|(name, _, _)| name).collect();
        assert_eq!(names, ["cpu:2", "cpu:10", "cuda:0"]);
        for bad in
            ["", "[]", "{\"cpu:0\": []}", "{\"cpu:0\": [[1], []]}", "{\"cpu:0\": [[],[],[]]}"]
        {
            let error = read(bad).unwrap_err();
            assert!(error.to_string().contains("topology.json"), "{error}");
        }
        assert!(read(&" ".repeat(1 << 21)).is_err());
        assert!(Topology::from_file(&folder.path().join("none")).is_err());
    }
}
