//! The segment descriptor: upstream's JSON, plus native fields that upstream ignores.

use std::collections::BTreeMap;

use mooncake_base::{EngineId, EngineMark, Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

/// Maximum size of a descriptor (upstream's limit of a handshake message).
pub const DESCRIPTOR_BYTES_MAX: usize = 128 << 20;

/// A segment descriptor, understood by this implementation and by upstream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default)]
pub struct SegmentDescriptor {
    /// The segment's name.
    pub name: String,
    /// `tcp`, `rdma`, …
    pub protocol: String,
    /// Host of the data listener.
    pub tcp_data_host: String,
    /// Port of the data listener.
    pub tcp_data_port: u16,
    /// 2 if the listener acknowledges writes.
    pub tcp_proto_version: u32,
    /// Name of the engine in the paths of its RDMA devices, if it is not `name`.
    pub rdma_server_name: String,
    /// Time of creation, informative only.
    pub timestamp: String,
    /// The RDMA devices, in the order of the keys of each buffer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceDescriptor>,
    /// The registered ranges.
    pub buffers: Vec<BufferDescriptor>,
    /// For each location of memory the names of the near RDMA devices and of the others. Upstream numbers
    /// devices by their first appearance here.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub priority_matrix: BTreeMap<String, (Vec<String>, Vec<String>)>,
    /// Present if the peer runs this implementation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mooncake: Option<NativeDescriptor>,
}

/// An RDMA device in upstream's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default)]
pub struct DeviceDescriptor {
    /// Name of the device.
    pub name: String,
    /// Identifier of its port in an InfiniBand subnet.
    pub lid: u16,
    /// Address of its port: sixteen bytes in hexadecimal, separated by colons.
    pub gid: String,
}

/// A registered range in upstream's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default)]
pub struct BufferDescriptor {
    /// Location of the memory (`cpu:0`, `*`).
    pub name: String,
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub length: u64,
    /// The keys with which peers reach the range, one for each device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rkey: Vec<u32>,
    /// The keys of the owner; upstream expects the field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lkey: Vec<u32>,
}

/// The native fields of a descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NativeDescriptor {
    /// Version of these fields and of the native frames: 1.
    pub version: u32,
    /// The engine's id, as 32 hexadecimal digits; see [`NativeDescriptor::engine`].
    pub engine: String,
    /// How to reach the engine on its own host; absent if the engine does not offer that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalDescriptor>,
    /// Names of the RDMA devices near each location of memory; a location that is absent is near all.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub near_devices: BTreeMap<String, Vec<String>>,
    /// True if the ids of all segments of the store in this engine begin with the engine's mark.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub marks_segments: bool,
}

/// How a process of the same host reaches the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalDescriptor {
    /// Name of the engine's abstract Unix socket.
    pub unix_socket: String,
    /// Process id of the engine, in its own namespace.
    pub process: u32,
}

impl NativeDescriptor {
    /// Creates the fields for an engine.
    pub fn new(engine: EngineId, local: Option<LocalDescriptor>) -> Self {
        Self {
            version: 1,
            engine: format!("{:032x}", engine.bits()),
            local,
            near_devices: BTreeMap::new(),
            marks_segments: false,
        }
    }

    /// The engine's id.
    pub fn engine(&self) -> Option<EngineId> {
        u128::from_str_radix(&self.engine, 16).ok().map(EngineId::from_bits)
    }
}

impl SegmentDescriptor {
    /// The id of the engine, if the peer runs this implementation.
    pub(crate) fn engine(&self) -> Option<EngineId> {
        self.mooncake.as_ref().and_then(NativeDescriptor::engine)
    }

    /// The mark that the ids of the store's segments in this engine begin with, if they do.
    pub(crate) fn segment_mark(&self) -> Option<EngineMark> {
        let native = self.mooncake.as_ref().filter(|native| native.marks_segments)?;
        native.engine().map(EngineId::mark)
    }

    /// Parses a descriptor; unknown fields are ignored.
    ///
    /// # Errors
    /// The text is not JSON, or a field has the wrong type.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        serde_json::from_slice(text).map_err(|source| {
            Error::new(ErrorCode::TRANSFER_FAIL, "the peer's segment descriptor cannot be read")
                .caused_by(source)
        })
    }

    /// Serializes the descriptor for the wire.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a struct of strings and numbers is always JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_of_an_earlier_version_has_no_mark() {
        let engine = EngineId::random();
        let mut native = NativeDescriptor::new(engine, None);
        let described = |native: &NativeDescriptor| {
            let mooncake = Some(native.clone());
            SegmentDescriptor { mooncake, ..SegmentDescriptor::default() }.to_json()
        };
        let earlier = described(&native);
        assert!(!String::from_utf8(earlier.clone()).unwrap().contains("marks"));
        let earlier = SegmentDescriptor::from_json(&earlier).unwrap();
        assert_eq!((earlier.engine(), earlier.segment_mark()), (Some(engine), None));
        native.marks_segments = true;
        let later = SegmentDescriptor::from_json(&described(&native)).unwrap();
        assert_eq!(later.segment_mark(), Some(engine.mark()));
        assert_eq!(SegmentDescriptor::default().segment_mark(), None, "upstream's");
    }
}
