//! The table of registered memory, and pins on it.
//!
//! Every address that comes from a peer is turned into a [`Pin`] once, on the owner's side, and
//! travels as that pin. A region that is being withdrawn accepts no new pins. Its memory may be
//! used otherwise when its last pin was dropped.

use std::{
    collections::BTreeMap,
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use mooncake_base::sync::{Condvar, Mutex, RwLock};
use mooncake_base::{Error, ErrorCode, Result};
use mooncake_os::memory::page_size;

use crate::{
    copy::LastingCheck,
    device::DeviceMemory,
    memory::{file::FileMapping, mapping::Mapping},
    transfer_entry::{LocalRange, RemoteRange},
};

/// The memory behind a region, which decides how peers can access it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// User memory: anything that was mapped when it was registered.
    User,
    /// Device memory, which only its driver can access.
    Device,
    /// Shared memory of the engine: the descriptor `file` (kept open by the code that registered
    /// the region) holds the region's bytes from `offset` on.
    Shared {
        /// A file descriptor of this process.
        file: i32,
        /// Offset of the region in the file; a multiple of the page size.
        offset: u64,
    },
}

/// A registered range.
#[derive(Debug)]
pub struct Region {
    /// First address in this process.
    pub base: u64,
    /// Length in bytes; at least 1.
    pub length: u64,
    /// Location of the memory, as the caller named it: `cpu:0`, `cuda:1`, `*`.
    pub location: String,
    /// The memory behind the region.
    pub backing: Backing,
    /// Number of regions registered before this one.
    pub(crate) order: u64,
    /// The owner of the memory, unless that is the user.
    owner: Option<MemoryOwner>,
    uses: Uses,
}

/// An owner of memory that keeps it usable while the region lives, thus as long as any pin.
#[derive(Debug, Clone)]
pub(crate) enum MemoryOwner {
    /// The device that accesses the memory, for [`Backing::Device`].
    Device(DeviceMemory),
    /// Shared memory of the engine, for [`Backing::Shared`].
    Shared(Arc<Mapping>),
    /// A mapped file.
    File(Arc<FileMapping>),
}

#[derive(Debug, Default)]
struct Uses {
    state: Mutex<UseState>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct UseState {
    pins: usize,
    is_withdrawn: bool,
}

/// Proof that an address range lies in a region, which stays registered while the pin lives.
#[derive(Debug)]
pub struct Pin {
    region: Arc<Region>,
    range: RemoteRange,
}

/// Registered memory of this process that a caller has named by its address: it is mapped, and stays
/// registered while this lives.
#[derive(Debug)]
pub struct HeldRange {
    range: LocalRange,
    _pin: Pin,
}

impl HeldRange {
    /// The memory, for uses that end before this is dropped.
    pub const fn range(&self) -> LocalRange {
        self.range
    }
}

/// All registered ranges of one engine.
#[derive(Debug, Default)]
pub struct Regions {
    by_base: RwLock<BTreeMap<u64, Arc<Region>>>,
    /// Regions of user memory whose withdrawal failed, since they were still in use.
    leaving: Mutex<Vec<Arc<Region>>>,
    registered: AtomicU64,
}

impl Regions {
    /// Registers a range without touching it.
    ///
    /// # Errors
    /// The range is empty, wraps around, or overlaps another
    /// ([`ErrorCode::SEGMENT_ALREADY_EXISTS`]).
    pub fn register(
        &self,
        base: u64,
        length: u64,
        location: &str,
        backing: Backing,
    ) -> Result<Arc<Region>> {
        self.enter((base, length), location, backing, None)
    }

    /// Registers memory that is kept usable by its owner while anything uses the region.
    ///
    /// # Errors
    /// Those of [`Regions::register`].
    pub(crate) fn register_owned(
        &self,
        range: (u64, u64),
        location: &str,
        owner: MemoryOwner,
    ) -> Result<Arc<Region>> {
        let backing = match &owner {
            MemoryOwner::Device(_) => Backing::Device,
            MemoryOwner::Shared(mapping) => {
                Backing::Shared { file: mapping.file().as_raw_fd(), offset: 0 }
            }
            MemoryOwner::File(_) => Backing::User,
        };
        self.enter(range, location, backing, Some(owner))
    }

    fn enter(
        &self,
        (base, length): (u64, u64),
        location: &str,
        backing: Backing,
        owner: Option<MemoryOwner>,
    ) -> Result<Arc<Region>> {
        let named =
            |error: Error| error.with("address", format_args!("{base:#x}")).with("length", length);
        if length == 0 {
            return Err(named(Error::invalid("the range is empty")));
        }
        let Some(end) = base.checked_add(length) else {
            return Err(named(Error::invalid("the range wraps around")));
        };
        let mut by_base = self.by_base.write();
        let before = by_base.range(..end).next_back();
        if before.is_some_and(|(_, other)| other.base + other.length > base) {
            let text = "the range overlaps a registered range";
            return Err(named(Error::new(ErrorCode::SEGMENT_ALREADY_EXISTS, text)));
        }
        let region = Arc::new(Region {
            base,
            length,
            location: location.to_owned(),
            backing,
            order: self.registered.fetch_add(1, Ordering::Relaxed),
            owner,
            uses: Uses::default(),
        });
        by_base.insert(base, Arc::clone(&region));
        Ok(region)
    }

    /// Removes the region that begins at `base` from the table, so that it accepts no new pins.
    /// Returns it, together with regions at the same address whose withdrawal failed before.
    ///
    /// # Errors
    /// No region begins there.
    pub(crate) fn withdraw(&self, base: u64) -> Result<Vec<Arc<Region>>> {
        let current = self.by_base.write().remove(&base);
        let is_here = |region: &mut Arc<Region>| region.base == base;
        let mut regions: Vec<_> = self.leaving.lock().extract_if(.., is_here).collect();
        regions.extend(current);
        if regions.is_empty() {
            let text = "no registered range begins there";
            return Err(Error::new(ErrorCode::SEGMENT_NOT_FOUND, text)
                .with("address", format_args!("{base:#x}")));
        }
        regions.iter().for_each(|region| region.uses.state.lock().is_withdrawn = true);
        Ok(regions)
    }

    /// Remembers user memory that is still in use after its withdrawal, so that the user can
    /// withdraw it again. Memory with an owner is kept by its users and needs no second attempt.
    pub(crate) fn keep_leaving(&self, regions: Vec<Arc<Region>>) {
        let user_memory = regions.into_iter().filter(|region| region.owner.is_none());
        self.leaving.lock().extend(user_memory);
    }

    /// Removes a region by its first address, and waits until its last pin is dropped.
    ///
    /// # Errors
    /// No region begins there, or it was still in use at the deadline. It accepts no new pins then,
    /// and the call can be repeated.
    #[cfg(test)]
    pub(crate) fn unregister(&self, base: u64, timeout: std::time::Duration) -> Result<()> {
        let regions = self.withdraw(base)?;
        let deadline = Instant::now() + timeout;
        let unused = regions.iter().try_for_each(|region| region.wait_unpinned(deadline));
        if unused.is_err() {
            self.keep_leaving(regions);
        }
        unused
    }

    /// Checks that the whole range lies in one region, and keeps that region registered.
    ///
    /// # Errors
    /// The range is not wholly in one region.
    pub fn pin(&self, range: RemoteRange) -> Result<Pin> {
        self.find(range).and_then(|region| region.pin(range)).ok_or_else(|| {
            Error::new(
                ErrorCode::TRANSFER_FAIL,
                "the address is not in a registered range of its owner",
            )
            .with("address", format_args!("{:#x}", range.address))
            .with("length", range.length)
        })
    }

    /// Returns the region that contains the whole range.
    pub fn find(&self, range: RemoteRange) -> Option<Arc<Region>> {
        let by_base = self.by_base.read();
        let (_, region) = by_base.range(..=range.address).next_back()?;
        region.holds(range).then(|| Arc::clone(region))
    }

    /// Holds each range that lies in a registered range of host memory and can be written; `None` for
    /// the others. Ranges that lie side by side are checked together.
    pub(crate) fn hold_all(&self, ranges: &[LocalRange]) -> Vec<Option<HeldRange>> {
        let pins: Vec<_> = ranges.iter().map(|range| self.pin_host(range)).collect();
        let mut order: Vec<_> = (0..ranges.len()).filter(|&at| pins[at].is_some()).collect();
        order.sort_unstable_by_key(|&at| ranges[at].address());
        let mut check = LastingCheck::default();
        let mut is_lasting = vec![false; ranges.len()];
        let end_of = |at: usize| ranges[at].address() + ranges[at].length();
        let are_neighbours = |&a: &usize, &b: &usize| {
            let end = end_of(a).checked_next_multiple_of(page_size());
            end.is_some_and(|end| ranges[b].address() <= end)
        };
        for run in order.chunk_by(are_neighbours) {
            let end = run.iter().map(|&at| end_of(at)).max().unwrap_or_default();
            let is_whole = check.is_lasting(ranges[run[0]].address()..end);
            for &at in run {
                is_lasting[at] =
                    is_whole || run.len() > 1 && check.is_lasting(ranges[at].address()..end_of(at));
            }
        }
        let pins = pins.into_iter().zip(is_lasting).zip(ranges);
        pins.map(|((pin, is_lasting), range)| {
            let (Some(pin), true) = (pin, is_lasting) else { return None };
            // SAFETY: it is mapped and writable. No references exist to bytes of a registered region,
            // and who registered it keeps it mapped until it is unregistered, for which the pin is
            // awaited.
            let range = unsafe { LocalRange::held(range.address() as *mut u8, range.length()) };
            Some(HeldRange { range, _pin: pin })
        })
        .collect()
    }

    /// Pins a range that lies in a registered range of host memory.
    fn pin_host(&self, range: &LocalRange) -> Option<Pin> {
        let (address, length) = (range.address() as u64, range.length() as u64);
        let wanted = RemoteRange { address, length };
        let region = self.find(wanted)?;
        match region.owner {
            Some(MemoryOwner::Device(_) | MemoryOwner::File(_)) => None,
            Some(MemoryOwner::Shared(_)) | None => region.pin(wanted),
        }
    }

    /// Returns all regions by address.
    pub fn all(&self) -> Vec<Arc<Region>> {
        self.by_base.read().values().cloned().collect()
    }
}

impl Region {
    /// Returns whether the region contains the whole range.
    pub fn holds(&self, range: RemoteRange) -> bool {
        let Some(offset) = range.address.checked_sub(self.base) else { return false };
        range.length <= self.length && offset <= self.length - range.length
    }

    /// Waits until the last pin of a withdrawn region is dropped.
    ///
    /// # Errors
    /// There are pins at the deadline.
    pub(crate) fn wait_unpinned(&self, deadline: Instant) -> Result<()> {
        let mut state = self.uses.state.lock();
        while state.pins > 0 {
            if self.uses.idle.wait_until(&mut state, deadline).timed_out() && state.pins > 0 {
                let text = "the range is still in use; unregister it again before its memory is \
                    freed";
                return Err(Error::new(ErrorCode::OBJECT_REPLICA_BUSY, text)
                    .with("address", format_args!("{:#x}", self.base))
                    .with("users", state.pins));
            }
        }
        Ok(())
    }

    /// The device that accesses the memory, if it is device memory.
    pub(crate) fn device(&self) -> Option<&DeviceMemory> {
        match &self.owner {
            Some(MemoryOwner::Device(device)) => Some(device),
            _ => None,
        }
    }

    /// The shared memory behind the region, if it is memory of the engine.
    pub(crate) fn mapping(&self) -> Option<&Arc<Mapping>> {
        match &self.owner {
            Some(MemoryOwner::Shared(mapping)) => Some(mapping),
            _ => None,
        }
    }

    /// A range of the region as local memory, for a copy that holds a pin.
    pub(crate) fn local_range(&self, range: RemoteRange) -> LocalRange {
        let (address, length) = (range.address as usize, range.length as usize);
        match &self.owner {
            Some(MemoryOwner::File(mapping)) => mapping.range(address, length),
            // SAFETY: no references exist to bytes of a registered region; registering requires
            // that.
            _ => unsafe { LocalRange::foreign(address, length) },
        }
    }

    fn pin(self: Arc<Self>, range: RemoteRange) -> Option<Pin> {
        let mut state = self.uses.state.lock();
        if state.is_withdrawn {
            return None;
        }
        state.pins += 1;
        drop(state);
        Some(Pin { region: self, range })
    }
}

impl Pin {
    /// First address of the pinned range.
    pub fn address(&self) -> *mut u8 {
        self.range.address as *mut u8
    }

    /// Length of the pinned range in bytes.
    pub fn length(&self) -> usize {
        self.range.length as usize
    }

    /// The region that contains the range.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

impl Clone for Pin {
    /// Succeeds while the region is being withdrawn, too: the withdrawal waits for the last pin.
    fn clone(&self) -> Self {
        self.region.uses.state.lock().pins += 1;
        Self { region: Arc::clone(&self.region), range: self.range }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.region.uses.state.lock();
        state.pins -= 1;
        if state.pins == 0 && state.is_withdrawn {
            self.region.uses.idle.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::transfer_entry::Ownership;

    fn range(address: u64, length: u64) -> RemoteRange {
        RemoteRange { address, length }
    }

    #[test]
    fn rejects_overlapping_ranges_and_accepts_adjacent_ones() {
        let regions = Regions::default();
        regions.register(100, 50, "*", Backing::User).unwrap();
        for (base, length) in [(100, 50), (149, 1), (99, 2), (0, 1000), (120, 5)] {
            assert!(regions.register(base, length, "*", Backing::User).is_err(), "{base}+{length}");
        }
        regions.register(150, 1, "*", Backing::User).unwrap();
        regions.register(99, 1, "*", Backing::User).unwrap();
        assert!(regions.register(7, 0, "*", Backing::User).is_err());
        assert!(regions.register(u64::MAX, 2, "*", Backing::User).is_err());
    }

    #[test]
    fn registered_memory_is_held_if_it_can_be_written() {
        let regions = Regions::default();
        let memory = vec![0_u8; 3 * 4096];
        let (base, length) = (memory.as_ptr() as u64, memory.len());
        // SAFETY: nothing is written to the range.
        let local = |address: u64, length| unsafe { LocalRange::foreign(address as usize, length) };
        let hold = |range| regions.hold_all(&[range]).remove(0);
        assert!(hold(local(base, length)).is_none(), "it is not registered");
        regions.register(base, length as u64, "*", Backing::User).unwrap();
        let held = hold(local(base + 1, length - 1)).unwrap();
        assert_eq!(held.range().ownership(), Ownership::Held);
        assert_eq!((held.range().address() as u64, held.range().length()), (base + 1, length - 1));
        assert!(hold(local(base, length + 1)).is_none(), "a byte too long");
        let region = regions.withdraw(base).unwrap().remove(0);
        assert!(region.wait_unpinned(Instant::now()).is_err(), "it is in use");
        drop(held);
        region.wait_unpinned(Instant::now()).unwrap();
        regions.register(4096, 4096, "*", Backing::User).unwrap();
        assert!(hold(local(4096, 100)).is_none(), "nothing is mapped there");
    }

    #[test]
    fn each_of_many_ranges_is_held_by_itself() {
        const PAGE: usize = 4096;
        let regions = Regions::default();
        let memory = vec![0_u8; 8 * PAGE];
        let base = memory.as_ptr().align_offset(PAGE) + memory.as_ptr() as usize;
        regions.register(base as u64, 4 * PAGE as u64, "*", Backing::User).unwrap();
        regions.register((base + 4 * PAGE) as u64, 2 * PAGE as u64, "*", Backing::User).unwrap();
        // Registered next to the others, and not mapped.
        regions.register(PAGE as u64, PAGE as u64, "*", Backing::User).unwrap();
        let ranges = [
            (base + 5 * PAGE, PAGE),
            (PAGE, 100),
            (base, 2 * PAGE),
            (base + 100, 10),
            (base + 2 * PAGE, PAGE - 1),
            // In two regions, and behind the last.
            (base + 3 * PAGE, 2 * PAGE),
            (base + 6 * PAGE, 1),
            (base + 4 * PAGE, 0),
        ];
        // SAFETY: nothing is written to the ranges.
        let local = ranges.map(|(at, length)| unsafe { LocalRange::foreign(at, length) });
        let held = regions.hold_all(&local);
        for (held, range) in held.iter().zip(&local) {
            let same = |held: &HeldRange| {
                (held.range.address(), held.range.length()) == (range.address(), range.length())
            };
            assert!(held.as_ref().is_none_or(same), "{held:?}");
        }
        let is_held: Vec<_> = held.iter().map(Option::is_some).collect();
        assert_eq!(is_held, [true, false, true, true, true, false, false, true]);
    }

    #[test]
    fn pin_needs_the_whole_range_in_one_region() {
        let regions = Regions::default();
        regions.register(100, 50, "*", Backing::User).unwrap();
        regions.register(150, 50, "*", Backing::User).unwrap();
        assert!(regions.pin(range(100, 50)).is_ok());
        assert!(regions.pin(range(149, 1)).is_ok());
        for (address, length) in [(99, 1), (140, 20), (200, 1), (100, 51), (100, u64::MAX)] {
            assert!(regions.pin(range(address, length)).is_err(), "{address}+{length}");
        }
    }

    #[test]
    fn unregister_waits_for_pins_and_accepts_no_new_ones() {
        let regions = Arc::new(Regions::default());
        regions.register(100, 50, "*", Backing::User).unwrap();
        let pin = regions.pin(range(100, 1)).unwrap();
        let late = regions.unregister(100, Duration::from_millis(1)).unwrap_err();
        assert!(late.to_string().contains("in use"), "{late}");
        assert_eq!(late.code(), ErrorCode::OBJECT_REPLICA_BUSY);
        assert!(regions.pin(range(100, 1)).is_err());
        assert!(regions.unregister(100, Duration::from_millis(1)).is_err(), "still in use");
        drop(pin);
        regions.unregister(100, Duration::ZERO).unwrap();
        let none = regions.unregister(100, Duration::ZERO).unwrap_err();
        assert_eq!(none.code(), ErrorCode::SEGMENT_NOT_FOUND);
        regions.register(100, 50, "*", Backing::User).unwrap();
        let pin = regions.pin(range(120, 1)).unwrap();
        let other = Arc::clone(&regions);
        let waiter = std::thread::spawn(move || other.unregister(100, Duration::from_secs(60)));
        while regions.pin(range(100, 1)).is_ok() {}
        drop(pin);
        assert!(waiter.join().unwrap().is_ok());
    }
}
