//! Completion queues: a device reports completed requests here.

use std::{fmt, mem::MaybeUninit, ptr, ptr::NonNull, sync::Arc};

use rdma_sys::{ibv_cq, ibv_wc, ibv_wc_status};

use crate::{Context, Error, Result};

/// Maximum completions per poll; the rest stay for the next poll.
const POLL_BATCH: usize = 32;

/// A queue of completions, filled by a device.
pub struct CompletionQueue {
    handle: NonNull<ibv_cq>,
    capacity: u32,
    context: Arc<Context>,
}

// SAFETY: ibverbs allows polling one queue from several threads at once (the driver locks it);
// only `Drop` of the last owner destroys it.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

/// The outcome of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Caller-chosen id of the request.
    pub request: u64,
    /// 0 for success, otherwise the `ibv_wc_status`.
    pub status: u32,
    /// Vendor-specific error code.
    pub vendor_error: u32,
    /// Bytes received; undefined after a failure.
    pub length: u32,
    /// Queue pair of the request.
    pub queue_pair: u32,
}

impl CompletionQueue {
    /// Creates a queue for at least `capacity` completions, polled and without events.
    ///
    /// # Errors
    /// The capacity is 0 or above the device's limit, or the driver refused.
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
        // SAFETY: the library returned an initialized queue, which is never resized.
        let given = unsafe { (*handle.as_ptr()).cqe };
        let capacity = u32::try_from(given).unwrap_or(capacity);
        Ok(Arc::new(Self { handle, capacity, context: Arc::clone(context) }))
    }

    /// Polls completions, at most a few dozen, passes each to `each` and returns their number.
    /// Never blocks and allocates nothing.
    ///
    /// # Errors
    /// The driver refused; the queue may have overrun and is unusable then.
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

    /// Maximum number of completions, as rounded up by the driver.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The device context of the queue.
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

    /// Returns whether the request succeeded.
    pub fn is_done(&self) -> bool {
        self.status == ibv_wc_status::IBV_WC_SUCCESS
    }
}
