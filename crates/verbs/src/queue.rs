//! Completion queues: where a device says what it has done.

use std::{fmt, mem::MaybeUninit, ptr, ptr::NonNull, sync::Arc};

use rdma_sys::{ibv_cq, ibv_wc, ibv_wc_status};

use crate::{Context, Error, Result};

/// Completions that one poll takes at the most; more are left for the next.
const POLL_BATCH: usize = 32;

/// A queue into which a device puts the outcome of requests.
pub struct CompletionQueue {
    handle: NonNull<ibv_cq>,
    capacity: u32,
    context: Arc<Context>,
}

// SAFETY: ibverbs allows polling one queue from several threads at once (the driver locks it);
// destroying it needs the last owner, which `Drop` is.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

/// The outcome of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The number that the request was given.
    pub request: u64,
    /// Zero if it was done; else the number of `ibv_wc_status`.
    pub status: u32,
    /// The driver's own number for a failure.
    pub vendor_error: u32,
    /// Bytes received; without meaning for a failure.
    pub length: u32,
    /// The queue pair it was posted to.
    pub queue_pair: u32,
}

impl CompletionQueue {
    /// Makes a queue with room for at least `capacity` outcomes, polled and without events.
    ///
    /// # Errors
    /// The capacity is zero or beyond the device's limit, or the driver refused.
    pub fn new(context: &Arc<Context>, capacity: u32) -> Result<Arc<Self>> {
        let out_of_range = Error::OutOfRange { what: "the capacity", value: capacity.into() };
        let entries = libc::c_int::try_from(capacity).map_err(|_| out_of_range)?;
        let create = context.library().functions.ibv_create_cq;
        // SAFETY: the context is open while its `Arc` lives; no channel, so that the vector has no
        // meaning, and no user context.
        let queue =
            unsafe { create(context.as_ptr(), entries, ptr::null_mut(), ptr::null_mut(), 0) };
        let handle = NonNull::new(queue)
            .ok_or_else(|| Error::last("ibv_create_cq", context.device().name()))?;
        // SAFETY: the library gave a queue it has filled; nobody resizes it.
        let given = unsafe { (*handle.as_ptr()).cqe };
        let capacity = u32::try_from(given).unwrap_or(capacity);
        Ok(Arc::new(Self { handle, capacity, context: Arc::clone(context) }))
    }

    /// Takes outcomes that are there, a few dozen at the most, hands each to `each`, and gives
    /// their number. Never waits, and allocates nothing.
    ///
    /// # Errors
    /// The driver refused; the queue may have overrun and is then of no more use.
    pub fn poll(&self, mut each: impl FnMut(Completion)) -> Result<usize> {
        let mut entries = [const { MaybeUninit::<ibv_wc>::uninit() }; POLL_BATCH];
        // SAFETY: the queue lives while `self` does, and the array has room for `POLL_BATCH`.
        let count = unsafe {
            rdma_sys::ibv_poll_cq(
                self.handle.as_ptr(),
                POLL_BATCH as i32,
                entries.as_mut_ptr().cast(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            return Err(Error::last("ibv_poll_cq", self.context.device().name()));
        };
        for entry in entries.iter().take(count) {
            // SAFETY: the driver wrote the first `count` entries.
            each(Completion::from_entry(unsafe { entry.assume_init_ref() }));
        }
        Ok(count)
    }

    /// Outcomes that it holds at the most, as the driver rounded it.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The device it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let destroy = self.context.library().functions.ibv_destroy_cq;
        // SAFETY: the queue came from this library and is destroyed once, here.
        unsafe { destroy(self.handle.as_ptr()) };
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("device", &self.context.device().name())
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

impl Completion {
    fn from_entry(entry: &ibv_wc) -> Self {
        Self {
            request: entry.wr_id,
            status: entry.status,
            vendor_error: entry.vendor_err,
            length: entry.byte_len,
            queue_pair: entry.qp_num,
        }
    }

    /// Whether the request was done.
    pub fn is_done(&self) -> bool {
        self.status == ibv_wc_status::IBV_WC_SUCCESS
    }
}
