//! The engine: exports memory to peers, finds peers, and moves bytes over the cheapest path.

mod allocate;
mod async_transfer;
mod batch;
mod descriptor_template;
mod lifecycle;
mod listen;
mod managed;
mod open;
#[cfg(feature = "rdma")]
mod rdma;
#[cfg(not(feature = "rdma"))]
#[path = "engine/rdma_absent.rs"]
mod rdma;
mod registry;
mod report;
mod staged;
mod transfer;
mod worker_pool;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use mooncake_base::sync::{Mutex, RwLock};
use mooncake_base::{Endpoint, EngineId, Error, ErrorKind, Result, SegmentId};
use mooncake_os::fork;

pub use self::{
    batch::{BatchId, BatchStatus},
    listen::address_facing,
    managed::ManagedBuffers,
    registry::Registry,
    staged::OnStream,
};
use self::{descriptor_template::DescriptorTemplate, rdma::Rdma, worker_pool::WorkerPool};
use crate::{
    config::EngineConfig,
    device::Devices,
    discovery::{
        handshake::{HandshakeServer, Notification},
        metadata::MetadataStore,
    },
    memory::{exported_memory::ExportedMemory, prefault::Prefaulter},
    metrics::{Metrics, Refusals},
    path::peer::Peer,
    transport::{Transport, shm::server::ShmServer, tcp::TcpServer},
    transport_kind::TransportKind,
};

/// A transfer engine. Clones share one engine, which closes when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

/// State shared by all clones of an engine.
#[derive(Debug)]
struct Inner {
    config: EngineConfig,
    generation: u64,
    /// The metadata server could not be told that memory is gone.
    is_announcement_late: AtomicBool,
    rpc: Endpoint,
    template: Arc<DescriptorTemplate>,
    exported: Arc<ExportedMemory>,
    /// Serves processes of this host; absent where the system does not permit it.
    shm_server: Option<Arc<ShmServer>>,
    metadata: Arc<dyn MetadataStore>,
    handshake: HandshakeServer,
    data: TcpServer,
    /// Cheapest first.
    transports: Vec<Arc<dyn Transport>>,
    peers: RwLock<HashMap<String, Arc<Peer>>>,
    /// Counts openings of peers, for least-recently-opened eviction.
    openings: AtomicU64,
    /// Number of evicted peers.
    evicted: AtomicU64,
    /// Read-locked while memory is withdrawn, write-locked while memory is registered: a range must
    /// not be exported again while peers are still releasing it.
    withdrawals: RwLock<()>,
    metrics: Metrics,
    refusals: Arc<Refusals>,
    /// Runs batches that their callers do not wait for.
    workers: WorkerPool,
    /// The RDMA devices, if there are any.
    rdma: Rdma,
    /// Access to device memory, once the CUDA driver is found.
    devices: Devices,
    /// Faults in the pages of new memory.
    prefaulter: Prefaulter,
    /// Task that logs statistics, if enabled.
    reporter: Mutex<Option<tokio::task::JoinHandle<()>>>,
    /// Task that publishes changes of RDMA devices on a metadata server.
    republisher: Mutex<Option<tokio::task::JoinHandle<()>>>,
    /// Task that closes unused connections.
    idle_closer: Mutex<Option<tokio::task::JoinHandle<()>>>,
    is_closed: AtomicBool,
}

impl Engine {
    /// The name that peers pass to [`Engine::open`].
    pub fn segment_name(&self) -> &str {
        &self.inner.template.name
    }

    /// The engine's id, a new one after each start.
    pub fn id(&self) -> EngineId {
        self.inner.exported.id
    }

    /// Creates the id of a segment of the store in the memory of this engine. Call it before the memory
    /// is allocated. [`Engine::transfer_to_owner`] recognizes the engine by the id.
    pub fn new_segment_id(&self) -> SegmentId {
        self.inner.exported.new_segment_id()
    }

    /// The transports that this engine may use, the cheapest first.
    pub fn transports(&self) -> impl Iterator<Item = TransportKind> {
        self.inner.transports.iter().map(|transport| transport.kind())
    }

    /// The port of the handshake socket.
    pub fn rpc_port(&self) -> u16 {
        self.inner.rpc.port.expect("it was made with a port")
    }

    /// The host that peers are told to come to.
    pub fn host(&self) -> &str {
        &self.inner.rpc.host
    }

    /// The table of registered memory.
    pub fn regions(&self) -> Registry<'_> {
        Registry { inner: &self.inner }
    }

    /// Takes the notifications that peers have sent, oldest first. Each is returned once.
    pub fn take_notifications(&self) -> Vec<Notification> {
        if fork::is_forked_since(self.inner.generation) {
            return Vec::new();
        }
        self.inner.handshake.take_notifications()
    }

    /// The store in which segments are found.
    pub fn metadata(&self) -> &Arc<dyn MetadataStore> {
        &self.inner.metadata
    }

    /// Fails if the engine is closed or was made before a fork.
    fn check_usable(&self) -> Result<()> {
        self.inner.check_usable()
    }
}

impl Inner {
    /// Counts a permission error, which means that the peer shares no token with this engine.
    fn count_refusal(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::PermissionDenied {
            self.refusals.token_there.increment();
        }
        error
    }

    /// Fails if the engine is closed or was made before a fork.
    fn check_usable(&self) -> Result<()> {
        if fork::is_forked_since(self.generation) {
            return Err(Error::closed("the engine was made before a fork; start another one here"));
        }
        if self.is_closed.load(Ordering::Acquire) {
            return Err(Error::closed("the engine is closed"));
        }
        Ok(())
    }
}
