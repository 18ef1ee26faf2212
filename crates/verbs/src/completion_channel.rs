//! Completion channels: a thread sleeps here until a completion queue has something.

use std::{
    fmt, io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    ptr,
    ptr::NonNull,
    sync::Arc,
    time::Duration,
};

use rdma_sys::ibv_comp_channel;

use crate::{Context, Error, Result, file_descriptor};

/// A file descriptor that is readable while armed completion queues have completions.
pub struct CompletionChannel {
    handle: NonNull<ibv_comp_channel>,
    descriptor: RawFd,
    context: Arc<Context>,
}

// SAFETY: ibverbs allows taking events of one channel from several threads at once; only `Drop` of
// the last owner destroys it.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    /// Creates a channel.
    ///
    /// # Errors
    /// The driver refused, or no file descriptor is left.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        let create = context.library().functions.ibv_create_comp_channel;
        // SAFETY: the context is open while its `Arc` lives.
        let channel = unsafe { create(context.as_ptr()) };
        let handle = NonNull::new(channel)
            .ok_or_else(|| Error::last("ibv_create_comp_channel", context.device().name()))?;
        // SAFETY: the library returned an initialized channel.
        let descriptor = unsafe { (*handle.as_ptr()).fd };
        let channel = Self { handle, descriptor, context: Arc::clone(context) };
        file_descriptor::set_nonblocking(channel.descriptor()).map_err(|source| Error::Call {
            call: "fcntl",
            device: context.device().name().to_owned(),
            source,
        })?;
        Ok(Arc::new(channel))
    }

    /// Sleeps until an armed queue has a completion or the time is over, and takes all events.
    /// Returns whether there was one. The queues have to be armed again.
    ///
    /// # Errors
    /// The device was removed, or the driver refused.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        file_descriptor::wait_readable([self.descriptor()], timeout)
            .map_err(|source| self.failure("poll", source))?;
        self.take_events()
    }

    /// Like [`Self::wait`], and returns as well when the device has an asynchronous event for
    /// [`Context::next_event`].
    ///
    /// # Errors
    /// Same as [`Self::wait`].
    pub fn wait_or_event(&self, timeout: Duration) -> Result<bool> {
        let both = [self.descriptor(), self.context.events()];
        file_descriptor::wait_readable(both, timeout)
            .map_err(|source| self.failure("poll", source))?;
        self.take_events()
    }

    /// Takes all events. Returns whether there was one.
    fn take_events(&self) -> Result<bool> {
        let mut has_event = false;
        while self.take_event().map_err(|source| self.failure("ibv_get_cq_event", source))? {
            has_event = true;
        }
        Ok(has_event)
    }

    fn failure(&self, call: &'static str, source: io::Error) -> Error {
        Error::Call { call, device: self.context.device().name().to_owned(), source }
    }

    /// Takes and acknowledges one event. Returns whether there was one.
    fn take_event(&self) -> io::Result<bool> {
        let functions = &self.context.library().functions;
        let (mut queue, mut user) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel lives while `self` does; both results are written to living variables.
        let code = unsafe {
            (functions.ibv_get_cq_event)(self.handle.as_ptr(), &raw mut queue, &raw mut user)
        };
        if code != 0 {
            let error = io::Error::last_os_error();
            let is_empty = error.kind() == io::ErrorKind::WouldBlock;
            return if is_empty { Ok(false) } else { Err(error) };
        }
        // SAFETY: destroying a queue waits until its events are acknowledged, so that `queue` is alive.
        unsafe { (functions.ibv_ack_cq_events)(queue, 1) };
        Ok(true)
    }

    /// The device context of the channel.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_comp_channel {
        self.handle.as_ptr()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel owns the descriptor and keeps it open while it lives.
        unsafe { BorrowedFd::borrow_raw(self.descriptor) }
    }
}

impl AsRawFd for CompletionChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        let destroy = self.context.library().functions.ibv_destroy_comp_channel;
        // SAFETY: the channel came from this library and is destroyed once, here; every queue on it
        // holds an `Arc` of it.
        unsafe { destroy(self.handle.as_ptr()) };
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionChannel").field(self.context.device()).finish()
    }
}
