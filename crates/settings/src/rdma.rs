//! Settings of RDMA devices from environment variables.

use std::time::Duration;

use mooncake_base::{
    Error, Result,
    env::{self, EnvVar},
    parse::{read_number, read_seconds},
};
use mooncake_transfer_engine::rdma::{Mtu, RdmaSettings};

use crate::variable::{is_on_by_default, value};

/// Returns the settings of RDMA devices; `devices` has names separated by commas, or is empty or
/// `auto-discovery` for all that are active. The other settings come from the environment.
///
/// # Errors
/// A variable has an invalid value.
pub fn rdma_settings(devices: &str) -> Result<RdmaSettings> {
    let names = devices.split(',').map(str::trim).filter(|name| !name.is_empty());
    let mut settings = RdmaSettings {
        devices: names.filter(|name| *name != "auto-discovery").map(str::to_owned).collect(),
        is_relaxed: is_on_by_default(&env::MC_IB_PCI_RELAXED_ORDERING),
        ..RdmaSettings::default()
    };
    set(&mut settings.port, &env::MC_IB_PORT)?;
    settings.gid_index = match value(&env::MC_GID_INDEX, read_number::<i32>)? {
        None | Some(-1) => None,
        Some(index) => Some(u8::try_from(index).map_err(|_| {
            Error::invalid("an index of the address table is 0 to 255, or -1 to choose")
                .with("variable", env::MC_GID_INDEX.name)
                .with("value", index)
        })?),
    };
    if let Some(mtu) = value(&env::MC_MTU, read_mtu)? {
        settings.mtu = mtu;
    }
    settings.traffic_class = read_class(&env::MC_IB_TC)?.unwrap_or(settings.traffic_class);
    settings.service_level = read_class(&env::MC_IB_SL)?.unwrap_or(settings.service_level);
    set(&mut settings.partition_index, &env::MC_PKEY_INDEX)?;
    set(&mut settings.queue_pairs, &env::MC_NUM_QP_PER_EP)?;
    set(&mut settings.queue_depth, &env::MC_MAX_WR)?;
    set(&mut settings.inline_bytes, &env::MC_MAX_INLINE)?;
    set(&mut settings.device_depth, &env::MC_MAX_CQE_PER_CTX)?;
    set(&mut settings.connections_max, &env::MC_MAX_EP_PER_CTX)?;
    set(&mut settings.slice_bytes, &env::MC_SLICE_SIZE)?;
    settings.slice_tail_bytes = match value(&env::MC_FRAGMENT_RATIO, read_number::<u32>)? {
        Some(ratio) => settings.slice_bytes / ratio.max(1),
        None => settings.slice_bytes / 4,
    };
    set(&mut settings.tries, &env::MC_RETRY_CNT)?;
    set(&mut settings.region_bytes_max, &env::MC_MAX_MR_SIZE)?;
    if let Some(timeout) = value(&env::MC_SLICE_TIMEOUT, read_seconds)? {
        settings.stall_timeout = timeout;
    }
    if let Some(pause) = value(&env::MC_RDMA_RAIL_PAUSE_SECONDS, read_seconds)? {
        settings.pause_max = pause.max(Duration::from_millis(50));
    }
    settings.check()?;
    Ok(settings)
}

/// Sets a number from a variable, if it is set.
fn set<T: std::str::FromStr>(number: &mut T, var: &'static EnvVar) -> Result<()> {
    if let Some(given) = value(var, read_number)? {
        *number = given;
    }
    Ok(())
}

/// Returns a class of service; -1 is the default.
fn read_class(var: &'static EnvVar) -> Result<Option<u8>> {
    let given = value(var, read_number::<i32>)?.filter(|class| *class != -1);
    let class = given.map(u8::try_from).transpose();
    class.map_err(|_| {
        Error::invalid("a class of service is 0 to 255, or -1 for the default")
            .with("variable", var.name)
    })
}

fn read_mtu(text: &str) -> Result<Mtu> {
    let bytes = read_number(text)?;
    Mtu::from_bytes(bytes).ok_or_else(|| {
        Error::invalid("the MTU must be 256, 512, 1024, 2048 or 4096").with("text", text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_and_trimmed() {
        let names = |text| rdma_settings(text).unwrap().devices;
        assert_eq!(names("mlx5_0, mlx5_1,"), ["mlx5_0", "mlx5_1"]);
        assert_eq!(names(""), [""; 0]);
        assert_eq!(names("auto-discovery"), [""; 0]);
    }

    #[test]
    fn rejects_sizes_that_are_no_mtu() {
        assert_eq!(read_mtu("1024").unwrap(), Mtu::Bytes1024);
        assert!(read_mtu("1500").is_err());
        assert!(read_mtu("big").is_err());
    }
}
