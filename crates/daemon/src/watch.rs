//! Watches the processes of dummy clients. When a process exits, its state at the master is
//! released at once, even if its children keep descriptors open. Also does what is due: releases
//! that the master has not answered, and clients that have had no connection for long.

use std::{io, os::fd::AsFd as _, time::Duration};

use mooncake_base::{Clock as _, SystemClock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{dummy_clients::DummyClients, waker::WakeReceiver};

/// Delay after a failed poll.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Watches until the dummy clients are closed and the waker fires.
#[allow(clippy::disallowed_methods, reason = "repeating the failure faster would not help")]
pub(crate) fn run(dummy_clients: &DummyClients, receiver: &WakeReceiver) {
    while !dummy_clients.is_closed() {
        if let Err(error) = wait_for_exit(dummy_clients, receiver) {
            tracing::warn!(%error, "cannot watch the processes of dummy clients");
            std::thread::sleep(RETRY_PAUSE);
        }
        dummy_clients.drop_unconnected();
        dummy_clients.send_releases();
    }
}

/// Waits until a process exits, something is due or the waker fires, and records the processes that
/// have exited.
fn wait_for_exit(dummy_clients: &DummyClients, receiver: &WakeReceiver) -> io::Result<()> {
    let watched = dummy_clients.processes();
    let mut events: Vec<PollFd<'_>> = watched
        .iter()
        .map(|(_, process)| PollFd::from_borrowed_fd(process.handle(), PollFlags::IN))
        .collect();
    events.push(PollFd::from_borrowed_fd(receiver.as_fd(), PollFlags::IN));
    let left = dummy_clients.next_due().map(|due| due.left(SystemClock.now()));
    // A time that has no `Timespec` is as good as none.
    let timeout = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(&mut events, timeout.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    let dead: Vec<_> = watched
        .iter()
        .zip(&events)
        .filter(|(_, event)| !event.revents().is_empty())
        .map(|((client, _), _)| *client)
        .collect();
    drop(events);
    receiver.drain();
    for client in dead {
        dummy_clients.on_process_exit(client);
    }
    Ok(())
}
