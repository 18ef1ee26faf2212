//! Loops of calls that a node makes on threads of its own until it is told to stop.

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

/// After a failure, so that a dead master is not asked a million times.
const PAUSE: Duration = Duration::from_millis(1);

/// Every so many puts of a key it is removed again.
const PUTS_PER_REMOVAL: u64 = 5;

/// The loops of one node.
#[derive(Debug, Default)]
pub struct Loads {
    running: Vec<JoinHandle<()>>,
    tallies: Vec<Arc<Mutex<Tally>>>,
    stop: Arc<AtomicBool>,
}

/// What a loop works with.
struct Worker {
    client: Arc<Client>,
    tally: Arc<Mutex<Tally>>,
    stop: Arc<AtomicBool>,
    keys: Vec<String>,
}

/// What its only writer knows of a key.
#[derive(Debug, Default, Clone, Copy)]
struct Known {
    /// No older version may be read any more.
    oldest: u64,
    /// The last one that was tried.
    newest: u64,
}

impl Loads {
    /// Reads `<name>0` and so on in turn, each time checking every byte.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn read(&mut self, client: &Arc<Client>, name: &str, keys: usize) -> Result<()> {
        self.start(client, name, keys, |worker| worker.read_all())
    }

    /// Puts `<name>0` and so on in turn, always a newer version, reads what it put, and now and
    /// then removes it. Nobody else may write these keys.
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

    /// What all of them came to so far.
    pub fn tally(&self) -> Tally {
        let mut sum = Tally::default();
        for tally in &self.tallies {
            sum.add(&tally.lock());
        }
        sum
    }

    /// Waits for the calls under way and says what all of them came to.
    ///
    /// # Errors
    /// A loop panicked.
    pub fn stop(&mut self) -> Result<Tally> {
        self.stop.store(true, Ordering::Relaxed);
        let joined: Vec<_> = self.running.drain(..).map(JoinHandle::join).collect();
        if joined.iter().any(std::result::Result::is_err) {
            return Err(Error::internal("a loop panicked"));
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
        let thread = std::thread::Builder::new()
            .spawn(move || work(&worker))
            .map_err(|source| Error::internal("no thread for a loop").caused_by(source))?;
        self.running.push(thread);
        Ok(())
    }
}

impl Worker {
    fn read_all(&self) {
        let mut known = vec![Known { oldest: 0, newest: u64::MAX }; self.keys.len()];
        while !self.is_stopped() {
            for (key, known) in self.keys.iter().zip(&mut known) {
                if self.is_stopped() {
                    return;
                }
                // Versions only rise: what was seen once must not give way to something older.
                if let Some(version) = self.read(key, *known) {
                    known.oldest = version;
                }
            }
        }
    }

    fn write_all(&self, length: usize, options: &PutOptions) {
        let options = PutOptions { is_upsert: true, ..options.clone() };
        let mut known = vec![Known::default(); self.keys.len()];
        while !self.is_stopped() {
            for (key, known) in self.keys.iter().zip(&mut known) {
                if self.is_stopped() {
                    return;
                }
                let is_stored = self.put(key, known, length, &options);
                if self.read(key, *known).is_none() && is_stored {
                    self.tally.lock().lost += 1;
                }
                if known.newest.is_multiple_of(PUTS_PER_REMOVAL) {
                    self.remove(key, known);
                    self.read(key, *known);
                }
            }
        }
    }

    fn put(&self, key: &str, known: &mut Known, length: usize, options: &PutOptions) -> bool {
        known.newest += 1;
        let value = pattern::value(key, known.newest, length);
        let outcome = self.call(|| self.client.put_bytes(&self::key(key)?, &value, options));
        let is_stored = matches!(outcome, Some(PutOutcome::Stored { .. }));
        if is_stored {
            known.oldest = known.newest;
            self.tally.lock().good += 1;
        }
        is_stored
    }

    fn remove(&self, key: &str, known: &mut Known) {
        let removed = self.call(|| {
            let outcome = self.client.remove(&[self::key(key)?], true).pop();
            outcome.unwrap_or_else(|| Err(Error::internal("a batch of one gave no outcome")))
        });
        if removed.is_some() {
            known.oldest = known.newest + 1;
            self.tally.lock().good += 1;
        }
    }

    /// The version that was read, if one that may be.
    fn read(&self, key: &str, known: Known) -> Option<u64> {
        let value = self.call(|| self.client.get_bytes(&self::key(key)?))?;
        let Some(value) = value else {
            self.tally.lock().missing += 1;
            return None;
        };
        let version = pattern::version_of(key, &value);
        let mut tally = self.tally.lock();
        match version {
            Ok(version) if (known.oldest..=known.newest).contains(&version) => {
                tally.good += 1;
                return Some(version);
            }
            Ok(version) => tally.mark_wrong(format!("key={key} version={version} {known:?}")),
            Err(what) => tally.mark_wrong(what),
        }
        None
    }

    /// Makes one call and notes how long it took, and why it failed if it did.
    fn call<T>(&self, call: impl FnOnce() -> Result<T>) -> Option<T> {
        let start = Instant::now();
        let outcome = call();
        let mut tally = self.tally.lock();
        tally.time(start.elapsed());
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                tally.fail(error.code().name());
                drop(tally);
                // Nobody unparks it: this only bounds how often a dead peer is asked.
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
