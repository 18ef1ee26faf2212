//! Dedicated threads: each serves one connection while its requests arrive in quick succession.
//!
//! A task of the runtime learns of a request through an event queue and makes one futile receive
//! call after each response. A thread that blocks in its only socket reacts sooner and saves two
//! system calls per request. The number of such threads is limited. Connections that find none free
//! continue as tasks, and an idle connection gives its thread up.

use std::{
    future::Future,
    io,
    net::{Shutdown, TcpStream},
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use mooncake_os::spin_wait::ActiveThread;

use super::{
    TcpServerShared,
    connection::Connection,
    native::{self, Scratch, Step},
};

/// The maximum number of dedicated threads of one listener, on any number of CPUs.
const DEDICATED_THREADS_MAX: usize = 4;

/// The dedicated threads of one listener.
#[derive(Debug)]
pub(super) struct DedicatedThreads {
    free: Arc<AtomicUsize>,
    #[cfg(test)]
    limit: usize,
}

/// The right to use one dedicated thread, returned on drop.
#[derive(Debug)]
pub(super) struct ThreadSlot {
    free: Arc<AtomicUsize>,
}

impl DedicatedThreads {
    /// Allows one dedicated thread per CPU, up to the maximum.
    pub(super) fn new(cpus: usize) -> Self {
        let limit = cpus.clamp(1, DEDICATED_THREADS_MAX);
        Self {
            free: Arc::new(AtomicUsize::new(limit)),
            #[cfg(test)]
            limit,
        }
    }

    /// Returns the number of threads in use.
    #[cfg(test)]
    pub(super) fn in_use(&self) -> usize {
        self.limit - self.free.load(Ordering::Relaxed)
    }

    /// Acquires a thread slot, if one is free.
    pub(super) fn try_acquire(&self) -> Option<ThreadSlot> {
        let less = |free: usize| free.checked_sub(1);
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        Some(ThreadSlot { free: Arc::clone(&self.free) })
    }
}

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        self.free.fetch_add(1, Ordering::Relaxed);
    }
}

impl ThreadSlot {
    /// Serves the connection on a dedicated thread until it is idle, and returns it then. Returns
    /// `None` if the peer closed it. Dropping the future shuts the connection down.
    pub(super) async fn serve(
        self,
        connection: Connection,
        shared: Arc<TcpServerShared>,
        scratch: Scratch,
    ) -> io::Result<Option<(Connection, Scratch)>> {
        let (connection, socket) = connection.into_blocking()?;
        let mut shutdown = ShutdownOnDrop(Arc::downgrade(&socket));
        drop(socket);
        let job = move || {
            let _active = ActiveThread::new();
            let served = serve_blocking(connection, &shared, scratch);
            drop(self);
            served
        };
        let served = tokio::task::spawn_blocking(job).await.map_err(io::Error::other)?;
        shutdown.0 = Weak::new();
        let Some((connection, scratch)) = served? else { return Ok(None) };
        Ok(Some((connection.into_async()?, scratch)))
    }
}

fn serve_blocking(
    mut connection: Connection,
    shared: &TcpServerShared,
    mut scratch: Scratch,
) -> io::Result<Option<(Connection, Scratch)>> {
    loop {
        match poll_ready(native::step(&mut connection, shared, &mut scratch))? {
            Step::Answered => {}
            Step::Idle => return Ok(Some((connection, scratch))),
            Step::Closed => return Ok(None),
        }
    }
}

/// Returns the result of a future that blocks in system calls and is therefore never pending.
fn poll_ready<T>(future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => outcome,
        Poll::Pending => {
            Err(io::Error::other("a connection on a dedicated thread waited for the runtime"))
        }
    }
}

/// Shuts the socket of a dedicated thread down on drop, which wakes the thread if it blocks in the
/// kernel.
struct ShutdownOnDrop(Weak<TcpStream>);

impl Drop for ShutdownOnDrop {
    fn drop(&mut self) {
        if let Some(socket) = self.0.upgrade() {
            // A failure means that the connection is already closed.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
