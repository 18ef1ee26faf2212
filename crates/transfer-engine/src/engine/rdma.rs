//! The RDMA devices of an engine, if it has any.

use std::{collections::BTreeMap, os::fd::AsFd, sync::Arc, time::Duration};

use mooncake_base::{DeviceUsage, EngineId, Result};
use mooncake_rdma::{Devices, Location, MemorySource};
use mooncake_verbs::Library;

use crate::{
    config::EngineConfig,
    device::DeviceMemory,
    discovery::{
        descriptor::{BufferDescriptor, SegmentDescriptor},
        handshake::server::Connect,
        metadata::MetadataStore,
    },
    memory::region::{Backing, Region},
    transfer_entry::LocalRange,
    transport::{
        Transport,
        rdma::{RdmaTransport, describe_devices, describe_region},
    },
};

/// The RDMA devices of an engine, if it has any.
#[derive(Debug, Clone, Default)]
pub(super) struct Rdma {
    devices: Option<Arc<Devices>>,
}

impl Rdma {
    /// Opens the devices that the configuration asks for. An engine without usable devices works over the
    /// other transports; the log has the reason.
    ///
    /// # Errors
    /// No device can be used, and the configuration requires one.
    pub(super) fn open(config: &EngineConfig, name: &str, engine: EngineId) -> Result<Self> {
        let (Some(settings), false) = (&config.rdma, config.is_tcp_forced) else {
            return Ok(Self::default());
        };
        #[cfg(feature = "test-util")]
        let library = config.rdma_fabric.clone().map_or_else(Library::load, |fabric| Ok(fabric.0));
        #[cfg(not(feature = "test-util"))]
        let library = Library::load();
        let opened = library.map_err(|source| {
            mooncake_base::Error::new(mooncake_base::ErrorCode::NOT_SUPPORTED, "there is no RDMA")
                .caused_by(source)
        });
        let engine = format!("{:032x}", engine.bits());
        let opened =
            opened.and_then(|library| Devices::open(&library, settings.clone(), name, &engine));
        match opened {
            Ok(devices) => Ok(Self { devices: Some(devices) }),
            Err(error) if settings.is_required => Err(error.with("required by", "MC_FORCE_HCA")),
            Err(error) => {
                tracing::warn!(%error, "transfers go over TCP");
                Ok(Self::default())
            }
        }
    }

    /// Returns the use of each device.
    pub(super) fn usage(&self) -> Vec<DeviceUsage> {
        self.devices.as_ref().map_or_else(Vec::new, |devices| devices.usage())
    }

    /// Registers memory, so that peers can reach it. Memory that cannot be registered is reached over
    /// other transports.
    pub(super) fn register(&self, region: &Region) {
        let (Some(devices), true) = (&self.devices, region.backing != Backing::Device) else {
            return;
        };
        // SAFETY: the caller of `register` promised that no Rust reference into the region exists while it is
        // registered, and the kernel keeps its pages.
        let registered = unsafe { devices.register(region.base, region.length, &region.location) };
        if let Err(error) = registered {
            tracing::warn!(%error, "peers reach the memory over TCP only");
        }
    }

    /// Registers memory of a CUDA device, so that peers reach it without its owner: as a dma-buf of its
    /// driver, else as memory that the kernel pins for the driver. Memory for which both fail is copied
    /// through host memory; the log has the reasons.
    pub(super) fn register_device(&self, region: &Region, memory: &DeviceMemory) {
        let Some(devices) = self.devices.as_ref().filter(|devices| devices.uses_device_memory())
        else {
            return;
        };
        let (range, place) = ((region.base, region.length), memory.pci_address());
        let location = Location { name: &region.location, device: place.as_deref() };
        let as_dma_buf = memory.export(region.base, region.length).and_then(|(file, offset)| {
            let source = MemorySource::DmaBuf { file: file.as_fd(), offset };
            // SAFETY: the caller of `register` promised that the memory stays allocated while it is
            // registered; no Rust reference to memory of a device exists.
            unsafe { devices.register_from(source, range, location) }
        });
        let Err(dma_buf) = as_dma_buf else { return };
        // SAFETY: as above.
        let as_pages = unsafe { devices.register_from(MemorySource::PeerMemory, range, location) };
        if let Err(peer_memory) = as_pages {
            tracing::warn!(
                address = format_args!("{:#x}", region.base),
                length = region.length,
                location = region.location,
                %dma_buf,
                %peer_memory,
                "memory of a device goes through host memory"
            );
        }
    }

    /// Returns whether the devices reach each byte of a range of this process.
    pub(super) fn holds(&self, range: &LocalRange) -> bool {
        let (address, length) = (range.address() as u64, range.length() as u64);
        self.devices.as_ref().is_some_and(|devices| devices.holds(address, length))
    }

    /// Ends a registration. When this succeeds no device accesses the range any more.
    pub(super) fn deregister(&self, base: u64, timeout: Duration) -> Result<()> {
        self.devices.as_ref().map_or(Ok(()), |devices| devices.deregister(base, timeout))
    }

    /// Returns the transport over the devices.
    pub(super) fn transport(
        &self,
        config: &EngineConfig,
        metadata: &Arc<dyn MetadataStore>,
    ) -> Option<Arc<dyn Transport>> {
        let devices = Arc::clone(self.devices.as_ref()?);
        let (metadata, token) = (Arc::clone(metadata), config.token.clone());
        Some(Arc::new(RdmaTransport { devices, metadata, token }))
    }

    /// Returns the function that answers peers that connect queue pairs.
    pub(super) fn connect(&self) -> Option<Connect> {
        let devices = Arc::downgrade(self.devices.as_ref()?);
        Some(Arc::new(move |body| {
            devices.upgrade().map_or_else(Vec::new, |devices| devices.answer(body))
        }))
    }

    /// Returns the buffers of a region for the segment descriptor.
    pub(super) fn describe_region(&self, region: &Region) -> Option<Vec<BufferDescriptor>> {
        self.devices.as_ref().map(|devices| describe_region(devices, region))
    }

    /// Adds the devices to the segment descriptor.
    pub(super) fn describe(&self, descriptor: &mut SegmentDescriptor) {
        let Some(devices) = &self.devices else { return };
        descriptor.protocol = "rdma".to_owned();
        descriptor.devices = describe_devices(devices);
        let names = descriptor.devices.iter().map(|device| device.name.clone()).collect();
        // One location: upstream numbers the devices in the order in which it walks through a hash table
        // of locations, and takes the keys of buffers by these numbers.
        descriptor.priority_matrix = BTreeMap::from([("cpu:0".to_owned(), (names, Vec::new()))]);
        if let Some(native) = &mut descriptor.mooncake {
            native.near_devices = devices.near();
        }
    }

    /// Calls a function after each change of what [`Self::describe`] tells about devices. It must not block.
    pub(super) fn observe(&self, observer: impl Fn() + Send + Sync + 'static) {
        if let Some(devices) = &self.devices {
            devices.observe(observer);
        }
    }

    /// Ends all connections and registrations.
    pub(super) fn close(&self) {
        if let Some(devices) = &self.devices {
            devices.close();
        }
    }
}
