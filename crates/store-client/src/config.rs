//! Settings of a client and its link.

use std::{path::PathBuf, time::Duration};

use mooncake_base::{ByteSize, Error, Result, TenantId, Token};
use mooncake_kv_client::redis::RedisLogin;

/// The settings of one client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// `host:port`, the name of the client's segments. Empty (the default): the engine's name.
    pub name: String,
    /// Namespace of the keys. Default: the default tenant.
    pub tenant: TenantId,
    /// Whether a client of another tenant than the default one refuses a master that ignores
    /// tenants, where all callers share one namespace of keys. If not, it logs a warning. Default:
    /// yes.
    pub refuses_ignored_tenant: bool,
    /// The directories in which the client keeps copies of objects for the pool. Default: none.
    pub disks: Vec<DiskConfig>,
    /// The limits of each of them. Default: none.
    pub disk_limits: DiskLimits,
    /// The memory through which records of these directories go to readers, at least 64 MiB; taken
    /// from the system when records are read. Default: 1.25 GiB.
    pub disk_staging_bytes: u64,
    /// The token of the pool, which the owners of directories and their readers prove to each other.
    /// Default: none.
    pub disk_token: Option<Token>,
    /// How objects that only a disk has are brought into memory before they are read.
    pub prefetch: PrefetchConfig,
    /// Memory lent to the pool. Default: 0, none.
    pub segment_bytes: u64,
    /// Largest single segment; more memory is split into several. Default: 1 TiB.
    pub segment_bytes_max: u64,
    /// Time limit of one call to the master. Default: 30 s.
    pub rpc_timeout: Duration,
    /// Time during which a call that failed is repeated: callers can repeat it themselves, and want
    /// to know soon that the master is gone. The end of a put is repeated until its time limit in
    /// any case. Default: 2 s.
    pub retry_patience: Duration,
    /// Whether a call also waits that long while the connection to the master is known to be lost.
    /// If not, it fails at once then. Default: yes.
    pub awaits_master: bool,
    /// Whether a read of an object fails with `TRANSFER_FAIL` while every process that holds a copy
    /// has lost its connection, as upstream's does. If not, the object counts as absent. Default: no.
    pub reports_lost_holders: bool,
    /// Time limit of the transfers of one call; of a large object or batch, of each round. A put also
    /// waits so long for memory whose objects move down to disks. Default: 30 s.
    pub transfer_timeout: Duration,
    /// Bytes of an object that are moved in one round, and a quarter of those of a batch; each round has
    /// a time limit of its own. A round costs a round trip to the peer. Default: 64 MiB.
    pub round_bytes: usize,
    /// Time that a put waits for memory that only read fences hold. Default: 3 s.
    pub fenced_wait: Duration,
    /// Whether a checksum is stored with every object that is put whole, and verified when such an
    /// object is read whole. Costs one extra pass over the bytes for a put and for a read. Default:
    /// no.
    pub has_checksums: bool,
    /// Metrics settings.
    pub metrics: MetricsConfig,
}

/// How objects that only a disk has are brought into memory before they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefetchConfig {
    /// Whether probes that ask for it bring objects into memory. Default: yes.
    pub is_enabled: bool,
    /// The time for which an object is not asked for again. Default: 30 s.
    pub dedup_ttl: Duration,
    /// The time for which an object is not asked for again that was refused or did not come. Default:
    /// 5 s.
    pub cooldown: Duration,
    /// The time that a read waits for the objects that this client has asked for. Default: 10 ms.
    pub get_wait: Duration,
}

impl Default for PrefetchConfig {
    fn default() -> Self {
        Self {
            is_enabled: true,
            dedup_ttl: Duration::from_secs(30),
            cooldown: Duration::from_secs(5),
            get_wait: Duration::from_millis(10),
        }
    }
}

/// A directory that keeps copies of objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskConfig {
    /// The directory, which is made if it does not exist.
    pub path: PathBuf,
    /// The bytes that it may take; `None`: 90 % of what is free, and what it takes already.
    pub capacity: Option<u64>,
    /// Whether it is read through io_uring or by threads; `None`: whatever works, the ring first.
    pub uses_ring: Option<bool>,
}

/// The limits of directories that keep copies of objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskLimits {
    /// The most records in a directory; `None`: no limit.
    pub records_max: Option<u64>,
    /// When a directory gives files back to its file system; `None`: below 64 MiB of free space.
    pub watermarks: Option<Watermarks>,
}

/// Shares of a file system that are in use: above the high one directories give files back, until the
/// low one is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watermarks {
    high_ppm: u64,
    low_ppm: u64,
}

impl Watermarks {
    /// Returns watermarks, as shares between 0 and 1.
    ///
    /// # Errors
    /// `INVALID_PARAMS`: a share is not above 0 and at most 1, or the low one is above the high one.
    pub fn new(high: f64, low: f64) -> Result<Self> {
        let ppm = |share: f64| (share * 1e6).round() as u64;
        if !(low > 0.0 && low <= high && high <= 1.0) {
            let why =
                "the low watermark of a file system must be above 0 and not above the high one";
            return Err(Error::invalid(why).with("high", high).with("low", low));
        }
        Ok(Self { high_ppm: ppm(high), low_ppm: ppm(low) })
    }

    /// Returns the bytes that are free at the high and at the low watermark of a file system.
    pub(crate) fn free_bytes(self, total: u64) -> (u64, u64) {
        let free = |ppm: u64| total / 1_000_000 * 1_000_000_u64.saturating_sub(ppm);
        (free(self.high_ppm), free(self.low_ppm))
    }
}

/// Settings of a client's metrics output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsConfig {
    /// Whether the HTTP server and the log show metrics. Counting is always on, since it costs next
    /// to nothing. Default: yes.
    pub is_enabled: bool,
    /// Value of the `cluster_id` label. Default: empty, no label.
    pub cluster: String,
    /// Whether the metrics have upstream's names, too. Default: yes.
    pub has_upstream_names: bool,
    /// Interval of the summary in the log, rounded to heartbeats. Default: never.
    pub report_interval: Option<Duration>,
    /// Whether the summary shows bytes per second. Default: yes.
    pub has_bandwidth: bool,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            tenant: TenantId::default(),
            refuses_ignored_tenant: true,
            disks: Vec::new(),
            disk_limits: DiskLimits::default(),
            disk_staging_bytes: 1_342_177_280,
            disk_token: None,
            prefetch: PrefetchConfig::default(),
            segment_bytes: 0,
            segment_bytes_max: ByteSize::gib(1024).bytes(),
            rpc_timeout: Duration::from_secs(30),
            retry_patience: Duration::from_secs(2),
            awaits_master: true,
            reports_lost_holders: false,
            transfer_timeout: Duration::from_secs(30),
            round_bytes: 64 << 20,
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
            has_upstream_names: true,
            report_interval: None,
            has_bandwidth: true,
        }
    }
}

/// The settings of one link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkConfig {
    /// Time limit for connecting, over all addresses of the host name together. Default: 5 s.
    pub connect_timeout: Duration,
    /// Maximum open connections for calls; heartbeats have one more of their own. Default: 16.
    pub connections_max: usize,
    /// Whether to use the Unix socket that the master announces, if it is reachable. Default: yes.
    pub may_use_unix_socket: bool,
    /// Whether the link passes on calls of other processes, as a daemon does. The end of a connection
    /// then does not mean that the process is dead that called over it. Default: no.
    pub passes_on_calls: bool,
    /// The token of the master, which both sides must know. Default: none; then a master with a
    /// token refuses the link.
    pub token: Option<Token>,
    /// The name of the cluster whose leader is asked for at a lease service. Default:
    /// `mooncake_cluster`.
    pub cluster: String,
    /// Login for a Redis server that names the leader. Default: none.
    pub redis: RedisLogin,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            connections_max: 16,
            may_use_unix_socket: true,
            passes_on_calls: false,
            token: None,
            cluster: "mooncake_cluster".to_owned(),
            redis: RedisLogin::default(),
        }
    }
}
