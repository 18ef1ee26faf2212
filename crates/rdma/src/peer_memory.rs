//! A peer's devices and registered memory, as its descriptor tells.

use std::collections::HashMap;

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_verbs::{Gid, RemoteRange};

use crate::{
    hello::parse_gid,
    near_devices::NearDevices,
    slices::{MemoryRange, MemoryRanges, Slice},
};

/// A device in a segment descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceDescription {
    /// Name of the device.
    pub name: String,
    /// Address of the port: sixteen bytes in hexadecimal, separated by colons.
    pub gid: String,
    /// Identifier in an InfiniBand subnet.
    pub lid: u16,
}

/// A registered range in a segment descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferDescription {
    /// Location of the memory, such as `cpu:0`.
    pub location: String,
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// The keys for peers, one per device.
    pub keys: Vec<u32>,
}

/// What a peer has published.
#[derive(Debug, Clone, Default)]
pub struct PeerDescription {
    /// Name of the peer in the paths of its devices.
    pub server: String,
    /// The devices.
    pub devices: Vec<DeviceDescription>,
    /// The registered ranges.
    pub buffers: Vec<BufferDescription>,
    /// For each location the names of the near devices and of the others.
    pub priority: HashMap<String, (Vec<String>, Vec<String>)>,
}

/// A peer's devices and memory, checked.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    pub(crate) server: String,
    pub(crate) devices: Vec<PeerDevice>,
    pub(crate) ranges: MemoryRanges,
    /// For each range one key per device.
    keys: Vec<Vec<u32>>,
    /// For each range the devices near it.
    near_ranges: Vec<NearDevices>,
    /// Indexes of devices that are near most of the memory, or all.
    pub(crate) near: Vec<usize>,
}

/// A device of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerDevice {
    pub(crate) name: String,
    pub(crate) gid: Gid,
    pub(crate) lid: u16,
}

impl PeerMemory {
    /// Checks what a peer has published.
    ///
    /// # Errors
    /// There is no device, an address cannot be read, or a range has another number of keys than there
    /// are devices.
    pub(crate) fn new(published: &PeerDescription) -> Result<Self> {
        let bad =
            |text: &str| Error::new(ErrorCode::TRANSFER_FAIL, text).with("peer", &published.server);
        if published.devices.is_empty() {
            return Err(bad("the peer has no RDMA device"));
        }
        let device = |device: &DeviceDescription| {
            let gid = parse_gid(&device.gid)
                .ok_or_else(|| bad("the address of a device of the peer cannot be read"))?;
            Ok(PeerDevice { name: device.name.clone(), gid, lid: device.lid })
        };
        let devices = published.devices.iter().map(device).collect::<Result<Vec<_>>>()?;
        if published.buffers.iter().any(|buffer| buffer.keys.len() != devices.len()) {
            return Err(bad("a range of the peer has another number of keys than devices"));
        }
        let range = |buffer: &BufferDescription| MemoryRange {
            address: buffer.address,
            length: buffer.length,
        };
        let near_range = |buffer: &BufferDescription| {
            let near = published.priority.get(&buffer.location).map_or(&[][..], |(near, _)| near);
            NearDevices::named(devices.iter().map(|device| device.name.as_str()), near)
        };
        Ok(Self {
            server: published.server.clone(),
            near: near_devices(published),
            near_ranges: published.buffers.iter().map(near_range).collect(),
            devices,
            ranges: MemoryRanges::new(published.buffers.iter().map(range)),
            keys: published.buffers.iter().map(|buffer| buffer.keys.clone()).collect(),
        })
    }

    /// Returns the devices of the peer that are near the memory of a slice.
    pub(crate) fn near(&self, slice: &Slice) -> NearDevices {
        let near = self.near_ranges.get(slice.remote_range as usize);
        near.copied().unwrap_or(NearDevices::ALL)
    }

    /// Returns the remote range of a slice, for one of the peer's devices.
    pub(crate) fn range(&self, slice: &Slice, device: usize) -> Option<RemoteRange> {
        let key = *self.keys.get(slice.remote_range as usize)?.get(device)?;
        Some(RemoteRange { address: slice.remote, key })
    }
}

/// Returns the devices that are near the location with the most bytes; all if that is not known.
fn near_devices(published: &PeerDescription) -> Vec<usize> {
    let mut bytes: HashMap<&str, u64> = HashMap::new();
    for buffer in &published.buffers {
        *bytes.entry(&buffer.location).or_default() += buffer.length;
    }
    let location = bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(location, _)| location);
    let near = location.and_then(|location| published.priority.get(location));
    let names = near.map_or(&[][..], |(near, _)| near);
    let is_near = |device: &DeviceDescription| names.contains(&device.name);
    let found: Vec<_> = published
        .devices
        .iter()
        .enumerate()
        .filter_map(|(index, device)| is_near(device).then_some(index))
        .collect();
    if found.is_empty() { (0..published.devices.len()).collect() } else { found }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hello::format_gid;

    fn device(name: &str, last: u8) -> DeviceDescription {
        DeviceDescription { name: name.to_owned(), gid: format_gid(Gid([last; 16])), lid: 0 }
    }

    fn buffer(location: &str, length: u64, keys: &[u32]) -> BufferDescription {
        let location = location.to_owned();
        BufferDescription { location, address: 4096, length, keys: keys.to_vec() }
    }

    fn published() -> PeerDescription {
        PeerDescription {
            server: "host:1".to_owned(),
            devices: vec![device("a", 1), device("b", 2)],
            buffers: vec![buffer("cpu:0", 100, &[10, 20])],
            priority: HashMap::new(),
        }
    }

    #[test]
    fn keys_are_found_by_piece_and_device() {
        let memory = PeerMemory::new(&published()).unwrap();
        let slice = Slice {
            entry: 0,
            length: 1,
            local: 0,
            remote: 4100,
            local_range: 0,
            remote_range: 0,
            tries: 1,
        };
        assert_eq!(memory.range(&slice, 1), Some(RemoteRange { address: 4100, key: 20 }));
        assert_eq!(memory.range(&slice, 2), None);
        assert_eq!(memory.near, [0, 1], "no matrix was published");
    }

    #[test]
    fn matrix_tells_the_near_devices() {
        let mut near = published();
        near.priority.insert("cpu:0".to_owned(), (vec!["b".to_owned()], vec!["a".to_owned()]));
        let memory = PeerMemory::new(&near).unwrap();
        assert_eq!(memory.near, [1]);
        let slice = Slice {
            entry: 0,
            length: 1,
            local: 0,
            remote: 4100,
            local_range: 0,
            remote_range: 0,
            tries: 1,
        };
        assert!(memory.near(&slice).contains(1) && !memory.near(&slice).contains(0));
    }

    #[test]
    fn rejects_contradictory_descriptors() {
        let none = PeerDescription { devices: Vec::new(), ..published() };
        let keys = PeerDescription { buffers: vec![buffer("*", 1, &[1])], ..published() };
        let address = DeviceDescription { gid: "::1".to_owned(), ..device("a", 1) };
        let address = PeerDescription { devices: vec![address], buffers: vec![], ..published() };
        for bad in [none, keys, address] {
            assert!(PeerMemory::new(&bad).unwrap_err().to_string().contains("host:1"));
        }
    }
}
