//! Completion queues: a device reports completed requests here.

use std::{fmt, mem::MaybeUninit, ptr, ptr::NonNull, sync::Arc};

use rdma_sys::{ibv_cq, ibv_wc};

use crate::{Completion, CompletionChannel, Context, Error, Result};

/// Maximum completions per poll; the rest stay for the next poll.
const POLL_BATCH: usize = 32;

/// A queue of completions, filled by a device.
pub struct CompletionQueue {
    handle: NonNull<ibv_cq>,
    capacity: u32,
    /// Outlives the queue.
    channel: Option<Arc<CompletionChannel>>,
    context: Arc<Context>,
}

// SAFETY: ibverbs allows polling one queue from several threads at once (the driver locks it);
// only `Drop` of the last owner destroys it.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Creates a queue for at least `capacity` completions, polled and without events.
    ///
    /// # Errors
    /// The capacity is 0 or above the device's limit, or the driver refused.
    pub fn new(context: &Arc<Context>, capacity: u32) -> Result<Arc<Self>> {
        Self::create(context, capacity, None, 0)
    }

    /// Creates a queue for at least `capacity` completions that reports to a channel when it is
    /// [armed](Self::arm). Its events interrupt the processor that the device uses for `vector`, of which
    /// the device has a few; larger numbers begin anew with the first.
    ///
    /// # Errors
    /// Same as [`Self::new`].
    pub fn with_channel(
        channel: &Arc<CompletionChannel>,
        capacity: u32,
        vector: u32,
    ) -> Result<Arc<Self>> {
        Self::create(channel.context(), capacity, Some(channel), vector)
    }

    fn create(
        context: &Arc<Context>,
        capacity: u32,
        channel: Option<&Arc<CompletionChannel>>,
        vector: u32,
    ) -> Result<Arc<Self>> {
        let out_of_range = Error::OutOfRange { what: "the capacity", value: capacity.into() };
        let entries = libc::c_int::try_from(capacity).map_err(|_| out_of_range)?;
        let create = context.library().functions.ibv_create_cq;
        let vector = vector.checked_rem(context.completion_vectors()).unwrap_or(0).cast_signed();
        let channel_ptr = channel.map_or(ptr::null_mut(), |channel| channel.as_ptr());
        // SAFETY: the context is open while its `Arc` lives, and so is the channel of the same context
        // or none. The device has the vector. No user context.
        let queue =
            unsafe { create(context.as_ptr(), entries, ptr::null_mut(), channel_ptr, vector) };
        let handle = NonNull::new(queue)
            .ok_or_else(|| Error::last("ibv_create_cq", context.device().name()))?;
        // SAFETY: the library returned an initialized queue, which is never resized.
        let given = unsafe { (*handle.as_ptr()).cqe };
        let capacity = u32::try_from(given).unwrap_or(capacity);
        let (channel, context) = (channel.map(Arc::clone), Arc::clone(context));
        Ok(Arc::new(Self { handle, capacity, channel, context }))
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

    /// Asks for one event on the channel when the next completion arrives.
    ///
    /// Poll once more afterwards: a completion that arrived before the call causes no event.
    ///
    /// # Errors
    /// The queue was made without a channel, or the driver refused.
    pub fn arm(&self) -> Result<()> {
        if self.channel.is_none() {
            return Err(Error::NoChannel);
        }
        // SAFETY: the queue lives while `self` does.
        let code = unsafe { rdma_sys::ibv_req_notify_cq(self.handle.as_ptr(), 0) };
        self.context.check("ibv_req_notify_cq", code)
    }

    /// Maximum number of completions, as rounded up by the driver.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The device context of the queue.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_cq {
        self.handle.as_ptr()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let destroy = self.context.library().functions.ibv_destroy_cq;
        // SAFETY: the queue came from this library and is destroyed once, here. Every queue pair on it
        // holds an `Arc` of it, and the channel acknowledges each event when it takes it.
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
