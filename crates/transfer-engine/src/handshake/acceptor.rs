//! A tokio listener that owns its tasks: their number is limited, and all have ended after `close`.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::sync_channel,
    },
    time::Duration,
};

use mooncake_base::{Error, ErrorCode, Result};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::{
    sync::CancellationToken,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

use crate::{fork, metrics::PoolSnapshot};

/// How long `close` waits for cancelled tasks, which end at their next await.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);

/// How long accepting pauses when the process has no free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Handling of connections above the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OverflowPolicy {
    /// They wait in the backlog; for short requests.
    Wait,
    /// They are closed; for long-lived connections.
    Close,
}

/// An accepted connection. A forked child closes its copy at once, so that no peer takes the child
/// for its parent. The parts must be dropped together.
#[derive(Debug)]
pub(crate) struct Accepted {
    /// Dropped before the stream, since a closed descriptor number may be reused at once.
    pub(crate) fork_guard: ForkGuard,
    pub(crate) stream: TcpStream,
    /// Ends the connection: its task is dropped at the next await.
    pub(crate) cut: CancellationToken,
    pub(crate) guard: ConnectionGuard,
}

/// Counts a connection until it is dropped; `close` waits for all of them.
#[derive(Debug)]
pub(crate) struct ConnectionGuard {
    _permit: OwnedSemaphorePermit,
    _counted: TaskTrackerToken,
}

/// A running listener.
#[derive(Debug)]
pub(crate) struct Acceptor {
    address: SocketAddr,
    stop: CancellationToken,
    tasks: TaskTracker,
    runtime: Handle,
    generation: u64,
    permits: Arc<Semaphore>,
    limit: usize,
    refused: Arc<AtomicU64>,
}

impl Acceptor {
    /// Calls `serve` for every connection of the listener, for at most `limit` at a time.
    pub(crate) fn start<Serve, Served>(
        listener: std::net::TcpListener,
        (limit, overflow): (usize, OverflowPolicy),
        runtime: &Handle,
        serve: Serve,
    ) -> Result<Self>
    where
        Serve: Fn(Accepted) -> Served + Send + Sync + 'static,
        Served: Future<Output = io::Result<()>> + Send + 'static,
    {
        let adopt = || -> io::Result<(SocketAddr, TcpListener)> {
            let address = listener.local_addr()?;
            listener.set_nonblocking(true)?;
            let _inside = runtime.enter();
            Ok((address, TcpListener::from_std(listener)?))
        };
        let (address, listener) = adopt().map_err(|source| {
            Error::new(ErrorCode::INTERNAL_ERROR, "the listener cannot be used").caused_by(source)
        })?;
        let generation = fork::generation();
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let (permits, refused) = (Arc::new(Semaphore::new(limit)), Arc::new(AtomicU64::new(0)));
        let pool = Pool {
            permits: Arc::clone(&permits),
            overflow,
            stop: stop.clone(),
            refused: Arc::clone(&refused),
        };
        tasks.spawn_on(accept(listener, pool, tasks.clone(), serve), runtime);
        let runtime = runtime.clone();
        Ok(Self { address, stop, tasks, runtime, generation, permits, limit, refused })
    }

    /// Returns the number of open connections, and of those refused above the limit.
    pub(crate) fn load(&self) -> PoolSnapshot {
        PoolSnapshot {
            open: self.limit - self.permits.available_permits(),
            idle: 0,
            limit: self.limit,
            refused: self.refused.load(Ordering::Relaxed),
        }
    }

    /// The listening address.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops listening, closes every connection and waits for that. Idempotent.
    pub(crate) fn close(&self) {
        if fork::is_forked_since(self.generation) {
            return; // after a fork the tasks and sockets belong to the parent
        }
        self.stop.cancel();
        self.tasks.close();
        // Waits on a channel, since `block_on` would panic on a thread of a runtime.
        let (done, is_done) = sync_channel(1);
        let tasks = self.tasks.clone();
        drop(self.runtime.spawn(async move {
            tasks.wait().await;
            let _ = done.send(());
        }));
        // An error means that the runtime is gone with its tasks, or that a task is late.
        let _ = is_done.recv_timeout(CLOSE_TIMEOUT);
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.close();
    }
}

struct Pool {
    permits: Arc<Semaphore>,
    overflow: OverflowPolicy,
    stop: CancellationToken,
    refused: Arc<AtomicU64>,
}

async fn accept<Serve, Served>(listener: TcpListener, pool: Pool, tasks: TaskTracker, serve: Serve)
where
    Serve: Fn(Accepted) -> Served + Send + Sync + 'static,
    Served: Future<Output = io::Result<()>> + Send + 'static,
{
    let fork_guard = ForkGuard::new(&listener);
    let accepting = async {
        loop {
            if pool.overflow == OverflowPolicy::Wait {
                // The permit is taken again below, by the only task that takes any.
                drop(pool.permits.acquire().await);
            }
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(failure) => {
                    tracing::warn!(%failure, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&pool.permits).try_acquire_owned() else {
                pool.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("a connection was closed, the limit of connections is reached");
                continue;
            };
            let fork_guard = ForkGuard::new(&stream);
            let guard = ConnectionGuard { _permit: permit, _counted: tasks.token() };
            let cut = pool.stop.child_token();
            let accepted = Accepted { fork_guard, stream, cut: cut.clone(), guard };
            let served = serve(accepted);
            tasks.spawn(async move {
                if let Some(Err(failure)) = cut.run_until_cancelled(served).await {
                    tracing::debug!(%failure, "a connection ended");
                }
            });
        }
    };
    pool.stop.run_until_cancelled(accepting).await;
    drop(fork_guard);
    drop(listener);
}

/// Makes a forked child close its copy of a socket.
#[derive(Debug)]
pub(crate) struct ForkGuard(RawFd);

impl ForkGuard {
    fn new(socket: &impl AsRawFd) -> Self {
        fork::guard_socket(socket.as_raw_fd());
        Self(socket.as_raw_fd())
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        fork::unguard(self.0);
    }
}
