//! DedicatedThreads: threads that serve one connection each while its requests come thick and fast.
//!
//! A task of the runtime learns of a request from an event queue and asks its socket once too often
//! after each answer. A thread that waits in its one socket is there sooner, with two system calls
//! less. There are few seats, so that threads stay few; who finds none free goes on as a task, and
//! who has nothing to do for a moment gives his back.

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

use mooncake_base::spin_wait::ActiveThread;

use super::{
    Shared,
    connection::Connection,
    native::{self, Scratch, Step},
};

/// The most seats of one listener, however many processors there are.
const DEDICATED_THREADS_MAX: usize = 4;

/// The seats of one listener.
#[derive(Debug)]
pub(super) struct DedicatedThreads {
    free: Arc<AtomicUsize>,
    #[cfg(test)]
    limit: usize,
}

/// The right to a thread. Dropped, it is free for others.
#[derive(Debug)]
pub(super) struct ThreadSlot {
    free: Arc<AtomicUsize>,
}

impl DedicatedThreads {
    /// One for each of the processors.
    pub(super) fn new(processors: usize) -> Self {
        let limit = processors.clamp(1, DEDICATED_THREADS_MAX);
        Self {
            free: Arc::new(AtomicUsize::new(limit)),
            #[cfg(test)]
            limit,
        }
    }

    /// How many are taken.
    #[cfg(test)]
    pub(super) fn in_use(&self) -> usize {
        self.limit - self.free.load(Ordering::Relaxed)
    }

    /// A seat, if one is free.
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
    /// Serves the connection until it has nothing to do for a moment, and gives it back then;
    /// nothing if the peer has gone. Dropped before that, it ends the connection.
    pub(super) async fn serve(
        self,
        connection: Connection,
        shared: Arc<Shared>,
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
    shared: &Shared,
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

/// The outcome of what waits in system calls only, as everything on a seat does.
fn poll_ready<T>(future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => outcome,
        Poll::Pending => Err(io::Error::other("a connection on a seat waited for the runtime")),
    }
}

/// Ends the connection of a seat, which may be waiting in the kernel, when nobody waits for it any
/// more.
struct ShutdownOnDrop(Weak<TcpStream>);

impl Drop for ShutdownOnDrop {
    fn drop(&mut self) {
        if let Some(socket) = self.0.upgrade() {
            // It may have been closed by the peer just now, which is as well.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
