//! Settings of a client and of its link to the master from environment variables.

use std::time::Duration;

use mooncake_base::{
    Result, Token, env,
    parse::{read_millis, read_seconds, read_size},
};
use mooncake_store_client::{ClientConfig, LinkConfig, MetricsConfig};

use crate::{
    disks::disk_limits,
    engine::redis_login,
    variable::{is_on_by_default, value},
};

/// Minimum transfer time-out.
const TRANSFER_TIMEOUT_MIN: Duration = Duration::from_secs(5);

/// Returns the settings of a client; its name, tenant and memory are left to the caller.
///
/// # Errors
/// An invalid value.
pub fn client_config() -> Result<ClientConfig> {
    let mut client = ClientConfig {
        has_checksums: env::MOONCAKE_STORE_CHECKSUM.is_on(),
        metrics: metrics()?,
        disk_token: token()?,
        disk_limits: disk_limits()?,
        ..ClientConfig::default()
    };
    if let Some(timeout) = value(&env::MC_RPC_TIMEOUT_MS, read_millis)? {
        client.rpc_timeout = timeout;
    }
    if let Some(timeout) = value(&env::MC_TRANSFER_TIMEOUT, read_seconds)? {
        client.transfer_timeout = timeout.max(TRANSFER_TIMEOUT_MIN);
    }
    if let Some(size) = value(&env::MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES, read_size)? {
        client.disk_staging_bytes = size.bytes();
    }
    Ok(client)
}

/// Returns the settings of a link.
///
/// # Errors
/// An invalid value.
pub fn link_config() -> Result<LinkConfig> {
    let mut link = LinkConfig { token: token()?, redis: redis_login()?, ..LinkConfig::default() };
    if let Some(cluster) = env::MC_STORE_CLUSTER_ID.read().filter(|id| !id.is_empty()) {
        link.cluster = cluster;
    }
    if let Some(timeout) = value(&env::MC_RPC_CONNECT_TIMEOUT_MS, read_millis)? {
        link.connect_timeout = timeout;
    }
    Ok(link)
}

fn token() -> Result<Option<Token>> {
    value(&env::MOONCAKE_MASTER_TOKEN, Token::new)
}

fn metrics() -> Result<MetricsConfig> {
    let interval = value(&env::MC_STORE_CLIENT_METRIC_INTERVAL, read_seconds)?;
    Ok(MetricsConfig {
        is_enabled: is_on_by_default(&env::MC_STORE_CLIENT_METRIC),
        cluster: env::MC_STORE_CLUSTER_ID.read().unwrap_or_default(),
        has_upstream_names: env::MC_STORE_CLIENT_UPSTREAM_METRICS.is_on(),
        report_interval: interval.filter(|interval| !interval.is_zero()),
        has_bandwidth: is_on_by_default(&env::MC_STORE_CLIENT_METRIC_BANDWIDTH),
    })
}
