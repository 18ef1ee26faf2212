//! RDMA devices in a build without the feature `rdma`: none.

use mooncake_base::Result;
use mooncake_transfer_engine::EngineConfig;

/// Logs that this build cannot use devices.
///
/// # Errors
/// None.
pub fn use_rdma(_: &mut EngineConfig, devices: Option<&str>) -> Result<()> {
    if devices.is_some() {
        tracing::warn!("this build has no RDMA; transfers go over TCP");
    }
    Ok(())
}

/// Logs that this build cannot use devices.
///
/// # Errors
/// None.
pub fn use_rdma_for_store(config: &mut EngineConfig, devices: Option<&str>) -> Result<()> {
    use_rdma(config, devices)
}
