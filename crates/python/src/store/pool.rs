//! The memory pool of a dummy client: a bump allocator whose memory is freed as a whole.

use std::collections::BTreeMap;

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, Result};
use mooncake_transfer_engine::{Engine, RemoteRange, SharedMemory};

/// Alignment of allocations: a page.
const ALIGNMENT: u64 = 4096;

/// Memory that is allocated from front to back.
#[derive(Debug)]
pub(crate) struct Pool {
    memory: Option<SharedMemory>,
    used: Mutex<u64>,
    /// Ranges that the caller registered, as lengths by address. The engine knows the whole memory
    /// from the start, so registration is only recorded here.
    registered: Mutex<BTreeMap<u64, u64>>,
}

impl Pool {
    /// Makes a pool of `bytes`, known to the engine. Pages take physical memory when they are
    /// written.
    ///
    /// # Errors
    /// The system has no such memory.
    pub(crate) fn new(engine: &Engine, bytes: u64) -> Result<Self> {
        let memory = (bytes > 0).then(|| engine.allocate(bytes)).transpose()?;
        Ok(Self { memory, used: Mutex::default(), registered: Mutex::default() })
    }

    /// Records a registered range. Returns `false` if it is outside of this memory.
    ///
    /// # Errors
    /// The range is empty, or overlaps a registered one.
    pub(crate) fn register(&self, address: u64, length: u64) -> Result<bool> {
        if !self.holds(address, length) {
            return Ok(false);
        }
        let end = address + length;
        let mut registered = self.registered.lock();
        let before = registered.range(..end).next_back();
        if length == 0 || before.is_some_and(|(first, length)| first + length > address) {
            return Err(Error::invalid("the buffer is empty, or overlaps a registered buffer")
                .with("address", format_args!("{address:#x}"))
                .with("length", length));
        }
        registered.insert(address, length);
        Ok(true)
    }

    /// Removes a registered range by its first address. Returns `false` if the address is outside
    /// of this memory.
    ///
    /// # Errors
    /// No range is registered at that address.
    pub(crate) fn unregister(&self, address: u64) -> Result<bool> {
        if !self.holds(address, 1) {
            return Ok(false);
        }
        match self.registered.lock().remove(&address) {
            Some(_) => Ok(true),
            None => Err(Error::invalid("no buffer is registered at that address")
                .with("address", format_args!("{address:#x}"))),
        }
    }

    /// Returns the registered range that contains the address.
    pub(crate) fn buffer_at(&self, address: u64) -> Option<RemoteRange> {
        let registered = self.registered.lock();
        let (&first, &length) = registered.range(..=address).next_back()?;
        (address - first < length).then_some(RemoteRange { address: first, length })
    }

    /// Allocates `bytes`; returns the address.
    ///
    /// # Errors
    /// The pool has not enough memory left.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut used = self.used.lock();
        let (base, length) =
            self.memory.as_ref().map_or((0, 0), |memory| (memory.base(), memory.length()));
        let end = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|room| used.checked_add(room));
        match end {
            _ if bytes == 0 => Err(Error::invalid("the size to allocate is 0")),
            // The last allocation may end within a page.
            Some(end) if *used + bytes <= length => {
                let address = base + *used;
                *used = end.min(length);
                Ok(address)
            }
            _ => Err(Error::invalid("the memory pool is exhausted")
                .with("bytes", bytes)
                .with("left", length - *used)),
        }
    }

    fn holds(&self, address: u64, length: u64) -> bool {
        self.memory.as_ref().is_some_and(|memory| {
            let offset = address.checked_sub(memory.base());
            offset
                .and_then(|offset| offset.checked_add(length))
                .is_some_and(|end| end <= memory.length())
        })
    }
}
