//! Dedicated threads: each serves one connection while its requests arrive in quick succession.
//!
//! A task of the runtime learns of a request through an event queue and makes one futile receive
//! call after each response. A thread that blocks in its only socket reacts sooner and saves two
//! system calls per request. The number of such threads is limited. Connections that find none free
//! continue as tasks, and an idle connection gives its thread up.

use std::{
    future::Future,
    io,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use mooncake_os::{dedicated_thread::ShutdownOnDrop, spin_wait::ActiveThread};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    TcpServerShared,
    connection::Connection,
    native::{self, Scratch, Step},
};

/// The maximum number of dedicated threads of one listener, on any number of CPUs.
const DEDICATED_THREADS_MAX: usize = 4;

/// Returns the dedicated threads of one listener as permits: one per CPU, up to the maximum.
pub(super) fn permits(cpus: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(cpus.clamp(1, DEDICATED_THREADS_MAX)))
}

/// Serves the connection on a dedicated thread until it is idle, and returns it then. Returns
/// `None` if the peer closed it. Dropping the future shuts the connection down.
pub(super) async fn serve(
    connection: Connection,
    shared: Arc<TcpServerShared>,
    scratch: Scratch,
    permit: OwnedSemaphorePermit,
) -> io::Result<Option<(Connection, Scratch)>> {
    let (connection, socket) = connection.into_blocking()?;
    let shutdown = ShutdownOnDrop::new(&socket);
    drop(socket);
    let job = move || {
        let _active = ActiveThread::new();
        let served = serve_blocking(connection, &shared, scratch);
        drop(permit);
        served
    };
    let served = tokio::task::spawn_blocking(job).await.map_err(io::Error::other)?;
    shutdown.disarm();
    let Some((connection, scratch)) = served? else { return Ok(None) };
    Ok(Some((connection.into_async()?, scratch)))
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
