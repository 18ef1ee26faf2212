//! An engine that runs, with the buffers it lends to this process.

use std::{
    fmt,
    sync::{Arc, Weak},
    time::Duration,
};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Error, Result, SystemClock};
use mooncake_transfer_engine::{Engine, EngineConfig, ManagedBuffers, process};
use tokio::runtime::Runtime;

/// How long an engine that ends may wait for a metadata server.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// The engines that run, so that exit can close them. Touched only by threads that are attached to
/// the interpreter, and so never taken by another thread at the moment of a fork.
static RUNNING: Mutex<Vec<Weak<Running>>> = Mutex::new(Vec::new());

/// Everything behind one handle. It ends when nobody, no store either, holds it.
pub(crate) struct Running {
    // First, since its memory is withdrawn by the engine.
    buffers: ManagedBuffers,
    engine: Engine,
    generation: u64,
}

impl Running {
    /// Starts an engine. Blocks; to be called detached.
    pub(super) fn start(config: EngineConfig, runtime: &'static Runtime) -> Result<Self> {
        let engine = Engine::start(config, runtime.handle().clone())?;
        let buffers = ManagedBuffers::new(engine.clone());
        Ok(Self { buffers, engine, generation: process::generation() })
    }

    /// The engine, in the process that started it.
    ///
    /// # Errors
    /// A closed error in a forked child.
    pub(crate) fn engine(&self) -> Result<&Engine> {
        self.check().map(|()| &self.engine)
    }

    pub(super) fn buffers(&self) -> Result<&ManagedBuffers> {
        self.check().map(|()| &self.buffers)
    }

    pub(super) fn segment(&self) -> &str {
        self.engine.segment_name()
    }

    pub(super) fn rpc_port(&self) -> u16 {
        self.engine.rpc_port()
    }

    /// Whether this is a forked child of the process that started it.
    pub(crate) fn is_forked(&self) -> bool {
        process::is_forked_since(self.generation)
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
        // A batch that is still being moved holds the engine itself; it is not to outlive us.
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

/// Remembers an engine for [`close_all`].
pub(super) fn track(running: &Arc<Running>) {
    let mut all = RUNNING.lock();
    all.retain(|running| running.strong_count() > 0);
    all.push(Arc::downgrade(running));
}

/// What closes the engines that run, to be called detached.
pub(crate) fn close_all() -> impl FnOnce() + Send {
    let all: Vec<_> = RUNNING.lock().iter().filter_map(Weak::upgrade).collect();
    move || {
        for running in all.iter().filter(|running| !running.is_forked()) {
            running.engine.close(SystemClock.now() + CLOSE_MAX);
        }
    }
}
