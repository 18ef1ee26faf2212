//! Network devices near each memory location, discovered from the kernel or read from a file.

use std::{
    fs,
    path::{Path, PathBuf},
};

use mooncake_base::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize, Serializer, ser::SerializeMap};

/// Root of the kernel's device tree.
const SYS: &str = "/sys";

/// Maximum size of a topology file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The PCI vendor and the PCI classes (VGA and 3D controllers) of GPUs whose memory is named
/// `cuda:N`.
const GPU_VENDOR: &str = "0x10de";
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// For each memory location, the near network devices and the others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    locations: Vec<(String, Affinity)>,
    /// By PCI address.
    gpus: Vec<(String, Affinity)>,
}

/// Near and far devices of one location; in JSON a pair of lists.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
struct Affinity(Vec<String>, Vec<String>);

/// A device and its place in the PCI tree.
#[derive(Debug)]
struct Device {
    name: String,
    /// Path below `/sys/devices`, which shows the bridges above the device.
    path: PathBuf,
    node: u32,
}

impl Topology {
    /// Discovers the topology of this machine, limited to the network devices in a comma-separated
    /// list; an empty list means all.
    pub fn local(wanted: &str) -> Self {
        Self::discover(Path::new(SYS), wanted)
    }

    /// Discovers the topology of a machine from a copy of its `/sys`.
    pub fn discover(sys: &Path, wanted: &str) -> Self {
        let wanted: Vec<_> = wanted.split(',').map(str::trim).filter(|n| !n.is_empty()).collect();
        let mut nics = devices(&sys.join("class/infiniband"), "device");
        nics.retain(|nic| wanted.is_empty() || wanted.contains(&nic.name.as_str()));
        let mut locations = Vec::new();
        let folder = sys.join("devices/system/node");
        for node in nodes(&folder) {
            let distances = node_distances(&folder, node);
            let distance = |nic: &Device| distances.distance(node, nic.node);
            let nearest = nics.iter().map(distance).min();
            let near = Affinity::split(&nics, |nic| Some(distance(nic)) == nearest);
            locations.push((format!("cpu:{node}"), near));
        }
        let mut by_address = Vec::new();
        for (number, gpu) in gpus(&sys.join("bus/pci/devices")).into_iter().enumerate() {
            let nearest = nics.iter().map(|nic| gpu.distance(nic)).min();
            let near = Affinity::split(&nics, |nic| Some(gpu.distance(nic)) == nearest);
            locations.push((format!("cuda:{number}"), near.clone()));
            by_address.push((gpu.name, near));
        }
        Self { locations, gpus: by_address }
    }

    /// Parses the form that [`Topology::to_json`] writes, which may also be written by hand. A key that is a
    /// PCI address (`0000:3b:00.0`) is that of a GPU.
    ///
    /// # Errors
    /// The text is not an object of pairs of lists of names.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        let bad = |source| {
            let text = "a topology is an object of pairs of lists, like \
                        {\"cpu:0\": [[\"mlx5_0\"], []]}";
            Error::invalid(text).caused_by(source)
        };
        // A map merges duplicate keys and sorts them.
        let map: std::collections::BTreeMap<String, Affinity> =
            serde_json::from_slice(text).map_err(bad)?;
        let mut locations: Vec<_> = map.into_iter().collect();
        locations.sort_by_cached_key(|(name, _)| natural_order(name));
        let (gpus, locations) = locations.into_iter().partition(|(name, _)| is_pci_address(name));
        Ok(Self { locations, gpus })
    }

    /// Reads a JSON file.
    ///
    /// # Errors
    /// The file cannot be read, is larger than 1 MiB, or is not a topology.
    pub fn from_file(path: &Path) -> Result<Self> {
        let unreadable = |source: std::io::Error| {
            let text = "the topology file cannot be read";
            Error::new(ErrorCode::FILE_READ_FAIL, text)
                .with("path", path.display())
                .caused_by(source)
        };
        if fs::metadata(path).map_err(unreadable)?.len() > FILE_BYTES_MAX {
            return Err(Error::invalid("a topology file may have at most 1 MiB")
                .with("path", path.display()));
        }
        let text = fs::read(path).map_err(unreadable)?;
        Self::from_json(&text).map_err(|error| error.with("path", path.display()))
    }

    /// Serializes the topology to upstream's JSON: `{"cpu:0": [[near devices], [other devices]],
    /// …}`.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("names and lists are always JSON")
    }

    /// The locations, each with its near and its other devices. GPUs are numbered in the order of their PCI
    /// addresses, which need not be that of a process; see [`Topology::gpus`].
    pub fn locations(&self) -> impl Iterator<Item = (&str, &[String], &[String])> {
        self.locations.iter().map(|(name, near)| (name.as_str(), &near.0[..], &near.1[..]))
    }

    /// The GPUs by PCI address, each with its near and its other devices.
    pub fn gpus(&self) -> impl Iterator<Item = (&str, &[String], &[String])> {
        self.gpus.iter().map(|(name, near)| (name.as_str(), &near.0[..], &near.1[..]))
    }
}

/// Returns whether a text has the form of a PCI address, such as `0000:3b:00.0`.
fn is_pci_address(text: &str) -> bool {
    let mut parts = text.split([':', '.']);
    let mut has = |digits: usize| {
        parts.next().is_some_and(|part| {
            part.len() >= digits && part.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    };
    has(4) && has(2) && has(2) && has(1) && parts.next().is_none()
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
    /// Distance to another device: a different node first, then the number of bridges between them.
    fn distance(&self, other: &Self) -> (bool, usize) {
        let both = self.path.components().zip(other.path.components());
        let shared = both.take_while(|(a, b)| a == b).count();
        let count = |path: &Path| path.components().count() - shared;
        (self.node != other.node, count(&self.path) + count(&other.path))
    }
}

/// Lists the devices of a folder of links; `inner` leads from each link to the device itself.
fn devices(folder: &Path, inner: &str) -> Vec<Device> {
    let found = entries(folder).into_iter().map(|(name, path)| {
        let path = path.join(inner);
        Device { name, node: node_of(&path), path: fs::canonicalize(&path).unwrap_or(path) }
    });
    let mut devices: Vec<_> = found.collect();
    devices.sort_by_cached_key(|device| natural_order(&device.name));
    devices
}

/// Lists GPUs by PCI address, which is the order of `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
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

/// Lists the NUMA nodes; a kernel without NUMA has node 0 only.
fn nodes(folder: &Path) -> Vec<u32> {
    let names = entries(folder).into_iter().map(|(name, _)| name);
    let mut nodes: Vec<u32> =
        names.filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
    nodes.sort_unstable();
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// Distances from one NUMA node, as the firmware tells them; 10 is the node itself.
#[derive(Debug)]
struct NodeDistances(Vec<u32>);

impl NodeDistances {
    /// Returns the distance to a node. Without the table all other nodes are equally far.
    fn distance(&self, from: u32, to: u32) -> u32 {
        let listed = self.0.get(to as usize).copied();
        listed.unwrap_or(if from == to { 10 } else { 20 })
    }
}

/// Reads the distances of a node. The table lists the nodes by number; where numbers are missing it
/// cannot be used.
fn node_distances(folder: &Path, node: u32) -> NodeDistances {
    let text = fs::read_to_string(folder.join(format!("node{node}/distance")));
    let text = text.unwrap_or_default();
    let row: Vec<u32> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let nodes = nodes(folder);
    let is_complete = row.len() == nodes.len() && (0..).zip(&nodes).all(|(at, node)| at == *node);
    NodeDistances(if is_complete { row } else { Vec::new() })
}

/// The node of a device; -1 in the file means that there is no preference.
fn node_of(device: &Path) -> u32 {
    let text = fs::read_to_string(device.join("numa_node"));
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let named = |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
    entries.filter_map(|entry| entry.ok().and_then(named)).collect()
}

/// Sort key for natural order: `mlx5_2` before `mlx5_10`.
fn natural_order(name: &str) -> (String, u64) {
    let letters = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (letters.to_owned(), name[letters.len()..].parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A fake `/sys` in a temporary folder.
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

        /// Adds a PCI device at the end of a path of bridges.
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
            let read = Topology::from_json(json.as_bytes()).unwrap();
            assert_eq!(read.locations, topology.locations, "{json}");
            let owned = topology.locations();
            owned.map(|(name, a, b)| (name.to_owned(), a.to_vec(), b.to_vec())).collect()
        }
    }

    fn row(name: &str, near: &[&str], far: &[&str]) -> (String, Vec<String>, Vec<String>) {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        (name.to_owned(), owned(near), owned(far))
    }

    #[test]
    fn machine_without_devices_lists_its_memory() {
        assert_eq!(Sys::new(0).topology(""), [row("cpu:0", &[], &[])]);
        assert_eq!(Sys::new(2).topology("x"), [row("cpu:0", &[], &[]), row("cpu:1", &[], &[])]);
        let nowhere = Topology::discover(Path::new("/nowhere"), "");
        assert_eq!(nowhere.to_json(), "{\n  \"cpu:0\": [\n    [],\n    []\n  ]\n}");
    }

    #[test]
    fn network_devices_are_near_their_own_node() {
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
    fn node_without_devices_is_near_those_of_the_nearest_node() {
        let sys = Sys::new(4);
        sys.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
        sys.nic("mlx5_3", "pci0000:80/0000:80:01.0/0000:81:00.0", 3);
        let all = sys.topology("");
        assert_eq!(all[1], row("cpu:1", &["mlx5_0", "mlx5_3"], &[]), "no distance is known");
        for (node, distances) in
            ["10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10"].into_iter().enumerate()
        {
            let file = sys.path(&format!("devices/system/node/node{node}/distance"));
            fs::write(file, distances).unwrap();
        }
        let near: Vec<_> = sys.topology("").into_iter().map(|(_, near, _)| near).collect();
        assert_eq!(near, [["mlx5_0"], ["mlx5_0"], ["mlx5_3"], ["mlx5_3"]]);
    }

    #[test]
    fn gpu_is_nearest_to_the_device_behind_its_bridge() {
        let sys = Sys::new(2);
        sys.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
        sys.nic("mlx5_1", "pci0000:00/0000:00:02.0/0000:02:00.0/0000:03:00.0", 0);
        sys.nic("mlx5_2", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
        sys.gpu("pci0000:00/0000:00:02.0/0000:02:01.0/0000:04:00.0", 0);
        sys.gpu("pci0000:80/0000:80:02.0/0000:82:00.0", 1);
        // A display of another vendor, and a device of this vendor that is not a GPU.
        sys.device("pci0000:00/0000:00:1f.0", 0, "0x030000", "0x1a03");
        sys.device("pci0000:00/0000:00:1e.0", 0, "0x068000", "0x10de");
        let found = sys.topology("");
        assert_eq!(found.len(), 4);
        assert_eq!(found[2], row("cuda:0", &["mlx5_1"], &["mlx5_0", "mlx5_2"]));
        assert_eq!(found[3], row("cuda:1", &["mlx5_2"], &["mlx5_0", "mlx5_1"]));
    }

    #[test]
    fn gpus_are_known_by_their_place_on_the_bus() {
        let sys = Sys::new(1);
        sys.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0);
        sys.nic("mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0", 0);
        sys.gpu("pci0000:80/0000:80:01.0/0000:82:00.0", 0);
        sys.gpu("pci0000:00/0000:00:01.0/0000:04:00.0", 0);
        let topology = Topology::discover(sys.0.path(), "");
        let near: Vec<_> =
            topology.gpus().map(|(name, near, _)| (name, near[0].as_str())).collect();
        assert_eq!(near, [("0000:04:00.0", "mlx5_0"), ("0000:82:00.0", "mlx5_1")]);
        let file = br#"{"0000:82:00.0": [["a"], ["b"]], "cpu:0": [["b"], ["a"]]}"#;
        let given = Topology::from_json(file).unwrap();
        let names = |rows: Vec<(&str, &[String], &[String])>| -> Vec<String> {
            rows.into_iter().map(|(name, _, _)| name.to_owned()).collect()
        };
        assert_eq!(names(given.gpus().collect()), ["0000:82:00.0"]);
        assert_eq!(names(given.locations().collect()), ["cpu:0"]);
    }

    #[test]
    fn reads_a_file_and_names_it_when_it_is_invalid() {
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
