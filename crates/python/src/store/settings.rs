//! What a store is told when it opens: arguments over environment over defaults.

use std::time::Duration;

use mooncake_base::{
    Endpoint, Error, Result, TenantId,
    env::{self, EnvVar},
    text::{read_bool, read_millis, read_seconds},
};
use mooncake_master::MasterConfig;
use mooncake_store_client::{ClientConfig, LinkConfig, MetricsConfig, address::face_master};
use mooncake_transfer_engine::EngineConfig;
use mooncake_transfer_tools::settings::{engine_config, value};

/// The word that asks for a master in this process.
pub(crate) const EMBEDDED: &str = "embedded";

/// Where an embedded master listens if it was not told.
const LOOPBACK: &str = "127.0.0.1";

/// The least that a transfer may be given.
const TRANSFER_TIMEOUT_MIN: Duration = Duration::from_secs(5);

/// What the caller says of a store. An empty name or listen address leaves the choice to us.
#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) master: String,
    pub(crate) name: String,
    pub(crate) metadata: String,
    pub(crate) segment_bytes: u64,
    pub(crate) tenant: String,
    pub(crate) is_tcp_forced: Option<bool>,
    pub(crate) rpc_timeout_s: Option<f64>,
    pub(crate) connect_timeout_s: Option<f64>,
    pub(crate) listen: String,
    pub(crate) has_checksums: Option<bool>,
    /// Where the client's HTTP server listens; none: nowhere.
    pub(crate) http_port: Option<u16>,
}

/// The settings of each part.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) master: String,
    pub(crate) engine: EngineConfig,
    pub(crate) client: ClientConfig,
    pub(crate) link: LinkConfig,
    pub(crate) embedded: MasterConfig,
    pub(crate) http_port: Option<u16>,
}

impl Settings {
    /// # Errors
    /// A value, from the caller or the environment, that cannot be.
    pub(crate) fn read(arguments: Arguments) -> Result<Self> {
        let rpc_timeout = seconds("rpc_timeout_s", arguments.rpc_timeout_s)?;
        let connect_timeout = seconds("connect_timeout_s", arguments.connect_timeout_s)?;
        let mut engine =
            engine_config(&arguments.name, &arguments.metadata, arguments.is_tcp_forced)?;
        face_master(&mut engine, master_address(&arguments));
        let mut client = ClientConfig {
            name: arguments.name,
            tenant: TenantId::new(&arguments.tenant),
            segment_bytes: arguments.segment_bytes,
            has_checksums: arguments
                .has_checksums
                .unwrap_or_else(|| env::MOONCAKE_STORE_CHECKSUM.is_on()),
            metrics: metrics()?,
            ..ClientConfig::default()
        };
        if let Some(timeout) = rpc_timeout.map_or_else(|| millis(&env::MC_RPC_TIMEOUT_MS), some)? {
            client.rpc_timeout = timeout;
        }
        if let Some(timeout) = value(&env::MC_TRANSFER_TIMEOUT, read_seconds)? {
            client.transfer_timeout = timeout.max(TRANSFER_TIMEOUT_MIN);
        }
        let mut link = LinkConfig::default();
        let from_environment = || millis(&env::MC_RPC_CONNECT_TIMEOUT_MS);
        if let Some(timeout) = connect_timeout.map_or_else(from_environment, some)? {
            link.connect_timeout = timeout;
        }
        let embedded = embedded(&arguments.listen)?;
        let http_port = arguments.http_port;
        Ok(Self { master: arguments.master, engine, client, link, embedded, http_port })
    }
}

/// Where the master is, as far as that is known yet.
fn master_address(arguments: &Arguments) -> &str {
    match arguments.master.as_str() {
        EMBEDDED if arguments.listen.is_empty() => LOOPBACK,
        EMBEDDED => &arguments.listen,
        address => address,
    }
}

fn metrics() -> Result<MetricsConfig> {
    let interval = value(&env::MC_STORE_CLIENT_METRIC_INTERVAL, read_seconds)?;
    Ok(MetricsConfig {
        is_told: is_left_on(&env::MC_STORE_CLIENT_METRIC),
        cluster: env::MC_STORE_CLUSTER_ID.read().unwrap_or_default(),
        report_interval: interval.filter(|interval| !interval.is_zero()),
        has_bandwidth: is_left_on(&env::MC_STORE_CLIENT_METRIC_BANDWIDTH),
    })
}

/// Whether a switch that is on by itself was left so. What is neither yes nor no turns it off.
fn is_left_on(var: &'static EnvVar) -> bool {
    let text = var.read().filter(|text| !text.trim().is_empty());
    text.is_none_or(|text| read_bool(&text).unwrap_or(false))
}

fn embedded(listen: &str) -> Result<MasterConfig> {
    let mut config = MasterConfig::embedded();
    if !listen.is_empty() {
        let endpoint: Endpoint = listen.parse()?;
        config.rpc_port = Some(endpoint.port.unwrap_or(0));
        config.rpc_address = endpoint.host;
    }
    Ok(config)
}

fn millis(var: &'static EnvVar) -> Result<Option<Duration>> {
    value(var, read_millis)
}

fn seconds(name: &'static str, seconds: Option<f64>) -> Result<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(Some(duration)),
        _ => Err(Error::invalid("a time-out is a positive number of seconds").with(name, seconds)),
    }
}

#[allow(clippy::unnecessary_wraps, reason = "the other branch of `map_or_else` may fail")]
fn some(duration: Duration) -> Result<Option<Duration>> {
    Ok(Some(duration))
}
