//! The short way in: one call to join a pool, then put and get whole values.
//!
//! [`Client`] is the long way, with batches, memory of the caller's own and options for all of it.

use std::{net::IpAddr, sync::Arc, time::Duration};

use mooncake_base::{ByteSize, Clock, Error, ErrorKind, ObjectKey, Result, SystemClock};
use mooncake_transfer_engine::{Engine, EngineConfig};
use tokio::runtime::{Builder, Runtime};

use crate::{
    address::set_engine_host,
    client::Client,
    config::{ClientConfig, LinkConfig},
    http::HttpServer,
    link::SocketLink,
    object::{PutOptions, PutOutcome, Selector},
};

/// Threads that answer other processes which reach this one's memory over TCP.
const WORKERS: usize = 2;

/// How long the engine may wait for a metadata server when it ends.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// A member of a pool: lends memory, and puts and gets whole values.
///
/// It has its own transfer engine and runtime. Closed when dropped.
#[derive(Debug)]
pub struct Store {
    client: Client,
    engine: Engine,
    // Last, so that it outlives what runs on it.
    runtime: Runtime,
}

impl Store {
    /// Joins the pool of that master and lends it 256 MiB, which take up room only once used.
    ///
    /// # Errors
    /// The address is none, or nobody answers there within 5 seconds.
    pub fn connect(master: &str) -> Result<Self> {
        let lent = ByteSize::mib(256).bytes();
        Self::join(
            master,
            EngineConfig::default(),
            ClientConfig { segment_bytes: lent, ..ClientConfig::default() },
        )
    }

    /// Joins with settings of one's own. An engine without a name gets the address of this host on
    /// the network on which the master is.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and settings that cannot be met.
    pub fn join(master: &str, engine: EngineConfig, client: ClientConfig) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .thread_name("mooncake-io")
            .enable_all()
            .build()
            .map_err(|source| Error::internal("the runtime does not start").caused_by(source))?;
        let mut engine = engine;
        set_engine_host(&mut engine, master);
        let link = SocketLink::new(master, LinkConfig::default())?;
        let engine = Engine::start(engine, runtime.handle().clone())?;
        let client = Client::connect(client, engine.clone(), Arc::new(link))?;
        Ok(Self { client, engine, runtime })
    }

    /// Puts a value. A key that exists keeps its value; see the outcome.
    ///
    /// # Errors
    /// The value is empty, there is no room, or the master or a holder cannot be reached.
    pub fn put(&self, key: &ObjectKey, value: &[u8]) -> Result<PutOutcome> {
        self.put_with(key, value, &PutOptions::default())
    }

    /// Puts a value in place of the one that the key may have.
    ///
    /// # Errors
    /// As [`put`](Self::put); the old value stays.
    pub fn upsert(&self, key: &ObjectKey, value: &[u8]) -> Result<PutOutcome> {
        self.put_with(key, value, &PutOptions { is_upsert: true, ..PutOptions::default() })
    }

    /// Gets a value; `None` if no object has the key.
    ///
    /// # Errors
    /// The object is still being written, or the master or every holder cannot be reached.
    pub fn get(&self, key: &ObjectKey) -> Result<Option<Vec<u8>>> {
        self.client.get_bytes(key)
    }

    /// Removes an object, also one that was read a moment ago. Says whether it was there.
    ///
    /// # Errors
    /// The object is being written, or the master cannot be reached.
    pub fn remove(&self, key: &ObjectKey) -> Result<bool> {
        match only(self.client.remove(std::slice::from_ref(key), true)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes the chosen objects, and says how many.
    ///
    /// # Errors
    /// A bad expression, or the master cannot be reached.
    pub fn remove_matching(&self, which: &Selector) -> Result<u64> {
        self.client.remove_matching(which, true)
    }

    /// The client under it, for all that this face leaves out.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Serves its health and metrics over HTTP at that address (port 0: any), until what is returned
    /// is dropped or the store closed.
    ///
    /// # Errors
    /// Nobody may listen there, or the store is closed.
    pub fn serve(&self, host: IpAddr, port: u16) -> Result<HttpServer> {
        self.client.serve(host, port, self.runtime.handle())
    }

    /// Leaves the pool. What only this process held is gone with it.
    pub fn close(&self) {
        self.client.close();
        self.engine.close(SystemClock.now() + CLOSE_PATIENCE);
    }

    fn put_with(&self, key: &ObjectKey, value: &[u8], options: &PutOptions) -> Result<PutOutcome> {
        self.client.put_bytes(key, value, options)
    }
}

/// The one outcome of a batch of one.
fn only<T>(outcomes: Vec<Result<T>>) -> Result<T> {
    let mut outcomes = outcomes.into_iter();
    outcomes.next().unwrap_or_else(|| Err(Error::internal("a batch of one gave no outcome")))
}
