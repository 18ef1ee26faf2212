//! An opened device and its limits.

use std::{fmt, mem, ptr::NonNull};

use rdma_sys::{ibv_context, ibv_device_attr};

use crate::{Device, Error, Library, Result};

/// An opened device.
pub struct Context {
    handle: NonNull<ibv_context>,
    device: Device,
}

// SAFETY: ibverbs allows every call on one context from several threads at once; only `Drop` of
// the last owner closes it.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Resource limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Number of ports, numbered from 1.
    pub ports: u8,
    /// Maximum length of a registered range.
    pub region_bytes_max: u64,
    /// Maximum number of registrations.
    pub regions_max: u32,
    /// Maximum number of completion queues.
    pub completion_queues_max: u32,
    /// Maximum number of entries in a completion queue.
    pub completions_max: u32,
    /// Maximum number of queue pairs.
    pub queue_pairs_max: u32,
    /// Maximum number of requests in one queue of a queue pair.
    pub requests_max: u32,
    /// Maximum number of local ranges of one request.
    pub ranges_max: u32,
    /// Maximum number of reads from peers that one queue pair serves at a time.
    pub incoming_reads_max: u8,
    /// Maximum number of reads of one queue pair in flight.
    pub outgoing_reads_max: u8,
}

impl Context {
    pub(crate) fn new(handle: NonNull<ibv_context>, device: Device) -> Self {
        Self { handle, device }
    }

    /// Queries the resource limits of the device.
    ///
    /// # Errors
    /// The driver refused.
    pub fn limits(&self) -> Result<DeviceLimits> {
        // SAFETY: integers and arrays of integers only, for which zero is a value.
        let mut attributes: ibv_device_attr = unsafe { mem::zeroed() };
        let query = self.library().functions.ibv_query_device;
        // SAFETY: the context is open while `self` lives, and `attributes` lives past the call.
        let code = unsafe { query(self.as_ptr(), &raw mut attributes) };
        self.check("ibv_query_device", code)?;
        let count = |value: libc::c_int| u32::try_from(value).unwrap_or(0);
        Ok(DeviceLimits {
            ports: attributes.phys_port_cnt,
            region_bytes_max: attributes.max_mr_size,
            regions_max: count(attributes.max_mr),
            completion_queues_max: count(attributes.max_cq),
            completions_max: count(attributes.max_cqe),
            queue_pairs_max: count(attributes.max_qp),
            requests_max: count(attributes.max_qp_wr),
            ranges_max: count(attributes.max_sge),
            incoming_reads_max: u8::try_from(attributes.max_qp_rd_atom).unwrap_or(u8::MAX),
            outgoing_reads_max: u8::try_from(attributes.max_qp_init_rd_atom).unwrap_or(u8::MAX),
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the number of interrupts among which completion queues are spread.
    pub(crate) fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is open while `self` lives, and its number of vectors never changes.
        let count = unsafe { (*self.as_ptr()).num_comp_vectors };
        u32::try_from(count).unwrap_or(0)
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_context {
        self.handle.as_ptr()
    }

    pub(crate) fn library(&self) -> &Library {
        self.device.library()
    }

    pub(crate) fn check(&self, call: &'static str, code: libc::c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(Error::status(call, self.device.name(), code)) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let close = self.library().functions.ibv_close_device;
        // SAFETY: the context was opened by this library and is closed once, here. Everything made
        // from it holds an `Arc` of it, so that nothing is left. A failure leaves a file descriptor
        // open, which cannot be handled.
        unsafe { close(self.as_ptr()) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.device).finish()
    }
}
