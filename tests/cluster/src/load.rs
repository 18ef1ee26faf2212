//! Load loops: threads of a node that read or write until the node is told to stop.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, ObjectKey, Result};
use mooncake_store_client::{Client, PutOptions, PutOutcome};

use crate::{pattern, tally::Tally};

/// The pause after a failed call, so that a dead master does not cause a busy loop.
const PAUSE: Duration = Duration::from_millis(1);

/// A key is removed after this many puts.
const PUTS_PER_REMOVAL: u64 = 5;

/// The load loops of one node.
#[derive(Debug, Default)]
pub struct Loads {
    running: Vec<JoinHandle<()>>,
    tallies: Vec<Arc<Mutex<Tally>>>,
    stop: Arc<AtomicBool>,
}

/// The state of one loop.
struct Worker {
    client: Arc<Client>,
    tally: Arc<Mutex<Tally>>,
    stop: Arc<AtomicBool>,
    keys: Vec<String>,
}

/// The versions of a key that a read may return.
#[derive(Debug, Default, Clone, Copy)]
struct VersionRange {
    /// The oldest allowed version.
    oldest: u64,
    /// The last version whose put was attempted.
    newest: u64,
    /// Whether a put was acknowledged, and no removal was attempted since.
    is_stored: bool,
}

/// The outcome of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Version(u64),
    Missing,
    /// The call failed, or the value was wrong.
    Failed,
}

impl Loads {
    /// Starts a loop that reads `<name>0`, `<name>1` … in turn and checks every byte.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn read(&mut self, client: &Arc<Client>, name: &str, keys: usize) -> Result<()> {
        self.start(client, name, keys, |worker| worker.read_all())
    }

    /// Starts a loop that puts `<name>0`, `<name>1` … in turn, each time a newer version, reads the
    /// value back, and sometimes removes it. These keys must have no other writer.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn write(
        &mut self,
        client: &Arc<Client>,
        name: &str,
        keys: usize,
        length: usize,
        options: PutOptions,
    ) -> Result<()> {
        self.start(client, name, keys, move |worker| worker.write_all(length, &options))
    }

    /// Returns the sum of all loops so far.
    pub fn tally(&self) -> Tally {
        let mut sum = Tally::default();
        for tally in &self.tallies {
            sum.add(&tally.lock());
        }
        sum
    }

    /// Ends the loops after their current calls and returns the sum.
    ///
    /// # Errors
    /// A loop panicked.
    pub fn stop(&mut self) -> Result<Tally> {
        self.stop.store(true, Ordering::Relaxed);
        let joined: Vec<_> = self.running.drain(..).map(JoinHandle::join).collect();
        if joined.iter().any(std::result::Result::is_err) {
            return Err(Error::internal("a load loop panicked"));
        }
        let tally = self.tally();
        *self = Self::default();
        Ok(tally)
    }

    fn start(
        &mut self,
        client: &Arc<Client>,
        name: &str,
        keys: usize,
        work: impl FnOnce(&Worker) + Send + 'static,
    ) -> Result<()> {
        let worker = Worker {
            client: Arc::clone(client),
            tally: Arc::default(),
            stop: Arc::clone(&self.stop),
            keys: (0..keys).map(|at| format!("{name}{at}")).collect(),
        };
        self.tallies.push(Arc::clone(&worker.tally));
        let thread =
            std::thread::Builder::new().spawn(move || work(&worker)).map_err(|source| {
                Error::internal("cannot start the thread of a load loop").caused_by(source)
            })?;
        self.running.push(thread);
        Ok(())
    }
}

impl Worker {
    fn read_all(&self) {
        let mut versions =
            vec![VersionRange { newest: u64::MAX, ..VersionRange::default() }; self.keys.len()];
        while !self.is_stopped() {
            for (key, versions) in self.keys.iter().zip(&mut versions) {
                if self.is_stopped() {
                    return;
                }
                // Versions only rise: a later read must not return an older version.
                if let Found::Version(version) = self.read(key, *versions) {
                    versions.oldest = version;
                }
            }
        }
    }

    fn write_all(&self, length: usize, options: &PutOptions) {
        let options = PutOptions { is_upsert: true, ..options.clone() };
        let mut versions = vec![VersionRange::default(); self.keys.len()];
        while !self.is_stopped() {
            for (key, versions) in self.keys.iter().zip(&mut versions) {
                if self.is_stopped() {
                    return;
                }
                // What was acknowledged is there, both after a while and at once.
                self.check_stored(key, versions);
                self.put(key, versions, length, &options);
                self.check_stored(key, versions);
                if versions.newest.is_multiple_of(PUTS_PER_REMOVAL) {
                    self.remove(key, versions);
                    self.read(key, *versions);
                }
            }
        }
    }

    /// Reads a key, and counts it as lost if it has to be there and is missing.
    fn check_stored(&self, key: &str, versions: &mut VersionRange) {
        if self.read(key, *versions) == Found::Missing && std::mem::take(&mut versions.is_stored) {
            self.tally.lock().lost += 1;
        }
    }

    fn put(&self, key: &str, versions: &mut VersionRange, length: usize, options: &PutOptions) {
        versions.newest += 1;
        let value = pattern::value(key, versions.newest, length);
        let outcome = self.call(|| self.client.put_bytes(&self::key(key)?, &value, options));
        if matches!(outcome, Some(PutOutcome::Stored { .. })) {
            versions.oldest = versions.newest;
            versions.is_stored = true;
            self.tally.lock().good += 1;
        }
    }

    fn remove(&self, key: &str, versions: &mut VersionRange) {
        versions.is_stored = false;
        let removed = self.call(|| {
            let outcome = self.client.remove(&[self::key(key)?], true).pop();
            outcome.unwrap_or_else(|| Err(Error::internal("a batch of one gave no outcome")))
        });
        if removed.is_some() {
            versions.oldest = versions.newest + 1;
            self.tally.lock().good += 1;
        }
    }

    /// Reads a key and returns its version, if the value is correct and not stale.
    fn read(&self, key: &str, versions: VersionRange) -> Found {
        let Some(value) = self.call(|| self.client.get_bytes(&self::key(key)?)) else {
            return Found::Failed;
        };
        let Some(value) = value else {
            self.tally.lock().missing += 1;
            return Found::Missing;
        };
        let version = pattern::version_of(key, &value);
        let mut tally = self.tally.lock();
        match version {
            Ok(version) if (versions.oldest..=versions.newest).contains(&version) => {
                tally.good += 1;
                return Found::Version(version);
            }
            Ok(version) => tally.record_wrong(format!("key={key} version={version} {versions:?}")),
            Err(what) => tally.record_wrong(what),
        }
        Found::Failed
    }

    /// Makes one call and records its latency and its error, if any.
    fn call<T>(&self, call: impl FnOnce() -> Result<T>) -> Option<T> {
        let start = Instant::now();
        let outcome = call();
        let mut tally = self.tally.lock();
        tally.record_latency(start.elapsed());
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                tally.record_error(error.code().name());
                drop(tally);
                // Never unparked: a sleep that limits the rate of calls to a dead peer.
                std::thread::park_timeout(PAUSE);
                None
            }
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

fn key(text: &str) -> Result<ObjectKey> {
    ObjectKey::new(text.as_bytes())
}
