//! Client and link settings from environment variables.

use std::time::Duration;

use mooncake_base::{
    Result, Token,
    env::{self, EnvVar},
    parse::{read_bool, read_millis, read_seconds},
};
use mooncake_store_client::{ClientConfig, LinkConfig, MetricsConfig};
use mooncake_transfer_tools::settings::value;

/// Minimum transfer time-out.
const TRANSFER_TIMEOUT_MIN: Duration = Duration::from_secs(5);

/// Returns the settings of a client.
///
/// # Errors
/// An invalid value.
pub fn client() -> Result<ClientConfig> {
    let mut client = ClientConfig {
        has_checksums: env::MOONCAKE_STORE_CHECKSUM.is_on(),
        metrics: metrics()?,
        ..ClientConfig::default()
    };
    if let Some(timeout) = value(&env::MC_RPC_TIMEOUT_MS, read_millis)? {
        client.rpc_timeout = timeout;
    }
    if let Some(timeout) = value(&env::MC_TRANSFER_TIMEOUT, read_seconds)? {
        client.transfer_timeout = timeout.max(TRANSFER_TIMEOUT_MIN);
    }
    Ok(client)
}

/// Returns the settings of a link.
///
/// # Errors
/// An invalid value.
pub fn link() -> Result<LinkConfig> {
    let token = value(&env::MOONCAKE_MASTER_TOKEN, Token::new)?;
    let mut link = LinkConfig { token, ..LinkConfig::default() };
    if let Some(timeout) = value(&env::MC_RPC_CONNECT_TIMEOUT_MS, read_millis)? {
        link.connect_timeout = timeout;
    }
    Ok(link)
}

/// Returns whether a client copies its own memory within the process, even where TCP is forced.
pub fn copies_own() -> bool {
    env::MC_STORE_MEMCPY.is_on()
}

fn metrics() -> Result<MetricsConfig> {
    let interval = value(&env::MC_STORE_CLIENT_METRIC_INTERVAL, read_seconds)?;
    Ok(MetricsConfig {
        is_enabled: is_on_by_default(&env::MC_STORE_CLIENT_METRIC),
        cluster: env::MC_STORE_CLUSTER_ID.read().unwrap_or_default(),
        report_interval: interval.filter(|interval| !interval.is_zero()),
        has_bandwidth: is_on_by_default(&env::MC_STORE_CLIENT_METRIC_BANDWIDTH),
    })
}

/// Returns the state of a switch that is on by default. An invalid value turns it off.
fn is_on_by_default(var: &'static EnvVar) -> bool {
    let text = var.read().filter(|text| !text.trim().is_empty());
    text.is_none_or(|text| read_bool(&text).unwrap_or(false))
}
