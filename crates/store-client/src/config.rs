//! What a client is told at its start.

use std::time::Duration;

use mooncake_base::{ByteSize, TenantId};

/// The settings of one client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// `host:port`, the name that the client's segments go by. Empty (the default): the name of
    /// its engine.
    pub name: String,
    /// Whose namespace its keys live in. Default: the default tenant.
    pub tenant: TenantId,
    /// How much memory it lends to the pool. Default: 0, none.
    pub segment_bytes: u64,
    /// The largest single segment; more memory than that becomes several. Default: 1 TiB.
    pub segment_bytes_max: u64,
    /// How long the master may take to answer one call. Default: 30 s.
    pub rpc_timeout: Duration,
    /// How long the bytes of one call may take to move. Default: 30 s.
    pub transfer_timeout: Duration,
    /// How long a put waits for memory that is held only by readers who are about to end.
    /// Default: 3 s.
    pub fenced_wait: Duration,
    /// Whether a checksum is kept with every object that is put whole, and checked when an object
    /// that has one is read whole. Reading costs a second look at the bytes, putting another.
    /// Default: no.
    pub has_checksums: bool,
    /// What it tells of its metrics.
    pub metrics: MetricsConfig,
}

/// What a client tells of its metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsConfig {
    /// Whether its HTTP server and its log tell them. Counting goes on all the same, since it costs
    /// next to nothing. Default: yes.
    pub is_enabled: bool,
    /// A label of every sample. Default: empty, no label.
    pub cluster: String,
    /// How often a summary is logged, to within a heartbeat. Default: never.
    pub report_interval: Option<Duration>,
    /// Whether the summary tells bytes a second. Default: yes.
    pub has_bandwidth: bool,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            tenant: TenantId::default(),
            segment_bytes: 0,
            segment_bytes_max: ByteSize::gib(1024).bytes(),
            rpc_timeout: Duration::from_secs(30),
            transfer_timeout: Duration::from_secs(30),
            fenced_wait: Duration::from_secs(3),
            has_checksums: false,
            metrics: MetricsConfig::default(),
        }
    }
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self {
            is_enabled: true,
            cluster: String::new(),
            report_interval: None,
            has_bandwidth: true,
        }
    }
}

/// The settings of one link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkConfig {
    /// How long to try for a connection, over all addresses of the name together. Default: 5 s.
    pub connect_timeout: Duration,
    /// The most connections open at once. Default: 16.
    pub connections_max: usize,
    /// Whether the Unix socket that the master names is used when it can be reached.
    /// Default: yes.
    pub may_use_unix_socket: bool,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            connections_max: 16,
            may_use_unix_socket: true,
        }
    }
}
