//! The engine: exports memory to peers, finds peers, and moves bytes over the cheapest path.

mod async_transfer;
mod batch;
mod descriptor_template;
mod listen;
mod managed;
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
    time::{Duration, Instant},
};

use mooncake_base::sync::{Mutex, RwLock};
use mooncake_base::{Clock, Endpoint, EngineId, Error, ErrorKind, Moment, Result, SystemClock};
use mooncake_os::fork;

pub use self::{
    batch::{BatchId, BatchStatus},
    listen::address_facing,
    managed::ManagedBuffers,
    registry::Registry,
    staged::OnStream,
};
use self::{descriptor_template::DescriptorTemplate, listen::Listeners, worker_pool::WorkerPool};
use crate::{
    config::EngineConfig,
    device::Devices,
    discovery::{
        handshake::{HandshakeServer, HandshakeSettings, Notification},
        metadata::{self, MetadataSettings, MetadataStore},
    },
    memory::{
        FileMemory, SharedMemory,
        exported_memory::ExportedMemory,
        prefault::Prefaulter,
        region::{MemoryOwner, Region},
    },
    metrics::{Metrics, Refusals},
    path::peer::{PathContext, PathState, Peer},
    transport::{
        Transport,
        memory::MemoryTransport,
        shm::{
            ShmTransport,
            server::{AuthPolicy, ShmServer},
        },
        tcp::{TcpServer, TcpServerSettings, TcpSettings, TcpTransport},
    },
};

/// How long `close` waits for peers to release exported memory.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(50);

/// How long a withdrawal waits for the end of connections that it closed.
const CUT_TIMEOUT: Duration = Duration::from_millis(500);

/// How often a withdrawal looks for connections to close during that time.
const CUT_INTERVAL: Duration = Duration::from_millis(20);

/// How long `close` waits for a slow metadata server. An entry that stays on the server blocks the
/// name for the next engine.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(1);

/// How long publishing a change may take.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// Access to device memory, once the CUDA driver is found.
    devices: Devices,
    /// Faults in the pages of new memory.
    prefaulter: Prefaulter,
    /// Task that logs statistics, if enabled.
    reporter: Mutex<Option<tokio::task::JoinHandle<()>>>,
    is_closed: AtomicBool,
}

impl Engine {
    /// Starts an engine: opens the listeners and publishes the segment. Blocks, so it must not be
    /// called from a task.
    ///
    /// # Errors
    /// The configuration is invalid, no port is free, or the metadata server cannot be reached or
    /// has another live engine under that name. Nothing is left behind then.
    pub fn start(config: EngineConfig, runtime: tokio::runtime::Handle) -> Result<Self> {
        config.check()?;
        let generation = fork::generation();
        let settings = MetadataSettings {
            connect_timeout: config.connect_timeout,
            prefix: config.metadata_prefix.clone(),
            redis: config.redis.clone(),
            token: config.token.clone(),
        };
        let metadata = metadata::open(&config.metadata, settings)?;
        let Listeners { host, rpc, data } = Listeners::bind(&config)?;
        let exported = ExportedMemory::register(EngineId::random());
        let refusals = Arc::<Refusals>::default();
        let auth = AuthPolicy { token: config.token.clone(), refusals: Arc::clone(&refusals) };
        let shm_server = start_shm_server(&config, &exported, auth);
        let settings = TcpServerSettings {
            engine: Some(exported.id),
            token: config.token.clone(),
            refusals: Arc::clone(&refusals),
            ..TcpServerSettings::default()
        };
        let data = TcpServer::start(data, Arc::clone(&exported.regions), settings, &runtime)?;
        let port = rpc.local_addr().map_err(|error| {
            Error::internal("the address of a listener cannot be read").caused_by(error)
        })?;
        let rpc_endpoint = Endpoint::new(host.clone(), port.port());
        let template = Arc::new(DescriptorTemplate {
            name: segment_name(&config, &rpc_endpoint),
            host,
            data_port: data.address().port(),
            local: shm_server.as_ref().map(|shm_server| shm_server.name().to_owned()),
            exported: Arc::clone(&exported),
        });
        let described = Arc::clone(&template);
        let describe = Arc::new(move || described.fill().to_json());
        let settings = handshake_settings(&config, &refusals);
        let handshake = HandshakeServer::start(rpc, describe, settings, &runtime)?;
        let transports = transports(&config, exported.id, shm_server.as_ref(), &refusals);
        let prefaulter = Prefaulter::new(config.prefault_bytes_max);
        let devices = Devices::new(config.device_driver.clone());
        devices.find_loaded();
        let inner = Arc::new(Inner {
            config,
            generation,
            rpc: rpc_endpoint,
            template,
            exported,
            shm_server,
            metadata,
            handshake,
            data,
            transports,
            peers: RwLock::default(),
            openings: AtomicU64::new(1),
            evicted: AtomicU64::new(0),
            withdrawals: RwLock::default(),
            metrics: Metrics::default(),
            refusals,
            workers: WorkerPool::default(),
            devices,
            prefaulter,
            reporter: Mutex::default(),
            is_closed: AtomicBool::new(false),
        });
        let engine = Self { inner };
        engine.inner.publish()?;
        engine.report_on(&runtime);
        Ok(engine)
    }

    /// Closes the engine: peers release its memory, paths and listeners are closed, threads are
    /// joined. Takes less than 0.2 s even if peers hang. If a metadata server does not answer,
    /// it takes until the deadline, at most one second more. Idempotent.
    ///
    /// A process of this host that is stopped (by SIGSTOP or a debugger) cannot confirm that it has
    /// left the memory, and may stay stopped for ever, so `close` disconnects it and does not wait.
    /// The engine's own allocations stay intact for such a peer. Memory of the user may be written
    /// once more, by a copy that the peer was about to start: if the memory is used after the
    /// engine, unregister it before, which returns an error while such a peer may reach it.
    pub fn close(&self, deadline: Moment) {
        self.inner.close(deadline);
    }

    /// The name that peers pass to [`Engine::open`].
    pub fn segment_name(&self) -> &str {
        &self.inner.template.name
    }

    /// The engine's id, a new one after each start.
    pub fn id(&self) -> EngineId {
        self.inner.exported.id
    }

    /// The port of the handshake socket.
    pub fn rpc_port(&self) -> u16 {
        self.inner.rpc.port.expect("it was made with a port")
    }

    /// The table of registered memory.
    pub fn regions(&self) -> Registry<'_> {
        Registry { inner: &self.inner }
    }

    /// Allocates shared memory that is registered with the engine and that peers of this host can
    /// map.
    ///
    /// Pages are allocated as they are written; a background thread faults in the first ones (see
    /// [`EngineConfig::prefault_bytes_max`]). Peers address the memory by its first address in this
    /// process.
    ///
    /// # Errors
    /// The system has no such memory, or the engine is closed.
    pub fn allocate(&self, length: u64) -> Result<SharedMemory> {
        self.inner.check_usable()?;
        let mut memory = SharedMemory::create(length, self.inner.config.huge_pages)?;
        let mapping = Arc::clone(memory.mapping());
        let node = self.inner.config.numa_node;
        if let Some(Err(error)) = node.map(|node| mapping.prefer_node(node)) {
            tracing::info!(%error, node, "memory cannot be bound to the preferred NUMA node");
        }
        let location = format!("cpu:{}", node.unwrap_or(0));
        let range = (memory.base(), memory.length());
        let owner = MemoryOwner::Shared(mapping);
        self.inner.exported.regions.register_owned(range, &location, owner)?;
        memory.on_drop(self.withdrawal());
        self.inner.announce()?;
        self.inner.prefaulter.prefault(memory.mapping());
        Ok(memory)
    }

    /// Maps a part of a file as memory that peers may access.
    ///
    /// # Errors
    /// The file cannot be mapped, `offset` is not a multiple of the page size, the file is shorter
    /// than the range, or the engine is closed.
    pub fn map_file(
        &self,
        path: &std::path::Path,
        offset: u64,
        length: u64,
        location: &str,
    ) -> Result<FileMemory> {
        self.inner.check_usable()?;
        let mut memory = FileMemory::map(path, offset, length)?;
        let range = (memory.base(), memory.length());
        let owner = MemoryOwner::File(Arc::clone(memory.mapping()));
        self.inner.exported.regions.register_owned(range, location, owner)?;
        memory.on_drop(self.withdrawal());
        self.inner.announce()?;
        Ok(memory)
    }

    /// Returns the drop hook of engine memory: withdraws it by its first address before it is
    /// unmapped.
    fn withdrawal(&self) -> impl FnOnce(u64) + Send + Sync + 'static {
        let (weak, generation) = (Arc::downgrade(&self.inner), self.inner.generation);
        move |base| {
            if fork::is_forked_since(generation) {
                return;
            }
            let Some(inner) = weak.upgrade() else { return };
            let taken = inner.withdraw(base).and_then(|()| inner.announce());
            if let Err(error) = taken {
                tracing::warn!(%error, "memory was dropped while peers still used it");
            }
        }
    }

    /// Finds a segment and opens a path to its engine. The same name gives the same peer; the
    /// engine's own name gives the engine itself.
    ///
    /// # Errors
    /// The segment is not known, or its engine cannot be reached on any path.
    pub fn open(&self, segment_name: &str, deadline: Moment) -> Result<Arc<Peer>> {
        let inner = &self.inner;
        inner.check_usable()?;
        let known = inner.peers.read().get(segment_name).cloned();
        let peer = match known {
            Some(peer) if peer.transport().is_some() => {
                peer.touch(inner.openings.fetch_add(1, Ordering::Relaxed));
                return Ok(peer);
            }
            Some(peer) => {
                let version = peer.version();
                let resolve = || inner.resolve(segment_name, deadline);
                if let Err(error) = peer.refresh(version, deadline, resolve) {
                    inner.peers.write().remove(segment_name);
                    return Err(error);
                }
                peer
            }
            None => {
                let descriptor = inner.resolve(segment_name, deadline)?;
                Arc::new(Peer::new(segment_name, descriptor, inner.path_context()))
            }
        };
        let context = inner.path_context();
        let is_reached = (0..context.transports.len())
            .any(|index| matches!(peer.path(index, context, deadline), PathState::Open(_)));
        if !is_reached {
            inner.peers.write().remove(segment_name);
            return Err(peer.unreachable());
        }
        inner.devices.find_loaded();
        let now = inner.openings.fetch_add(1, Ordering::Relaxed);
        let mut peers = inner.peers.write();
        let peer = Arc::clone(peers.entry(segment_name.to_owned()).or_insert(peer));
        peer.touch(now);
        let evicted = (peers.len() > inner.config.peers_max).then(|| {
            let oldest = peers.values().min_by_key(|peer| peer.last_use())?.name().to_owned();
            peers.remove(&oldest)
        });
        drop(peers);
        if let Some(evicted) = evicted.flatten() {
            inner.evicted.fetch_add(1, Ordering::Relaxed);
            // Other holders of the peer can go on using it; its connections close when the last one
            // drops it.
            drop(evicted);
        }
        Ok(peer)
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

impl Drop for Engine {
    fn drop(&mut self) {
        if fork::is_forked_since(self.inner.generation) {
            // Threads and sockets belong to the parent: one leaked reference keeps them all as they
            // are.
            std::mem::forget(Arc::clone(&self.inner));
        }
    }
}

impl Inner {
    fn path_context(&self) -> PathContext<'_> {
        PathContext {
            transports: &self.transports,
            metrics: &self.metrics,
            connect_timeout: self.config.connect_timeout,
        }
    }

    fn resolve(&self, name: &str, deadline: Moment) -> Result<crate::SegmentDescriptor> {
        if name == self.template.name {
            return Ok(self.template.fill());
        }
        let found = self.metadata.resolve(name, deadline);
        found.map_err(|error| self.count_refusal(error).with("segment", name))
    }

    /// Counts a permission error, which means that the peer shares no token with this engine.
    fn count_refusal(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::PermissionDenied {
            self.refusals.count_token_there();
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

    /// Removes a region from the table and waits until no peer uses it. Peers of this host are
    /// told, connections over TCP that use it at the deadline are closed.
    ///
    /// # Errors
    /// No region begins there; or it is still in use, and the call can be repeated.
    fn withdraw(&self, base: u64) -> Result<()> {
        let _withdrawal = self.withdrawals.read();
        let deadline = Instant::now() + self.config.withdraw_timeout;
        let regions = self.exported.regions.withdraw(base)?;
        // All peers leave at the same time: one that stalls costs the others nothing.
        if let Some(shm_server) = &self.shm_server {
            regions.iter().for_each(|region| shm_server.begin_withdrawal(region));
        }
        let unpinned = regions.iter().try_for_each(|region| self.wait_unpinned(region, deadline));
        let left_by_peers = match &self.shm_server {
            Some(shm_server) => shm_server.await_withdrawal(base, deadline),
            None => Ok(()),
        };
        let outcome = unpinned.and(left_by_peers);
        if outcome.is_err() {
            self.exported.regions.keep_leaving(regions);
        }
        outcome
    }

    /// Waits until the last pin of a withdrawn region is dropped. Connections that hold pins at the
    /// deadline are closed.
    fn wait_unpinned(&self, region: &Arc<Region>, deadline: Instant) -> Result<()> {
        let mut unpinned = region.wait_unpinned(deadline);
        let closed = deadline + CUT_TIMEOUT;
        while unpinned.is_err() && Instant::now() < closed {
            // A connection that was about to record its pin is found the next time.
            self.data.cut_users(region);
            unpinned = region.wait_unpinned(closed.min(Instant::now() + CUT_INTERVAL));
        }
        unpinned
    }

    /// Publishes a change on the metadata server. Peers that ask the engine itself always get the
    /// current state.
    fn announce(&self) -> Result<()> {
        if self.config.is_p2p() || self.is_closed.load(Ordering::Acquire) {
            return Ok(());
        }
        self.publish()
    }

    fn publish(&self) -> Result<()> {
        if self.config.is_unpublished {
            return Ok(());
        }
        let deadline = SystemClock.now() + PUBLISH_TIMEOUT;
        self.metadata.publish(&self.template.fill(), &self.rpc, deadline)
    }

    fn close(&self, deadline: Moment) {
        if fork::is_forked_since(self.generation) || self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let soon = deadline.min(SystemClock.now() + WITHDRAW_TIMEOUT);
        self.exported.unregister();
        if let Some(reporter) = self.reporter.lock().take() {
            reporter.abort();
        }
        self.prefaulter.close();
        if !self.config.is_unpublished
            && let Err(error) = self.metadata.withdraw(soon)
        {
            tracing::info!(%error, "the segment's entry stays on the metadata server");
        }
        if let Some(shm_server) = &self.shm_server {
            shm_server.stop(CLOSE_TIMEOUT);
        }
        let peers = std::mem::take(&mut *self.peers.write());
        peers.values().for_each(|peer| peer.close());
        drop(peers);
        self.workers.close(CLOSE_TIMEOUT);
        self.handshake.close();
        self.data.close();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close(SystemClock.now() + WITHDRAW_TIMEOUT);
    }
}

fn start_shm_server(
    config: &EngineConfig,
    exported: &Arc<ExportedMemory>,
    auth: AuthPolicy,
) -> Option<Arc<ShmServer>> {
    if config.is_tcp_forced {
        return None;
    }
    match ShmServer::start(Arc::clone(exported), auth) {
        Ok(shm_server) => Some(Arc::new(shm_server)),
        Err(error) => {
            tracing::debug!(%error, "processes of this host are served over TCP");
            None
        }
    }
}

fn handshake_settings(config: &EngineConfig, refusals: &Arc<Refusals>) -> HandshakeSettings {
    HandshakeSettings {
        message_bytes_max: config.handshake_bytes_max,
        token: config.token.clone(),
        refusals: Arc::clone(refusals),
        ..HandshakeSettings::default()
    }
}

fn transports(
    config: &EngineConfig,
    own: EngineId,
    shm_server: Option<&Arc<ShmServer>>,
    refusals: &Arc<Refusals>,
) -> Vec<Arc<dyn Transport>> {
    let tcp = TcpSettings {
        connections_per_peer: config.connections_per_peer,
        connections_per_transfer: None,
        connect_timeout: config.connect_timeout,
        token: config.token.clone(),
        refusals: Arc::clone(refusals),
    };
    let mut transports: Vec<Arc<dyn Transport>> = vec![Arc::new(TcpTransport::new(tcp))];
    if config.is_tcp_forced && config.copies_own {
        transports.push(Arc::new(MemoryTransport { only: Some(own) }));
    }
    if !config.is_tcp_forced {
        transports.push(Arc::new(MemoryTransport { only: None }));
        let shm = shm_server.map(|shm_server| ShmTransport::new(Arc::clone(shm_server)));
        transports.extend(shm.map(|shm| Arc::new(shm) as Arc<dyn Transport>));
    }
    #[cfg(feature = "test-util")]
    transports.retain(|transport| !config.disabled.contains(&transport.kind()));
    transports.sort_by_key(|transport| transport.capability().cost);
    transports
}

fn segment_name(config: &EngineConfig, rpc: &Endpoint) -> String {
    match config.name.trim() {
        name if !name.is_empty() && !config.is_p2p() => name.to_owned(),
        _ => rpc.to_string(),
    }
}
