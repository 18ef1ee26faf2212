//! The life of an engine: it starts its listeners and transports, and closes them.

use std::{
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::{Mutex, RwLock};
use mooncake_base::{Clock, Endpoint, EngineId, Error, Moment, Result, SystemClock};
use mooncake_os::fork;

use super::{
    Engine, Inner, descriptor_template::DescriptorTemplate, listen::Listeners, rdma::Rdma,
    worker_pool::WorkerPool,
};
use crate::{
    config::EngineConfig,
    device::Devices,
    discovery::{
        handshake::{HandshakeServer, HandshakeSettings},
        metadata::{self, MetadataSettings},
    },
    memory::{exported_memory::ExportedMemory, prefault::Prefaulter},
    metrics::{Metrics, Refusals},
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

/// How long `close` waits for a slow metadata server. An entry that stays on the server blocks the
/// name for the next engine.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(1);

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
        let metadata = metadata::open(&config.metadata, metadata_settings(&config))?;
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
        let rpc_endpoint = Endpoint::new(host.clone(), port_of(&rpc)?);
        let name = segment_name(&config, &rpc_endpoint);
        let (rdma_server, rdma) = open_rdma(&config, &name, &rpc_endpoint, exported.id)?;
        let template = Arc::new(DescriptorTemplate {
            name,
            host,
            data_port: data.address().port(),
            rdma_server,
            local: shm_server.as_ref().map(|shm_server| shm_server.name().to_owned()),
            exported: Arc::clone(&exported),
            rdma: rdma.clone(),
        });
        let described = Arc::clone(&template);
        let describe = Arc::new(move || described.fill().to_json());
        let settings =
            HandshakeSettings { connect: rdma.connect(), ..handshake_settings(&config, &refusals) };
        let handshake = HandshakeServer::start(rpc, describe, settings, &runtime)?;
        let mut transports = transports(&config, exported.id, shm_server.as_ref(), &refusals);
        transports.extend(rdma.transport(&config, &metadata));
        sort_transports(&config, &mut transports);
        let prefaulter = Prefaulter::new(config.prefault_bytes_max);
        let devices = Devices::new(config.device_driver.clone());
        devices.find_loaded();
        let inner = Arc::new(Inner {
            config,
            generation,
            is_announcement_late: AtomicBool::new(false),
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
            rdma,
            devices,
            prefaulter,
            reporter: Mutex::default(),
            republisher: Mutex::default(),
            idle_closer: Mutex::default(),
            is_closed: AtomicBool::new(false),
        });
        let engine = Self { inner };
        engine.inner.publish()?;
        engine.start_tasks(&runtime);
        Ok(engine)
    }

    /// Closes the engine: peers release its memory, paths and listeners are closed, threads are
    /// joined. Submitted batches that have not ended fail, and no byte of their memory is read or
    /// written after the return; a thread in [`Engine::transfer`] soon returns with an error. Takes
    /// less than 0.3 s even if peers hang, longer if an RDMA device has to give up its requests. If
    /// a metadata server does not answer, it takes until the deadline, at most one second more.
    /// Idempotent.
    ///
    /// A process of this host that is stopped (by SIGSTOP or a debugger) cannot confirm that it has
    /// left the memory, and may stay stopped for ever, so `close` disconnects it and does not wait.
    /// The engine's own allocations stay intact for such a peer. Memory of the user may be written
    /// once more, by a copy that the peer was about to start: if the memory is used after the
    /// engine, unregister it before, which returns an error while such a peer may reach it.
    pub fn close(&self, deadline: Moment) {
        self.inner.close(deadline);
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
    fn close(&self, deadline: Moment) {
        if fork::is_forked_since(self.generation) || self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let soon = deadline.min(SystemClock.now() + WITHDRAW_TIMEOUT);
        self.exported.unregister();
        for task in [&self.reporter, &self.republisher, &self.idle_closer] {
            if let Some(task) = task.lock().take() {
                task.abort();
            }
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
        self.transports.iter().for_each(|transport| transport.close());
        self.workers.close();
        self.handshake.close();
        self.rdma.close();
        self.data.close();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close(SystemClock.now() + WITHDRAW_TIMEOUT);
    }
}

fn port_of(listener: &TcpListener) -> Result<u16> {
    let address = listener.local_addr().map_err(|error| {
        Error::internal("the address of a listener cannot be read").caused_by(error)
    })?;
    Ok(address.port())
}

/// Opens the RDMA devices. Returns them with the name of the engine in their paths, if that is not the name of
/// its segment; else an empty one.
fn open_rdma(
    config: &EngineConfig,
    name: &str,
    rpc: &Endpoint,
    engine: EngineId,
) -> Result<(String, Rdma)> {
    let by_address = |host: &String| Endpoint { host: host.clone(), port: rpc.port }.to_string();
    let server = config.rdma_bind_address.as_ref().map(by_address).unwrap_or_default();
    let rdma = Rdma::open(config, if server.is_empty() { name } else { &server }, engine)?;
    Ok((server, rdma))
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

fn metadata_settings(config: &EngineConfig) -> MetadataSettings {
    MetadataSettings {
        connect_timeout: config.connect_timeout,
        prefix: config.metadata_prefix.clone(),
        redis: config.redis.clone(),
        token: config.token.clone(),
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
        ..TcpSettings::default()
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
    transports
}

/// Puts the cheapest transport first.
fn sort_transports(_config: &EngineConfig, transports: &mut Vec<Arc<dyn Transport>>) {
    #[cfg(feature = "test-util")]
    transports.retain(|transport| !_config.disabled.contains(&transport.kind()));
    transports.sort_by_key(|transport| transport.capability().cost);
}

fn segment_name(config: &EngineConfig, rpc: &Endpoint) -> String {
    match config.name.trim() {
        name if !name.is_empty() && !config.is_p2p() => name.to_owned(),
        _ => rpc.to_string(),
    }
}
