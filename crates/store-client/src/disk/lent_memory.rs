//! Memory that records are read into, and private memory from which they are written.

use std::ptr::NonNull;

use mooncake_disk::Destination;
use mooncake_transfer_engine::{LocalRange, Ownership};

use super::staging::StagingRange;

/// Returns a part of staging memory as the destination of a read, for a call that names no other
/// destination there.
pub(crate) fn of_stage(stage: &StagingRange, at: u64, length: u64) -> Option<Destination<'_>> {
    let (address, length) = stage.range(at, length)?;
    // SAFETY: the stage holds the mapping and is the only owner of this part of it, of which no
    // reference of Rust is ever made. The destinations of a call are disjoint.
    Some(unsafe { Destination::from_raw(address, length) })
}

/// Returns whether somebody keeps memory of a caller mapped until its transfer has returned.
pub(crate) fn is_held(range: &LocalRange) -> bool {
    range.ownership() == Ownership::Held
}

/// Returns memory of a caller as the destination of a read that returns before the transfer that the
/// range was made for; `None` if nobody keeps the memory mapped. No other destination of the read
/// overlaps it.
pub(crate) fn of_caller(range: &LocalRange) -> Option<Destination<'_>> {
    let address = NonNull::new(range.address() as *mut u8)?;
    if !is_held(range) {
        return None;
    }
    // SAFETY: who made the range keeps it mapped and writable, without references to it, until the
    // transfer has returned.
    Some(unsafe { Destination::from_raw(address, range.length()) })
}

/// More memory than this is given back after use.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// Memory that is used again and again.
#[derive(Debug, Default)]
pub(crate) struct PayloadBuffer(Vec<u8>);

impl PayloadBuffer {
    /// Has `fill` read bytes into the memory, and returns what it returns. It returns once all
    /// transfers into the range are over.
    pub(crate) fn fill<R>(&mut self, length: usize, fill: impl FnOnce(LocalRange) -> R) -> R {
        if self.0.len() < length {
            // New memory costs nothing until it is touched; growing would copy.
            self.0 = vec![0; length];
        }
        // SAFETY: the vector is borrowed exclusively until `fill` returns, which transfers do not
        // outlive.
        let range = unsafe { LocalRange::held(self.0.as_mut_ptr(), length) };
        fill(range)
    }

    /// Returns the bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Gives memory back, all of it if the owner is idle.
    pub(crate) fn shrink(&mut self, is_idle: bool) {
        if is_idle || self.0.len() > KEPT_BYTES_MAX {
            self.0 = Vec::new();
        }
    }
}
