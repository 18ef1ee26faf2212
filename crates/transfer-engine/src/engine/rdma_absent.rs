//! The RDMA devices of an engine in a build without the feature `rdma`: none.

use std::{sync::Arc, time::Duration};

use mooncake_base::{DeviceUsage, EngineId, Result};

use crate::{
    config::EngineConfig,
    device::DeviceMemory,
    discovery::{
        descriptor::{BufferDescriptor, SegmentDescriptor},
        handshake::server::Connect,
        metadata::MetadataStore,
    },
    memory::region::Region,
    transfer_entry::LocalRange,
    transport::Transport,
};

/// No RDMA devices.
#[derive(Debug, Clone)]
pub(super) struct Rdma;

impl Rdma {
    /// # Errors
    /// None.
    #[allow(clippy::unnecessary_wraps, reason = "opening devices may fail")]
    pub(super) const fn open(_: &EngineConfig, _: &str, _: EngineId) -> Result<Self> {
        Ok(Self)
    }

    pub(super) const fn usage(&self) -> Vec<DeviceUsage> {
        Vec::new()
    }

    pub(super) const fn register(&self, _: &Region) {}

    pub(super) const fn register_device(&self, _: &Region, _: &DeviceMemory) {}

    pub(super) const fn holds(&self, _: &LocalRange) -> bool {
        false
    }

    pub(super) const fn deregister(&self, _: u64, _: Duration) -> Result<()> {
        Ok(())
    }

    pub(super) fn transport(
        &self,
        _: &EngineConfig,
        _: &Arc<dyn MetadataStore>,
    ) -> Option<Arc<dyn Transport>> {
        None
    }

    pub(super) fn connect(&self) -> Option<Connect> {
        None
    }

    pub(super) const fn describe_region(&self, _: &Region) -> Option<Vec<BufferDescriptor>> {
        None
    }

    pub(super) const fn describe(&self, _: &mut SegmentDescriptor) {}

    pub(super) fn observe(&self, _: impl Fn() + Send + Sync + 'static) {}

    pub(super) const fn close(&self) {}
}
