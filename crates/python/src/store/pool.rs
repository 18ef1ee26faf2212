//! Memory of a guest that is handed out by address, and taken back all at once.

use std::collections::BTreeMap;

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, Result};
use mooncake_transfer_engine::{Engine, SharedMemory};

/// What handed out memory is aligned to: a page.
const ALIGNMENT: u64 = 4096;

/// Memory that is handed out piece by piece.
#[derive(Debug)]
pub(crate) struct Pool {
    memory: Option<SharedMemory>,
    used: Mutex<u64>,
    /// Parts that the caller registered, as lengths by addresses. The engine knows all of the memory
    /// from the start.
    registered: Mutex<BTreeMap<u64, u64>>,
}

impl Pool {
    /// So much memory, known to the engine. It takes room as it is written.
    ///
    /// # Errors
    /// The system has no such memory.
    pub(crate) fn new(engine: &Engine, bytes: u64) -> Result<Self> {
        let memory = (bytes > 0).then(|| engine.allocate(bytes)).transpose()?;
        Ok(Self { memory, used: Mutex::default(), registered: Mutex::default() })
    }

    /// Takes note of a part that is registered. `false`: it is no part of this memory.
    ///
    /// # Errors
    /// It overlaps with one that is registered, or is empty.
    pub(crate) fn register(&self, address: u64, length: u64) -> Result<bool> {
        if !self.holds(address, length) {
            return Ok(false);
        }
        let end = address + length;
        let mut registered = self.registered.lock();
        let before = registered.range(..end).next_back();
        if length == 0 || before.is_some_and(|(first, length)| first + length > address) {
            return Err(Error::invalid(
                "the buffer is empty, or overlaps with one that is registered",
            )
            .with("address", format_args!("{address:#x}"))
            .with("length", length));
        }
        registered.insert(address, length);
        Ok(true)
    }

    /// Forgets a part that was registered, by its first address. `false`: it is no part of this
    /// memory.
    ///
    /// # Errors
    /// Nothing was registered there.
    pub(crate) fn unregister(&self, address: u64) -> Result<bool> {
        if !self.holds(address, 1) {
            return Ok(false);
        }
        match self.registered.lock().remove(&address) {
            Some(_) => Ok(true),
            None => Err(Error::invalid("no buffer is registered there")
                .with("address", format_args!("{address:#x}"))),
        }
    }

    /// The address of so many bytes that nobody was given yet.
    ///
    /// # Errors
    /// So much is not left.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut used = self.used.lock();
        let (base, length) =
            self.memory.as_ref().map_or((0, 0), |memory| (memory.base(), memory.length()));
        let end = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|room| used.checked_add(room));
        match end {
            _ if bytes == 0 => Err(Error::invalid("there is no memory of no bytes")),
            // The last piece need not fill its pages.
            Some(end) if *used + bytes <= length => {
                let address = base + *used;
                *used = end.min(length);
                Ok(address)
            }
            _ => Err(Error::invalid("the memory pool has not so much left")
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
