//! What an engine is told when it starts.

use std::{ops::RangeInclusive, path::PathBuf, time::Duration};

use mooncake_base::{Endpoint, Error, Result};

use crate::{
    descriptor::DESCRIPTOR_BYTES_MAX, handshake::codec::MESSAGE_BYTES_MAX_DEFAULT,
    memory::HugePages, metadata::RedisLogin, token::Token,
};

/// The metadata address that means: ask the peer itself.
pub const P2P: &str = "P2PHANDSHAKE";

/// Settings of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Name or address of this host as peers reach it, with an optional port. With a metadata
    /// server it is also the name of the segment. Default: empty, which means the address that
    /// this host uses towards others.
    pub name: String,
    /// `P2PHANDSHAKE`, or the address of a metadata server (`http://host:port/metadata`,
    /// `etcd://host:port`, `redis://host:port`).
    pub metadata: String,
    /// Part of every key on a metadata server (`mooncake/<prefix>/…`), so that clusters can share
    /// one. Default: empty.
    pub metadata_prefix: String,
    /// Who we are to a Redis metadata server. Default: nobody, and database 0.
    pub redis: RedisLogin,
    /// Moves bytes over TCP only, also within one process and one host.
    pub is_tcp_forced: bool,
    /// Where that is so, copies all the same what lies in memory of this very engine.
    pub copies_own: bool,
    /// Address to bind and to publish instead of the one that was found.
    pub bind_address: Option<String>,
    /// Where the listeners look for a free port; when none is free the system chooses.
    pub ports: RangeInclusive<u16>,
    /// Binds exactly the port in `name`, or fails.
    pub is_port_fixed: bool,
    /// Prefers this host's IPv6 address where `name` and `bind_address` leave the choice.
    pub is_ipv6_preferred: bool,
    /// How many connections to the handshake socket may wait to be accepted.
    pub handshake_backlog: u16,
    /// The longest handshake message that is accepted: 1 MiB to 128 MiB.
    pub handshake_bytes_max: usize,
    /// Connections to one peer, at the most. 1 to 16.
    pub connections_per_peer: usize,
    /// Peers that are kept open, at the most; the one opened longest ago makes room. At least 1.
    pub peers_max: usize,
    /// How long to wait for a peer to accept a connection.
    pub connect_timeout: Duration,
    /// How long unregistering waits for those who use the memory.
    pub withdraw_timeout: Duration,
    /// A secret that peers must know, and that is proven to them. With it the established engine's
    /// frames, which have no room for a proof, are refused.
    pub token: Option<Token>,
    /// Takes allocations from huge pages of that size where the system has some reserved.
    pub huge_pages: Option<HugePages>,
    /// Of each allocation, how many bytes are made ready in the background by a thread of low
    /// priority: never more than an eighth of the room there is. 0 for none.
    pub prefault_bytes_max: u64,
    /// Asks in the background for huge pages under memory that the user registers, where all of the
    /// small ones are there. Changes no byte; takes time and room for the copy.
    pub collapses_registered: bool,
    /// The node of the machine that allocations come from while it has room.
    pub numa_node: Option<u32>,
    /// The library that is the CUDA driver, by name or path. Default: `libcuda.so.1`.
    pub device_driver: PathBuf,
    /// Lends nothing to peers, so that nothing of it goes to the metadata server, which it only
    /// asks; its name need not be its own there.
    pub is_unpublished: bool,
    /// How often a line about what was moved is logged, if at all.
    pub report_interval: Option<Duration>,
    /// Ways that are not to be used, so that a test reaches the others.
    #[cfg(feature = "test-util")]
    pub disabled: Vec<crate::TransportKind>,
}

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
            #[cfg(feature = "test-util")]
            disabled: Vec::new(),
        }
    }
}

impl EngineConfig {
    /// Whether peers are asked for their descriptors, instead of a server.
    pub fn is_p2p(&self) -> bool {
        self.metadata.trim().eq_ignore_ascii_case(P2P)
    }

    /// Host and port of `name`; no host if it is empty.
    pub(crate) fn endpoint(&self) -> Result<Option<Endpoint>> {
        match self.name.trim() {
            "" => Ok(None),
            name => name.parse().map(Some),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.metadata.is_empty() {
            return Err(Error::invalid(
                "the metadata address is empty; P2PHANDSHAKE needs no server",
            ));
        }
        if !(1..=16).contains(&self.connections_per_peer) {
            return Err(Error::invalid("a peer has 1 to 16 connections")
                .with("connections_per_peer", self.connections_per_peer));
        }
        if self.peers_max == 0 {
            return Err(Error::invalid("an engine keeps at least one peer open"));
        }
        if !(MESSAGE_BYTES_MAX_DEFAULT..=DESCRIPTOR_BYTES_MAX).contains(&self.handshake_bytes_max) {
            return Err(Error::invalid("a handshake message has at most 1 MiB to 128 MiB")
                .with("handshake_bytes_max", self.handshake_bytes_max));
        }
        self.endpoint().map(drop)
    }
}
