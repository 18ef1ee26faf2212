//! A cluster in one process: a master on a free port, and nodes with their own engines.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use mooncake_base::{ByteSize, Clock, Error, ObjectKey, Result, SystemClock};
use mooncake_master::{Disk, Master, MasterConfig, Origin, master::start_on, state::Totals};
use mooncake_proto::v1;
use mooncake_store_client::{
    Client, ClientConfig, InProcessLink, LinkConfig, MasterLink, PutOptions, PutOutcome, SocketLink,
};
use mooncake_transfer_engine::{Engine, EngineConfig, LocalRange, SharedMemory};
use tokio::runtime::{Builder, Runtime};

use crate::faulty::FaultyLink;

/// The maximum time for closing an engine.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The initial settings of a cluster.
#[derive(Debug, Clone)]
pub struct ClusterSettings {
    /// The number of nodes.
    pub nodes: usize,
    /// The memory that each node lends to the pool, in bytes.
    pub segment_bytes: u64,
    /// The master's settings.
    pub master: MasterConfig,
    /// Whether transfers use TCP even within this process.
    pub is_tcp_forced: bool,
    /// The disk of the master's log; `None`: as the master's settings say.
    pub disk: Option<Arc<dyn Disk>>,
}

impl Default for ClusterSettings {
    fn default() -> Self {
        Self {
            nodes: 1,
            segment_bytes: ByteSize::mib(64).bytes(),
            master: MasterConfig::embedded(),
            is_tcp_forced: false,
            disk: None,
        }
    }
}

/// A master and its nodes. Dropping the cluster stops all of them.
#[derive(Debug)]
pub struct Cluster {
    /// The nodes, in the order in which they joined.
    pub nodes: Vec<Node>,
    settings: ClusterSettings,
    master: Option<Master>,
    address: SocketAddr,
    runtime: Runtime,
}

/// A node of the cluster.
#[derive(Debug)]
pub struct Node {
    /// The client of the node.
    pub client: Client,
    /// The client's link to the master, for fault injection.
    pub link: Arc<FaultyLink>,
    engine: Engine,
}

impl Cluster {
    /// Starts a master and its nodes.
    ///
    /// # Errors
    /// If the master or a node fails to start.
    pub fn start(settings: ClusterSettings) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|source| Error::internal("no runtime").caused_by(source))?;
        let config = settings.master.clone();
        let master = match &settings.disk {
            None => runtime.block_on(mooncake_master::start(config))?,
            Some(disk) => runtime.block_on(start_on(config, Arc::clone(disk)))?,
        };
        let address = master.addresses().rpc;
        let nodes = Vec::with_capacity(settings.nodes);
        let mut cluster = Self { nodes, settings, master: Some(master), address, runtime };
        for _ in 0..cluster.settings.nodes {
            let bytes = cluster.settings.segment_bytes;
            let node = cluster.join(bytes)?;
            cluster.nodes.push(node);
        }
        Ok(cluster)
    }

    /// Starts a node that lends this much memory; the caller owns the node.
    ///
    /// # Errors
    /// If the master or the engine refuses.
    pub fn join(&self, segment_bytes: u64) -> Result<Node> {
        self.join_with(ClientConfig { segment_bytes, ..ClientConfig::default() })
    }

    /// Starts a node with settings of its own.
    ///
    /// # Errors
    /// If the master or the engine refuses.
    pub fn join_with(&self, config: ClientConfig) -> Result<Node> {
        let token = self.settings.master.rpc_token.clone();
        let to_master = LinkConfig { token, ..LinkConfig::default() };
        let link = SocketLink::new(&self.address.to_string(), to_master)?;
        let disk_token = self.settings.master.rpc_token.clone();
        self.join_by(ClientConfig { disk_token, ..config }, Arc::new(link))
    }

    /// Starts a node with its own link to the master. Its client stores and verifies checksums.
    ///
    /// # Errors
    /// If the master or the engine refuses.
    pub fn join_by(&self, config: ClientConfig, link: Arc<dyn MasterLink>) -> Result<Node> {
        let engine = EngineConfig {
            name: "127.0.0.1".to_owned(),
            is_tcp_forced: self.settings.is_tcp_forced,
            ..EngineConfig::default()
        };
        let config = ClientConfig { has_checksums: true, ..config };
        let engine = Engine::start(engine, self.runtime.handle().clone())?;
        let link = FaultyLink::new(link);
        let client =
            Client::connect(config, engine.clone(), Arc::clone(&link) as Arc<dyn MasterLink>)?;
        Ok(Node { client, link, engine })
    }

    /// Returns the master's RPC address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns a link that calls the master directly and passes each response through `tamper`.
    ///
    /// # Panics
    /// If the master is stopped.
    pub fn tampering_link(
        &self,
        tamper: impl Fn(&mut v1::Response) + Send + Sync + 'static,
    ) -> Arc<dyn MasterLink> {
        let service = self.master.as_ref().expect("the test did not stop the master").service();
        Arc::new(InProcessLink::new("this process", move |request| {
            let mut response = service.dispatch(request, &Origin::in_process());
            tamper(&mut response);
            Ok(response)
        }))
    }

    /// Returns the totals of the pool.
    ///
    /// # Panics
    /// If the master is stopped.
    pub fn totals(&self) -> Totals {
        self.master.as_ref().expect("the test did not stop the master").service().totals()
    }

    /// Stops the master; the nodes keep running.
    pub fn stop_master(&mut self) {
        if let Some(master) = self.master.take() {
            self.runtime.block_on(master.stop());
        }
    }

    /// Restarts the master without its state, at the same address.
    ///
    /// # Errors
    /// If the port was taken meanwhile.
    pub fn start_master(&mut self) -> Result<()> {
        self.stop_master();
        let config =
            MasterConfig { rpc_port: Some(self.address.port()), ..self.settings.master.clone() };
        self.master = Some(self.runtime.block_on(mooncake_master::start(config))?);
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The nodes stop first, so that they can unregister from the master.
        self.nodes.clear();
        self.stop_master();
    }
}

impl Node {
    /// Returns the engine of the node.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Puts a value under a key.
    ///
    /// # Errors
    /// The errors of the put.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<PutOutcome> {
        self.client.put_bytes(&self::key(key), value, &PutOptions::default())
    }

    /// Gets the value under a key.
    ///
    /// # Errors
    /// The errors of the read.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.client.get_bytes(&self::key(key))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.client.close();
        self.engine.close(SystemClock.now() + CLOSE_TIMEOUT);
    }
}

/// Creates a key from a text.
///
/// # Panics
/// If the text is empty or too long.
pub fn key(text: &str) -> ObjectKey {
    ObjectKey::new(text.as_bytes()).expect("tests use valid keys")
}

/// Returns a part of shared memory as a local range.
///
/// # Panics
/// If the part is not within the memory.
pub fn range(memory: &SharedMemory, offset: usize, length: usize) -> LocalRange {
    assert!(offset + length <= memory.length() as usize, "the range lies in the memory");
    // SAFETY: no code in this process holds a reference into shared memory: it is accessed by
    // copies only. If the memory is unmapped too early, the transfer fails and touches nothing.
    unsafe { LocalRange::foreign(memory.base() as usize + offset, length) }
}
