//! What a store is told when it opens: arguments over environment over defaults.

use std::{
    net::{Ipv4Addr, ToSocketAddrs},
    ops::RangeInclusive,
    time::Duration,
};

use mooncake_base::{
    Endpoint, Error, Result, TenantId,
    env::{self, EnvVar},
    text::{read_millis, read_number, read_seconds},
};
use mooncake_master::MasterConfig;
use mooncake_store_client::{ClientConfig, LinkConfig};
use mooncake_transfer_engine::{EngineConfig, address_facing};

/// The word that asks for a master in this process.
pub(crate) const EMBEDDED: &str = "embedded";

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
}

/// The settings of each part.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) master: String,
    pub(crate) engine: EngineConfig,
    pub(crate) client: ClientConfig,
    pub(crate) link: LinkConfig,
    pub(crate) embedded: MasterConfig,
}

impl Settings {
    /// # Errors
    /// A value, from the caller or the environment, that cannot be.
    pub(crate) fn read(arguments: Arguments) -> Result<Self> {
        let rpc_timeout = seconds("rpc_timeout_s", arguments.rpc_timeout_s)?;
        let connect_timeout = seconds("connect_timeout_s", arguments.connect_timeout_s)?;
        let mut engine =
            engine_config(&arguments.name, &arguments.metadata, arguments.is_tcp_forced)?;
        if engine.name.is_empty() && engine.is_p2p() {
            engine.name = own_name(&arguments);
        }
        let mut client = ClientConfig {
            name: arguments.name,
            tenant: TenantId::new(&arguments.tenant),
            segment_bytes: arguments.segment_bytes,
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
        Ok(Self { master: arguments.master, engine, client, link, embedded })
    }
}

/// The settings of an engine of that name, the rest from the environment.
///
/// # Errors
/// A value of the environment that cannot be.
pub(crate) fn engine_config(
    name: &str,
    metadata: &str,
    is_tcp_forced: Option<bool>,
) -> Result<EngineConfig> {
    let is_port_fixed = env::MC_LEGACY_RPC_PORT_BINDING.is_on();
    let mut config = EngineConfig {
        name: name.to_owned(),
        metadata: metadata.to_owned(),
        is_tcp_forced: is_tcp_forced.unwrap_or_else(|| env::MC_FORCE_TCP.is_on()),
        bind_address: env::MC_TCP_BIND_ADDRESS.read().filter(|address| !address.is_empty()),
        is_port_fixed,
        is_huge_page_wanted: env::MC_STORE_USE_HUGEPAGE.is_on(),
        ..EngineConfig::default()
    };
    if config.is_p2p() && !is_port_fixed {
        // The port only tells stores apart here; the engine finds one, and names itself by it.
        config.name = host(name).to_owned();
    }
    config.ports = ports(&env::MC_MIN_RPC_PORT, &env::MC_MAX_RPC_PORT, &config.ports)?;
    if let Some(cluster) = env::MC_METADATA_CLUSTER_ID.read().filter(|id| !id.is_empty()) {
        config.metadata_prefix = cluster;
    }
    if let Some(lanes) = value(&env::MC_TCP_LANES_PER_PEER, read_number::<usize>)? {
        config.lanes_per_peer = lanes;
    }
    if let Some(timeout) = value(&env::MC_HANDSHAKE_CONNECT_TIMEOUT, read_seconds)? {
        config.connect_timeout = timeout;
    }
    Ok(config)
}

/// The address of this host on the network on which its master is: loopback for a master here.
/// Empty, which leaves the choice to the engine, if the master's address is none.
fn own_name(arguments: &Arguments) -> String {
    let master = match arguments.master.as_str() {
        EMBEDDED if arguments.listen.is_empty() => return Ipv4Addr::LOCALHOST.to_string(),
        EMBEDDED => &arguments.listen,
        address => address,
    };
    let facing = |master: &Endpoint| {
        // A port that is not known yet does not matter to the route.
        let port = master.port.filter(|port| *port > 0).unwrap_or(9);
        let mut addresses = (master.host.as_str(), port).to_socket_addrs().ok()?;
        addresses.find_map(|address| address_facing(address).ok()).map(|own| own.to_string())
    };
    master.parse().ok().as_ref().and_then(facing).unwrap_or_default()
}

/// The name without what follows a colon that is no part of an IPv6 address.
fn host(name: &str) -> &str {
    match name.rsplit_once(':') {
        Some((host, _)) if !host.contains(':') || host.ends_with(']') => host,
        _ => name,
    }
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

fn ports(
    first: &'static EnvVar,
    last: &'static EnvVar,
    default: &RangeInclusive<u16>,
) -> Result<RangeInclusive<u16>> {
    let (lowest, highest) = (*default.start(), *default.end());
    let first_port = value(first, read_number)?.unwrap_or(lowest);
    let last_port = value(last, read_number)?.unwrap_or(highest);
    if first_port <= last_port {
        return Ok(first_port..=last_port);
    }
    Err(Error::invalid("the first port is above the last")
        .with(first.name, first_port)
        .with(last.name, last_port))
}

fn millis(var: &'static EnvVar) -> Result<Option<Duration>> {
    value(var, read_millis)
}

/// The value of a variable that is set to anything.
fn value<T>(var: &'static EnvVar, read: fn(&str) -> Result<T>) -> Result<Option<T>> {
    let text = var.read().filter(|text| !text.trim().is_empty());
    text.map(|text| read(&text)).transpose().map_err(|error| error.with("variable", var.name))
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
