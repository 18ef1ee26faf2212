//! Asynchronous events of a device: links that go up and down, queues that fail, removal.

use std::{io, mem::MaybeUninit, os::fd::BorrowedFd, ptr, time::Duration};

use rdma_sys::{ibv_async_event, ibv_event_type};

use crate::{Context, Error, Result, file_descriptor};

/// An asynchronous event of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The link of the port carries traffic again.
    PortActive(u8),
    /// The link of the port is down.
    PortError(u8),
    /// The address table of the port, its identifier in the subnet, the subnet's manager or another
    /// attribute of its addresses changed.
    AddressChange(u8),
    /// The device failed or was removed. Nothing that was made from it works any more.
    DeviceFatal,
    /// The queue pair with this number failed.
    QueuePairError(u32),
    /// A completion queue overran.
    CompletionQueueError,
    /// Another event of ibverbs, by its number.
    Other(u32),
}

impl Context {
    /// Returns the next event, if there is one within the time.
    ///
    /// # Errors
    /// The driver refused.
    pub fn next_event(&self, timeout: Duration) -> Result<Option<AsyncEvent>> {
        let failed =
            |call, source| Error::Call { call, device: self.device().name().to_owned(), source };
        if !file_descriptor::wait_readable([self.events()], timeout)
            .map_err(|source| failed("poll", source))?
        {
            return Ok(None);
        }
        let functions = &self.library().functions;
        let mut event = MaybeUninit::<ibv_async_event>::uninit();
        // SAFETY: the context is open while `self` lives, and `event` lives past the call. The
        // descriptor does not block, since `Device::open` made it so.
        let code = unsafe { (functions.ibv_get_async_event)(self.as_ptr(), event.as_mut_ptr()) };
        if code != 0 {
            let source = io::Error::last_os_error();
            return match source.kind() {
                // Another thread took the event.
                io::ErrorKind::WouldBlock => Ok(None),
                _ => Err(failed("ibv_get_async_event", source)),
            };
        }
        // SAFETY: the library has filled the event, whose queue pair, if it is of one, is alive until
        // the event is acknowledged.
        let found = unsafe { decode(event.as_ptr()) };
        // SAFETY: each event is acknowledged once.
        unsafe { (functions.ibv_ack_async_event)(event.as_mut_ptr()) };
        Ok(Some(found))
    }

    /// The file descriptor that is readable while there are events.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open while `self` lives, and its descriptor never changes.
        let descriptor = unsafe { (*self.as_ptr()).async_fd };
        // SAFETY: the context owns the descriptor and keeps it open while it lives.
        unsafe { BorrowedFd::borrow_raw(descriptor) }
    }
}

/// Converts an event.
///
/// # Safety
/// The event was filled by the library and is not acknowledged yet.
unsafe fn decode(event: *const ibv_async_event) -> AsyncEvent {
    use ibv_event_type as kind;
    // A newer library may report a number that the type does not know.
    // SAFETY: `event` is valid by the contract of the function.
    let number = unsafe { ptr::addr_of!((*event).event_type) }.cast::<u32>();
    // SAFETY: as above; the field is an integer in C.
    let number = unsafe { number.read() };
    // SAFETY: `event` is valid by the contract of the function.
    let element = unsafe { &(*event).element };
    let port = || {
        // SAFETY: events of ports carry the number of the port.
        let number = unsafe { element.port_num };
        u8::try_from(number).unwrap_or(0)
    };
    let queue_pair = || {
        // SAFETY: events of queue pairs carry the queue pair.
        let queue_pair = unsafe { element.qp };
        // SAFETY: destroying a queue pair waits until its events are acknowledged.
        unsafe { (*queue_pair).qp_num }
    };
    let is = |kind: ibv_event_type| number == kind as u32;
    if is(kind::IBV_EVENT_PORT_ACTIVE) {
        AsyncEvent::PortActive(port())
    } else if is(kind::IBV_EVENT_PORT_ERR) {
        AsyncEvent::PortError(port())
    } else if [
        kind::IBV_EVENT_GID_CHANGE,
        kind::IBV_EVENT_LID_CHANGE,
        kind::IBV_EVENT_PKEY_CHANGE,
        kind::IBV_EVENT_SM_CHANGE,
        kind::IBV_EVENT_CLIENT_REREGISTER,
    ]
    .into_iter()
    .any(is)
    {
        AsyncEvent::AddressChange(port())
    } else if is(kind::IBV_EVENT_DEVICE_FATAL) {
        AsyncEvent::DeviceFatal
    } else if [
        kind::IBV_EVENT_QP_FATAL,
        kind::IBV_EVENT_QP_REQ_ERR,
        kind::IBV_EVENT_QP_ACCESS_ERR,
        kind::IBV_EVENT_PATH_MIG_ERR,
    ]
    .into_iter()
    .any(is)
    {
        AsyncEvent::QueuePairError(queue_pair())
    } else if is(kind::IBV_EVENT_CQ_ERR) {
        AsyncEvent::CompletionQueueError
    } else {
        AsyncEvent::Other(number)
    }
}
