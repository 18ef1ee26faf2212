//! Registered memory: ranges that a device may access.

use std::{
    fmt, io,
    marker::PhantomData,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
    sync::Arc,
};

use rdma_sys::{ibv_access_flags, ibv_mr};

use crate::{Error, ProtectionDomain, Result};

/// A range of this process's memory that a device may access until this is dropped.
pub struct MemoryRegion {
    handle: NonNull<ibv_mr>,
    local_key: u32,
    remote_key: u32,
    address: u64,
    length: usize,
    owner: Owner,
    domain: Arc<ProtectionDomain>,
}

/// Whose memory a region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// That of the host: its processors read it, so that small writes may carry the bytes.
    Host,
    /// That of another device, or unknown: no processor reads it.
    Device,
}

/// A part of a registered region of this process.
#[derive(Debug, Clone, Copy)]
pub struct LocalRange<'a> {
    address: u64,
    length: u32,
    key: u32,
    owner: Owner,
    region: PhantomData<&'a MemoryRegion>,
}

/// The start of a range in the memory of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRange {
    /// Address in the peer's process.
    pub address: u64,
    /// The peer's key for the region.
    pub key: u32,
}

/// Order of a device's accesses to a region on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ordering {
    /// As they arrive.
    Strict,
    /// As the bus likes, where device and library can. The data of a request is in place when it has
    /// completed; nothing is said of its parts before.
    Relaxed,
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
    /// device has no resources left; the message says which.
    ///
    /// # Safety
    /// Until the region is dropped, the range stays mapped, and every other access to it in this
    /// process tolerates the concurrent device accesses that `access` allows.
    pub unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        base: NonNull<u8>,
        length: usize,
        access: Access,
        ordering: Ordering,
    ) -> Result<Self> {
        // SAFETY: by the contract of the function.
        unsafe { Self::register_pages(domain, (base, length), Owner::Host, access, ordering) }
    }

    /// Registers a range whose pages may be those of another device: the kernel pins them for its driver
    /// (peer memory). No processor reads the bytes; see [`Self::register`].
    ///
    /// # Errors
    /// Those of [`Self::register`]; or no driver of this machine gives access to such memory.
    ///
    /// # Safety
    /// That of [`Self::register`].
    pub unsafe fn register_peer_memory(
        domain: &Arc<ProtectionDomain>,
        base: NonNull<u8>,
        length: usize,
        access: Access,
        ordering: Ordering,
    ) -> Result<Self> {
        // SAFETY: by the contract of the function.
        unsafe { Self::register_pages(domain, (base, length), Owner::Device, access, ordering) }
    }

    /// Registers the pages of a range.
    ///
    /// # Safety
    /// That of [`Self::register`].
    unsafe fn register_pages(
        domain: &Arc<ProtectionDomain>,
        (base, length): (NonNull<u8>, usize),
        owner: Owner,
        access: Access,
        ordering: Ordering,
    ) -> Result<Self> {
        let functions = &domain.context().library().functions;
        let (address, flags) = (base.as_ptr(), access.flags());
        // SAFETY: for both calls: the domain lives while its `Arc` does. The library checks the range
        // itself and gives EFAULT for one that is not mapped; the caller promises that it stays mapped.
        let handle = match (ordering, functions.ibv_reg_mr_iova2) {
            (Ordering::Relaxed, Some(register)) => {
                let flags = flags | ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING;
                // A device without the option ignores the flag.
                // SAFETY: above.
                unsafe {
                    register(domain.as_ptr(), address.cast(), length, address as u64, flags.0)
                }
            }
            _ => {
                let flags = flags.0.cast_signed();
                // SAFETY: above.
                unsafe { (functions.ibv_reg_mr)(domain.as_ptr(), address.cast(), length, flags) }
            }
        };
        Self::new(domain, handle, (base.as_ptr() as u64, length), owner)
    }

    /// Registers device memory that its driver exported as a dma-buf. Peers and requests use `address`
    /// for its start.
    ///
    /// # Errors
    /// The library or the kernel is too old, the RDMA device cannot reach the memory, or no resources are
    /// left.
    ///
    /// # Safety
    /// Every other access to the memory tolerates the concurrent device accesses that `access` allows.
    pub unsafe fn register_dma_buf(
        domain: &Arc<ProtectionDomain>,
        buffer: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        address: u64,
        access: Access,
    ) -> Result<Self> {
        let functions = &domain.context().library().functions;
        let Some(register) = functions.ibv_reg_dmabuf_mr else {
            return Err(Error::TooOld { function: "ibv_reg_dmabuf_mr", since: "rdma-core 34" });
        };
        let flags = access.flags().0.cast_signed();
        // SAFETY: the domain lives while its `Arc` does, and the kernel keeps the buffer alive while it is
        // registered. The library checks offset and length.
        let handle = unsafe {
            register(domain.as_ptr(), offset, length, address, buffer.as_raw_fd(), flags)
        };
        Self::new(domain, handle, (address, length), Owner::Device)
    }

    /// Takes what the library returned for a registration.
    fn new(
        domain: &Arc<ProtectionDomain>,
        handle: *mut ibv_mr,
        (address, length): (u64, usize),
        owner: Owner,
    ) -> Result<Self> {
        let Some(handle) = NonNull::new(handle) else {
            let source = io::Error::last_os_error();
            let device = domain.context().device().name().to_owned();
            return Err(Error::Register { device, length, reason: explain(&source), source });
        };
        // SAFETY: the library gave a region it has filled and does not change any more.
        let keys = unsafe { handle.read() };
        let (local_key, remote_key) = (keys.lkey, keys.rkey);
        let domain = Arc::clone(domain);
        Ok(Self { handle, local_key, remote_key, address, length, owner, domain })
    }

    /// Returns a part of the region for a request, if it is inside.
    pub fn range(&self, offset: usize, length: u32) -> Option<LocalRange<'_>> {
        let end = offset.checked_add(length as usize)?;
        (end <= self.length).then(|| LocalRange {
            address: self.address + offset as u64,
            length,
            key: self.local_key,
            owner: self.owner,
            region: PhantomData,
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

    /// Start of the range, as requests and peers name it.
    pub fn address(&self) -> u64 {
        self.address
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
            .field("address", &format_args!("{:#x}", self.address))
            .field("length", &self.length)
            .field("device", &self.domain.context().device().name())
            .finish_non_exhaustive()
    }
}

impl Access {
    fn flags(self) -> ibv_access_flags {
        let local = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        let read = ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        let write = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        match self {
            Self::Source => ibv_access_flags(0),
            Self::Destination => local,
            Self::RemoteRead => read,
            Self::RemoteReadWrite => local | read | write, // a remote write asks for a local one
        }
    }
}

impl LocalRange<'_> {
    /// Start of the range.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Whose memory the range is.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    pub(crate) fn key(&self) -> u32 {
        self.key
    }
}

/// Explains the error number of a failed registration.
fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => match locked_memory_limit() {
            Some(limit) => format!(
                "the process may lock {limit} bytes of memory in all; raise the limit \
                 (ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1)"
            ),
            None => "the device or the kernel has no memory left for registrations".to_owned(),
        },
        Some(libc::EFAULT) => "the range is not mapped, or not writable".to_owned(),
        Some(libc::EINVAL) => {
            "the range is empty, longer than the device allows, or of a kind that cannot be pinned"
                .to_owned()
        }
        Some(libc::EOPNOTSUPP) => "the device or the kernel cannot register such memory".to_owned(),
        _ => "the driver refused".to_owned(),
    }
}

/// Returns the limit on locked memory, if there is one.
fn locked_memory_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the result lives past the call.
    let code = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (code == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
