//! Registered memory, shared memory that peers of the same host can map, and mapped files.

mod address_quarantine;
pub(crate) mod exported_memory;
pub(crate) mod file;
pub(crate) mod mapping;
pub(crate) mod prefault;
pub mod region;

use std::{fmt, sync::Arc};

use mooncake_base::{Error, Result};

pub use self::{
    file::FileMemory,
    mapping::HugePages,
    region::{HeldRange, Region, Regions},
};
use crate::{
    memory::{
        file::FileMapping,
        mapping::{Mapping, open_gate},
    },
    transfer_entry::LocalRange,
};

/// Shared memory that stays registered with an engine while this lives.
///
/// Dropping it withdraws the memory from every peer and waits, up to the engine's
/// `withdraw_timeout`, until each peer has confirmed or is gone.
pub struct SharedMemory {
    mapping: Arc<Mapping>,
    withdraw: Option<Box<dyn FnOnce(u64) + Send + Sync>>,
}

impl SharedMemory {
    /// Allocates memory; falls back to pages of the usual size with a warning if no huge pages are
    /// available.
    pub(crate) fn create(length: u64, huge: Option<HugePages>) -> Result<Self> {
        let huge = huge.and_then(|huge| {
            Mapping::create(length, Some(huge))
                .inspect_err(|error| {
                    tracing::warn!(%error, "no huge pages, using pages of the usual size");
                })
                .ok()
        });
        let mapping = match huge {
            Some(mapping) => mapping,
            None => Mapping::create(length, None)?,
        };
        Ok(Self { mapping: Arc::new(mapping), withdraw: None })
    }

    /// Sets the hook that runs, with the first address, before the memory is unmapped.
    pub(crate) fn on_drop(&mut self, withdraw: impl FnOnce(u64) + Send + Sync + 'static) {
        self.withdraw = Some(Box::new(withdraw));
    }

    pub(crate) const fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Keeps the memory mapped beyond the life of this object.
    pub fn hold(&self) -> MemoryHold {
        MemoryHold { owner: HoldOwner::Shared(Arc::clone(&self.mapping)) }
    }

    /// First address in this process, by which peers address the memory.
    pub fn base(&self) -> u64 {
        self.mapping.base()
    }

    /// Length in bytes, rounded up to whole pages.
    pub fn length(&self) -> u64 {
        self.mapping.length()
    }

    /// Copies bytes into the memory.
    ///
    /// # Errors
    /// The bytes do not fit behind `offset`, or the system has no memory left.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the slice outlives the call, which only reads it.
        let from = unsafe { LocalRange::held(bytes.as_ptr().cast_mut(), bytes.len()) };
        self.mapping.write(usize::try_from(offset).unwrap_or(usize::MAX), from, &open_gate)
    }

    /// Copies bytes out of the memory.
    ///
    /// # Errors
    /// The memory is too short behind `offset`.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the slice outlives the call and is borrowed exclusively.
        let to = unsafe { LocalRange::held(bytes.as_mut_ptr(), bytes.len()) };
        self.mapping.read(usize::try_from(offset).unwrap_or(usize::MAX), to, &open_gate)
    }
}

/// Keeps memory of an engine mapped while this lives, also after the memory was withdrawn and its
/// [`SharedMemory`] or [`FileMemory`] was dropped.
#[derive(Debug, Clone)]
pub struct MemoryHold {
    owner: HoldOwner,
}

#[derive(Debug, Clone)]
enum HoldOwner {
    Shared(Arc<Mapping>),
    File(Arc<FileMapping>),
}

impl MemoryHold {
    pub(crate) fn file(mapping: &Arc<FileMapping>) -> Self {
        Self { owner: HoldOwner::File(Arc::clone(mapping)) }
    }

    /// Returns a part of the memory as the local side of a transfer. The caller keeps this object
    /// until the transfer has returned.
    ///
    /// # Errors
    /// The part is not inside the memory.
    pub fn range(&self, offset: u64, length: u64) -> Result<LocalRange> {
        let (base, bytes) = match &self.owner {
            HoldOwner::Shared(mapping) => (mapping.base() as usize, mapping.length() as usize),
            HoldOwner::File(mapping) => mapping.bounds(),
        };
        if length > bytes as u64 || offset > bytes as u64 - length {
            return Err(Error::invalid("the range is not inside the memory")
                .with("offset", offset)
                .with("length", length)
                .with("memory_bytes", bytes));
        }
        let (address, length) = (base + offset as usize, length as usize);
        Ok(match &self.owner {
            // SAFETY: the mapping is held by the caller, and no reference into it is ever created.
            HoldOwner::Shared(_) => unsafe { LocalRange::foreign(address, length) },
            HoldOwner::File(mapping) => mapping.range(address, length),
        })
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory")
            .field("base", &format_args!("{:#x}", self.base()))
            .field("length", &self.length())
            .finish_non_exhaustive()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if let Some(withdraw) = self.withdraw.take() {
            withdraw(self.base());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn addresses_of_dropped_memory_are_not_reused_for_a_while() {
        let old: Vec<_> = (0..8).map(|_| SharedMemory::create(1 << 20, None).unwrap()).collect();
        let resting: Vec<u64> = old.iter().map(SharedMemory::base).collect();
        drop(old);
        let new: Vec<_> = (0..16).map(|_| SharedMemory::create(1 << 20, None).unwrap()).collect();
        for memory in &new {
            assert!(!resting.contains(&memory.base()), "{memory:?}");
        }
    }

    #[test]
    fn prefers_an_existing_numa_node_and_rejects_others() {
        let memory = SharedMemory::create(4 << 20, None).unwrap();
        // A container may not be permitted to call mbind; then both calls fail.
        if memory.mapping.prefer_node(0).is_ok() {
            memory.write(0, b"here").unwrap();
            assert!(memory.mapping.prefer_node(63).is_err());
        }
        assert!(memory.mapping.prefer_node(64).is_err());
    }

    #[test]
    fn reads_back_writes_before_and_after_a_chunk_is_mapped() {
        let memory = SharedMemory::create(5 << 20, None).unwrap();
        assert_eq!(memory.length(), 5 << 20);
        let mut back = vec![0; 3 << 20];
        for round in 0..4_u8 {
            let bytes: Vec<u8> = (0..3 << 20).map(|i| (i % 249) as u8 ^ round).collect();
            memory.write(1_000_001, &bytes).unwrap();
            memory.read(1_000_001, &mut back).unwrap();
            assert!(back == bytes, "round {round}");
        }
        let mut edge = [1; 1];
        memory.read(1_000_000, &mut edge).unwrap();
        assert_eq!(edge, [0]);
        memory.write((5 << 20) - 1, &[9]).unwrap();
        assert!(memory.write(5 << 20, &[9]).is_err());
        assert!(memory.write(u64::MAX, &[9]).is_err());
        assert!(memory.read((5 << 20) - 1, &mut [0; 2]).is_err());
    }

    #[test]
    fn rejects_bad_local_memory_before_and_after_a_chunk_is_mapped() {
        let memory = SharedMemory::create(4 << 20, None).unwrap();
        // SAFETY: nothing is mapped at this address, so there is no reference to it.
        let bad = |length| unsafe { LocalRange::foreign(8, length) };
        for _ in 0..2 {
            for length in [1, 100_000, 4 << 20] {
                assert!(memory.mapping.write(0, bad(length), &open_gate).is_err());
                assert!(memory.mapping.read(0, bad(length), &open_gate).is_err());
            }
            memory.write(0, &vec![1; 4 << 20]).unwrap();
            memory.write(0, &vec![1; 4 << 20]).unwrap();
        }
    }

    #[test]
    fn second_mapping_sees_the_same_bytes_and_the_size_is_sealed() {
        let memory = SharedMemory::create(3 << 20, None).unwrap();
        let file = memory.mapping.file().try_clone_to_owned().unwrap();
        assert!(std::fs::File::from(file.try_clone().unwrap()).set_len(4096).is_err());
        let other = Mapping::attach(file, 3 << 20, false).unwrap();
        memory.write(77, b"hello").unwrap();
        let mut bytes = [0; 5];
        // SAFETY: the array outlives the call.
        let to = unsafe { LocalRange::held(bytes.as_mut_ptr(), 5) };
        other.read(77, to, &open_gate).unwrap();
        assert_eq!(&bytes, b"hello");
    }

    #[test]
    fn rejects_unsealed_or_too_small_memory() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let error = Mapping::attach(file.as_fd().try_clone_to_owned().unwrap(), 1 << 20, false);
        assert!(error.unwrap_err().to_string().contains("not sealed"));
        let memory = SharedMemory::create(1 << 20, None).unwrap();
        let file = memory.mapping.file().try_clone_to_owned().unwrap();
        let error = Mapping::attach(file, (1 << 20) + 1, false).unwrap_err();
        assert!(error.to_string().contains("smaller"), "{error}");
    }

    #[test]
    fn rejects_impossible_lengths() {
        for length in [0, u64::MAX, 1 << 63, 1 << 60] {
            assert!(SharedMemory::create(length, None).is_err(), "{length}");
        }
    }

    #[test]
    fn falls_back_to_usual_pages_without_huge_pages() {
        let memory = SharedMemory::create(100, Some(HugePages::TwoMiB)).unwrap();
        memory.write(99, &[5]).unwrap();
        let mut back = [0; 1];
        memory.read(99, &mut back).unwrap();
        assert_eq!(back, [5]);
    }
}
