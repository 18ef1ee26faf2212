//! Settings of the RDMA devices of an engine.

use std::{collections::BTreeMap, time::Duration};

use mooncake_base::{Error, Result};
use mooncake_verbs::Mtu;

/// Settings of the RDMA devices of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaSettings {
    /// Names of the devices to use, in any order; empty: all that are active.
    pub devices: Vec<String>,
    /// Names of the only devices that may be used; empty: any.
    pub allowed: Vec<String>,
    /// Names of devices that are not used.
    pub excluded: Vec<String>,
    /// An engine without a usable device fails, instead of using other transports.
    pub is_required: bool,
    /// Which devices of peers own devices prefer.
    pub affinity: PeerAffinity,
    /// Names of the devices near each location of memory, such as `cpu:0`. Where none is listed, all
    /// devices are near.
    pub near: BTreeMap<String, Vec<String>>,
    /// Names of the devices near the memory of each GPU, by its PCI address, such as `0000:3b:00.0`.
    pub near_gpus: BTreeMap<String, Vec<String>>,
    /// Port of each device, numbered from 1.
    pub port: u8,
    /// Entry of the port's address table; None chooses.
    pub gid_index: Option<u8>,
    /// Maximum payload of a packet; peers must agree. The port's own limit counts, too.
    pub mtu: Mtu,
    /// Traffic class of packets.
    pub traffic_class: u8,
    /// Service level of packets.
    pub service_level: u8,
    /// Entry of the port's table of partitions.
    pub partition_index: u16,
    /// Queue pairs to each device of a peer; peers must agree.
    pub queue_pairs: usize,
    /// Requests in flight per queue pair.
    pub queue_depth: u32,
    /// Writes of at most this length carry their bytes in the request.
    pub inline_bytes: u32,
    /// Requests in flight per device.
    pub device_depth: u32,
    /// Length of a slice, the unit that is sent over one device and tried again.
    pub slice_bytes: u32,
    /// Bytes that the last slice of an entry may have beyond that, at most as many again.
    pub slice_tail_bytes: u32,
    /// How often a slice is tried.
    pub tries: u32,
    /// A connection without a completion for this long is given up.
    pub stall_timeout: Duration,
    /// Longest pause before a device pair that failed is tried again.
    pub pause_max: Duration,
    /// Maximum length of one registration; longer ranges have several.
    pub region_bytes_max: u64,
    /// Registers memory of CUDA devices, so that it is reached without a copy in host memory.
    pub uses_device_memory: bool,
    /// Lets the bus reorder a device's accesses.
    pub is_relaxed: bool,
    /// Maximum number of connected device pairs.
    pub connections_max: usize,
}

/// Which devices of peers the own devices prefer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum PeerAffinity {
    /// None: the devices of both sides are paired in turn.
    #[default]
    None,
    /// Devices of the same name.
    SameName,
    /// For an own device the names of the preferred ones.
    Names(BTreeMap<String, Vec<String>>),
}

impl PeerAffinity {
    /// Returns whether an own device prefers one of a peer.
    pub(crate) fn prefers(&self, own: &str, remote: &str) -> bool {
        match self {
            Self::None => false,
            Self::SameName => own == remote,
            Self::Names(preferred) => {
                preferred.get(own).is_some_and(|names| names.iter().any(|name| name == remote))
            }
        }
    }
}

impl Default for RdmaSettings {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            allowed: Vec::new(),
            excluded: Vec::new(),
            is_required: false,
            affinity: PeerAffinity::None,
            near: BTreeMap::new(),
            near_gpus: BTreeMap::new(),
            port: 1,
            gid_index: None,
            mtu: Mtu::Bytes4096,
            traffic_class: 0,
            service_level: 0,
            partition_index: 0,
            queue_pairs: 2,
            queue_depth: 256,
            inline_bytes: 64,
            device_depth: 4096,
            slice_bytes: 64 << 10,
            slice_tail_bytes: 16 << 10,
            tries: 9,
            stall_timeout: Duration::from_secs(3),
            pause_max: Duration::from_secs(30),
            region_bytes_max: 1 << 40,
            uses_device_memory: true,
            is_relaxed: true,
            connections_max: 65_536,
        }
    }
}

impl RdmaSettings {
    /// Returns why a device is not to be used, if that is so.
    pub(crate) fn exclusion(&self, device: &str) -> Option<&'static str> {
        let has = |names: &[String]| names.iter().any(|name| name == device);
        if !self.devices.is_empty() && !has(&self.devices) {
            return Some("is not among the named devices");
        }
        if !self.allowed.is_empty() && !has(&self.allowed) {
            return Some("is not in the list of allowed devices");
        }
        has(&self.excluded).then_some("is in the list of excluded devices")
    }

    /// Checks the limits.
    ///
    /// # Errors
    /// A number is out of its range; the message names it.
    pub fn check(&self) -> Result<()> {
        let out_of_range = |name: &'static str, range: &str, value: u64| {
            Err(Error::invalid("a setting of the RDMA devices is out of range")
                .with("setting", name)
                .with("value", value)
                .with("range", range))
        };
        if self.port == 0 {
            return out_of_range("port", "1 to 255", 0);
        }
        if !(1..=64).contains(&self.queue_pairs) {
            return out_of_range("queue_pairs", "1 to 64", self.queue_pairs as u64);
        }
        if !(1..=1 << 16).contains(&self.queue_depth) {
            return out_of_range("queue_depth", "1 to 65536", self.queue_depth.into());
        }
        if !(1..=1 << 22).contains(&self.device_depth) {
            return out_of_range("device_depth", "1 to 4194304", self.device_depth.into());
        }
        if !(1024..=1 << 30).contains(&self.slice_bytes) {
            return out_of_range("slice_bytes", "1 KiB to 1 GiB", self.slice_bytes.into());
        }
        if !(1..=127).contains(&self.tries) {
            return out_of_range("tries", "1 to 127", self.tries.into());
        }
        if self.region_bytes_max < 4096 {
            return out_of_range("region_bytes_max", "4 KiB or more", self.region_bytes_max);
        }
        if self.connections_max == 0 {
            return out_of_range("connections_max", "1 or more", 0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_settings_are_valid() {
        RdmaSettings::default().check().unwrap();
    }

    #[test]
    fn rejects_a_number_out_of_range_by_name() {
        let slices = RdmaSettings { slice_bytes: 10, ..RdmaSettings::default() };
        let error = slices.check().unwrap_err().to_string();
        assert!(error.contains("slice_bytes") && error.contains("10"), "{error}");
        let tries = RdmaSettings { tries: 128, ..RdmaSettings::default() };
        assert!(tries.check().is_err());
    }
}
