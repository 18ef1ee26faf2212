//! Seats: threads that serve one connection each while its requests come thick and fast.
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
    own_side::{self, Scratch, Step},
};

/// The most seats of one listener, however many processors there are.
const SEATS_MAX: usize = 4;

/// The seats of one listener.
#[derive(Debug)]
pub(super) struct Seats {
    free: Arc<AtomicUsize>,
    #[cfg(test)]
    limit: usize,
}

/// The right to a thread. Dropped, it is free for others.
#[derive(Debug)]
pub(super) struct Seat {
    free: Arc<AtomicUsize>,
}

impl Seats {
    /// One for each of the processors.
    pub(super) fn new(processors: usize) -> Self {
        let limit = processors.clamp(1, SEATS_MAX);
        Self {
            free: Arc::new(AtomicUsize::new(limit)),
            #[cfg(test)]
            limit,
        }
    }

    /// How many are taken.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.limit - self.free.load(Ordering::Relaxed)
    }

    /// A seat, if one is free.
    pub(super) fn take(&self) -> Option<Seat> {
        let less = |free: usize| free.checked_sub(1);
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        Some(Seat { free: Arc::clone(&self.free) })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.free.fetch_add(1, Ordering::Relaxed);
    }
}

impl Seat {
    /// Serves the connection until it has nothing to do for a moment, and gives it back then;
    /// nothing if the peer has gone. Dropped before that, it ends the connection.
    pub(super) async fn serve(
        self,
        connection: Connection,
        shared: Arc<Shared>,
        scratch: Scratch,
    ) -> io::Result<Option<(Connection, Scratch)>> {
        let (connection, socket) = connection.seated()?;
        let mut recall = Recall(Arc::downgrade(&socket));
        drop(socket);
        let stay = move || {
            let _active = ActiveThread::new();
            let stayed = stay(connection, &shared, scratch);
            drop(self);
            stayed
        };
        let stayed = tokio::task::spawn_blocking(stay).await.map_err(io::Error::other)?;
        recall.0 = Weak::new();
        let Some((connection, scratch)) = stayed? else { return Ok(None) };
        Ok(Some((connection.unseated()?, scratch)))
    }
}

fn stay(
    mut connection: Connection,
    shared: &Shared,
    mut scratch: Scratch,
) -> io::Result<Option<(Connection, Scratch)>> {
    loop {
        match at_once(own_side::step(&mut connection, shared, &mut scratch))? {
            Step::Answered => {}
            Step::Idle => return Ok(Some((connection, scratch))),
            Step::Gone => return Ok(None),
        }
    }
}

/// The outcome of what waits in system calls only, as everything on a seat does.
fn at_once<T>(future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => outcome,
        Poll::Pending => Err(io::Error::other("a connection on a seat waited for the runtime")),
    }
}

/// Ends the connection of a seat, which may be waiting in the kernel, when nobody waits for it any
/// more.
struct Recall(Weak<TcpStream>);

impl Drop for Recall {
    fn drop(&mut self) {
        if let Some(socket) = self.0.upgrade() {
            // It may have been closed by the peer just now, which is as well.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
