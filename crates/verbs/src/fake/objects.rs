//! Objects of the simulated library: each begins with the C type that callers see.

use std::{
    io::Write,
    mem,
    os::{fd::IntoRawFd, unix::net::UnixStream},
    ptr::NonNull,
    sync::{Arc, Weak},
};

use rdma_sys::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_event_type, ibv_mr, ibv_pd, ibv_qp,
};

use super::Fabric;

/// A device; it belongs to the fabric.
#[repr(C)]
pub(super) struct DeviceObject {
    pub(super) device: ibv_device,
    pub(super) fabric: Weak<Fabric>,
    pub(super) index: usize,
}

/// An opened device.
#[repr(C)]
pub(super) struct ContextObject {
    pub(super) context: ibv_context,
    pub(super) fabric: Arc<Fabric>,
    pub(super) device: usize,
    /// The other end of `async_fd`.
    events: UnixStream,
}

/// A protection domain.
#[repr(C)]
pub(super) struct DomainObject {
    pub(super) domain: ibv_pd,
}

/// A registration.
#[repr(C)]
pub(super) struct RegionObject {
    pub(super) region: ibv_mr,
}

/// A completion channel. An event is the address of the queue.
#[repr(C)]
pub(super) struct ChannelObject {
    pub(super) channel: ibv_comp_channel,
    events: UnixStream,
}

/// A completion queue.
#[repr(C)]
pub(super) struct CompletionsObject {
    pub(super) queue: ibv_cq,
    pub(super) number: u32,
    pub(super) fabric: Arc<Fabric>,
}

/// Tells the channel of a completion queue.
#[derive(Debug)]
pub(super) struct Reporter {
    pub(super) channel: NonNull<ChannelObject>,
    pub(super) queue: NonNull<CompletionsObject>,
}

// SAFETY: the reporter is removed before its queue is, and the channel outlives the queue.
unsafe impl Send for Reporter {}

/// A queue pair.
#[repr(C)]
pub(super) struct QueuePairObject {
    pub(super) queue_pair: ibv_qp,
}

/// A context, for reports to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ContextHandle(pub(super) NonNull<ContextObject>);

// SAFETY: the context is alive while its handle is in the list of its device, which is locked.
unsafe impl Send for ContextHandle {}

impl DeviceObject {
    pub(super) fn new(fabric: Weak<Fabric>, index: usize, name: &str) -> Self {
        // SAFETY: integers, arrays of integers and optional functions, for which zero is a value.
        let mut device: ibv_device = unsafe { mem::zeroed() };
        // The last byte stays zero, which ends the text.
        let places = device.name.len() - 1;
        for (place, byte) in device.name[..places].iter_mut().zip(name.bytes()) {
            *place = byte.cast_signed();
        }
        Self { device, fabric, index }
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_device {
        (&raw const self.device).cast_mut()
    }
}

// SAFETY: the object is never written after it was made.
unsafe impl Send for DeviceObject {}

impl std::fmt::Debug for DeviceObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DeviceObject")
    }
}

impl ContextObject {
    pub(super) fn new(fabric: Arc<Fabric>, device: usize, object: *mut ibv_device) -> Box<Self> {
        let (reader, events) = UnixStream::pair().expect("a pair of sockets");
        // SAFETY: integers, pointers and optional functions, for which zero is a value.
        let mut context: ibv_context = unsafe { mem::zeroed() };
        context.device = object;
        context.async_fd = reader.into_raw_fd();
        Box::new(Self { context, fabric, device, events })
    }

    /// Reads the number of the next event from a descriptor that does not block.
    pub(super) fn next_event(&self) -> Option<u32> {
        read_exact(self.context.async_fd).map(u32::from_ne_bytes)
    }
}

impl Drop for ContextObject {
    fn drop(&mut self) {
        close(self.context.async_fd);
    }
}

impl ContextHandle {
    pub(super) fn report(&self, event: ibv_event_type) {
        // SAFETY: the context is alive while its handle is listed.
        let events = unsafe { &(*self.0.as_ptr()).events };
        let mut events = events;
        events.write_all(&(event as u32).to_ne_bytes()).expect("the reader is open");
    }
}

impl ChannelObject {
    pub(super) fn new(context: *mut ibv_context) -> Box<Self> {
        let (reader, events) = UnixStream::pair().expect("a pair of sockets");
        let channel = ibv_comp_channel { context, fd: reader.into_raw_fd(), refcnt: 0 };
        Box::new(Self { channel, events })
    }

    fn report(&self, queue: *mut ibv_cq) {
        let mut events = &self.events;
        let address = queue.expose_provenance();
        events.write_all(&address.to_ne_bytes()).expect("the reader is open");
    }

    /// Reads the queue of the next event from a descriptor that does not block.
    pub(super) fn next_event(&self) -> Option<*mut ibv_cq> {
        let address = read_exact(self.channel.fd).map(usize::from_ne_bytes)?;
        Some(std::ptr::with_exposed_provenance_mut(address))
    }
}

impl Reporter {
    pub(super) fn report(&self) {
        // SAFETY: the channel is alive while the reporter is listed.
        let channel = unsafe { self.channel.as_ref() };
        channel.report(self.queue.as_ptr().cast());
    }
}

impl Drop for ChannelObject {
    fn drop(&mut self) {
        close(self.channel.fd);
    }
}

/// Reads an event of `N` bytes. Events are written whole.
fn read_exact<const N: usize>(descriptor: i32) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: the descriptor is that of a living object, and the array has `N` bytes.
    let count = unsafe { libc::read(descriptor, bytes.as_mut_ptr().cast(), N) };
    usize::try_from(count).is_ok_and(|count| count == N).then_some(bytes)
}

fn close(descriptor: i32) {
    // SAFETY: the object owns the descriptor and closes it once.
    unsafe { libc::close(descriptor) };
}
