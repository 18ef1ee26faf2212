//! A whole cluster in one process: a master on a free port, and nodes with their own engines.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use mooncake_base::{ByteSize, Clock, Error, ObjectKey, Result, SystemClock};
use mooncake_master::{Master, MasterConfig, Origin};
use mooncake_proto::v1;
use mooncake_store_client::{
    Client, ClientConfig, InProcessLink, LinkConfig, MasterLink, PutOptions, PutOutcome, SocketLink,
};
use mooncake_transfer_engine::{Engine, EngineConfig, LocalRange, SharedMemory};
use tokio::runtime::{Builder, Runtime};

use crate::faulty::FaultyLink;

/// How long an engine may take to end.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// How a cluster begins.
#[derive(Debug, Clone)]
pub struct ClusterSettings {
    /// How many nodes.
    pub nodes: usize,
    /// What each lends to the pool.
    pub segment_bytes: u64,
    /// The master's settings.
    pub master: MasterConfig,
    /// Whether bytes go over TCP even within this process.
    pub is_tcp_forced: bool,
}

impl Default for ClusterSettings {
    fn default() -> Self {
        Self {
            nodes: 1,
            segment_bytes: ByteSize::mib(64).bytes(),
            master: MasterConfig::embedded(),
            is_tcp_forced: false,
        }
    }
}

/// A master and its nodes. Everything ends when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    /// The nodes, in the order in which they joined.
    pub nodes: Vec<Node>,
    settings: ClusterSettings,
    master: Option<Master>,
    address: SocketAddr,
    runtime: Runtime,
}

/// A member of the cluster.
#[derive(Debug)]
pub struct Node {
    /// Its client.
    pub client: Client,
    /// The client's link, to be hurt.
    pub link: Arc<FaultyLink>,
    engine: Engine,
}

impl Cluster {
    /// Starts a master and lets the nodes join.
    ///
    /// # Errors
    /// Whatever the master or a node says.
    pub fn start(settings: ClusterSettings) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|source| Error::internal("no runtime").caused_by(source))?;
        let master = runtime.block_on(mooncake_master::start(settings.master.clone()))?;
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

    /// A new member that lends so much; the caller keeps it.
    ///
    /// # Errors
    /// Whatever the master or the engine says.
    pub fn join(&self, segment_bytes: u64) -> Result<Node> {
        self.join_with(ClientConfig { segment_bytes, ..ClientConfig::default() })
    }

    /// A new member with settings of its own.
    ///
    /// # Errors
    /// Whatever the master or the engine says.
    pub fn join_with(&self, config: ClientConfig) -> Result<Node> {
        let link = SocketLink::new(&self.address.to_string(), LinkConfig::default())?;
        self.join_by(config, Arc::new(link))
    }

    /// A new member that reaches the master its own way. Its client keeps and checks checksums.
    ///
    /// # Errors
    /// Whatever the master or the engine says.
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

    /// Where the master answers.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A link that calls the master directly and has each answer pass through `tamper`.
    ///
    /// # Panics
    /// If there is no master.
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

    /// Stops the master; the nodes go on without.
    pub fn stop_master(&mut self) {
        if let Some(master) = self.master.take() {
            self.runtime.block_on(master.stop());
        }
    }

    /// Starts a master that knows nothing at the address of the one before.
    ///
    /// # Errors
    /// The port was taken meanwhile.
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
        // The nodes first, while there is a master to take leave of.
        self.nodes.clear();
        self.stop_master();
    }
}

impl Node {
    /// Its engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Puts a value under a key.
    ///
    /// # Errors
    /// Whatever the put says.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<PutOutcome> {
        self.client.put_bytes(&self::key(key), value, &PutOptions::default())
    }

    /// Gets the value under a key.
    ///
    /// # Errors
    /// Whatever the read says.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.client.get_bytes(&self::key(key))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.client.close();
        self.engine.close(SystemClock.now() + CLOSE_PATIENCE);
    }
}

/// A key from a text that is one.
///
/// # Panics
/// If it is empty or too long.
pub fn key(text: &str) -> ObjectKey {
    ObjectKey::new(text.as_bytes()).expect("tests use keys that are keys")
}

/// A part of shared memory, as a local range.
///
/// # Panics
/// If it is not all in it.
pub fn range(memory: &SharedMemory, offset: usize, length: usize) -> LocalRange {
    assert!(offset + length <= memory.length() as usize, "the range lies in the memory");
    // SAFETY: nothing of ours holds a reference into shared memory: it is read and written by
    // copies only. Should it be unmapped too early, the transfer fails and nothing is touched.
    unsafe { LocalRange::foreign(memory.base() as usize + offset, length) }
}
