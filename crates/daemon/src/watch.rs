//! Watches the processes of guests: what the master holds for one is given back as soon as it is
//! dead, whatever descriptors its children keep open.

use std::{io, os::fd::AsFd as _, sync::Arc, thread::JoinHandle, time::Duration};

use mooncake_base::{Error, Result};
use rustix::event::{PollFd, PollFlags, poll};

use crate::{dummy_clients::DummyClients, waker::WakeReceiver};

/// After a failure that should not be, so long until the next look.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Begins to watch; ends once the guests are closed and the bell rings.
///
/// # Errors
/// The system has no thread.
#[allow(clippy::disallowed_methods, reason = "it is no use to fail faster")]
pub(crate) fn start(
    dummy_clients: Arc<DummyClients>,
    receiver: WakeReceiver,
) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name("mc-watch".to_owned())
        .spawn(move || {
            while !dummy_clients.is_closed() {
                if let Err(error) = wait_for_exit(&dummy_clients, &receiver) {
                    tracing::warn!(%error, "the processes of guests cannot be watched");
                    std::thread::sleep(RETRY_PAUSE);
                }
            }
        })
        .map_err(|source| Error::internal("no thread to watch with").caused_by(source))
}

/// Waits for a death or for the bell, and releases what the dead held.
fn wait_for_exit(dummy_clients: &DummyClients, receiver: &WakeReceiver) -> io::Result<()> {
    let watched = dummy_clients.processes();
    let mut events: Vec<PollFd<'_>> = watched
        .iter()
        .map(|(_, process)| PollFd::from_borrowed_fd(process.handle(), PollFlags::IN))
        .collect();
    events.push(PollFd::from_borrowed_fd(receiver.as_fd(), PollFlags::IN));
    match poll(&mut events, None) {
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
