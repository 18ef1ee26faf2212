//! Watches the processes of guests: what the master holds for one is given back as soon as it is
//! dead, whatever descriptors its children keep open.

use std::{io, os::fd::AsFd as _, sync::Arc, thread::JoinHandle, time::Duration};

use mooncake_base::{Error, Result};
use rustix::event::{PollFd, PollFlags, poll};

use crate::{bell::Ear, guests::Guests};

/// After a failure that should not be, so long until the next look.
const PAUSE: Duration = Duration::from_millis(100);

/// Begins to watch; ends once the guests are closed and the bell rings.
///
/// # Errors
/// The system has no thread.
#[allow(clippy::disallowed_methods, reason = "it is no use to fail faster")]
pub(crate) fn start(guests: Arc<Guests>, ear: Ear) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name("mc-watch".to_owned())
        .spawn(move || {
            while !guests.are_closed() {
                if let Err(error) = look(&guests, &ear) {
                    tracing::warn!(%error, "the processes of guests cannot be watched");
                    std::thread::sleep(PAUSE);
                }
            }
        })
        .map_err(|source| Error::internal("no thread to watch with").caused_by(source))
}

/// Waits for a death or for the bell, and releases what the dead held.
fn look(guests: &Guests, ear: &Ear) -> io::Result<()> {
    let watched = guests.processes();
    let mut events: Vec<PollFd<'_>> = watched
        .iter()
        .map(|(_, process)| PollFd::from_borrowed_fd(process.handle(), PollFlags::IN))
        .collect();
    events.push(PollFd::from_borrowed_fd(ear.as_fd(), PollFlags::IN));
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
    ear.empty();
    for client in dead {
        guests.bury(client);
    }
    Ok(())
}
