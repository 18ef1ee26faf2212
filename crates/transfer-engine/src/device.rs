//! Memory of CUDA devices: recognised by asking the driver, and moved through pinned memory.
//!
//! The driver is a library that is loaded at run time. A process that has device memory has loaded
//! the driver already, so an engine only checks for a loaded driver. It loads the driver by itself
//! only when the caller names a stream.

mod driver;
mod exported;
mod pinned;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, Moment, Result};

pub(crate) use self::{
    driver::Ordinal,
    exported::{DeviceCopy, DeviceMemory},
    pinned::{BUFFER_BYTES, PinnedBuffer},
};
use self::{
    driver::{Direction, Driver},
    pinned::PinnedPool,
};
use crate::{
    metrics::PoolSnapshot,
    transfer_entry::{LocalRange, Opcode, Ownership, TransferEntry},
};

/// Alignment of parts in a buffer.
const ALIGNMENT: usize = 64;

/// A stream of a CUDA device, by the handle of the caller's library.
///
/// Zero is the default stream of the device. The stream must exist while it is used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(pub usize);

impl Stream {
    /// The default stream.
    pub const DEFAULT: Self = Self(0);
}

/// The CUDA driver of an engine, once it is found.
#[derive(Debug)]
pub(crate) struct Devices {
    file: PathBuf,
    /// Held while a thread looks for the driver.
    search: Mutex<()>,
    cuda: OnceLock<Arc<Cuda>>,
}

/// A working driver, with its pool of pinned buffers.
pub(crate) struct Cuda {
    driver: Arc<Driver>,
    pool: Arc<PinnedPool>,
}

/// A part of an entry that shares a pinned buffer with other parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StagedPart {
    /// Index of the entry in the batch.
    pub(crate) entry: usize,
    /// Offset of the part in the entry.
    pub(crate) from: usize,
    /// Offset of the part in the buffer.
    pub(crate) at: usize,
    pub(crate) length: usize,
    /// The device that owns the memory.
    pub(crate) device: Ordinal,
}

impl Devices {
    /// Creates the lookup with the file name of the driver library.
    pub(crate) fn new(file: PathBuf) -> Self {
        Self { file, search: Mutex::default(), cuda: OnceLock::new() }
    }

    /// Returns the driver, if it was found before.
    pub(crate) fn known(&self) -> Option<&Arc<Cuda>> {
        self.cuda.get()
    }

    /// Returns the driver, if this process has loaded it.
    pub(crate) fn find_loaded(&self) -> Option<&Arc<Cuda>> {
        self.find(Driver::loaded).unwrap_or_else(|error| {
            tracing::debug!(%error, "the CUDA driver is loaded but cannot be used");
            None
        })
    }

    /// Returns the driver, and loads it if necessary.
    ///
    /// # Errors
    /// There is no driver, or it finds no device.
    pub(crate) fn load(&self) -> Result<&Arc<Cuda>> {
        let found = self.find(|file| Driver::load(file).map(Some))?;
        found.ok_or_else(|| Error::internal("a loaded driver is not registered"))
    }

    /// Returns the device that a whole range belongs to, if any.
    ///
    /// # Errors
    /// Only a part of the range belongs to a device.
    pub(crate) fn memory(&self, address: u64, length: u64) -> Result<Option<DeviceMemory>> {
        match self.find_loaded() {
            Some(cuda) => DeviceMemory::of(cuda, address, length),
            None => Ok(None),
        }
    }

    fn find(
        &self,
        open: impl FnOnce(&Path) -> Result<Option<Driver>>,
    ) -> Result<Option<&Arc<Cuda>>> {
        if let Some(cuda) = self.known() {
            return Ok(Some(cuda));
        }
        let _search = self.search.lock();
        if self.known().is_none()
            && let Some(driver) = open(&self.file)?
        {
            let driver = Arc::new(driver);
            let pool = Arc::new(PinnedPool::new(Arc::clone(&driver)));
            self.cuda.get_or_init(|| Arc::new(Cuda { driver, pool }));
        }
        Ok(self.known())
    }
}

impl Cuda {
    /// Returns the device that an address belongs to, if any.
    pub(crate) fn owner(&self, address: u64) -> Option<Ordinal> {
        self.driver.owner(address)
    }

    /// Returns this driver and the device that owns local memory, if a device does. Held ranges are
    /// known to be host memory and are not looked up.
    pub(crate) fn owner_of(&self, range: &LocalRange) -> Option<(&Self, Ordinal)> {
        let is_asked = range.ownership() == Ownership::Foreign;
        is_asked.then(|| self.owner(range.address() as u64)).flatten().map(|device| (self, device))
    }

    /// Returns, for each open entry, the device that owns its local memory; `None` if no entry has
    /// device memory. Held ranges are known to be host memory and are not looked up.
    pub(crate) fn owners(&self, entries: &[TransferEntry]) -> Option<Vec<Option<Ordinal>>> {
        let owner = |entry: &TransferEntry| {
            let local = entry.outcome.is_none().then_some(&entry.local)?;
            self.owner_of(local).map(|(_, device)| device)
        };
        let first = entries.iter().position(|entry| owner(entry).is_some())?;
        let rest = entries[first..].iter().map(owner);
        Some(std::iter::repeat_n(None, first).chain(rest).collect())
    }

    /// Waits until all work queued on a stream is done.
    ///
    /// # Errors
    /// Some of that work has failed, or there is no such stream.
    pub(crate) fn synchronize(&self, stream: Stream) -> Result<()> {
        let current = self.driver.push_context(stream, None)?;
        current.synchronize(stream)
    }

    /// Waits until all work queued so far is done on a stream of a device.
    ///
    /// # Errors
    /// Some of that work has failed, or there is no such stream.
    pub(crate) fn synchronize_on(&self, stream: Stream, device: Ordinal) -> Result<()> {
        let current = self.driver.push_context(stream, Some(device))?;
        current.synchronize(stream)
    }

    /// Takes a pinned buffer for copies from and to a device.
    ///
    /// # Errors
    /// All buffers are in use until the deadline, or the driver cannot allocate one.
    pub(crate) fn buffer(&self, device: Ordinal, deadline: Moment) -> Result<PinnedBuffer> {
        self.pool.take(device, deadline)
    }

    /// Shows the bytes of device memory to `look`, one bufferful at a time and in order. The copies
    /// run after earlier work of the default stream.
    ///
    /// # Errors
    /// All buffers are in use until the deadline, or the driver refuses a copy.
    pub(crate) fn read(
        &self,
        device: Ordinal,
        range: LocalRange,
        deadline: Moment,
        mut look: impl FnMut(&[u8]),
    ) -> Result<()> {
        let buffer = self.buffer(device, deadline)?;
        let mut done = 0;
        while done < range.length() {
            let length = BUFFER_BYTES.min(range.length() - done);
            let current = self.driver.push_context(Stream::DEFAULT, Some(device))?;
            let (from, to) = (range.part(done, length), buffer.range(0, length));
            let copied = current.copy(Direction::ToHost, from, to, Stream::DEFAULT);
            let synchronized = current.synchronize(Stream::DEFAULT);
            copied.and(synchronized)?;
            buffer.with_bytes(length, &mut look);
            done += length;
        }
        Ok(())
    }

    /// Usage of the pool of pinned buffers.
    pub(crate) fn pinned(&self) -> PoolSnapshot {
        self.pool.snapshot()
    }

    /// Copies parts between device memory and the buffer: into the buffer for [`Opcode::Write`].
    /// The copies run after earlier work of the stream and are done when this returns.
    ///
    /// # Errors
    /// The driver refuses a copy; other parts may have been copied.
    pub(crate) fn copy(
        &self,
        opcode: Opcode,
        parts: &[StagedPart],
        entries: &[TransferEntry],
        buffer: &PinnedBuffer,
        stream: Stream,
    ) -> Result<()> {
        let direction = match opcode {
            Opcode::Write => Direction::ToHost,
            Opcode::Read => Direction::ToDevice,
        };
        for run in parts.chunk_by(|one, other| one.device == other.device) {
            let current = self.driver.push_context(stream, Some(run[0].device))?;
            let copied = run.iter().try_for_each(|part| {
                let device = entries[part.entry].local.part(part.from, part.length);
                current.copy(direction, device, buffer.range(part.at, part.length), stream)
            });
            // Synchronize after a failure, too: started copies must have left the buffer.
            let synchronized = current.synchronize(stream);
            copied.and(synchronized)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("driver", &self.driver).finish_non_exhaustive()
    }
}

/// Chooses the parts that fill one buffer, starting at a cursor into the batch (an entry and an
/// offset in it), and advances the cursor. Returns no parts when nothing is left.
pub(crate) fn fill_buffer(
    entries: &[TransferEntry],
    owners: &[Option<Ordinal>],
    place: &mut (usize, usize),
) -> Vec<StagedPart> {
    let (mut parts, mut at) = (Vec::new(), 0);
    while place.0 < entries.len() && at < BUFFER_BYTES {
        let (entry, from) = *place;
        let (Some(device), true) = (owners[entry], entries[entry].outcome.is_none()) else {
            *place = (entry + 1, 0);
            continue;
        };
        let left = entries[entry].local.length() - from;
        let length = left.min(BUFFER_BYTES - at);
        parts.push(StagedPart { entry, from, at, length, device });
        at = (at + length).next_multiple_of(ALIGNMENT);
        *place = if length == left { (entry + 1, 0) } else { (entry, from + length) };
    }
    parts
}
