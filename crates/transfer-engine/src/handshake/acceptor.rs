//! A listener on tokio whose tasks are owned: at most so many, all gone after `close`.

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

/// How long `close` waits for tasks that have been told to end; they end at their next wait.
const CLOSE_PATIENCE: Duration = Duration::from_millis(200);

/// How long accepting rests when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What happens to connections above the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OverflowPolicy {
    /// They wait in the backlog: for requests that are over soon.
    Wait,
    /// They are closed: for connections that stay.
    Close,
}

/// A connection that was accepted. A forked child closes it at once, so that nobody takes the
/// child for us; hence it is dropped whole.
#[derive(Debug)]
pub(crate) struct Accepted {
    /// Dropped before the stream: a number that is closed may be another file's at once.
    pub(crate) fork_guard: ForkGuard,
    pub(crate) stream: TcpStream,
    pub(crate) guard: ConnectionGuard,
}

/// That a connection is counted, and waited for by `close`; dropped when all else of it is.
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
    /// Serves every connection of the listener with `serve`, at most `limit` at a time.
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

    /// How many connections there are, and how many were closed for being too many.
    pub(crate) fn load(&self) -> PoolSnapshot {
        PoolSnapshot {
            open: self.limit - self.permits.available_permits(),
            idle: 0,
            limit: self.limit,
            refused: self.refused.load(Ordering::Relaxed),
        }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops listening, closes every connection and waits until they are closed. Idempotent.
    pub(crate) fn close(&self) {
        if fork::is_forked_since(self.generation) {
            return; // after a fork the tasks and sockets belong to the parent
        }
        self.stop.cancel();
        self.tasks.close();
        // By a channel and not by `block_on`, which would panic on a thread of a runtime.
        let (done, is_done) = sync_channel(1);
        let tasks = self.tasks.clone();
        drop(self.runtime.spawn(async move {
            tasks.wait().await;
            let _ = done.send(());
        }));
        // An error means that the runtime is gone, and the tasks with it, or that one is late.
        let _ = is_done.recv_timeout(CLOSE_PATIENCE);
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
                tracing::warn!("a connection was closed, there are as many as allowed");
                continue;
            };
            let fork_guard = ForkGuard::new(&stream);
            let guard = ConnectionGuard { _permit: permit, _counted: tasks.token() };
            let accepted = Accepted { fork_guard, stream, guard };
            let (served, stop) = (serve(accepted), pool.stop.clone());
            tasks.spawn(async move {
                if let Some(Err(failure)) = stop.run_until_cancelled(served).await {
                    tracing::debug!(%failure, "a connection ended");
                }
            });
        }
    };
    pool.stop.run_until_cancelled(accepting).await;
    drop(fork_guard);
    drop(listener);
}

/// Has a forked child close a socket.
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
