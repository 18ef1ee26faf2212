//! The directories in which a client keeps copies of objects, from environment variables.

use mooncake_base::{
    ByteSize, Error, Result, env,
    parse::{read_bool, read_number, read_share, read_size},
};
use mooncake_store_client::{DiskConfig, DiskLimits, Watermarks};

use crate::variable::value;

/// Returns the settings of a directory. Without a capacity it takes the one of the environment, or 90 %
/// of what is free.
///
/// # Errors
/// An invalid value in the environment.
pub fn disk_at(path: &str, capacity: Option<u64>) -> Result<DiskConfig> {
    let of_environment = value(&env::MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES, read_size)?;
    let capacity =
        capacity.or_else(|| of_environment.map(ByteSize::bytes)).filter(|&bytes| bytes > 0);
    Ok(DiskConfig { path: path.into(), capacity, uses_ring: uses_ring()? })
}

/// The watermarks if only one of them is given.
const HIGH: f64 = 0.90;
const LOW: f64 = 0.80;

/// Returns the limits of all directories.
///
/// # Errors
/// An invalid value in the environment, or a directory that hosts share.
pub(crate) fn disk_limits() -> Result<DiskLimits> {
    if value(&env::MOONCAKE_ENABLE_DFS, read_bool)? == Some(true) {
        let why = "a directory that several hosts share is not supported; unset the variable, and \
            give each host a directory of its own with MOONCAKE_OFFLOAD_FILE_STORAGE_PATH";
        return Err(Error::invalid(why).with("variable", env::MOONCAKE_ENABLE_DFS.name));
    }
    let high = value(&env::MOONCAKE_OFFLOAD_DISK_EVICTION_HIGH_WATERMARK_RATIO, read_share)?;
    let low = value(&env::MOONCAKE_OFFLOAD_DISK_EVICTION_LOW_WATERMARK_RATIO, read_share)?;
    let switch = value(&env::MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION, read_bool)?;
    let watermarks = match (high, low) {
        (None, None) => None,
        // Checked also where they do not count.
        (high, low) => {
            let high = high.unwrap_or(HIGH);
            let low = low.unwrap_or_else(|| LOW.min(high));
            Some(Watermarks::new(high, low)?)
        }
    };
    let records_max = value(&env::MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT, read_number::<u64>)?;
    let records_max = records_max.filter(|&records| records > 0);
    if switch.unwrap_or(true) {
        return Ok(DiskLimits { records_max, watermarks });
    }
    Ok(DiskLimits { records_max, watermarks: None })
}

/// Returns whether directories are read through io_uring, if the environment says so.
///
/// # Errors
/// An invalid value in the environment.
pub fn uses_ring() -> Result<Option<bool>> {
    value(&env::MOONCAKE_OFFLOAD_USE_URING, read_bool)
}

/// Returns the directories that the environment names: several, or one.
///
/// # Errors
/// An invalid value in the environment.
pub fn disks_of_environment() -> Result<Vec<DiskConfig>> {
    let one = &env::MOONCAKE_OFFLOAD_FILE_STORAGE_PATH;
    let given = env::MOONCAKE_OFFLOAD_FILE_STORAGE_PATHS.read().unwrap_or_default();
    let paths: Vec<&str> =
        given.split(',').map(str::trim).filter(|path| !path.is_empty()).collect();
    if !paths.is_empty() {
        return paths.into_iter().map(|path| disk_at(path, None)).collect();
    }
    let path = one.read().filter(|path| !path.trim().is_empty());
    Ok(vec![disk_at(path.as_deref().unwrap_or(one.default).trim(), None)?])
}
