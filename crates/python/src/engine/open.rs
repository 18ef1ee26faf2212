//! A running engine and the buffers it lends to this process.

use std::{
    fmt,
    sync::{Arc, Weak},
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_os::fork;
use mooncake_transfer_engine::{Engine, EngineConfig, ManagedBuffers};
use tokio::runtime::Runtime;

/// Longest time that the close of an engine waits for a metadata server.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// The running engines, to be closed at exit. Only threads that are attached to the interpreter
/// take the lock, so no other thread holds it at the moment of a fork.
static RUNNING: Mutex<Vec<Weak<Running>>> = Mutex::new(Vec::new());

/// The state behind an engine handle. The engine closes when the last handle or store that holds it
/// is dropped.
pub(crate) struct Running {
    // Declared first so that it is dropped first: the engine unregisters its memory.
    buffers: ManagedBuffers,
    engine: Engine,
    generation: u64,
}

impl Running {
    /// Starts an engine. Blocks; must be called detached from the interpreter.
    pub(super) fn start(config: EngineConfig, runtime: &'static Runtime) -> Result<Self> {
        let engine = Engine::start(config, runtime.handle().clone())?;
        let buffers = ManagedBuffers::new(engine.clone());
        Ok(Self { buffers, engine, generation: fork::generation() })
    }

    /// Returns the engine.
    ///
    /// # Errors
    /// Returns a closed error in a forked child.
    pub(crate) fn engine(&self) -> Result<&Engine> {
        self.check().map(|()| &self.engine)
    }

    pub(super) fn buffers(&self) -> Result<&ManagedBuffers> {
        self.check().map(|()| &self.buffers)
    }

    pub(crate) fn segment(&self) -> &str {
        self.engine.segment_name()
    }

    pub(super) fn rpc_port(&self) -> u16 {
        self.engine.rpc_port()
    }

    /// True in a forked child of the process that started the engine.
    pub(crate) fn is_forked(&self) -> bool {
        fork::is_forked_since(self.generation)
    }

    fn check(&self) -> Result<()> {
        if self.is_forked() {
            return Err(Error::closed(
                "the engine was started before this process was forked; start one here",
            ));
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A batch in flight holds the engine itself; closing ends it.
        if !self.is_forked() {
            self.engine.close(SystemClock.now() + CLOSE_MAX);
        }
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("segment", &self.segment()).finish_non_exhaustive()
    }
}

/// Registers an engine for [`close_all`].
pub(super) fn track(running: &Arc<Running>) {
    let mut all = RUNNING.lock();
    all.retain(|running| running.strong_count() > 0);
    all.push(Arc::downgrade(running));
}

/// Returns a function that closes the running engines, to be called detached from the interpreter.
pub(crate) fn close_all() -> impl FnOnce() + Send {
    let all: Vec<_> = RUNNING.lock().iter().filter_map(Weak::upgrade).collect();
    move || {
        for running in all.iter().filter(|running| !running.is_forked()) {
            running.engine.close(SystemClock.now() + CLOSE_MAX);
        }
    }
}
