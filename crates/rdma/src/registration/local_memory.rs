//! The registered memory at one moment, for transfers.

use std::sync::Arc;

use mooncake_verbs::{LocalRange, ProtectionDomain};

use super::{registered::Registered, rule::RegistrationRule};
use crate::{
    near_devices::NearDevices,
    slices::{MemoryRange, MemoryRanges, Slice},
};

/// The smallest page. Ranges are joined on pages of this size, however large they are.
const PAGE_BYTES: u64 = 4096;

/// The registered memory at one moment. Registrations live while a transfer uses it.
#[derive(Debug, Default)]
pub(crate) struct LocalMemory {
    ranges: MemoryRanges,
    /// For each part its range and its place in there.
    owners: Vec<(Arc<Registered>, usize)>,
    /// Memory that is registered for one transfer only, and used where nothing else is registered.
    temporary: Option<Box<Self>>,
}

impl LocalMemory {
    pub(super) fn new<'a>(ranges: impl Iterator<Item = &'a Arc<Registered>>) -> Self {
        let mut owners = Vec::new();
        for registered in ranges {
            let places = 0..registered.parts.len();
            owners.extend(places.map(|place| (Arc::clone(registered), place)));
        }
        let parts = owners.iter().map(|(registered, place)| registered.parts[*place].range);
        Self { ranges: MemoryRanges::new(parts), owners, temporary: None }
    }

    /// Returns this memory and other ranges, which are registered while the result lives. Ranges that
    /// cannot be registered, such as ranges that are not mapped, are left out.
    ///
    /// # Safety
    /// Those of [`MemoryRegion::register`], while the result lives.
    pub(crate) unsafe fn with_temporary(
        &self,
        domains: &[Arc<ProtectionDomain>],
        wanted: Vec<MemoryRange>,
        rule: RegistrationRule<'_>,
    ) -> Self {
        let mut registered = Vec::new();
        for range in joined(wanted) {
            // SAFETY: by the contract of the function.
            match unsafe { Registered::new(domains, (range.address, range.length), rule) } {
                Ok(found) => registered.push(Arc::new(found)),
                Err(error) => tracing::debug!(%error, "memory of a transfer cannot be registered"),
            }
        }
        let temporary = Some(Box::new(Self::new(registered.iter())));
        Self { ranges: self.ranges.clone(), owners: self.owners.clone(), temporary }
    }

    /// Returns the index of the registration with an address, and the bytes from there to its end.
    pub(crate) fn at(&self, address: u64) -> Option<(u32, u64)> {
        self.ranges.at(address).or_else(|| {
            let (index, left) = self.temporary.as_ref()?.at(address)?;
            let before = u32::try_from(self.owners.len()).ok()?;
            Some((before.checked_add(index)?, left))
        })
    }

    /// Returns whether each byte of a range is registered.
    pub(crate) fn covers(&self, address: u64, length: u64) -> bool {
        self.ranges.cover(address, length)
    }

    /// Returns the devices that are near the memory of a slice.
    pub(crate) fn near(&self, slice: &Slice) -> NearDevices {
        let owner = self.owners.get(slice.local_range as usize);
        owner.map_or(NearDevices::ALL, |(registered, _)| registered.near)
    }

    /// Returns the local range of a slice, registered with a device.
    pub(crate) fn range(&self, slice: &Slice, device: usize) -> Option<LocalRange<'_>> {
        let index = slice.local_range as usize;
        let (registered, place) = match index.checked_sub(self.owners.len()) {
            None => &self.owners[index],
            Some(index) => self.temporary.as_ref()?.owners.get(index)?,
        };
        let part = &registered.parts[*place];
        let offset = usize::try_from(slice.local.checked_sub(part.range.address)?).ok()?;
        part.regions.get(device)?.range(offset, slice.length)
    }
}

/// Joins ranges that touch the same or neighbouring pages: a page is mapped as a whole.
fn joined(mut ranges: Vec<MemoryRange>) -> Vec<MemoryRange> {
    ranges.sort_by_key(|range| range.address);
    let mut joined: Vec<MemoryRange> = Vec::new();
    for range in ranges {
        let end = range.address.saturating_add(range.length);
        match joined.last_mut() {
            Some(last)
                if range.address / PAGE_BYTES
                    <= (last.address + last.length).div_ceil(PAGE_BYTES) =>
            {
                last.length = last.length.max(end - last.address);
            }
            _ => joined.push(MemoryRange { address: range.address, length: end - range.address }),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_on_neighbouring_pages_are_joined() {
        let range = |address, length| MemoryRange { address, length };
        let found = joined(vec![range(9000, 10), range(4096, 100), range(5000, 4000)]);
        assert_eq!(found, [range(4096, 4914)]);
        let found = joined(vec![range(4096, 4096), range(8192, 1), range(16_384, 1)]);
        assert_eq!(found, [range(4096, 4097), range(16_384, 1)]);
        assert_eq!(joined(vec![range(4096, 10_000), range(5000, 1)]), [range(4096, 10_000)]);
        assert_eq!(joined(Vec::new()), []);
    }
}
