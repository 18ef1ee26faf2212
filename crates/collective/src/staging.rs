//! Contributions to collective operations in memory that peers map on this host, or read from another.
//!
//! A member copies a large contribution into a buffer, and names the buffer to the others. Once all
//! members have their data, each writes its result straight from the buffer. That is one copy at each
//! side, both past the caches; lent memory costs a copy by the kernel, and another one for the result. A
//! buffer that a receiver has mapped outlives its maker, so that the receiver has its data.
//!
//! If both sides have a [`Fabric`], peers of other hosts read the buffer through it, into a buffer of
//! their own.
//!
//! A buffer is used again when all members have begun a later operation of the same view, since they
//! have written their results by then. After a change of the view it is not: a member that was removed
//! may still write from it.
#![allow(unsafe_code, reason = "memory that other processes map")]

pub(crate) mod peer_buffers;

use std::{
    io, slice,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use mooncake_base::{Error, Result, sync::Mutex, token::nonce};

use crate::{fabric::Fabric, memory::copy_large, shared_memory::SharedMemory};

/// From this size on, a contribution is staged: the result is written by one copy less.
pub(crate) const STAGED_BYTES_MIN: usize = 256 << 10;
/// Most memory of a process that holds contributions. What does not fit is lent.
const STAGED_BYTES_MAX: usize = 256 << 20;
/// Sizes of buffers are multiples of this.
const UNIT: usize = 1 << 20;
/// The page at the start of a buffer, with its number.
const HEAD_BYTES: usize = 4096;

/// Where a peer finds a contribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StagedPlace {
    /// Number of the buffer, which also stands in the buffer.
    pub(crate) buffer: u64,
    /// The descriptor of the buffer in the process that made it.
    pub(crate) descriptor: u64,
    /// Buffers with smaller numbers do not exist any more.
    pub(crate) oldest: u64,
}

/// Memory for contributions of one process.
#[derive(Debug, Default)]
pub(crate) struct StagingMemory {
    buffers: Mutex<StagingBuffers>,
    /// Reads memory of other hosts, and lets them read this memory.
    fabric: Option<Arc<dyn Fabric>>,
}

#[derive(Debug, Default)]
struct StagingBuffers {
    free: Vec<Numbered>,
    /// Numbers of all buffers, in the order in which they were made.
    numbers: Vec<u64>,
    bytes: usize,
}

#[derive(Debug)]
struct Numbered {
    number: u64,
    memory: SharedMemory,
    /// Where the memory is registered.
    fabric: Option<Arc<dyn Fabric>>,
}

/// A buffer with a contribution. The drop gives its memory back to the system.
#[derive(Debug)]
pub(crate) struct StagedBuffer {
    buffer: Option<Numbered>,
    length: usize,
    stage: Arc<StagingMemory>,
}

impl StagingMemory {
    pub(crate) fn new(fabric: Option<Arc<dyn Fabric>>) -> Self {
        Self { buffers: Mutex::default(), fabric }
    }

    /// Returns what reads memory of other hosts.
    pub(crate) fn fabric(&self) -> Option<&Arc<dyn Fabric>> {
        self.fabric.as_ref()
    }

    /// Copies a contribution into a buffer; `None` if there is no memory for it.
    pub(crate) fn put(self: &Arc<Self>, bytes: &[u8]) -> Option<StagedBuffer> {
        let buffer = Some(self.take(bytes.len(), STAGED_BYTES_MAX).ok()??);
        let staged = StagedBuffer { buffer, length: bytes.len(), stage: Arc::clone(self) };
        // SAFETY: the buffer has at least this length, peers only read it, and none reads these bytes
        // before it is told of them.
        unsafe { copy_large(bytes.as_ptr() as usize, staged.start()?, bytes.len()) };
        Some(staged)
    }

    /// Returns a buffer for bytes of a peer, whose bytes are those of an earlier use.
    ///
    /// # Errors
    /// The system gives no memory.
    pub(crate) fn buffer(self: &Arc<Self>, length: usize) -> Result<StagedBuffer> {
        let buffer = self.take(length, usize::MAX)?;
        Ok(StagedBuffer { buffer, length, stage: Arc::clone(self) })
    }

    /// Takes a buffer, if that leaves all buffers within a limit.
    fn take(&self, length: usize, bytes_max: usize) -> Result<Option<Numbered>> {
        let size = HEAD_BYTES + length.next_multiple_of(UNIT);
        let mut buffers = self.buffers.lock();
        let fits = buffers.free.iter().enumerate().filter(|(_, it)| it.memory.length() >= size);
        let smallest = fits.min_by_key(|(_, it)| it.memory.length()).map(|(index, _)| index);
        if let Some(index) = smallest {
            return Ok(Some(buffers.free.swap_remove(index)));
        }
        while buffers.bytes + size > STAGED_BYTES_MAX
            && let Some(free) = buffers.free.pop()
        {
            buffers.forget(&free);
        }
        if buffers.bytes + size > bytes_max {
            return Ok(None);
        }
        let created = Numbered::create(size, self.fabric.as_ref()).map_err(|error| {
            let text = "there is no shared memory for a collective operation";
            Error::invalid(text).with("bytes", size).caused_by(error)
        })?;
        buffers.numbers.push(created.number);
        buffers.bytes += size;
        Ok(Some(created))
    }
}

impl StagingBuffers {
    fn forget(&mut self, buffer: &Numbered) {
        self.numbers.retain(|number| *number != buffer.number);
        self.bytes -= buffer.memory.length();
    }
}

impl Numbered {
    fn create(size: usize, fabric: Option<&Arc<dyn Fabric>>) -> io::Result<Self> {
        let memory = SharedMemory::create(size)?;
        let number = next_number();
        head_of(&memory).store(number, Ordering::SeqCst);
        let address = memory.memory().as_ptr() as u64;
        let is_registered = |fabric: &&Arc<dyn Fabric>| {
            let registered = fabric.register(address, size as u64);
            registered
                .inspect_err(|error| tracing::warn!(%error, "memory is not registered"))
                .is_ok()
        };
        let fabric = fabric.filter(is_registered).map(Arc::clone);
        Ok(Self { number, memory, fabric })
    }

    fn start(&self) -> usize {
        self.memory.memory().as_ptr() as usize + HEAD_BYTES
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        if let Some(fabric) = &self.fabric {
            fabric.unregister(self.memory.memory().as_ptr() as u64);
        }
    }
}

/// Returns a number that no other buffer of this host has, greater than those of this process before.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let [a, b, c, d, e, f, g, ..] = nonce();
    let random = u64::from_le_bytes([a, b, c, d, e, f, g, 0]);
    let _ = NEXT.compare_exchange(0, 1 + random, Ordering::SeqCst, Ordering::SeqCst);
    NEXT.fetch_add(1, Ordering::SeqCst)
}

fn head_of(memory: &SharedMemory) -> &AtomicU64 {
    // SAFETY: the memory is mapped as long as the reference, starts at a page, and has a page at least;
    // all access to this word is atomic.
    unsafe { memory.memory().cast().as_ref() }
}

impl StagedBuffer {
    /// Returns where peers find the contribution.
    pub(crate) fn place(&self) -> Option<StagedPlace> {
        let Numbered { number, memory, .. } = self.buffer.as_ref()?;
        let descriptor = u64::try_from(memory.descriptor()).ok()?;
        let oldest = self.stage.buffers.lock().numbers.first().copied().unwrap_or(*number);
        Some(StagedPlace { buffer: *number, descriptor, oldest })
    }

    /// Returns where peers of other hosts read the contribution.
    pub(crate) fn registered_address(&self) -> Option<u64> {
        let buffer = self.buffer.as_ref().filter(|buffer| buffer.fabric.is_some())?;
        Some(buffer.start() as u64)
    }

    /// Returns address and length of the bytes, for a fabric that writes them.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.start().unwrap_or(0) as u64, self.length as u64)
    }

    /// Lets `take` look at the bytes, and keeps the memory for another use. No peer knows of it.
    pub(crate) fn end<T>(self, take: impl FnOnce(&[u8]) -> T) -> T {
        let taken = match self.start() {
            // SAFETY: the buffer has this length and lives until the end of the call. Peers that map it
            // map it for reading, and the fabric has written it before.
            Some(start) => take(unsafe { slice::from_raw_parts(start as *const u8, self.length) }),
            None => take(&[]),
        };
        self.reuse();
        taken
    }

    fn start(&self) -> Option<usize> {
        self.buffer.as_ref().map(Numbered::start)
    }

    /// Keeps the memory for another contribution: nobody reads this one any more.
    pub(crate) fn reuse(mut self) {
        let mut buffers = self.stage.buffers.lock();
        if buffers.bytes <= STAGED_BYTES_MAX {
            buffers.free.extend(self.buffer.take());
        }
    }
}

impl Drop for StagedBuffer {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.stage.buffers.lock().forget(&buffer);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test panics where a step fails")]
mod tests {
    use super::{
        peer_buffers::{Contribution, PeerBuffers},
        *,
    };
    use crate::memory::HostRange;

    fn put(stage: &Arc<StagingMemory>, length: usize, value: u8) -> (StagedBuffer, StagedPlace) {
        let staged = stage.put(&vec![value; length]).unwrap();
        let place = staged.place().unwrap();
        (staged, place)
    }

    fn read(contribution: &Contribution) -> Vec<u8> {
        let mut bytes = vec![0; contribution.length];
        // SAFETY: the vector lives until the copy has returned.
        contribution.write_to(unsafe { HostRange::new(bytes.as_mut_ptr() as usize, bytes.len()) });
        bytes
    }

    #[test]
    fn contribution_outlives_its_buffer_at_the_maker() {
        let (stage, peer, own) =
            (Arc::<StagingMemory>::default(), PeerBuffers::default(), std::process::id());
        let (staged, place) = put(&stage, 700_000, 7);
        let found = peer.find(own, place, 700_000).unwrap();
        drop(staged);
        assert_eq!(stage.buffers.lock().bytes, 0);
        let (_other, _) = put(&stage, 700_000, 8);
        assert!(read(&found) == vec![7; 700_000]);
    }

    #[test]
    fn memory_is_used_again_and_mapped_once() {
        let (stage, peer, own) =
            (Arc::<StagingMemory>::default(), PeerBuffers::default(), std::process::id());
        let (staged, first) = put(&stage, 2 * UNIT, 1);
        let before = peer.find(own, first, 2 * UNIT).unwrap();
        staged.reuse();
        let (_staged, second) = put(&stage, UNIT + 1, 2);
        assert_eq!(first.buffer, second.buffer);
        let after = peer.find(own, second, UNIT + 1).unwrap();
        assert!(Arc::ptr_eq(&before.buffer, &after.buffer));
        assert!(read(&after) == vec![2; UNIT + 1]);
    }

    #[test]
    fn buffers_that_their_maker_gave_up_are_unmapped() {
        let (stage, peer, own) =
            (Arc::<StagingMemory>::default(), PeerBuffers::default(), std::process::id());
        let (first, place) = put(&stage, UNIT, 1);
        peer.find(own, place, UNIT).unwrap();
        drop(first);
        let (_second, place) = put(&stage, UNIT, 2);
        peer.find(own, place, UNIT).unwrap();
        assert_eq!(peer.0.lock().len(), 1);
    }

    #[test]
    fn memory_for_contributions_is_bounded() {
        let stage = Arc::<StagingMemory>::default();
        let half = STAGED_BYTES_MAX / 2 - UNIT;
        let (first, _) = put(&stage, half, 1);
        let (second, _) = put(&stage, half, 2);
        assert!(stage.put(&vec![0; 4 * UNIT]).is_none());
        first.reuse();
        // A free buffer gives way to one of another size.
        let (_third, _) = put(&stage, half + UNIT / 2, 3);
        drop(second);
        assert!(stage.buffers.lock().bytes < STAGED_BYTES_MAX);
    }

    #[test]
    fn wrong_places_are_errors() {
        let (stage, peer, own) =
            (Arc::<StagingMemory>::default(), PeerBuffers::default(), std::process::id());
        let (_staged, place) = put(&stage, UNIT, 1);
        peer.find(own, place, UNIT + 1).unwrap_err();
        let other = PeerBuffers::default();
        other.find(own, StagedPlace { buffer: place.buffer + 1, ..place }, UNIT).unwrap_err();
        other.find(own, StagedPlace { descriptor: u64::MAX, ..place }, UNIT).unwrap_err();
        other.find(u32::MAX, place, UNIT).unwrap_err();
    }
}
