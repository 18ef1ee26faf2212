//! A pool of pinned buffers for copies from and to devices: few buffers of one size, allocated on
//! demand.

use std::{ptr::NonNull, sync::Arc};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Error, ErrorCode, Moment, Result};
use mooncake_os::call_limit;

use super::{
    Stream,
    driver::{Driver, Ordinal},
};
use crate::{metrics::PoolSnapshot, transfer_entry::LocalRange};

/// Size of a buffer, large enough that starting a copy costs little in comparison.
pub(crate) const BUFFER_BYTES: usize = 8 << 20;

/// Maximum number of buffers per engine. Callers wait while all are in use.
const BUFFERS_MAX: usize = 8;

/// Addresses of the buffers of all engines of this process, each with the driver library that
/// allocated it.
static ALL_BUFFERS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// The pinned buffers of one engine.
pub(super) struct PinnedPool {
    driver: Arc<Driver>,
    state: Mutex<FreeBuffers>,
    /// Notified when a buffer is returned.
    change: Condvar,
}

#[derive(Default)]
struct FreeBuffers {
    free: Vec<PinnedAllocation>,
    made: usize,
    /// Number of requests that timed out.
    refused: u64,
}

/// One pinned allocation.
struct PinnedAllocation {
    address: NonNull<u8>,
    /// The device in whose context the memory was allocated.
    device: Ordinal,
}

// SAFETY: pinned memory belongs to the process, not to a thread, and has a single owner.
unsafe impl Send for PinnedAllocation {}

/// A pinned buffer in use; dropping it returns the buffer to the pool.
pub(crate) struct PinnedBuffer {
    pool: Arc<PinnedPool>,
    pinned: Option<PinnedAllocation>,
}

impl PinnedPool {
    pub(super) fn new(driver: Arc<Driver>) -> Self {
        Self { driver, state: Mutex::default(), change: Condvar::new() }
    }

    /// Takes a buffer, and allocates one in the context of the device while the limit permits it.
    pub(super) fn take(
        self: &Arc<Self>,
        device: Ordinal,
        deadline: Moment,
    ) -> Result<PinnedBuffer> {
        let mut state = self.state.lock();
        loop {
            if let Some(pinned) = state.free.pop() {
                return Ok(PinnedBuffer { pool: Arc::clone(self), pinned: Some(pinned) });
            }
            if state.made < BUFFERS_MAX {
                state.made += 1;
                break;
            }
            let left = call_limit::next_wait(deadline);
            if left.is_zero() {
                state.refused += 1;
                let text = "all pinned buffers were taken until the deadline";
                return Err(Error::new(ErrorCode::TRANSFER_FAIL, text).with("buffers", state.made));
            }
            self.change.wait_for(&mut state, left);
        }
        drop(state);
        let made = self
            .driver
            .push_context(Stream::DEFAULT, Some(device))
            .and_then(|current| current.allocate_pinned(BUFFER_BYTES));
        let address = made.inspect_err(|_| {
            self.state.lock().made -= 1;
            self.change.notify_one();
        })?;
        ALL_BUFFERS.lock().push((address.as_ptr() as usize, self.driver.library()));
        Ok(PinnedBuffer {
            pool: Arc::clone(self),
            pinned: Some(PinnedAllocation { address, device }),
        })
    }

    /// Returns whether a range lies in a buffer of this pool, or of another pool of the same
    /// driver.
    pub(super) fn is_pinned(&self, range: LocalRange) -> bool {
        let (library, begin) = (self.driver.library(), range.address());
        ALL_BUFFERS.lock().iter().any(|(base, of)| {
            *of == library
                && begin >= *base
                && range.length() <= BUFFER_BYTES
                && begin - base <= BUFFER_BYTES - range.length()
        })
    }

    pub(super) fn snapshot(&self) -> PoolSnapshot {
        let state = self.state.lock();
        PoolSnapshot {
            open: state.made,
            idle: state.free.len(),
            limit: BUFFERS_MAX,
            refused: state.refused,
        }
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        for pinned in self.state.get_mut().free.drain(..) {
            let base = pinned.address.as_ptr() as usize;
            ALL_BUFFERS.lock().retain(|(other, _)| *other != base);
            let freed = self.driver.push_context(Stream::DEFAULT, Some(pinned.device)).and_then(
                |current| {
                    // SAFETY: allocated by `take` and freed only here. No `PinnedBuffer` holds it,
                    // since each keeps the pool alive.
                    unsafe { current.free_pinned(pinned.address) }
                },
            );
            if let Err(error) = freed {
                tracing::debug!(%error, "pinned memory stays until the process ends");
            }
        }
    }
}

impl PinnedBuffer {
    /// Returns `length` bytes of the buffer, starting at offset `at`.
    pub(crate) fn range(&self, at: usize, length: usize) -> LocalRange {
        let pinned = self.pinned.as_ref().expect("only drop takes it");
        // SAFETY: the buffer has this length and stays mapped while it is in use; no reference to
        // its bytes is ever created.
        let whole = unsafe { LocalRange::held(pinned.address.as_ptr(), BUFFER_BYTES) };
        whole.part(at, length)
    }
}

impl PinnedBuffer {
    /// Shows the first `length` bytes of the buffer, while no copy is in flight.
    pub(super) fn with_bytes(&self, length: usize, look: impl FnOnce(&[u8])) {
        let pinned = self.pinned.as_ref().expect("only drop takes it");
        let length = length.min(BUFFER_BYTES);
        // SAFETY: the buffer has this length, stays mapped while it is in use, and is written only
        // by copies that its holder starts, none of which is in flight.
        look(unsafe { std::slice::from_raw_parts(pinned.address.as_ptr(), length) });
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.pool.state.lock().free.extend(self.pinned.take());
        self.pool.change.notify_one();
    }
}
