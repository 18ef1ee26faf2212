//! The simple API: one call to join a pool, then puts and gets of whole values.
//!
//! [`Client`] is the full API, with batches, caller-owned memory and all options.

use std::{net::IpAddr, time::Duration};

use mooncake_base::{Clock, Error, ErrorKind, ObjectKey, Result, SystemClock};
use mooncake_transfer_engine::{Engine, EngineConfig};
use tokio::runtime::{Builder, Runtime};

use crate::{
    address::set_engine_host,
    client::Client,
    config::{ClientConfig, LinkConfig},
    http::HttpServer,
    link::open_link,
    object::{PutOptions, PutOutcome, RemovalTerms, Selector},
};

/// Threads that serve TCP transfers from other processes.
const WORKERS: usize = 2;

/// Time limit for the metadata server while the engine closes.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// Removals take leased objects, and leave hard-pinned ones.
const TERMS: RemovalTerms =
    RemovalTerms { is_forced: true, spares_hard_pinned: true, if_version: None };

/// A member of a pool: lends memory, and puts and gets whole values.
///
/// Owns its transfer engine and runtime. Closed when dropped.
#[derive(Debug)]
pub struct Store {
    client: Client,
    engine: Engine,
    // Last field, so that the runtime outlives everything that runs on it.
    runtime: Runtime,
}

impl Store {
    /// Joins the pool of the master and lends no memory: objects lie in the memory of other
    /// processes, and outlast this one. [`join`](Self::join) lends memory.
    ///
    /// # Errors
    /// The address is invalid, or no master answers there within 5 seconds.
    pub fn connect(master: &str) -> Result<Self> {
        Self::join(master, EngineConfig::default(), ClientConfig::default())
    }

    /// Joins with explicit settings. An engine without a name gets this host's address on the
    /// master's network.
    ///
    /// # Errors
    /// Same as [`connect`](Self::connect), and for settings that cannot be met.
    pub fn join(master: &str, engine: EngineConfig, client: ClientConfig) -> Result<Self> {
        Self::join_with(master, engine, client, LinkConfig::default())
    }

    /// Joins as [`join`](Self::join) does, with settings of the link to the master, such as its
    /// token.
    ///
    /// # Errors
    /// Same as [`join`](Self::join), and if only one side has a token or the tokens differ.
    pub fn join_with(
        master: &str,
        engine: EngineConfig,
        client: ClientConfig,
        link: LinkConfig,
    ) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .thread_name("mooncake-io")
            .enable_all()
            .build()
            .map_err(|source| Error::internal("the runtime does not start").caused_by(source))?;
        let mut engine = engine;
        set_engine_host(&mut engine, master);
        let link = open_link(master, link)?;
        let engine = Engine::start(engine, runtime.handle().clone())?;
        let client = Client::connect(client, engine.clone(), link)?;
        Ok(Self { client, engine, runtime })
    }

    /// Puts a value. An existing key keeps its value, reported by the outcome.
    ///
    /// # Errors
    /// The value is empty, no space is left, or the master or an owner of the memory cannot be
    /// reached.
    pub fn put(&self, key: &ObjectKey, value: &[u8]) -> Result<PutOutcome> {
        self.put_with(key, value, &PutOptions::default())
    }

    /// Puts a value and replaces the value that the key may have.
    ///
    /// # Errors
    /// Same as [`put`](Self::put); the old value stays.
    pub fn upsert(&self, key: &ObjectKey, value: &[u8]) -> Result<PutOutcome> {
        self.put_with(key, value, &PutOptions { is_upsert: true, ..PutOptions::default() })
    }

    /// Gets a value; `None` if no object has the key. Takes no lease.
    ///
    /// # Errors
    /// The object is still being written, or the master or all replicas cannot be reached.
    pub fn get(&self, key: &ObjectKey) -> Result<Option<Vec<u8>>> {
        self.client.get_bytes(key)
    }

    /// Removes an object, even if another client has leased it. Returns whether the object existed.
    ///
    /// # Errors
    /// The object is hard-pinned ([`Client::remove`] takes it) or being written, or the master cannot be reached.
    pub fn remove(&self, key: &ObjectKey) -> Result<bool> {
        match only(self.client.remove_under(std::slice::from_ref(key), &TERMS)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes the selected objects, except hard-pinned ones, and returns their number.
    ///
    /// # Errors
    /// A bad expression, or the master cannot be reached.
    pub fn remove_matching(&self, which: &Selector) -> Result<u64> {
        Ok(self.client.remove_matching_under(which, &TERMS)?.removed)
    }

    /// The underlying client, with the full API.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Serves health and metrics over HTTP at the address (port 0: a free port), until the returned
    /// server is dropped or the store is closed.
    ///
    /// # Errors
    /// The address cannot be bound, or the store is closed.
    pub fn serve(&self, host: IpAddr, port: u16) -> Result<HttpServer> {
        self.client.serve(host, port, self.runtime.handle())
    }

    /// Leaves the pool. Objects without a replica in another process are lost.
    pub fn close(&self) {
        self.client.close();
        self.engine.close(SystemClock.now() + CLOSE_PATIENCE);
    }

    fn put_with(&self, key: &ObjectKey, value: &[u8], options: &PutOptions) -> Result<PutOutcome> {
        self.client.put_bytes(key, value, options)
    }
}

/// Returns the outcome of a batch of one item.
fn only<T>(outcomes: Vec<Result<T>>) -> Result<T> {
    let mut outcomes = outcomes.into_iter();
    outcomes.next().unwrap_or_else(|| Err(Error::internal("a batch of one gave no outcome")))
}
