//! What an engine would find and choose, without using it.

use std::sync::Arc;

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_verbs::{Device, DeviceLimits, GidEntry, Library, Port};

use crate::{address::choose_address, nic::failure, settings::RdmaSettings};

/// A device of this machine.
#[derive(Debug)]
pub struct DeviceReport {
    /// Name of the device.
    pub name: String,
    /// The port that the settings name; None if the device cannot be opened or has no such port.
    pub port: Option<Port>,
    /// The used entries of the port's address table.
    pub addresses: Vec<GidEntry>,
    /// Limits of the device, if it can be opened.
    pub limits: Option<DeviceLimits>,
    /// The address by which an engine with these settings would use it, or why it would not.
    pub choice: Result<GidEntry>,
}

/// Looks at all devices of this machine, also at those that the settings leave out.
///
/// # Errors
/// The kernel does not list its devices.
pub fn survey(library: &Arc<Library>, settings: &RdmaSettings) -> Result<Vec<DeviceReport>> {
    let listed = library.devices().map_err(|source| {
        Error::new(ErrorCode::INVALID_PARAMS, "the RDMA devices cannot be listed").caused_by(source)
    })?;
    Ok(listed.iter().map(|device| report(device, settings)).collect())
}

fn report(device: &Device, settings: &RdmaSettings) -> DeviceReport {
    let (mut port, mut addresses, mut limits) = (None, Vec::new(), None);
    let mut choose = || -> Result<GidEntry> {
        let failed = |source| failure(device.name(), source);
        let context = device.open().map_err(failed)?;
        limits = Some(context.limits().map_err(failed)?);
        let found = *port.insert(context.port(settings.port).map_err(failed)?);
        addresses = context.gids(settings.port).map_err(failed)?;
        match settings.exclusion(device.name()) {
            Some(reason) => Err(Error::invalid(format!("the device {reason}"))),
            None => choose_address(device.name(), &found, addresses.clone(), settings),
        }
    };
    let choice = choose();
    DeviceReport { name: device.name().to_owned(), port, addresses, limits, choice }
}
