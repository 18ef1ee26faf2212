//! Settings of a daemon: upstream's flags with upstream's defaults.

use std::collections::BTreeMap;

use mooncake_base::{
    ByteSize, Error, Result,
    options::{OptionSpec, resolve},
    parse::{read_bool, read_number, read_size},
};
use mooncake_cli::CliCommand;
use mooncake_store_client::MasterAddress;

/// All settings of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonConfig {
    /// Name or address under which peers reach this host, with an optional port. Empty or
    /// `0.0.0.0`: this host's address on the master's network.
    pub host: String,
    /// Port for dummy clients; 0: a free port. The Unix socket is named after it.
    pub port: u16,
    /// Serves only processes of this user and of root, over the Unix socket.
    pub is_unix_only: bool,
    /// Memory lent to the pool.
    pub segment: ByteSize,
    /// Address of the master.
    pub master: String,
    /// Metadata for engine discovery: `P2PHANDSHAKE`, or the address of a metadata server.
    pub metadata: String,
    /// Transport protocol.
    pub protocol: String,
    /// Names of the RDMA devices, separated by commas; empty: chosen automatically.
    pub devices: String,
    /// Namespace of the dummy clients' keys.
    pub tenant: String,
    /// File for the bound addresses; empty: none.
    pub ports_file: String,
    /// Whether it keeps copies of objects in the directories that the environment names.
    pub has_offload: bool,
    /// Whether health and metrics are served over HTTP.
    pub has_http: bool,
    /// Port of the HTTP server; 0: a free port.
    pub http_port: u16,
    /// Given options that are accepted but have no effect, with their values.
    pub ignored: BTreeMap<&'static str, String>,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        Self {
            host: "0.0.0.0".to_owned(),
            port: 50052,
            is_unix_only: false,
            segment: ByteSize::gib(4),
            master: "127.0.0.1:50051".to_owned(),
            metadata: "http://127.0.0.1:8080/metadata".to_owned(),
            protocol: "tcp".to_owned(),
            devices: String::new(),
            tenant: "default".to_owned(),
            ports_file: String::new(),
            has_offload: false,
            has_http: false,
            http_port: 9300,
            ignored: BTreeMap::new(),
        }
    }
}

/// Parses a command line.
///
/// # Errors
/// An unknown flag, reported with the nearest known one, or an invalid value.
pub fn from_arguments(arguments: Vec<String>) -> Result<CliCommand<DaemonConfig>> {
    CliCommand::read(OPTIONS, arguments)?.and_then(|assignments| {
        let config: DaemonConfig = resolve(OPTIONS, &[], |_| None, &assignments)?;
        config.check()?;
        Ok(config)
    })
}

impl DaemonConfig {
    /// Checks the settings and names the first invalid option.
    ///
    /// # Errors
    /// The first option whose value is out of its range.
    pub fn check(&self) -> Result<()> {
        if !["tcp", "rdma"].contains(&self.protocol.to_ascii_lowercase().as_str()) {
            return Err(Error::invalid("unknown protocol; this build has tcp and rdma")
                .with("option", "protocol")
                .with("value", &self.protocol));
        }
        for (option, value) in
            [("master_server_address", &self.master), ("metadata_server", &self.metadata)]
        {
            if value.trim().is_empty() {
                return Err(Error::invalid("the address is empty").with("option", option));
            }
        }
        // The login of a Redis server, which the environment may have, is added where it connects.
        let master = self.master.parse::<MasterAddress>();
        master.map(drop).map_err(|error| error.with("option", "master_server_address"))
    }

    /// Returns the names of the RDMA devices, if the protocol is `rdma`.
    pub fn rdma_devices(&self) -> Option<&str> {
        self.protocol.eq_ignore_ascii_case("rdma").then_some(self.devices.as_str())
    }

    /// Returns the port of the HTTP server, if enabled.
    pub fn http(&self) -> Option<u16> {
        self.has_http.then_some(self.http_port)
    }

    /// Returns a warning for every given option that has no effect.
    pub fn warnings(&self) -> Vec<String> {
        let given = self.ignored.iter();
        given
            .filter(|(name, value)| !IGNORED_SILENTLY.contains(name) && value.as_str() != "false")
            .map(|(name, value)| format!("--{name}={value} is accepted but has no effect yet"))
            .collect()
    }
}

/// Ignored options that need no warning: nothing is slower or missing without them.
const IGNORED_SILENTLY: &[&str] = &["local_buffer_size", "threads", "start_offload_rpc_server"];

const fn value(
    name: &'static str,
    help: &'static str,
    set: fn(&mut DaemonConfig, &str) -> Result<()>,
    show: fn(&DaemonConfig) -> String,
) -> OptionSpec<DaemonConfig> {
    OptionSpec { name, aliases: &[], env: None, is_switch: false, help, set, show }
}

const fn switch(
    name: &'static str,
    help: &'static str,
    set: fn(&mut DaemonConfig, &str) -> Result<()>,
    show: fn(&DaemonConfig) -> String,
) -> OptionSpec<DaemonConfig> {
    OptionSpec { name, aliases: &[], env: None, is_switch: true, help, set, show }
}

/// An option that is parsed and stored, but has no effect.
macro_rules! ignored {
    ($name:literal, $default:literal, $help:literal, $read:expr, $is_switch:literal) => {
        OptionSpec {
            name: $name,
            aliases: &[],
            env: None,
            is_switch: $is_switch,
            help: concat!("(no effect) ", $help),
            set: |config, text| {
                $read(text)?;
                config.ignored.insert($name, text.trim().to_ascii_lowercase());
                Ok(())
            },
            show: |config| {
                config.ignored.get($name).cloned().unwrap_or_else(|| $default.to_owned())
            },
        }
    };
}

/// The declaration of all flags with their help texts.
#[rustfmt::skip]
pub const OPTIONS: &[OptionSpec<DaemonConfig>] = &[
    value("host", "Name or address under which peers reach this host, with an optional port; 0.0.0.0: this \
         host's address on the master's network.",
        |c, t| { t.trim().clone_into(&mut c.host); Ok(()) }, |c| c.host.clone()),
    value("port", "The port for processes of this host (`setup_dummy`); 0 takes a free port. The abstract Unix socket \
         is named mooncake_client_PORT.sock.",
        |c, t| read_number(t).map(|port| c.port = port), |c| c.port.to_string()),
    switch("unix_only", "Serves only processes of the daemon's own user and of root, over the Unix socket. Without it \
         any user of this host may use the daemon, which passes calls on with its token of the pool.",
        |c, t| read_bool(t).map(|on| c.is_unix_only = on), |c| c.is_unix_only.to_string()),
    value("global_segment_size", "Memory lent to the pool: bytes, or with KB, MB, GB, TB. 0 lends none.",
        |c, t| read_size(t).map(|size| c.segment = size), |c| match c.segment.bytes() {
            bytes if bytes > 0 && bytes % (1 << 30) == 0 => format!("{} GB", bytes >> 30),
            bytes => bytes.to_string(),
        }),
    ignored!("local_buffer_size", "0", "Bytes go straight to and from the memory of the served \
         processes.", read_size, false),
    value("master_server_address", "Address of the master.",
        |c, t| { t.trim().clone_into(&mut c.master); Ok(()) }, |c| c.master.clone()),
    value("metadata_server", "Engine discovery: P2PHANDSHAKE, or the address of a metadata server. \
         Sent to the served processes, too.",
        |c, t| { t.trim().clone_into(&mut c.metadata); Ok(()) }, |c| c.metadata.clone()),
    value("protocol", "tcp, or rdma (tcp where there is no device).",
        |c, t| { t.trim().clone_into(&mut c.protocol); Ok(()) }, |c| c.protocol.clone()),
    value("device_names", "Names of the RDMA devices, separated by commas; empty: chosen automatically.",
        |c, t| { t.trim().clone_into(&mut c.devices); Ok(()) }, |c| c.devices.clone()),
    ignored!("threads", "1", "Each connection has a thread.", read_number::<i32>, false),
    value("tenant_id", "Namespace of the served processes' keys.",
        |c, t| { t.trim().clone_into(&mut c.tenant); Ok(()) }, |c| c.tenant.clone()),
    switch("enable_offload", "Keeps copies of the pool's objects in the directory MOONCAKE_OFFLOAD_FILE_STORAGE_PATH, or \
         in several, MOONCAKE_OFFLOAD_FILE_STORAGE_PATHS. The master needs --enable_offload, too.",
        |c, t| read_bool(t).map(|on| c.has_offload = on), |c| c.has_offload.to_string()),
    ignored!("start_offload_rpc_server", "true", "Records on disk are always served.", read_bool, true),
    switch("enable_http_server", "Serves the daemon's health and metrics over HTTP: /health, /metrics, \
         /metrics/summary.",
        |c, t| read_bool(t).map(|on| c.has_http = on), |c| c.has_http.to_string()),
    value("http_port", "Port of the HTTP server; 0 takes a free port.",
        |c, t| read_number(t).map(|port| c.http_port = port), |c| c.http_port.to_string()),
    value("ports_file", "File to write the bound addresses to, as JSON.",
        |c, t| { t.clone_into(&mut c.ports_file); Ok(()) }, |c| c.ports_file.clone()),
];

#[cfg(test)]
mod tests {
    use mooncake_base::options::NO_EFFECT;

    use super::*;

    fn read(line: &str) -> Result<DaemonConfig> {
        match from_arguments(line.split_whitespace().map(str::to_owned).collect())? {
            CliCommand::Run(config) => Ok(config),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn reads_upstream_flags_in_every_spelling() {
        let line = "-host=10.0.0.1:17000 -port 0 --global-segment-size=512MB \
                    -master_server_address=m:1 --metadata_server P2PHANDSHAKE -protocol=rdma \
                    --tenant_id=t -device_names=mlx5_0 -threads=8 -local_buffer_size=1GB";
        let config = read(line).unwrap();
        let named = (config.host.as_str(), config.port, config.segment);
        assert_eq!(named, ("10.0.0.1:17000", 0, ByteSize::mib(512)));
        let places = (config.master.as_str(), config.metadata.as_str(), config.tenant.as_str());
        assert_eq!(places, ("m:1", "P2PHANDSHAKE", "t"));
        assert_eq!(config.protocol, "rdma");
        assert_eq!(config.rdma_devices(), Some("mlx5_0"));
        assert_eq!(
            read("--device_names=mlx5_0").unwrap().rdma_devices(),
            None,
            "the protocol is tcp"
        );
        assert!(config.warnings().is_empty(), "{:?}", config.warnings());
    }

    #[test]
    fn shown_defaults_parse_to_defaults() {
        let defaults = DaemonConfig::default();
        for spec in OPTIONS {
            let mut config = DaemonConfig::default();
            let shown = (spec.show)(&defaults);
            (spec.set)(&mut config, &shown).unwrap();
            config.ignored.clear();
            assert_eq!(config, defaults, "{}", spec.name);
        }
    }

    #[test]
    fn options_without_effect_say_so() {
        for spec in OPTIONS {
            let mut config = DaemonConfig::default();
            (spec.set)(&mut config, &(spec.show)(&DaemonConfig::default())).unwrap();
            let says_so = spec.help.starts_with(NO_EFFECT);
            assert_eq!(says_so, !config.ignored.is_empty(), "{}", spec.name);
        }
    }

    #[test]
    fn warns_of_ignored_option_only_if_enabled() {
        assert!(read("--enable_offload").unwrap().has_offload);
        assert!(read("--noenable_offload -v=1").unwrap().warnings().is_empty());
    }

    #[test]
    fn error_names_wrong_option() {
        let check = |line: &str, words: &[&str]| {
            let error = read(line).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{line}: {error}");
        };
        check("--prot=1", &["prot", "port"]);
        check("--protocol=foo", &["protocol", "foo"]);
        check("--global_segment_size=much", &["global_segment_size", "much"]);
        check("--master_server_address=", &["master_server_address"]);
        check("--master_server_address=a:x", &["master_server_address", "port"]);
        check("--master_server_address=http://a:1", &["master_server_address", "etcd://"]);
        check("word", &["word"]);
    }
}
