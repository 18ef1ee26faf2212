//! Protection domains: memory and queues must share one to work together.

use std::{fmt, ptr::NonNull, sync::Arc};

use rdma_sys::ibv_pd;

use crate::{Context, Error, Result};

/// A protection domain of an opened device.
pub struct ProtectionDomain {
    handle: NonNull<ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: ibverbs allows every call on one domain from several threads at once; only `Drop` of the
// last owner frees it.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// Allocates a domain.
    ///
    /// # Errors
    /// The device has no free domain, or the driver refused.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        let allocate = context.library().functions.ibv_alloc_pd;
        // SAFETY: the context is open while its `Arc` lives.
        let domain = unsafe { allocate(context.as_ptr()) };
        let handle = NonNull::new(domain)
            .ok_or_else(|| Error::last("ibv_alloc_pd", context.device().name()))?;
        Ok(Arc::new(Self { handle, context: Arc::clone(context) }))
    }

    /// The device context of the domain.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_pd {
        self.handle.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        let free = self.context.library().functions.ibv_dealloc_pd;
        // SAFETY: the domain came from this library, is freed once, here, and all memory
        // registered in it holds an `Arc` of it, so that none is left.
        unsafe { free(self.as_ptr()) };
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProtectionDomain").field(self.context.device()).finish()
    }
}
