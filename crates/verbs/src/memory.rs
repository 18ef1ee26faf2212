//! Registered memory: ranges that a device may access.

use std::{fmt, ptr::NonNull, sync::Arc};

use rdma_sys::{ibv_access_flags, ibv_mr};

use crate::{Error, ProtectionDomain, Result};

/// A range of this process's memory that a device may access until this is dropped.
pub struct MemoryRegion {
    handle: NonNull<ibv_mr>,
    local_key: u32,
    remote_key: u32,
    base: NonNull<u8>,
    length: usize,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: the region is only a handle; the caller of `MemoryRegion::register` vouches for the
// memory under it. Only `Drop` of the last owner deregisters it.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

/// Access rights of a device besides local reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// None: a source of sends.
    Source,
    /// Local writes: a destination of reads and receives.
    Destination,
    /// Reads by peers that know the remote key.
    RemoteRead,
    /// Reads and writes by peers that know the remote key.
    RemoteReadWrite,
}

impl MemoryRegion {
    /// Registers a range. Its pages are pinned, which takes time in proportion to the length and
    /// counts against the limit on locked memory.
    ///
    /// # Errors
    /// The limit on locked memory is too low, the range is not mapped or not writable, or the
    /// device has no resources left.
    ///
    /// # Safety
    /// Until the region is dropped, the range stays mapped, and every other access to it in this
    /// process tolerates the concurrent device accesses that `access` allows.
    pub unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        base: NonNull<u8>,
        length: usize,
        access: Access,
    ) -> Result<Self> {
        let context = domain.context();
        let register = context.library().functions.ibv_reg_mr;
        // SAFETY: the domain lives while its `Arc` does. The library checks the range itself and
        // gives EFAULT for one that is not mapped; the caller promises that it stays mapped.
        let region =
            unsafe { register(domain.as_ptr(), base.as_ptr().cast(), length, access.flags()) };
        let handle = NonNull::new(region)
            .ok_or_else(|| Error::last("ibv_reg_mr", context.device().name()))?;
        // SAFETY: the library gave a region it has filled and does not change any more.
        let keys = unsafe { handle.read() };
        Ok(Self {
            handle,
            local_key: keys.lkey,
            remote_key: keys.rkey,
            base,
            length,
            domain: Arc::clone(domain),
        })
    }

    /// The key for this process's own requests.
    pub fn local_key(&self) -> u32 {
        self.local_key
    }

    /// The key that a peer needs to access the range.
    pub fn remote_key(&self) -> u32 {
        self.remote_key
    }

    /// Start of the range.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The protection domain of the range.
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let deregister = self.domain.context().library().functions.ibv_dereg_mr;
        // SAFETY: the region came from this library and is given back once, here.
        unsafe { deregister(self.handle.as_ptr()) };
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("base", &self.base)
            .field("length", &self.length)
            .field("device", &self.domain.context().device().name())
            .finish_non_exhaustive()
    }
}

impl Access {
    fn flags(self) -> libc::c_int {
        let local = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        let read = ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        let write = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        let flags = match self {
            Self::Source => ibv_access_flags(0),
            Self::Destination => local,
            Self::RemoteRead => read,
            Self::RemoteReadWrite => local | read | write, // a remote write asks for a local one
        };
        flags.0.cast_signed()
    }
}
