//! Allocation memory through which device memory goes: few buffers of one size, made when needed.

use std::{ptr::NonNull, sync::Arc};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};

use super::{
    Stream,
    driver::{Driver, Ordinal},
};
use crate::{metrics::PoolSnapshot, transfer_entry::LocalRange};

/// The size of a buffer: enough that starting a copy costs little beside it.
pub(crate) const BUFFER_BYTES: usize = 8 << 20;

/// Buffers of one engine, at the most. Who finds all of them taken waits.
const BUFFERS_MAX: usize = 8;

/// Where the buffers of this process are, of all engines, and whose library they are known to.
static ALL_BUFFERS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// The buffers of one engine.
pub(super) struct PinnedPool {
    driver: Arc<Driver>,
    state: Mutex<State>,
    /// A buffer came back.
    change: Condvar,
}

#[derive(Default)]
struct State {
    free: Vec<Allocation>,
    made: usize,
    /// How often none was to be had in time.
    refused: u64,
}

/// One buffer.
struct Allocation {
    address: NonNull<u8>,
    /// In whose context it was made.
    device: Ordinal,
}

// SAFETY: pinned memory belongs to the process, not to a thread, and only one holds the buffer.
unsafe impl Send for Allocation {}

/// A buffer that is taken; it goes back when this is dropped.
pub(crate) struct PinnedBuffer {
    pool: Arc<PinnedPool>,
    pinned: Option<Allocation>,
}

impl PinnedPool {
    pub(super) fn new(driver: Arc<Driver>) -> Self {
        Self { driver, state: Mutex::default(), change: Condvar::new() }
    }

    /// Takes a buffer, and makes one, in the context of that device, if that may be.
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
            let left = deadline.left(SystemClock.now());
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
        Ok(PinnedBuffer { pool: Arc::clone(self), pinned: Some(Allocation { address, device }) })
    }

    /// Whether a range lies in a buffer, of this pool or of another of the same driver.
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
                    // SAFETY: it was allocated by `take`, is freed only here, and no lease holds it,
                    // for leases keep the pool.
                    unsafe { current.free_pinned(pinned.address) }
                },
            );
            if let Err(error) = freed {
                tracing::debug!(%error, "pinned memory ends with the process");
            }
        }
    }
}

impl PinnedBuffer {
    /// So many bytes of it, `at` bytes after its beginning.
    pub(crate) fn range(&self, at: usize, length: usize) -> LocalRange {
        let pinned = self.pinned.as_ref().expect("only drop takes it");
        // SAFETY: the buffer is of that length and mapped while it is taken; no reference to its
        // bytes is ever made.
        let whole = unsafe { LocalRange::held(pinned.address.as_ptr(), BUFFER_BYTES) };
        whole.part(at, length)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.pool.state.lock().free.extend(self.pinned.take());
        self.pool.change.notify_one();
    }
}
