//! The register of environment variables: every name we read, once, with its meaning.
//!
//! Only the doors (the binaries and the Python binding) call [`EnvVar::read`]; libraries are
//! handed values. The table in `docs/reference/environment.md` is generated from [`ALL`].

mod unsupported;

pub use unsupported::{UNSUPPORTED, Unsupported};

/// A variable we honour.
#[derive(Debug, Clone, Copy)]
pub struct EnvVar {
    /// Its name.
    pub name: &'static str,
    /// Older spellings, read when the name itself is not set.
    pub aliases: &'static [&'static str],
    /// What holds when it is not set, as text.
    pub default: &'static str,
    /// What it does, in a sentence.
    pub help: &'static str,
}

impl EnvVar {
    /// Its value, if it is set and is UTF-8.
    #[allow(
        clippy::disallowed_methods,
        reason = "this is the one place that reads the environment"
    )]
    pub fn read(&self) -> Option<String> {
        std::iter::once(&self.name).chain(self.aliases).find_map(|name| std::env::var(name).ok())
    }

    /// Whether its value is nobody's business.
    pub fn is_secret(&self) -> bool {
        self.name.ends_with("_TOKEN") || self.name.ends_with("_PASSWORD")
    }

    /// Whether it is set to anything that does not say no, or on where it is not set.
    pub fn is_on(&self) -> bool {
        let is_on_unset = self.default == "on";
        self.read().map_or(is_on_unset, |text| crate::parse::read_bool(&text).unwrap_or(true))
    }
}

impl Unsupported {
    /// Those of them that are set, with the reason why they have no effect.
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

/// The value that a flag has in the environment, for those who ask for it by `--fromenv`.
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
    MOONCAKE_LOG = "", "Level of our log, with per-module filters in the form of tracing's EnvFilter; wins over MC_LOG_LEVEL.";
    MC_FORCE_TCP = "off", "Move bytes over TCP only, also within one process and one host; but see MC_STORE_MEMCPY.";
    MC_TRANSFER_TIMEOUT = "30", "Seconds that a transfer may take before it fails (at least 5).";
    MC_TCP_BIND_ADDRESS = "", "Address that the transfer engine binds and publishes instead of the one it finds.";
    MC_MIN_RPC_PORT ("MC_MIN_PRC_PORT") = "15000", "First port that the transfer engine tries to listen on.";
    MC_MAX_RPC_PORT ("MC_MAX_PRC_PORT") = "17000", "Last port that the transfer engine tries to listen on.";
    MC_LEGACY_RPC_PORT_BINDING = "off", "Bind exactly the port given in the local host name.";
    MC_METADATA_CLUSTER_ID = "", "Puts metadata keys under `mooncake/ID/` instead of `mooncake/`.";
    MC_REDIS_USERNAME = "", "Who we are to a Redis metadata server; empty for its default user.";
    MC_REDIS_PASSWORD = "", "The password for a Redis metadata server.";
    MC_REDIS_DB_INDEX = "0", "The database of a Redis metadata server.";
    MC_TCP_LANES_PER_PEER ("MC_TCP_MAX_CONNECTIONS_PER_PEER") = "4", "Connections that the transfer engine opens to one peer at the most (1 to 16).";
    MC_BUSY_POLL ("MC_STAY_AWAKE") = "on", "Look for answers and calls without pause for one or two tenths of a millisecond before sleeping for them, as long as they come that soon and no more than half of the processors are taken up by it. Off, every thread sleeps at once.";
    MC_TE_METRIC = "off", "Log a line every so often about what the transfer engine has moved, if it has: throughput and how long batches took as the established engine writes them, then each way by itself. It is logged at any level.";
    MC_TE_METRIC_INTERVAL_SECONDS = "5", "How many seconds lie between two lines of MC_TE_METRIC.";
    MC_PREPARED_MEMORY_SIZE = "1GB", "Of each segment, how much is made ready in the background, never more than an eighth of the room there is; 0 for none.";
    MC_COLLAPSE_REGISTERED_MEMORY = "off", "Ask in the background for huge pages under memory that is registered, where all of its small pages are there.";
    MC_STORE_NUMA_SOCKET_ID = "", "The node of the machine that segments are taken from while it has room.";
    MC_CUDA_DRIVER = "libcuda.so.1", "The library that is the CUDA driver, by name or path. It is loaded by the first transfer on a stream, or used if the process has loaded it.";
    MC_TRANSFER_TOKEN = "", "Secret of at least 8 bytes that transfer engines prove to each other before they touch memory, tell their segment or take a notification; engines without it, the established one among them, are refused.";
    MC_HANDSHAKE_PORT = "12001", "Port of the handshake socket with P2PHANDSHAKE where MC_LEGACY_RPC_PORT_BINDING asks for the one in the local host name, and that has none.";
    MC_HANDSHAKE_LISTEN_BACKLOG = "128", "How many connections to the handshake socket may wait to be accepted.";
    MC_HANDSHAKE_MAX_LENGTH = "1048576", "The longest handshake message that is accepted (1 MiB to 128 MiB).";
    MC_USE_IPV6 = "off", "Prefer this host's IPv6 address where no address is given.";
    MC_HANDSHAKE_CONNECT_TIMEOUT = "5", "Seconds to wait for a peer's handshake socket.";
    MC_CUSTOM_TOPO_JSON = "", "File that says which network devices are near which memory, instead of what the kernel tells.";
    MC_STORE_CLIENT_MIN_PORT = "12300", "First port that a store client without a port in its name takes for its name.";
    MC_STORE_CLIENT_MAX_PORT = "14300", "Last port that a store client without a port in its name takes for its name.";
    MC_STORE_CLIENT_METRIC = "on", "Tell the metrics of a store client over its HTTP server and in its log; they are counted in any case.";
    MC_STORE_CLIENT_METRIC_INTERVAL = "0", "Seconds between two summaries of a store client's metrics in the log; 0 for none.";
    MC_STORE_CLIENT_METRIC_BANDWIDTH = "on", "Tell bytes a second in that summary.";
    MC_STORE_CLUSTER_ID = "", "A label, `cluster_id`, on every sample of a store client's metrics.";
    MC_STORE_MEMCPY = "on", "Copy within the process what lies in a store's own memory, even where MC_FORCE_TCP is set. Off, that goes over TCP too.";
    MC_STORE_USE_HUGEPAGE = "off", "Take segments from huge pages of hugetlbfs.";
    MC_STORE_HUGEPAGE_SIZE = "2MB", "Size of those huge pages: 2MB or 1GB.";
    MC_RPC_TIMEOUT_MS = "30000", "Milliseconds that the master may take to answer a call.";
    MC_RPC_CONNECT_TIMEOUT_MS = "5000", "Milliseconds to wait for a connection to the master.";
    MOONCAKE_STORE_CHECKSUM = "off", "Keep a checksum with every object and check it at every read.";
    MOONCAKE_ADMIN_TOKEN = "", "Token that lets its holders change something through the master's admin port from other hosts.";
    MOONCAKE_TEST_CHAOS_SECONDS = "15", "Seconds that each test which kills holders and masters under load lasts; 600 with `MOONCAKE_LONG_TESTS`. For our own tests.";
    MOONCAKE_CONFIG_PATH = "", "JSON file with the settings of a store, for Python's MooncakeConfig.load_from_env and what is built on it.";
    MOONCAKE_MASTER = "127.0.0.1:50051", "Address of the master, for the command `mooncake` and, where no MOONCAKE_CONFIG_PATH is set, for MooncakeConfig.load_from_env, as all of the next.";
    MOONCAKE_LOCAL_HOSTNAME = "localhost", "Name or address by which peers reach a store.";
    MOONCAKE_TE_META_DATA_SERVER = "P2PHANDSHAKE", "Metadata server of a store.";
    MOONCAKE_GLOBAL_SEGMENT_SIZE = "3355443200", "Bytes that a store lends to the pool; units as in 4gb are understood.";
    MOONCAKE_LOCAL_BUFFER_SIZE = "1073741824", "Bytes of a store's buffer for copying calls; units as in 4gb are understood.";
    MOONCAKE_PROTOCOL = "tcp", "Transport protocol of a store.";
    MOONCAKE_DEVICE = "", "Network devices of a store, for RDMA.";
    MOONCAKE_OFFLOAD_ENABLED = "off", "Let a store use a local disk.";
    MOONCAKE_OFFLOAD_FILE_STORAGE_PATH = "", "The directory for that.";
    MOONCAKE_TENANT_ID = "default", "Tenant in whose namespace a store's keys live.";
    MOONCAKE_ENABLE_CLIENT_HTTP_SERVER = "off", "Let a store serve its health and metrics over HTTP.";
    MOONCAKE_CLIENT_HTTP_PORT = "9300", "The port for that.";
    MOONCAKE_STATE_DIR = "", "Directory for the master's log and snapshots.";
    XDG_STATE_HOME = "", "Folder of the user's state, under which the master keeps its log by default.";
    HOME = "", "The user's home; `.local/state` in it takes the place of XDG_STATE_HOME.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_established_variable_of_the_engine_is_honoured_or_refused_and_never_both() {
        let honoured = |name: &str| ALL.iter().any(|v| v.name == name || v.aliases.contains(&name));
        let refused =
            |name: &str| UNSUPPORTED.iter().filter(|row| row.names.contains(&name)).count();
        let names = include_str!("env/upstream.txt").lines();
        for name in names.filter(|line| !line.starts_with('#')) {
            assert_eq!(usize::from(honoured(name)) + refused(name), 1, "{name}");
        }
        for name in UNSUPPORTED.iter().flat_map(|row| row.names) {
            assert!(!honoured(name) && refused(name) == 1, "{name}");
        }
        assert!(UNSUPPORTED.iter().all(|row| row.reason.ends_with('.')));
    }

    #[test]
    fn every_variable_is_documented_and_stands_once() {
        for (i, var) in ALL.iter().enumerate() {
            assert!(var.help.ends_with('.'), "{}", var.name);
            assert!(ALL[i + 1..].iter().all(|other| other.name != var.name), "{}", var.name);
        }
    }
}
