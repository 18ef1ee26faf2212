//! Registration of user memory with an engine.

use std::sync::Arc;

use mooncake_base::{Error, Result};

use super::Inner;
use crate::{
    copy,
    memory::region::{Backing, HeldRange, MemoryOwner, Region},
    transfer_entry::LocalRange,
};

/// The registered ranges of an engine.
#[derive(Debug)]
pub struct Registry<'a> {
    pub(super) inner: &'a Inner,
}

impl Registry<'_> {
    /// Registers a range of this process, or of one of its CUDA devices, so that peers can access
    /// it. No page is touched. RDMA devices access memory of a device themselves, if their drivers can;
    /// device work on it must have ended before. Otherwise its bytes go through pinned memory, over TCP
    /// or within the process, after the work of the default stream.
    ///
    /// `location` names the place of the memory for peers (`cpu:0`, `cuda:1`). With `*` it is found out: the
    /// device, or the NUMA node of the first page. Memory of a device is never taken for that of a node.
    ///
    /// The range must be mapped when peers access it, or their transfers fail. No Rust reference
    /// into the range may exist while it is registered. Registration checks only two pages: a
    /// range whose first and last pages are both unmapped is refused, since such an address is a
    /// mistake of the caller. Memory that is only reserved (`PROT_NONE`, never
    /// touched) or has holes is accepted, since it may be filled in before the first access.
    ///
    /// # Errors
    /// The range is empty, wraps around, overlaps another, is partly device memory, or is mapped
    /// neither at its beginning nor at its end; the engine is closed; or the metadata server did
    /// not accept the update.
    pub fn register(&self, address: u64, length: u64, location: &str) -> Result<()> {
        self.register_all(&[(address, length)], location)
    }

    /// Registers many ranges, given by first address and length, with one update of the metadata
    /// server. Registers all of them or none.
    ///
    /// # Errors
    /// Those of [`Registry::register`], for one of the ranges.
    pub fn register_all(&self, ranges: &[(u64, u64)], location: &str) -> Result<()> {
        self.inner.check_usable()?;
        let regions = &self.inner.exported.regions;
        // Waits for withdrawals in progress, at most for the engine's `withdraw_timeout`.
        let leaving = self.inner.withdrawals.write();
        let (mut registered, mut host) = (Vec::with_capacity(ranges.len()), Vec::new());
        let entered = ranges.iter().try_for_each(|(address, length)| {
            match self.inner.devices.memory(*address, *length)? {
                Some(device) => {
                    let is_of_device = location != "*" && !location.starts_with("cpu:");
                    let named = if is_of_device { location } else { &device.location() };
                    let owner = MemoryOwner::Device(device.clone());
                    let region = regions.register_owned((*address, *length), named, owner)?;
                    self.inner.rdma.register_device(&region, &device);
                }
                None => {
                    check_mapped(*address, *length)?;
                    let found = (location == "*").then(|| copy::node_of(*address)).flatten();
                    let found = found.map(|node| format!("cpu:{node}"));
                    let named = found.as_deref().unwrap_or(location);
                    let region = regions.register(*address, *length, named, Backing::User)?;
                    self.inner.rdma.register(&region);
                    host.push(*address);
                }
            }
            registered.push(*address);
            Ok(())
        });
        drop(leaving);
        if entered.is_ok() && self.inner.config.collapses_registered {
            host.iter().for_each(|base| self.inner.prefaulter.collapse(regions, *base));
        }
        entered.and_then(|()| self.inner.announce()).inspect_err(|_| {
            for address in registered {
                // The range was just registered, and no peer knows of it yet.
                let _ = self.inner.withdraw(address);
            }
        })
    }

    /// Unregisters a range by its first address. When this succeeds, no peer accesses the range any
    /// more. Connections that still use it after the engine's `withdraw_timeout` are closed.
    ///
    /// # Errors
    /// No range begins there; or a peer may still access the range
    /// ([`OBJECT_REPLICA_BUSY`](mooncake_base::ErrorCode::OBJECT_REPLICA_BUSY)). Then new accesses
    /// are refused, but the memory must not be freed before a repeated call succeeds.
    pub fn unregister(&self, address: u64) -> Result<()> {
        self.unregister_all(&[address])
    }

    /// Unregisters many ranges with one update of the metadata server. Every one of them is tried.
    ///
    /// # Errors
    /// The first error of [`Registry::unregister`].
    pub fn unregister_all(&self, addresses: &[u64]) -> Result<()> {
        self.inner.check_usable()?;
        let withdraw = |address: &u64| self.inner.withdraw(*address);
        let withdrawn = addresses.iter().map(withdraw).fold(Ok(()), Result::and);
        let announced = self.inner.announce();
        withdrawn.and(announced)
    }

    /// Holds memory that a caller has named by its addresses, so that its bytes can be written without
    /// a check of each access; `None` for each range that is not within a registered range of host
    /// memory, or cannot be written.
    pub fn hold_all(&self, ranges: &[LocalRange]) -> Vec<Option<HeldRange>> {
        self.inner.exported.regions.hold_all(ranges)
    }

    /// All registered ranges by address, including the engine's own allocations.
    pub fn all(&self) -> Vec<Arc<Region>> {
        self.inner.exported.regions.all()
    }
}

/// Refuses memory whose first and last pages are both unmapped. An invalid range passes here and is
/// refused later.
fn check_mapped(address: u64, length: u64) -> Result<()> {
    let Some(last) = length.checked_sub(1).and_then(|more| address.checked_add(more)) else {
        return Ok(());
    };
    if copy::is_unmapped(address) && copy::is_unmapped(last) {
        let text = "nothing is mapped at this address, and it belongs to no known device";
        return Err(Error::invalid(text)
            .with("address", format_args!("{address:#x}"))
            .with("length", length));
    }
    Ok(())
}
