//! The register of environment variables: every variable that is read, once, with its effect.
//!
//! The entry points (the programs and the Python binding) read the environment, and the crates `cli`
//! and `settings` do so on their behalf. Other libraries take values; `tests/tidy` checks that.
//! The table in `docs/reference/environment.md` is generated from [`ALL`].

mod unsupported;
mod value_kind;

pub use unsupported::{UNSUPPORTED, Unsupported};
pub use value_kind::{Invalid, ValueKind};

/// An environment variable that is read.
#[derive(Debug, Clone, Copy)]
pub struct EnvVar {
    /// The preferred name.
    pub name: &'static str,
    /// Older spellings, read when the name itself is not set.
    pub aliases: &'static [&'static str],
    /// The value that applies when the variable is not set, as text.
    pub default: &'static str,
    /// The values that it takes.
    pub kind: ValueKind,
    /// The effect, in one sentence.
    pub help: &'static str,
}

impl EnvVar {
    /// Reads the value, if it is set and is UTF-8.
    #[allow(
        clippy::disallowed_methods,
        reason = "this is the one place that reads the environment"
    )]
    pub fn read(&self) -> Option<String> {
        std::iter::once(&self.name).chain(self.aliases).find_map(|name| std::env::var(name).ok())
    }

    /// Returns what is wrong with the value, if it is set and is not one that the variable takes.
    pub fn invalid(&self) -> Option<Invalid> {
        self.kind.invalid(&self.read()?)
    }

    /// Returns whether the value is a secret, which must not be shown.
    pub fn is_secret(&self) -> bool {
        self.name.ends_with("_TOKEN") || self.name.ends_with("_PASSWORD")
    }

    /// Returns whether the switch is on: set to anything but a false value, or on by default.
    pub fn is_on(&self) -> bool {
        let is_on_unset = self.default == "on";
        self.read().map_or(is_on_unset, |text| crate::parse::read_bool(&text).unwrap_or(true))
    }
}

impl Unsupported {
    /// Returns the unsupported variables that are set, each with the reason.
    #[allow(
        clippy::disallowed_methods,
        reason = "this is the one place that reads the environment"
    )]
    pub fn set_in_environment() -> impl Iterator<Item = (&'static str, &'static str)> {
        UNSUPPORTED.iter().flat_map(|row| {
            let set = row.names.iter().filter(|name| std::env::var_os(name).is_some());
            set.map(|name| (*name, row.reason))
        })
    }
}

/// Reads the value of a flag from the variable `FLAGS_name`, as `--fromenv` asks for.
#[allow(clippy::disallowed_methods, reason = "this is the one place that reads the environment")]
pub fn read_flag(name: &str) -> Option<String> {
    std::env::var(format!("FLAGS_{name}")).ok()
}

/// Declares the variables and the list of them.
macro_rules! variables {
    ($($name:ident $(($($alias:literal),+))?: $kind:expr => $default:literal, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub static $name: EnvVar = EnvVar {
                name: stringify!($name),
                aliases: &[$($($alias),+)?],
                default: $default,
                kind: {
                    use ValueKind::*;
                    $kind
                },
                help: $help,
            };
        )*
        /// Every variable, in the order of the reference page.
        pub static ALL: &[&EnvVar] = &[$(&$name),*];
    };
}

// A macro because each variable must be a name in Rust and a row of the table, once.
variables! {
    MC_LOG_LEVEL: Level => "warn", "Log level: trace, debug, info, warn or error. Upstream's values are accepted, too: TRACE, INFO, WARNING and ERROR, or 0 (info), 1 (warning) and 2 (error).";
    MOONCAKE_LOG: Text => "", "Log filter with a level per module, in the syntax of tracing's EnvFilter; takes precedence over MC_LOG_LEVEL.";
    MC_FORCE_TCP: Switch => "off", "Move bytes over TCP only, even within one process or host; see also MC_STORE_MEMCPY.";
    MC_TRANSFER_TIMEOUT: Seconds => "30", "Seconds that a transfer may take before it fails (at least 5); of an object of more than 64 MiB, seconds for each 64 MiB.";
    MC_TCP_BIND_ADDRESS: Text => "", "Address that the transfer engine binds and publishes instead of the detected one.";
    MC_RDMA_BIND_ADDRESS: Text => "", "Address of this host under which peers connect RDMA devices, instead of the published one.";
    MC_MIN_RPC_PORT ("MC_MIN_PRC_PORT"): Number(0, 65_535) => "15000", "First port that the transfer engine may listen on, two for each engine; 0: any port.";
    MC_MAX_RPC_PORT ("MC_MAX_PRC_PORT"): Number(0, 65_535) => "17000", "Last port that the transfer engine may listen on. An engine that finds no free port does not start.";
    MC_LEGACY_RPC_PORT_BINDING: Switch => "off", "Bind exactly the port given in the local host name.";
    MC_METADATA_CLUSTER_ID: Text => "", "Store metadata keys under `mooncake/ID/` instead of `mooncake/`.";
    MC_REDIS_USERNAME: Text => "", "User name for a Redis server, of metadata or of masters; empty for its default user.";
    MC_REDIS_PASSWORD: Text => "", "Password for a Redis server, of metadata or of masters.";
    MC_REDIS_DB_INDEX: Number(0, u32::MAX as i64) => "0", "Database index of a Redis server, of metadata or of masters.";
    MC_TCP_LANES_PER_PEER ("MC_TCP_MAX_CONNECTIONS_PER_PEER"): Number(1, 16) => "4", "Maximum number of connections that the transfer engine opens to one peer (1 to 16).";
    MC_BUSY_POLL ("MC_STAY_AWAKE"): Switch => "on", "Busy-poll a socket before the thread sleeps: 0.1 ms for a reply, 0.2 ms for the next call and for the reply to a change. Threads poll only while most messages arrive within that time and there are enough CPUs for the polling threads and their peers. Off: threads sleep at once.";
    MC_TE_METRIC: Switch => "off", "Log a line of transfer statistics periodically, if there were transfers: throughput and batch latency in upstream's format, then the counters of each transport. The line is logged at any log level.";
    MC_TE_METRIC_INTERVAL_SECONDS: Interval => "5", "Interval in seconds between two log lines of MC_TE_METRIC.";
    MC_PREFAULT_SIZE ("MC_PREPARED_MEMORY_SIZE"): Size => "1GB", "Bytes of each segment that are prefaulted in the background, at most an eighth of the available memory; 0 for none.";
    MC_COLLAPSE_REGISTERED_MEMORY: Switch => "off", "Ask the kernel in the background to replace the small pages of registered memory by huge pages, where all of the small pages are resident.";
    MC_STORE_NUMA_SOCKET_ID: Number(0, u32::MAX as i64) => "", "NUMA node that segments are allocated on while it has free memory.";
    MC_CUDA_DRIVER: Text => "libcuda.so.1", "Name or path of the CUDA driver library. It is loaded by the first transfer on a stream; a library that the process has already loaded is used as is.";
    MC_TRANSFER_TOKEN: Token => "", "Shared secret of at least 8 bytes. Transfer engines prove to each other that they know the secret before they access memory, send their segment descriptor or accept a notification. Engines without the secret, including upstream's, are refused.";
    MC_HANDSHAKE_PORT: Number(0, 65_535) => "12001", "Port of the handshake socket if the metadata server is P2PHANDSHAKE, MC_LEGACY_RPC_PORT_BINDING is on, and the local host name has no port.";
    MC_HANDSHAKE_LISTEN_BACKLOG: Number(0, 65_535) => "128", "Listen backlog of the handshake socket.";
    MC_HANDSHAKE_MAX_LENGTH: Number(1 << 20, 1 << 27) => "1048576", "Maximum length in bytes of a handshake message (1 MiB to 128 MiB).";
    MC_USE_IPV6: Switch => "off", "Prefer this host's IPv6 address where no address is given.";
    MC_HANDSHAKE_CONNECT_TIMEOUT: Seconds => "5", "Timeout in seconds for a connection to a peer's handshake socket.";
    MC_CUSTOM_TOPO_JSON: Text => "", "Path of a JSON file with the network devices near each memory location; replaces the topology that the kernel reports.";
    MC_MS_AUTO_DISC: Boolean => "", "Choice of the RDMA devices of a store: 1 uses all devices (see MC_MS_FILTERS) whatever names the caller gives; 0 requires names. Default: all devices if the caller gives no names.";
    MC_MS_FILTERS: Text => "", "Names of the RDMA devices, separated by commas, that a store may use when it chooses its devices itself (see MC_MS_AUTO_DISC); empty for all.";
    MC_TE_FILTERS: Text => "", "Names of the only RDMA devices that engines and stores may use, separated by commas; empty for all.";
    MC_TE_FILTERS_EXCLUDE: Text => "", "Names of RDMA devices that engines and stores do not use, separated by commas.";
    MC_FORCE_HCA: Text => "", "Set to anything, an engine or store that asks for RDMA fails if no RDMA device can be used, instead of using TCP. MC_FORCE_TCP takes precedence.";
    MC_ENABLE_DEST_DEVICE_AFFINITY: Switch => "off", "Prefer the RDMA device of a peer that has the same name as the local one.";
    MC_ENABLE_HCA_PEER_AFFINITY: Switch => "off", "Prefer the pairs of RDMA devices in MC_NIC_PEER_AFFINITY. Excludes MC_ENABLE_DEST_DEVICE_AFFINITY.";
    MC_NIC_PEER_AFFINITY: Text => "", "For a local RDMA device the preferred devices of peers, such as mlx5_0=mlx5_0,mlx5_1;mlx5_2=mlx5_3.";
    MC_IB_PORT: Number(1, 255) => "1", "Port of the RDMA devices, numbered from 1.";
    MC_GID_INDEX ("NCCL_IB_GID_INDEX"): Number(-1, 255) => "-1", "Entry of the address table (GID) of the port of the RDMA devices; -1 chooses a routable RoCE v2 or InfiniBand address.";
    MC_MTU: OneOf(&["256", "512", "1024", "2048", "4096"]) => "4096", "Maximum payload in bytes of an RDMA packet: 256, 512, 1024, 2048 or 4096. Peers must agree; the limit of the port counts, too.";
    MC_IB_TC: Number(-1, 255) => "-1", "Traffic class of RDMA packets (0 to 255); -1 for the default.";
    MC_IB_SL: Number(-1, 255) => "-1", "Service level of RDMA packets (0 to 15); -1 for the default.";
    MC_PKEY_INDEX: Number(0, 65_535) => "0", "Entry of the table of partitions of the port of the RDMA devices.";
    MC_DISABLE_GPU_DIRECT_RDMA: Switch => "off", "Do not register memory of CUDA devices with RDMA devices: its bytes go through host memory.";
    MC_IB_PCI_RELAXED_ORDERING: SwitchElseOff => "on", "Let the bus reorder accesses of the RDMA devices to registered memory.";
    MC_NUM_QP_PER_EP: Number(1, 64) => "2", "Queue pairs to each RDMA device of a peer (1 to 64); peers must agree.";
    MC_MAX_WR: Number(1, 1 << 16) => "256", "Maximum number of requests in flight on an RDMA queue pair.";
    MC_MAX_INLINE: Number(0, u32::MAX as i64) => "64", "Writes of at most this length carry their bytes in the RDMA request itself.";
    MC_MAX_CQE_PER_CTX: Number(1, 1 << 22) => "4096", "Maximum number of requests in flight on an RDMA device.";
    MC_MAX_EP_PER_CTX: Number(1, i64::MAX) => "65536", "Maximum number of connected pairs of RDMA devices.";
    MC_MAX_MR_SIZE: Number(4096, i64::MAX) => "1099511627776", "Maximum length in bytes of a registration with an RDMA device; longer ranges have several.";
    MC_SLICE_SIZE: Number(1024, 1 << 30) => "65536", "Length in bytes of a slice, the part of a transfer that is sent over one RDMA device and tried again.";
    MC_FRAGMENT_RATIO: Number(0, u32::MAX as i64) => "4", "The last slice of a transfer over RDMA may be longer by MC_SLICE_SIZE divided by this.";
    MC_RETRY_CNT: Number(1, 127) => "9", "How often a slice of a transfer over RDMA is tried (1 to 127).";
    MC_SLICE_TIMEOUT: Seconds => "3", "Seconds without progress after which an RDMA connection is given up, unless the caller has a shorter limit.";
    MC_RDMA_RAIL_PAUSE_SECONDS: Seconds => "30", "Longest pause in seconds before a pair of RDMA devices that failed is tried again.";
    MC_STORE_CLIENT_MIN_PORT: Number(0, 65_535) => "12300", "First port of the range from which a store client picks the port in its name, if none is given.";
    MC_STORE_CLIENT_MAX_PORT: Number(0, 65_535) => "14300", "Last port of the range from which a store client picks the port in its name, if none is given.";
    MC_STORE_CLIENT_METRIC: SwitchElseOff => "on", "Export the metrics of a store client over its HTTP server and in its log. Off: metrics are counted but not exported.";
    MC_STORE_CLIENT_UPSTREAM_METRICS: Switch => "on", "Serve upstream's metric names, too, beside those that begin with mooncake_client_.";
    MC_STORE_CLIENT_METRIC_INTERVAL: Seconds => "0", "Interval in seconds between two summaries of a store client's metrics in the log; 0 for no summaries.";
    MC_STORE_CLIENT_METRIC_BANDWIDTH: SwitchElseOff => "on", "Include bytes per second in the summaries of MC_STORE_CLIENT_METRIC_INTERVAL.";
    MC_STORE_CLUSTER_ID: Text => "", "Name of the cluster whose leader a store client asks a lease service for; mooncake_cluster if it is empty. Also the value of the label `cluster_id` on every sample of its metrics.";
    MC_STORE_MEMCPY: Switch => "on", "Copy objects that lie in a store's own memory within the process, even if MC_FORCE_TCP is on. Off: with MC_FORCE_TCP, reads of these objects go over TCP, too.";
    MC_STORE_USE_HUGEPAGE: Switch => "off", "Allocate segments from huge pages of hugetlbfs.";
    MC_STORE_HUGEPAGE_SIZE: OneOf(&["2MB", "1GB"]) => "2MB", "Size of the huge pages of MC_STORE_USE_HUGEPAGE: 2MB or 1GB.";
    MC_RPC_TIMEOUT_MS: Millis => "30000", "Timeout in milliseconds for a call to the master.";
    MC_RPC_CONNECT_TIMEOUT_MS: Millis => "5000", "Timeout in milliseconds for a connection to the master.";
    MOONCAKE_STORE_CHECKSUM: Switch => "off", "Store a checksum with every object and verify it at every read.";
    MOONCAKE_MASTER_TOKEN: Token => "", "Shared secret of at least 8 bytes of a master and its clients, daemons and commands. Over the native protocol both sides prove to each other that they know it; calls over gRPC carry it as `authorization: Bearer TOKEN`. A master with the secret answers others with its health and nothing else; a client with the secret refuses a master without.";
    MOONCAKE_ADMIN_TOKEN: Text => "", "Token that requests from other hosts must carry to change state through the master's admin port.";
    MOONCAKE_REST_TOKEN: Text => "", "Token that requests from other hosts must carry to read and change objects through `mc_store_rest_server`. In a pool with a token, requests from its own host need it or that of the pool, too.";
    MOONCAKE_TEST_CHAOS_SECONDS: Number(1, i64::MAX) => "15", "For the tests of this project: duration in seconds of each chaos test, which kills clients and masters under load; 600 with `MOONCAKE_LONG_TESTS`.";
    MOONCAKE_CONFIG_PATH: Text => "", "Path of a JSON file with the settings of a store, read by MooncakeConfig.load_from_env in Python.";
    MOONCAKE_MASTER: Text => "127.0.0.1:50051", "Address of the master for the command `mooncake`. MooncakeConfig.load_from_env reads this variable and the following ones if MOONCAKE_CONFIG_PATH is not set.";
    MOONCAKE_LOCAL_HOSTNAME: Text => "localhost", "Name or address by which peers reach a store.";
    MOONCAKE_TE_META_DATA_SERVER: Text => "P2PHANDSHAKE", "Metadata server of a store.";
    MOONCAKE_GLOBAL_SEGMENT_SIZE: Size => "3355443200", "Bytes of memory that a store lends to the pool; units are accepted, such as 4gb.";
    MOONCAKE_LOCAL_BUFFER_SIZE: Size => "1073741824", "Bytes of a store's buffer for calls that copy; units are accepted, such as 4gb.";
    MOONCAKE_PROTOCOL: Text => "tcp", "Transport protocol of a store.";
    MOONCAKE_DEVICE: Text => "", "Network devices of a store, for RDMA.";
    MOONCAKE_OFFLOAD_ENABLED: Boolean => "off", "Let a store keep copies of objects in a directory (MooncakeConfig.load_from_env).";
    MOONCAKE_OFFLOAD_FILE_STORAGE_PATH: Text => "/data/file_storage", "Directory of a store or `mooncake_client` that keeps copies of objects and is named no other.";
    MOONCAKE_OFFLOAD_FILE_STORAGE_PATHS: Text => "", "Several such directories, separated by commas, instead of the one of MOONCAKE_OFFLOAD_FILE_STORAGE_PATH.";
    MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES: Size => "0", "Bytes that each of these directories may take; 0: 90 % of what is free at the start.";
    MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT: Number(0, i64::MAX) => "0", "Most records in each of these directories, of which the oldest make room for others; 0: no limit.";
    MOONCAKE_OFFLOAD_DISK_EVICTION_HIGH_WATERMARK_RATIO ("MOONCAKE_DISK_EVICTION_HIGH_WATERMARK_RATIO"): Share => "", "Share of their file system in use, by whatever data, above which these directories give files back, down to a quarter of their capacity. Not set: 0.90 if the low watermark is set; otherwise 64 MiB stay free.";
    MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO ("MOONCAKE_DISK_EVICTION_LOW_WATERMARK_RATIO"): Share => "", "Share down to which they give files back then. Not set: 0.80 if the high watermark is set, or that one if it is lower.";
    MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION: Boolean => "on", "Whether the two watermarks count; if not, 64 MiB of the file system stay free.";
    MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES: Size => "1342177280", "Bytes of memory through which records of these directories go to readers in other processes, at least 64 MiB.";
    MOONCAKE_OFFLOAD_USE_URING ("MOONCAKE_USE_URING"): Switch => "", "Read these directories through io_uring (1) or by threads (0). Not set: through io_uring if the system permits it.";
    MOONCAKE_ENABLE_DFS ("MOONCAKE_DFS_ENABLED"): Boolean => "off", "Refused when on: a directory that several hosts share is not supported; see MOONCAKE_OFFLOAD_FILE_STORAGE_PATH.";
    MOONCAKE_TENANT_ID: Text => "default", "Tenant whose namespace holds a store's keys.";
    MOONCAKE_ENABLE_CLIENT_HTTP_SERVER: Boolean => "off", "Let a store serve its health and metrics over HTTP.";
    MOONCAKE_CLIENT_HTTP_PORT: Number(0, 65_535) => "9300", "Port of the HTTP server of MOONCAKE_ENABLE_CLIENT_HTTP_SERVER.";
    VLLM_MOONCAKE_SIDE_CHANNEL_PORT: Number(1, 65_535) => "6557", "First port of the ZMQ sockets at which vLLM workers that prefill are asked for KV blocks; each worker adds its tensor-parallel rank, each data-parallel replica the size of its group.";
    VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: Number(1, 86_400) => "120", "Seconds after which a vLLM worker that prefills frees blocks that nobody asked for, and a worker that decodes gives up a request for blocks.";
    VLLM_MOONCAKE_SENDER_WORKERS: Number(1, 256) => "10", "Threads of a vLLM worker that send KV blocks (1 to 256).";
    VLLM_MOONCAKE_PROTOCOL: Text => "rdma", "Transport protocol of the engine of a vLLM worker; rdma means TCP where there is no RDMA device.";
    MOONCAKE_STATE_DIR: Text => "", "Directory for the master's log and snapshots.";
    MOONCAKE_ON_LOG_FAILURE: Text => "auto", "What the master does when its log cannot be written: stop, continue or auto; see its option on_log_failure.";
    POD_NAME: Text => "", "Name of the pod of a master in Kubernetes, which has a label while the master leads.";
    POD_NAMESPACE: Text => "", "Namespace of the pod of a master in Kubernetes, in which its Lease is.";
    XDG_STATE_HOME: Text => "", "Directory of the user's state, under which the master keeps its log by default.";
    HOME: Text => "", "Home directory of the user; if XDG_STATE_HOME is not set, `.local/state` in this directory is used instead.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_upstream_variable_is_supported_or_unsupported() {
        let supported =
            |name: &str| ALL.iter().any(|v| v.name == name || v.aliases.contains(&name));
        let unsupported =
            |name: &str| UNSUPPORTED.iter().filter(|row| row.names.contains(&name)).count();
        let names = include_str!("env/upstream.txt").lines();
        for name in names.filter(|line| !line.starts_with('#')) {
            assert_eq!(usize::from(supported(name)) + unsupported(name), 1, "{name}");
        }
        for name in UNSUPPORTED.iter().flat_map(|row| row.names) {
            assert!(!supported(name) && unsupported(name) == 1, "{name}");
        }
        assert!(UNSUPPORTED.iter().all(|row| row.reason.ends_with('.')));
    }

    #[test]
    fn variables_are_documented_and_unique() {
        for (i, var) in ALL.iter().enumerate() {
            assert!(var.help.ends_with('.'), "{}", var.name);
            let default = Some(var.default).filter(|text| !text.is_empty());
            assert_eq!(default.and_then(|text| var.kind.invalid(text)), None, "{}", var.name);
            assert!(ALL[i + 1..].iter().all(|other| other.name != var.name), "{}", var.name);
        }
    }
}
