//! The register of environment variables: every variable we read, once, with its meaning.
//!
//! Only the entry points (the binaries and the Python binding) call [`EnvVar::read`]; libraries
//! take values. The table in `docs/reference/environment.md` is generated from [`ALL`].

mod unsupported;

pub use unsupported::{UNSUPPORTED, Unsupported};

/// An environment variable that we read.
#[derive(Debug, Clone, Copy)]
pub struct EnvVar {
    /// The preferred name.
    pub name: &'static str,
    /// Older spellings, read when the name itself is not set.
    pub aliases: &'static [&'static str],
    /// The value that applies when the variable is not set, as text.
    pub default: &'static str,
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
    ($($name:ident $(($($alias:literal),+))? = $default:literal, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub static $name: EnvVar = EnvVar {
                name: stringify!($name),
                aliases: &[$($($alias),+)?],
                default: $default,
                help: $help,
            };
        )*
        /// Every variable, in the order of the reference page.
        pub static ALL: &[&EnvVar] = &[$(&$name),*];
    };
}

// A macro because each variable must be a name in Rust and a row of the table, once.
variables! {
    MC_LOG_LEVEL = "warn", "Level of our log: trace, debug, info, warn, error (or TRACE INFO WARNING ERROR, or 0 info, 1 warning, 2 error).";
    MOONCAKE_LOG = "", "Level of our log, with per-module filters in the form of tracing's EnvFilter; takes precedence over MC_LOG_LEVEL.";
    MC_FORCE_TCP = "off", "Move bytes over TCP only, even within one process or host; see also MC_STORE_MEMCPY.";
    MC_TRANSFER_TIMEOUT = "30", "Seconds that a transfer may take before it fails (at least 5).";
    MC_TCP_BIND_ADDRESS = "", "Address that the transfer engine binds and publishes instead of the detected one.";
    MC_MIN_RPC_PORT ("MC_MIN_PRC_PORT") = "15000", "First port that the transfer engine tries to listen on.";
    MC_MAX_RPC_PORT ("MC_MAX_PRC_PORT") = "17000", "Last port that the transfer engine tries to listen on.";
    MC_LEGACY_RPC_PORT_BINDING = "off", "Bind exactly the port given in the local host name.";
    MC_METADATA_CLUSTER_ID = "", "Store metadata keys under `mooncake/ID/` instead of `mooncake/`.";
    MC_REDIS_USERNAME = "", "User name for a Redis metadata server; empty for its default user.";
    MC_REDIS_PASSWORD = "", "Password for a Redis metadata server.";
    MC_REDIS_DB_INDEX = "0", "Database index of a Redis metadata server.";
    MC_TCP_LANES_PER_PEER ("MC_TCP_MAX_CONNECTIONS_PER_PEER") = "4", "Maximum number of connections that the transfer engine opens to one peer (1 to 16).";
    MC_BUSY_POLL ("MC_STAY_AWAKE") = "on", "Busy-poll sockets for 0.1 ms (replies) or 0.2 ms (next calls) before a thread sleeps, while messages arrive that soon and the polling threads and their peers fit on the CPUs. Off: every thread sleeps at once.";
    MC_TE_METRIC = "off", "Log a line periodically about the transfers of the engine, if there were any: throughput and batch latency in upstream's format, then each transport by itself. The line is logged at any level.";
    MC_TE_METRIC_INTERVAL_SECONDS = "5", "Seconds between two lines of MC_TE_METRIC.";
    MC_PREFAULT_SIZE ("MC_PREPARED_MEMORY_SIZE") = "1GB", "Bytes of each segment that are prefaulted in the background, at most an eighth of the available memory; 0 for none.";
    MC_COLLAPSE_REGISTERED_MEMORY = "off", "Ask the kernel in the background to back registered memory with huge pages, where all of its small pages are present.";
    MC_STORE_NUMA_SOCKET_ID = "", "NUMA node that segments are allocated on while it has free memory.";
    MC_CUDA_DRIVER = "libcuda.so.1", "Name or path of the CUDA driver library. It is loaded by the first transfer on a stream; a library that the process has already loaded is used as is.";
    MC_TRANSFER_TOKEN = "", "Secret of at least 8 bytes that transfer engines prove to each other before they access memory, send their segment descriptor or accept a notification; engines without it, including upstream's, are refused.";
    MC_HANDSHAKE_PORT = "12001", "Port of the handshake socket with P2PHANDSHAKE if MC_LEGACY_RPC_PORT_BINDING is on and the local host name has no port.";
    MC_HANDSHAKE_LISTEN_BACKLOG = "128", "Listen backlog of the handshake socket.";
    MC_HANDSHAKE_MAX_LENGTH = "1048576", "Maximum length in bytes of a handshake message (1 MiB to 128 MiB).";
    MC_USE_IPV6 = "off", "Prefer this host's IPv6 address where no address is given.";
    MC_HANDSHAKE_CONNECT_TIMEOUT = "5", "Timeout in seconds for a connection to a peer's handshake socket.";
    MC_CUSTOM_TOPO_JSON = "", "JSON file that maps memory to the nearest network devices, instead of the topology that the kernel reports.";
    MC_STORE_CLIENT_MIN_PORT = "12300", "First port of the range from which a store client picks the port in its name, if none is given.";
    MC_STORE_CLIENT_MAX_PORT = "14300", "Last port of the range from which a store client picks the port in its name, if none is given.";
    MC_STORE_CLIENT_METRIC = "on", "Export the metrics of a store client over its HTTP server and in its log; they are counted in any case.";
    MC_STORE_CLIENT_METRIC_INTERVAL = "0", "Seconds between two summaries of a store client's metrics in the log; 0 for none.";
    MC_STORE_CLIENT_METRIC_BANDWIDTH = "on", "Include bytes per second in that summary.";
    MC_STORE_CLUSTER_ID = "", "A label, `cluster_id`, on every sample of a store client's metrics.";
    MC_STORE_MEMCPY = "on", "Copy objects in a store's own memory within the process, even if MC_FORCE_TCP is on. Off: such reads go over TCP, too.";
    MC_STORE_USE_HUGEPAGE = "off", "Allocate segments from huge pages of hugetlbfs.";
    MC_STORE_HUGEPAGE_SIZE = "2MB", "Size of those huge pages: 2MB or 1GB.";
    MC_RPC_TIMEOUT_MS = "30000", "Timeout in milliseconds for a call to the master.";
    MC_RPC_CONNECT_TIMEOUT_MS = "5000", "Timeout in milliseconds for a connection to the master.";
    MOONCAKE_STORE_CHECKSUM = "off", "Store a checksum with every object and verify it at every read.";
    MOONCAKE_ADMIN_TOKEN = "", "Token that allows requests from other hosts to change state through the master's admin port.";
    MOONCAKE_TEST_CHAOS_SECONDS = "15", "Duration in seconds of each chaos test (kills of clients and masters under load); 600 with `MOONCAKE_LONG_TESTS`. For our own tests.";
    MOONCAKE_CONFIG_PATH = "", "JSON file with the settings of a store, for Python's MooncakeConfig.load_from_env and its users.";
    MOONCAKE_MASTER = "127.0.0.1:50051", "Address of the master, for the command `mooncake` and, if MOONCAKE_CONFIG_PATH is not set, for MooncakeConfig.load_from_env, like the variables that follow.";
    MOONCAKE_LOCAL_HOSTNAME = "localhost", "Name or address by which peers reach a store.";
    MOONCAKE_TE_META_DATA_SERVER = "P2PHANDSHAKE", "Metadata server of a store.";
    MOONCAKE_GLOBAL_SEGMENT_SIZE = "3355443200", "Bytes that a store contributes to the pool; accepts units, such as 4gb.";
    MOONCAKE_LOCAL_BUFFER_SIZE = "1073741824", "Bytes of a store's buffer for calls that copy; accepts units, such as 4gb.";
    MOONCAKE_PROTOCOL = "tcp", "Transport protocol of a store.";
    MOONCAKE_DEVICE = "", "Network devices of a store, for RDMA.";
    MOONCAKE_OFFLOAD_ENABLED = "off", "Let a store use a local disk.";
    MOONCAKE_OFFLOAD_FILE_STORAGE_PATH = "", "Directory of that local disk storage.";
    MOONCAKE_TENANT_ID = "default", "Tenant in whose namespace a store's keys live.";
    MOONCAKE_ENABLE_CLIENT_HTTP_SERVER = "off", "Let a store serve its health and metrics over HTTP.";
    MOONCAKE_CLIENT_HTTP_PORT = "9300", "Port of that HTTP server.";
    MOONCAKE_STATE_DIR = "", "Directory for the master's log and snapshots.";
    XDG_STATE_HOME = "", "Directory of the user's state, under which the master keeps its log by default.";
    HOME = "", "Home directory of the user; `.local/state` in it replaces XDG_STATE_HOME if that is not set.";
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
            assert!(ALL[i + 1..].iter().all(|other| other.name != var.name), "{}", var.name);
        }
    }
}
