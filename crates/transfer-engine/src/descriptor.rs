//! What a segment says of itself to its peers: the established JSON, and our own fields beside it
//! that the established engine ignores.

use mooncake_base::{EngineId, Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

/// The most bytes a descriptor may have (the established limit of a handshake message).
pub const DESCRIPTOR_BYTES_MAX: usize = 128 << 20;

/// A segment descriptor, `contract` of both engines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default)]
pub struct SegmentDescriptor {
    /// The segment's name.
    pub name: String,
    /// `tcp`, `rdma`, …
    pub protocol: String,
    /// Where the data listener is.
    pub tcp_data_host: String,
    /// Its port.
    pub tcp_data_port: u16,
    /// 2: the listener acknowledges.
    pub tcp_proto_version: u32,
    /// Unused on TCP; the established engine expects the field.
    pub rdma_server_name: String,
    /// When it was made; informative.
    pub timestamp: String,
    /// The registered ranges.
    pub buffers: Vec<BufferDescriptor>,
    /// Present if the peer is one of ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mooncake: Option<NativeDescriptor>,
}

/// A registered range as the established engine describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(default)]
pub struct BufferDescriptor {
    /// Its location (`cpu:0`, `*`).
    pub name: String,
    /// First byte.
    pub addr: u64,
    /// Length.
    pub length: u64,
}

/// Our own fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NativeDescriptor {
    /// Version of these fields and of our frames: 1.
    pub version: u32,
    /// The engine's id, as 32 hexadecimal digits; see [`NativeDescriptor::engine`].
    pub engine: String,
    /// How to reach it on its own host; absent if it does not offer that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalDescriptor>,
}

/// How a process of the same host reaches the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalDescriptor {
    /// Name of its abstract Unix socket.
    pub unix_socket: String,
    /// Its process id, in its own namespace.
    pub process: u32,
}

impl NativeDescriptor {
    /// The fields for an engine.
    pub fn new(engine: EngineId, local: Option<LocalDescriptor>) -> Self {
        Self { version: 1, engine: format!("{:032x}", engine.bits()), local }
    }

    /// The engine's id.
    pub fn engine(&self) -> Option<EngineId> {
        u128::from_str_radix(&self.engine, 16).ok().map(EngineId::from_bits)
    }
}

impl SegmentDescriptor {
    /// Reads a descriptor; unknown fields are ignored.
    ///
    /// # Errors
    /// Not JSON, or fields of the wrong type.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        serde_json::from_slice(text).map_err(|source| {
            Error::new(ErrorCode::TRANSFER_FAIL, "the peer's segment descriptor cannot be read")
                .caused_by(source)
        })
    }

    /// As it goes over the wire.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a struct of strings and numbers is always JSON")
    }
}
