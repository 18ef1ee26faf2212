//! How a range is registered with a device: by its pages, or as a buffer of another device.

use std::{os::fd::BorrowedFd, ptr::NonNull, sync::Arc};

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_verbs::{Access, MemoryRegion, Ordering, ProtectionDomain};

use crate::slices::MemoryRange;

/// How ranges are registered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RegistrationRule<'a> {
    pub(crate) bytes_max: u64,
    pub(crate) ordering: Ordering,
    pub(crate) access: Access,
    pub(crate) source: MemorySource<'a>,
}

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location<'a> {
    /// The name that is published for peers, such as `cpu:0` or `cuda:1`.
    pub name: &'a str,
    /// PCI address of the device whose memory it is, such as `0000:3b:00.0`.
    pub device: Option<&'a str>,
}

/// How devices get at the bytes of a range.
#[derive(Debug, Clone, Copy)]
pub enum MemorySource<'a> {
    /// By the pages at its addresses: memory of the host.
    Pages,
    /// By the pages at its addresses, which may be those of another device: the kernel pins them for its
    /// driver.
    PeerMemory,
    /// As a dma-buf of another device's driver, whose bytes begin at an offset.
    DmaBuf {
        /// The buffer.
        file: BorrowedFd<'a>,
        /// Offset of the first byte of the range in the buffer.
        offset: u64,
    },
}

impl RegistrationRule<'_> {
    /// Registers a part of a range that begins at `base` with a device.
    ///
    /// # Safety
    /// Those of [`MemoryRegion::register`].
    pub(super) unsafe fn register(
        &self,
        domain: &Arc<ProtectionDomain>,
        base: u64,
        part: MemoryRange,
    ) -> Result<MemoryRegion> {
        let (length, access) = (part.length as usize, self.access);
        let start = std::ptr::with_exposed_provenance_mut::<u8>(part.address as usize);
        let start = NonNull::new(start)
            .ok_or_else(|| Error::invalid("the null address cannot be registered"))?;
        let registered = match self.source {
            MemorySource::Pages => {
                // SAFETY: by the contract of the function.
                unsafe { MemoryRegion::register(domain, start, length, access, self.ordering) }
            }
            MemorySource::PeerMemory => {
                let order = self.ordering;
                // SAFETY: by the contract of the function.
                unsafe { MemoryRegion::register_peer_memory(domain, start, length, access, order) }
            }
            MemorySource::DmaBuf { file, offset } => {
                let (offset, address) = (offset + (part.address - base), part.address);
                // SAFETY: by the contract of the function.
                unsafe {
                    MemoryRegion::register_dma_buf(domain, file, offset, length, address, access)
                }
            }
        };
        registered.map_err(|source| {
            Error::new(ErrorCode::INVALID_PARAMS, "memory cannot be registered for RDMA")
                .with("address", format_args!("{:#x}", part.address))
                .with("length", part.length)
                .caused_by(source)
        })
    }
}
