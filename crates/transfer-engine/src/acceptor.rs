//! A tokio listener that owns its tasks: their number is limited, and all have ended after `close`.

mod connection_table;

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
    time::{Duration, Instant},
};

use mooncake_base::{Error, ErrorCode, Result};
use mooncake_os::{acceptor::ACCEPT_PAUSE, fork};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_util::{
    sync::CancellationToken,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

use self::connection_table::{ConnectionEntry, ConnectionTable, Displacement};
use crate::metrics::PoolSnapshot;

/// How long `close` waits for cancelled tasks, which end at their next await.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);

/// The pause after a connection was ended to free its descriptor.
const DISPLACE_PAUSE: Duration = Duration::from_millis(5);

/// The maximum wait for a connection that was told to end, before another one is.
const ROOM_INTERVAL: Duration = Duration::from_millis(200);

/// Handling of connections above the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OverflowPolicy {
    /// They wait until another connection ends or gives way; for short requests.
    Wait,
    /// They are closed if no other connection gives way; for long-lived connections.
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
    entry: ConnectionEntry,
    _permit: OwnedSemaphorePermit,
    _counted: TaskTrackerToken,
}

impl ConnectionGuard {
    /// Marks the connection as one that has sent a valid request.
    pub(crate) fn mark_known(&self) {
        self.entry.mark_known();
    }

    /// Marks the connection as waiting for its peer: it may have to give way to another one.
    pub(crate) fn begin_wait(&self) {
        self.entry.begin_wait(Instant::now());
    }

    /// Marks the connection as being at work.
    pub(crate) fn end_wait(&self) {
        self.entry.end_wait();
    }
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
        limit: usize,
        overflow: OverflowPolicy,
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
            table: Arc::new(ConnectionTable::new(Instant::now())),
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
    table: Arc<ConnectionTable>,
    overflow: OverflowPolicy,
    stop: CancellationToken,
    refused: Arc<AtomicU64>,
}

impl Pool {
    /// Acquires a permit for a new connection; ends another connection if there is none left.
    async fn acquire(&self) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
                return Some(permit);
            }
            let wait = match (self.table.displace(Instant::now()), self.overflow) {
                (Displacement::Refused, OverflowPolicy::Close) => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!("a connection was closed, the limit of connections is reached");
                    return None;
                }
                (Displacement::Refused, OverflowPolicy::Wait) => ROOM_INTERVAL,
                (Displacement::After(wait), _) => wait,
                (Displacement::Ended, _) => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    ROOM_INTERVAL
                }
            };
            // A permit that arrives earlier ends the wait, and is taken above.
            drop(timeout(wait, self.permits.acquire()).await);
        }
    }
}

async fn accept<Serve, Served>(listener: TcpListener, pool: Pool, tasks: TaskTracker, serve: Serve)
where
    Serve: Fn(Accepted) -> Served + Send + Sync + 'static,
    Served: Future<Output = io::Result<()>> + Send + 'static,
{
    let fork_guard = ForkGuard::new(&listener);
    let accepting = async {
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(failure) => {
                    // If the process has no free descriptor, a silent connection gives one back.
                    let has_no_descriptor =
                        matches!(failure.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
                    if has_no_descriptor
                        && pool.table.displace(Instant::now()) == Displacement::Ended
                    {
                        tracing::debug!(%failure, "a connection was ended for its descriptor");
                        pool.refused.fetch_add(1, Ordering::Relaxed);
                        tokio::time::sleep(DISPLACE_PAUSE).await;
                        continue;
                    }
                    tracing::warn!(%failure, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Some(permit) = pool.acquire().await else { continue };
            let fork_guard = ForkGuard::new(&stream);
            let cut = pool.stop.child_token();
            let entry = pool.table.add(cut.clone(), Instant::now());
            let guard = ConnectionGuard { entry, _permit: permit, _counted: tasks.token() };
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
        fork::guard_descriptor(socket.as_raw_fd());
        Self(socket.as_raw_fd())
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        fork::unguard(self.0);
    }
}
