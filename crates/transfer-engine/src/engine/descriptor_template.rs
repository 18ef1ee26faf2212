//! Fills in the segment descriptor of an engine.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use super::rdma::Rdma;
use crate::{
    discovery::descriptor::{
        BufferDescriptor, LocalDescriptor, NativeDescriptor, SegmentDescriptor,
    },
    memory::exported_memory::ExportedMemory,
};

/// The constant parts of a descriptor, and the exported memory for the rest.
#[derive(Debug)]
pub(super) struct DescriptorTemplate {
    pub(super) name: String,
    pub(super) host: String,
    pub(super) data_port: u16,
    /// Name of the engine in the paths of its RDMA devices, if it is another one; else empty.
    pub(super) rdma_server: String,
    /// Name of the Unix socket for processes of this host.
    pub(super) local: Option<String>,
    pub(super) exported: Arc<ExportedMemory>,
    pub(super) rdma: Rdma,
}

impl DescriptorTemplate {
    /// Returns the descriptor for the current state.
    pub(super) fn fill(&self) -> SegmentDescriptor {
        // In order of registration: peers ask for the first buffer of a segment.
        let mut regions = self.exported.regions.all();
        regions.sort_by_key(|region| region.order);
        let buffers = regions.into_iter().flat_map(|region| {
            let plain = || BufferDescriptor {
                name: region.location.clone(),
                addr: region.base,
                length: region.length,
                ..BufferDescriptor::default()
            };
            self.rdma.describe_region(&region).unwrap_or_else(|| vec![plain()])
        });
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let local = self
            .local
            .clone()
            .map(|unix_socket| LocalDescriptor { unix_socket, process: std::process::id() });
        let mut native = NativeDescriptor::new(self.exported.id, local);
        native.marks_segments = self.exported.marks_segments();
        let mut descriptor = SegmentDescriptor {
            name: self.name.clone(),
            protocol: "tcp".to_owned(),
            tcp_data_host: self.host.clone(),
            tcp_data_port: self.data_port,
            tcp_proto_version: 2,
            rdma_server_name: self.rdma_server.clone(),
            timestamp: since.as_secs().to_string(),
            buffers: buffers.collect(),
            mooncake: Some(native),
            ..SegmentDescriptor::default()
        };
        self.rdma.describe(&mut descriptor);
        descriptor
    }
}
