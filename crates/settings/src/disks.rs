//! The directories in which a client keeps copies of objects, from environment variables.

use mooncake_base::{
    ByteSize, Result, env,
    parse::{read_bool, read_size},
};
use mooncake_store_client::DiskConfig;

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
    let uses_ring = value(&env::MOONCAKE_OFFLOAD_USE_URING, read_bool)?;
    Ok(DiskConfig { path: path.into(), capacity, uses_ring })
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
