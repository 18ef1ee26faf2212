//! Settings of an engine.

use std::{ops::RangeInclusive, path::PathBuf, time::Duration};

use mooncake_base::{Endpoint, Error, Result};

use crate::{
    discovery::{
        descriptor::DESCRIPTOR_BYTES_MAX, handshake::codec::MESSAGE_BYTES_MAX_DEFAULT,
        metadata::RedisLogin,
    },
    memory::HugePages,
    token::Token,
};

/// The metadata address that means: ask the peer itself.
pub const P2P: &str = "P2PHANDSHAKE";

/// Settings of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Name or address of this host as peers reach it, with an optional port. With a metadata
    /// server it is also the name of the segment. Default: empty, which means the address that this
    /// host uses towards others.
    pub name: String,
    /// `P2PHANDSHAKE`, or the address of a metadata server (`http://host:port/metadata`,
    /// `etcd://host:port`, `redis://host:port`).
    pub metadata: String,
    /// Part of every key on a metadata server (`mooncake/<prefix>/…`), so that clusters can share
    /// one server. Default: empty.
    pub metadata_prefix: String,
    /// Login for a Redis metadata server. Default: no login, database 0.
    pub redis: RedisLogin,
    /// Moves bytes over TCP only, even within one process or one host.
    pub is_tcp_forced: bool,
    /// With `is_tcp_forced`: still copies directly what lies in memory of this very engine.
    pub copies_own: bool,
    /// Address to bind and to publish instead of the detected one.
    pub bind_address: Option<String>,
    /// Address under which peers connect RDMA devices, instead of the published one: that of another
    /// network of this host. The handshake socket is bound to all addresses then.
    pub rdma_bind_address: Option<String>,
    /// Port range of the two listeners, which fail if no port of it is free. From 0 on: the system
    /// chooses.
    pub ports: RangeInclusive<u16>,
    /// Binds exactly the port in `name`, or fails.
    pub is_port_fixed: bool,
    /// Prefers this host's IPv6 address where `name` and `bind_address` leave the choice open.
    pub is_ipv6_preferred: bool,
    /// Backlog of the handshake socket.
    pub handshake_backlog: u16,
    /// Maximum length of a handshake message: 1 MiB to 128 MiB.
    pub handshake_bytes_max: usize,
    /// Maximum number of connections to one peer: 1 to 16.
    pub connections_per_peer: usize,
    /// Maximum number of peers that are kept open, at least 1. The least recently opened peer is
    /// evicted.
    pub peers_max: usize,
    /// Timeout for connecting to a peer.
    pub connect_timeout: Duration,
    /// Maximum wait of an unregistration for users of the memory.
    pub withdraw_timeout: Duration,
    /// A secret that peers must prove to know, and that is proven to them. With a token,
    /// connections in upstream's frames are refused, since those have no room for a proof.
    pub token: Option<Token>,
    /// Takes allocations from reserved huge pages of this size, if the system has any.
    pub huge_pages: Option<HugePages>,
    /// Bytes of each allocation whose pages a background thread of low priority faults in, at most
    /// an eighth of the available memory. 0 turns prefaulting off.
    pub prefault_bytes_max: u64,
    /// Asks in the background for huge pages (MADV_COLLAPSE) under memory that the user registers,
    /// where all small pages are resident. No byte changes; the copy takes time and memory.
    pub collapses_registered: bool,
    /// The preferred NUMA node of allocations.
    pub numa_node: Option<u32>,
    /// Name or path of the CUDA driver library. Default: `libcuda.so.1`.
    pub device_driver: PathBuf,
    /// Exports no memory to peers and publishes nothing. The engine only queries the metadata
    /// server, so its name need not be unique there.
    pub is_unpublished: bool,
    /// Interval at which a line of transfer statistics is logged; `None` for never.
    pub report_interval: Option<Duration>,
    /// Uses RDMA devices with these settings, if the machine has any that are active.
    #[cfg(feature = "rdma")]
    pub rdma: Option<mooncake_rdma::RdmaSettings>,
    /// The simulated devices to use instead of the machine's.
    #[cfg(all(feature = "rdma", feature = "test-util"))]
    pub rdma_fabric: Option<RdmaFabric>,
    /// Transports that are not used, so that a test reaches the others.
    #[cfg(feature = "test-util")]
    pub disabled: Vec<crate::TransportKind>,
}

/// The library of simulated RDMA devices. Two are equal if they are the same.
#[cfg(all(feature = "rdma", feature = "test-util"))]
#[derive(Debug, Clone)]
pub struct RdmaFabric(pub std::sync::Arc<mooncake_verbs::Library>);

#[cfg(all(feature = "rdma", feature = "test-util"))]
impl PartialEq for RdmaFabric {
    fn eq(&self, other: &Self) -> bool {
        std::sync::Arc::ptr_eq(&self.0, &other.0)
    }
}

#[cfg(all(feature = "rdma", feature = "test-util"))]
impl Eq for RdmaFabric {}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            metadata: P2P.to_owned(),
            metadata_prefix: String::new(),
            redis: RedisLogin::default(),
            is_tcp_forced: false,
            copies_own: false,
            bind_address: None,
            rdma_bind_address: None,
            ports: 15000..=17000,
            is_port_fixed: false,
            is_ipv6_preferred: false,
            handshake_backlog: 128,
            handshake_bytes_max: MESSAGE_BYTES_MAX_DEFAULT,
            connections_per_peer: 4,
            peers_max: 4096,
            connect_timeout: Duration::from_secs(5),
            withdraw_timeout: Duration::from_secs(1),
            token: None,
            huge_pages: None,
            prefault_bytes_max: 1 << 30,
            collapses_registered: false,
            numa_node: None,
            device_driver: PathBuf::from("libcuda.so.1"),
            is_unpublished: false,
            report_interval: None,
            #[cfg(feature = "rdma")]
            rdma: None,
            #[cfg(all(feature = "rdma", feature = "test-util"))]
            rdma_fabric: None,
            #[cfg(feature = "test-util")]
            disabled: Vec::new(),
        }
    }
}

impl EngineConfig {
    /// Returns whether peers are asked for their descriptors, instead of a server.
    pub fn is_p2p(&self) -> bool {
        self.metadata.trim().eq_ignore_ascii_case(P2P)
    }

    /// Host and port of `name`; `None` if it is empty.
    pub(crate) fn endpoint(&self) -> Result<Option<Endpoint>> {
        match self.name.trim() {
            "" => Ok(None),
            name => name.parse().map(Some),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.metadata.is_empty() {
            return Err(Error::invalid(
                "the metadata address is empty; use P2PHANDSHAKE to run without a server",
            ));
        }
        if !(1..=16).contains(&self.connections_per_peer) {
            return Err(Error::invalid("the number of connections per peer must be 1 to 16")
                .with("connections_per_peer", self.connections_per_peer));
        }
        if self.peers_max == 0 {
            return Err(Error::invalid("the maximum number of open peers must be at least 1"));
        }
        if !(MESSAGE_BYTES_MAX_DEFAULT..=DESCRIPTOR_BYTES_MAX).contains(&self.handshake_bytes_max) {
            return Err(Error::invalid(
                "the limit of a handshake message must be 1 MiB to 128 MiB",
            )
            .with("handshake_bytes_max", self.handshake_bytes_max));
        }
        self.endpoint().map(drop)
    }
}
