//! Registering memory of the user with an engine.

use std::sync::Arc;

use mooncake_base::{Error, Result};

use super::Inner;
use crate::{
    copy,
    region::{Backing, Region},
};

/// The registered ranges of an engine.
#[derive(Debug)]
pub struct Registry<'a> {
    pub(super) inner: &'a Inner,
}

impl Registry<'_> {
    /// Lets peers reach a range of this process, or of a CUDA device of it. Touches no page of it.
    /// Bytes of a device go through pinned memory here, over TCP or within the process; a device's
    /// work on them that was not given to the default stream must have ended before.
    ///
    /// The range must be mapped when peers reach for it, or their transfers fail; nobody may hold
    /// Rust references into it while it is registered. Two of its pages are asked about, whatever
    /// its length: if neither the first nor the last is mapped it is refused, since an address that
    /// leads nowhere is a mistake of its caller. What is only reserved (`PROT_NONE`, never touched) or
    /// has holes is taken: it may be filled in before anybody reaches for it.
    ///
    /// # Errors
    /// The range is empty, wraps around, overlaps another, is partly memory of a device, or is mapped
    /// neither where it begins nor where it ends; the engine is closed; or the metadata server did
    /// not take the news.
    pub fn register(&self, address: u64, length: u64, location: &str) -> Result<()> {
        self.register_all(&[(address, length)], location)
    }

    /// Registers many ranges, given by first address and length, and tells the metadata server
    /// once. All of them or none.
    ///
    /// # Errors
    /// Those of [`Registry::register`], for one of them.
    pub fn register_all(&self, ranges: &[(u64, u64)], location: &str) -> Result<()> {
        self.inner.check_usable()?;
        let regions = &self.inner.exported.regions;
        // A wait no longer than the engine's `withdraw_timeout`.
        let leaving = self.inner.withdrawals.write();
        let (mut registered, mut host) = (Vec::with_capacity(ranges.len()), Vec::new());
        let entered = ranges.iter().try_for_each(|(address, length)| {
            match self.inner.devices.memory(*address, *length)? {
                Some(device) => {
                    let named = if location == "*" { &device.location() } else { location };
                    regions.register_device((*address, *length), named, device)?;
                }
                None => {
                    check_mapped(*address, *length)?;
                    regions.register(*address, *length, location, Backing::User)?;
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
                // It was just registered, and nobody was told of it.
                let _ = self.inner.withdraw(address);
            }
        })
    }

    /// Takes a range back, by its first address: when this returns nobody touches it any more.
    ///
    /// # Errors
    /// No range begins there; or somebody still used it when the engine's `withdraw_timeout` was
    /// over, and it is taken back all the same.
    pub fn unregister(&self, address: u64) -> Result<()> {
        self.unregister_all(&[address])
    }

    /// Takes many ranges back and tells the metadata server once. Every one of them is tried.
    ///
    /// # Errors
    /// The first of those of [`Registry::unregister`].
    pub fn unregister_all(&self, addresses: &[u64]) -> Result<()> {
        self.inner.check_usable()?;
        let withdraw = |address: &u64| self.inner.withdraw(*address);
        let withdrawn = addresses.iter().map(withdraw).fold(Ok(()), Result::and);
        let announced = self.inner.announce();
        withdrawn.and(announced)
    }

    /// Every range, by address, those of the engine's own memory among them.
    pub fn all(&self) -> Vec<Arc<Region>> {
        self.inner.exported.regions.all()
    }
}

/// Refuses memory of which neither end is mapped. A range that is none is refused in other words.
fn check_mapped(address: u64, length: u64) -> Result<()> {
    let Some(last) = length.checked_sub(1).and_then(|more| address.checked_add(more)) else {
        return Ok(());
    };
    if copy::is_unmapped(address) && copy::is_unmapped(last) {
        let text = "nothing is mapped there, and it is no memory of a device that is known here";
        return Err(Error::invalid(text)
            .with("address", format_args!("{address:#x}"))
            .with("length", length));
    }
    Ok(())
}
