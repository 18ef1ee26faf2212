//! Memory of CUDA devices: recognised by asking the driver, and moved through pinned memory.
//!
//! The driver is a library that is loaded at run time. A process that has device memory has loaded
//! it already, so an engine only looks whether it is there, and loads it by itself only for who
//! names a stream.

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
    transfer_entry::{Opcode, Ownership, TransferEntry},
};

/// Where parts begin in a buffer: at multiples of this.
const ALIGNMENT: usize = 64;

/// A stream of a CUDA device, by the number that the caller's library knows it by.
///
/// Zero is the default stream of the device. The stream must exist for as long as it is used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(pub usize);

impl Stream {
    /// The default stream.
    pub const DEFAULT: Self = Self(0);
}

/// The driver of an engine, from when it is found.
#[derive(Debug)]
pub(crate) struct Devices {
    file: PathBuf,
    /// Held by whoever looks for it.
    search: Mutex<()>,
    cuda: OnceLock<Arc<Cuda>>,
}

/// A driver that works, with memory through which bytes go.
pub(crate) struct Cuda {
    driver: Arc<Driver>,
    pool: Arc<PinnedPool>,
}

/// A stretch of a entry that goes through the buffer together with others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StagedPart {
    /// Whose, by its place in the batch.
    pub(crate) entry: usize,
    /// Where it begins, in the entry.
    pub(crate) from: usize,
    /// Where it lies, in the buffer.
    pub(crate) at: usize,
    /// How long it is.
    pub(crate) length: usize,
    /// The device whose memory it is.
    pub(crate) device: Ordinal,
}

impl Devices {
    /// With the file name of the driver's library.
    pub(crate) fn new(file: PathBuf) -> Self {
        Self { file, search: Mutex::default(), cuda: OnceLock::new() }
    }

    /// The driver, if it was found before.
    pub(crate) fn known(&self) -> Option<&Arc<Cuda>> {
        self.cuda.get()
    }

    /// The driver, if this process has loaded it.
    pub(crate) fn find_loaded(&self) -> Option<&Arc<Cuda>> {
        self.find(Driver::loaded).unwrap_or_else(|error| {
            tracing::debug!(%error, "the CUDA driver is there and cannot be used");
            None
        })
    }

    /// The driver, loaded if it was not.
    ///
    /// # Errors
    /// There is none, or it finds no device.
    pub(crate) fn load(&self) -> Result<&Arc<Cuda>> {
        let found = self.find(|file| Driver::load(file).map(Some))?;
        found.ok_or_else(|| Error::internal("a driver was loaded and is not there"))
    }

    /// The device that a whole range belongs to, if to one.
    ///
    /// # Errors
    /// Only a part of it does.
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
    /// Which device an address belongs to, if to one.
    pub(crate) fn owner(&self, address: u64) -> Option<Ordinal> {
        self.driver.owner(address)
    }

    /// For each entry that is still to be moved, the device whose memory its local side is; nothing
    /// if none is. What is known to be mapped here is not asked for.
    pub(crate) fn owners(&self, entries: &[TransferEntry]) -> Option<Vec<Option<Ordinal>>> {
        let owner = |entry: &TransferEntry| {
            let is_asked = entry.outcome.is_none() && entry.local.ownership() == Ownership::Foreign;
            is_asked.then(|| self.owner(entry.local.address() as u64)).flatten()
        };
        let first = entries.iter().position(|entry| owner(entry).is_some())?;
        let rest = entries[first..].iter().map(owner);
        Some(std::iter::repeat_n(None, first).chain(rest).collect())
    }

    /// Waits until everything that was given to a stream is done.
    ///
    /// # Errors
    /// Something of it has failed, or there is no such stream.
    pub(crate) fn synchronize(&self, stream: Stream) -> Result<()> {
        let current = self.driver.push_context(stream, None)?;
        current.synchronize(stream)
    }

    /// A buffer through which memory of that device can go.
    ///
    /// # Errors
    /// All are taken until the deadline, or the driver has none to give.
    pub(crate) fn buffer(&self, device: Ordinal, deadline: Moment) -> Result<PinnedBuffer> {
        self.pool.take(device, deadline)
    }

    /// How full the pool of those buffers is.
    pub(crate) fn pinned(&self) -> PoolSnapshot {
        self.pool.snapshot()
    }

    /// Copies parts between their entries' device memory and the buffer: to the buffer for
    /// [`Opcode::Write`]. Done after what was given to the stream before, and when it returns.
    ///
    /// # Errors
    /// The driver refuses one of them; others may have been copied.
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
            // Also after a failure: what was begun must have left the buffer.
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

/// What one filling of a buffer takes, beginning at a place of a batch: a entry and an offset in it.
/// Moves the place on; nothing is left if there are no parts.
pub(crate) fn fill_buffer(
    entries: &[TransferEntry],
    owners: &[Option<Ordinal>],
    place: &mut (usize, usize),
) -> Vec<StagedPart> {
    let (mut parts, mut at) = (Vec::new(), 0);
    while place.0 < entries.len() && at < BUFFER_BYTES {
        let (entry, from) = *place;
        let open = owners[entry].filter(|_| entries[entry].outcome.is_none());
        let Some(device) = open else {
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
