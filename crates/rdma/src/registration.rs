//! Memory of this process that is registered with all devices.

use std::{
    collections::BTreeMap,
    fmt,
    os::fd::BorrowedFd,
    ptr::NonNull,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use mooncake_base::sync::{Condvar, Mutex, RwLock};
use mooncake_base::{Error, ErrorCode, Result};
use mooncake_verbs::{Access, LocalRange, MemoryRegion, Ordering, ProtectionDomain};

use crate::{
    near_devices::NearDevices,
    slices::{MemoryRange, MemoryRanges, Slice},
};

/// All registered ranges.
#[derive(Debug, Default)]
pub(crate) struct Registrations {
    state: RwLock<RegistrationTable>,
}

#[derive(Debug, Default)]
struct RegistrationTable {
    by_base: BTreeMap<u64, Arc<Registered>>,
    /// The parts of all ranges; None after a change, until the next transfer.
    memory: Option<Arc<LocalMemory>>,
}

/// The registered memory at one moment. Registrations live while a transfer uses it.
#[derive(Debug, Default)]
pub(crate) struct LocalMemory {
    ranges: MemoryRanges,
    /// For each part its range and its place in there.
    owners: Vec<(Arc<Registered>, usize)>,
    /// Memory that is registered for one transfer only, and used where nothing else is registered.
    temporary: Option<Box<Self>>,
}

/// A registered range.
pub(crate) struct Registered {
    length: u64,
    /// The devices that are near the memory.
    near: NearDevices,
    /// Neighbouring parts, each as long as a device allows.
    parts: Vec<RegisteredPart>,
    ended: Arc<EndedFlag>,
}

struct RegisteredPart {
    range: MemoryRange,
    /// One registration per device, in the order of devices.
    regions: Vec<MemoryRegion>,
}

/// Tells that a range has no registration any more.
#[derive(Debug, Default)]
struct EndedFlag {
    is_ended: Mutex<bool>,
    changed: Condvar,
}

/// The smallest page. Ranges are joined on pages of this size, however large they are.
const PAGE_BYTES: u64 = 4096;

/// How ranges are registered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RegistrationRule<'a> {
    pub(crate) bytes_max: u64,
    pub(crate) ordering: Ordering,
    pub(crate) access: Access,
    pub(crate) source: MemorySource<'a>,
}

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location<'a> {
    /// The name that is published for peers, such as `cpu:0` or `cuda:1`.
    pub name: &'a str,
    /// PCI address of the device whose memory it is, such as `0000:3b:00.0`.
    pub device: Option<&'a str>,
}

/// How devices get at the bytes of a range.
#[derive(Debug, Clone, Copy)]
pub enum MemorySource<'a> {
    /// By the pages at its addresses: memory of the host.
    Pages,
    /// By the pages at its addresses, which may be those of another device: the kernel pins them for its
    /// driver.
    PeerMemory,
    /// As a dma-buf of another device's driver, whose bytes begin at an offset.
    DmaBuf {
        /// The buffer.
        file: BorrowedFd<'a>,
        /// Offset of the first byte of the range in the buffer.
        offset: u64,
    },
}

impl RegistrationRule<'_> {
    /// Registers a part of a range that begins at `base` with a device.
    ///
    /// # Safety
    /// Those of [`MemoryRegion::register`].
    unsafe fn register(
        &self,
        domain: &Arc<ProtectionDomain>,
        base: u64,
        part: MemoryRange,
    ) -> Result<MemoryRegion> {
        let (length, access) = (part.length as usize, self.access);
        let start = std::ptr::with_exposed_provenance_mut::<u8>(part.address as usize);
        let start = NonNull::new(start)
            .ok_or_else(|| Error::invalid("the null address cannot be registered"))?;
        let registered = match self.source {
            MemorySource::Pages => {
                // SAFETY: by the contract of the function.
                unsafe { MemoryRegion::register(domain, start, length, access, self.ordering) }
            }
            MemorySource::PeerMemory => {
                let order = self.ordering;
                // SAFETY: by the contract of the function.
                unsafe { MemoryRegion::register_peer_memory(domain, start, length, access, order) }
            }
            MemorySource::DmaBuf { file, offset } => {
                let (offset, address) = (offset + (part.address - base), part.address);
                // SAFETY: by the contract of the function.
                unsafe {
                    MemoryRegion::register_dma_buf(domain, file, offset, length, address, access)
                }
            }
        };
        registered.map_err(|source| {
            Error::new(ErrorCode::INVALID_PARAMS, "memory cannot be registered for RDMA")
                .with("address", format_args!("{:#x}", part.address))
                .with("length", part.length)
                .caused_by(source)
        })
    }
}

impl Registrations {
    /// Registers a range with all devices.
    ///
    /// # Errors
    /// A device refused; the message names it and says why. Nothing is registered then.
    ///
    /// # Safety
    /// Those of [`MemoryRegion::register`], until the range is deregistered.
    pub(crate) unsafe fn register(
        &self,
        domains: &[Arc<ProtectionDomain>],
        (base, length): (u64, u64),
        near: NearDevices,
        rule: RegistrationRule<'_>,
    ) -> Result<()> {
        // SAFETY: by the contract of the function.
        let mut registered = unsafe { Registered::new(domains, (base, length), rule) }?;
        registered.near = near;
        let mut state = self.state.write();
        state.by_base.insert(base, Arc::new(registered));
        state.memory = None;
        Ok(())
    }

    /// Ends the registration of the range that begins at `base`, if there is one. When this succeeds no
    /// device accesses the range any more.
    ///
    /// # Errors
    /// A transfer still used the range after the time. The registration ends with the transfer.
    pub(crate) fn deregister(&self, base: u64, timeout: Duration) -> Result<()> {
        let mut state = self.state.write();
        let Some(registered) = state.by_base.remove(&base) else { return Ok(()) };
        let memory = state.memory.take();
        drop(state);
        let ended = Arc::clone(&registered.ended);
        drop(memory);
        drop(registered);
        let deadline = Instant::now() + timeout;
        let mut is_ended = ended.is_ended.lock();
        while !*is_ended {
            if ended.changed.wait_until(&mut is_ended, deadline).timed_out() && !*is_ended {
                let text = "a transfer of this process still uses the range";
                return Err(Error::new(ErrorCode::OBJECT_REPLICA_BUSY, text)
                    .with("address", format_args!("{base:#x}")));
            }
        }
        Ok(())
    }

    /// Ends all registrations, those in use with their last transfer.
    pub(crate) fn clear(&self) {
        let state = std::mem::take(&mut *self.state.write());
        drop(state);
    }

    /// Returns the registered memory.
    pub(crate) fn memory(&self) -> Arc<LocalMemory> {
        if let Some(memory) = &self.state.read().memory {
            return Arc::clone(memory);
        }
        let mut state = self.state.write();
        if let Some(memory) = &state.memory {
            return Arc::clone(memory);
        }
        let memory = Arc::new(LocalMemory::new(state.by_base.values()));
        state.memory = Some(Arc::clone(&memory));
        memory
    }

    /// Returns the parts of the range that begins at `base`, each with the keys that peers need, one per
    /// device.
    pub(crate) fn keys(&self, base: u64) -> Vec<(MemoryRange, Vec<u32>)> {
        let found = self.state.read().by_base.get(&base).cloned();
        let parts = found.iter().flat_map(|registered| &registered.parts);
        let keys =
            |part: &RegisteredPart| part.regions.iter().map(MemoryRegion::remote_key).collect();
        parts.map(|part| (part.range, keys(part))).collect()
    }
}

impl Registered {
    /// Registers a range with all devices side by side, the parts of a long range in turn.
    ///
    /// # Errors
    /// A device refused; the message names it and says why. Nothing is registered then.
    ///
    /// # Safety
    /// Those of [`MemoryRegion::register`], while the value lives.
    unsafe fn new(
        domains: &[Arc<ProtectionDomain>],
        (base, length): (u64, u64),
        rule: RegistrationRule<'_>,
    ) -> Result<Self> {
        let parts = split(base, length, rule.bytes_max);
        let register = |part: MemoryRange, domain: &Arc<ProtectionDomain>| {
            // SAFETY: by the contract of the function.
            unsafe { rule.register(domain, base, part) }
        };
        // One thread per further device: registering pins pages, which takes long.
        let columns = thread::scope(|scope| {
            let mut rows = Vec::new();
            for part in &parts {
                let others: Vec<_> = domains
                    .iter()
                    .skip(1)
                    .map(|domain| scope.spawn(move || register(*part, domain)))
                    .collect();
                let first = domains.iter().take(1).map(|domain| register(*part, domain));
                let first: Vec<_> = first.collect();
                let others = others.into_iter().map(|thread| {
                    let panicked = |_| Err(Error::internal("a registration panicked"));
                    thread.join().unwrap_or_else(panicked)
                });
                rows.push(first.into_iter().chain(others).collect::<Result<Vec<_>>>());
            }
            rows
        });
        let parts: Result<Vec<_>> = parts
            .into_iter()
            .zip(columns)
            .map(|(range, regions)| Ok(RegisteredPart { range, regions: regions? }))
            .collect();
        Ok(Self { length, near: NearDevices::ALL, parts: parts?, ended: Arc::default() })
    }
}

impl LocalMemory {
    fn new<'a>(ranges: impl Iterator<Item = &'a Arc<Registered>>) -> Self {
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

/// Cuts a range into parts of at most `bytes_max`, the last one shorter.
fn split(base: u64, length: u64, bytes_max: u64) -> Vec<MemoryRange> {
    let starts = (0..length).step_by(usize::try_from(bytes_max).unwrap_or(usize::MAX));
    let part = |start| MemoryRange { address: base + start, length: bytes_max.min(length - start) };
    starts.map(part).collect()
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.parts.clear();
        *self.ended.is_ended.lock() = true;
        self.ended.changed.notify_all();
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("length", &self.length)
            .field("parts", &self.parts.len())
            .finish_non_exhaustive()
    }
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

    #[test]
    fn long_range_is_split_with_a_shorter_rest() {
        let lengths = |length| -> Vec<u64> {
            let parts = split(4096, length, 131_072);
            let mut end = 4096;
            for part in &parts {
                assert_eq!(part.address, end);
                end += part.length;
            }
            parts.iter().map(|part| part.length).collect()
        };
        assert_eq!(lengths(300_000), [131_072, 131_072, 37_856]);
        assert_eq!(lengths(131_072), [131_072]);
        assert_eq!(lengths(1), [1]);
    }
}
