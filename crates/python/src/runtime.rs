//! The tokio runtime of the process: made on first use, made again in a forked child, never
//! dropped, since dropping it at interpreter exit would wait for tasks that are no longer needed.

use mooncake_base::sync::Mutex;
use mooncake_base::{Error, Result, env};
use mooncake_os::{cpu_count, fork, spin_wait};
use tokio::runtime::{Builder, Runtime};

/// Maximum number of threads that serve sockets; payload over shared memory is copied by the
/// calling thread.
const WORKERS_MAX: usize = 4;

struct ProcessRuntime {
    generation: u64,
    runtime: &'static Runtime,
}

static CURRENT: Mutex<Option<ProcessRuntime>> = Mutex::new(None);

/// Returns the runtime of this process.
///
/// Only threads that are attached to the interpreter take the lock, so no other thread holds it at
/// the moment of a fork.
///
/// # Errors
/// The system cannot provide a thread or an event queue.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    let generation = fork::generation();
    let mut current = CURRENT.lock();
    if let Some(current) = current.as_ref().filter(|current| current.generation == generation) {
        return Ok(current.runtime);
    }
    spin_wait::set_enabled(env::MC_BUSY_POLL.is_on());
    let workers = cpu_count().min(WORKERS_MAX);
    let runtime = Builder::new_multi_thread()
        .worker_threads(workers)
        .thread_name("mooncake-io")
        .enable_all()
        .build()
        .map_err(|error| Error::internal("the runtime did not start").caused_by(error))?;
    let runtime: &'static Runtime = Box::leak(Box::new(runtime));
    *current = Some(ProcessRuntime { generation, runtime });
    Ok(runtime)
}
