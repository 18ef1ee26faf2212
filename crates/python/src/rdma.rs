//! The use of RDMA devices, if a caller asks for it.

use mooncake_base::Result;
use mooncake_transfer_engine::EngineConfig;

/// Sets the devices, by their names separated by commas; "" uses all that are active, None none.
///
/// # Errors
/// An environment variable has an invalid value.
#[cfg(feature = "rdma")]
pub(crate) fn enable(config: &mut EngineConfig, devices: Option<&str>) -> Result<()> {
    config.rdma = devices.map(mooncake_settings::rdma_settings).transpose()?;
    Ok(())
}

/// Logs that this build cannot use devices.
///
/// # Errors
/// None.
#[cfg(not(feature = "rdma"))]
pub(crate) fn enable(_: &mut EngineConfig, devices: Option<&str>) -> Result<()> {
    if devices.is_some() {
        tracing::warn!("this build has no RDMA; transfers go over TCP");
    }
    Ok(())
}
