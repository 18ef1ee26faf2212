//! Settings of a transfer engine from environment variables, and the topology that they name.

use std::{ops::RangeInclusive, path::Path, time::Duration};

use mooncake_base::{
    Endpoint, Error, Result,
    env::{self, EnvVar},
    parse::{read_number, read_seconds, read_size},
};
use mooncake_transfer_engine::{
    EngineConfig, HugePages, Token, Topology, discovery::metadata::RedisLogin,
};

use crate::variable::value;

/// The default interval of log lines about transfers.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// The default port of the handshake socket if the port is fixed.
const HANDSHAKE_PORT: u16 = 12001;

/// Returns the settings of an engine with this name; the other settings come from the environment.
/// `is_tcp_forced` overrides the environment.
///
/// # Errors
/// A variable has an invalid value.
pub fn engine_config(
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
        huge_pages: huge_pages()?,
        ..EngineConfig::default()
    };
    config.is_ipv6_preferred = env::MC_USE_IPV6.is_on();
    if let Some(backlog) = value(&env::MC_HANDSHAKE_LISTEN_BACKLOG, read_number)? {
        config.handshake_backlog = backlog;
    }
    if let Some(bytes) = value(&env::MC_HANDSHAKE_MAX_LENGTH, read_number)? {
        config.handshake_bytes_max = bytes;
    }
    if is_port_fixed
        && config.is_p2p()
        && let Ok(endpoint) = config.name.parse::<Endpoint>()
    {
        let port = value(&env::MC_HANDSHAKE_PORT, read_number)?.unwrap_or(HANDSHAKE_PORT);
        config.name = endpoint.or_port(port).to_string();
    }
    if config.is_p2p() && !is_port_fixed {
        // The port only distinguishes stores; the engine picks a free one and puts it in its name.
        config.name = host_of(name).to_owned();
    }
    config.ports = ports(&env::MC_MIN_RPC_PORT, &env::MC_MAX_RPC_PORT, &config.ports)?;
    if let Some(cluster) = env::MC_METADATA_CLUSTER_ID.read().filter(|id| !id.is_empty()) {
        config.metadata_prefix = cluster;
    }
    config.redis = redis_login()?;
    if let Some(lanes) = value(&env::MC_TCP_LANES_PER_PEER, read_number::<usize>)? {
        config.connections_per_peer = lanes;
    }
    if env::MC_TE_METRIC.is_on() {
        let interval = value(&env::MC_TE_METRIC_INTERVAL_SECONDS, read_interval)?;
        config.report_interval = Some(interval.unwrap_or(REPORT_INTERVAL));
    }
    if let Some(size) = value(&env::MC_PREFAULT_SIZE, read_size)? {
        config.prefault_bytes_max = size.bytes();
    }
    config.collapses_registered = env::MC_COLLAPSE_REGISTERED_MEMORY.is_on();
    config.numa_node = value(&env::MC_STORE_NUMA_SOCKET_ID, read_number::<u32>)?;
    if let Some(driver) = env::MC_CUDA_DRIVER.read().filter(|file| !file.is_empty()) {
        config.device_driver = driver.into();
    }
    config.token = value(&env::MC_TRANSFER_TOKEN, Token::new)?;
    if let Some(timeout) = value(&env::MC_HANDSHAKE_CONNECT_TIMEOUT, read_seconds)? {
        config.connect_timeout = timeout;
    }
    Ok(config)
}

/// Returns the settings of the engine of a store, which copies within its own memory even where
/// other transfers are forced to use TCP.
///
/// # Errors
/// A variable has an invalid value.
pub fn store_engine_config(
    name: &str,
    metadata: &str,
    is_tcp_forced: Option<bool>,
) -> Result<EngineConfig> {
    let config = engine_config(name, metadata, is_tcp_forced)?;
    Ok(EngineConfig { copies_own: env::MC_STORE_MEMCPY.is_on(), ..config })
}

/// Returns the topology of this machine, or of the file that the environment names.
///
/// # Errors
/// The file cannot be read or is invalid.
pub fn topology(wanted: &str) -> Result<Topology> {
    match custom_topology() {
        Some(path) => Topology::from_file(Path::new(&path)),
        None => Ok(Topology::local(wanted)),
    }
}

/// Returns the topology file that the environment names.
pub fn custom_topology() -> Option<String> {
    env::MC_CUSTOM_TOPO_JSON.read().filter(|path| !path.is_empty())
}

/// Returns the name without its port, if it has one.
fn host_of(name: &str) -> &str {
    match name.rsplit_once(':') {
        Some((host, _)) if !host.contains(':') || host.ends_with(']') => host,
        _ => name,
    }
}

/// Returns the size of huge pages for segments, if they are enabled.
fn huge_pages() -> Result<Option<HugePages>> {
    if !env::MC_STORE_USE_HUGEPAGE.is_on() {
        return Ok(None);
    }
    value(&env::MC_STORE_HUGEPAGE_SIZE, read_huge_pages)
        .map(|size| size.or(Some(HugePages::TwoMiB)))
}

fn read_interval(text: &str) -> Result<Duration> {
    match read_seconds(text)? {
        Duration::ZERO => {
            Err(Error::invalid("an interval must be longer than 0").with("text", text))
        }
        interval => Ok(interval),
    }
}

fn read_huge_pages(text: &str) -> Result<HugePages> {
    match read_size(text)?.bytes() {
        0x20_0000 => Ok(HugePages::TwoMiB),
        0x4000_0000 => Ok(HugePages::OneGiB),
        _ => Err(Error::invalid("the size of huge pages must be 2MB or 1GB").with("text", text)),
    }
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

/// Reads the login for a Redis server, which has metadata or names the master.
///
/// # Errors
/// An invalid value.
pub(crate) fn redis_login() -> Result<RedisLogin> {
    Ok(RedisLogin {
        username: env::MC_REDIS_USERNAME.read().unwrap_or_default(),
        password: env::MC_REDIS_PASSWORD.read().unwrap_or_default(),
        database: value(&env::MC_REDIS_DB_INDEX, read_number)?.unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_two_sizes_of_huge_pages() {
        assert_eq!(read_huge_pages("2MB").unwrap(), HugePages::TwoMiB);
        assert_eq!(read_huge_pages("1gb").unwrap(), HugePages::OneGiB);
        assert!(read_huge_pages("4MB").is_err());
        assert!(read_huge_pages("big").is_err());
    }

    #[test]
    fn strips_ports_but_no_part_of_an_address() {
        let check = |name: &str, wanted: &str| assert_eq!(host_of(name), wanted);
        check("h:1", "h");
        check("h", "h");
        check("[::1]:1", "[::1]");
        check("::1", "::1");
        check("", "");
    }
}
