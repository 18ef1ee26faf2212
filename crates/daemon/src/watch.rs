//! Watches the processes of guests: what the master holds for one is given back as soon as it is
//! dead, whatever descriptors its children keep open.

use std::{
    io::{self, Read as _, Write as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    thread::JoinHandle,
    time::Duration,
};

use mooncake_base::{Clock, Error, Result, SystemClock};
use rustix::event::{PollFd, PollFlags, poll};

use crate::relay::Shared;

/// After a failure that should not be, so long until the next look.
const PAUSE: Duration = Duration::from_millis(100);

/// Wakes the watching thread: there is somebody new, or it shall end.
#[derive(Debug)]
pub(crate) struct Bell(UnixStream);

impl Bell {
    pub(crate) fn ring(&self) {
        // A full socket wakes as well as one byte more would.
        let _ = (&self.0).write(&[1]);
    }
}

/// A bell and what hears it.
///
/// # Errors
/// The system has no more descriptors.
pub(crate) fn bell() -> Result<(Bell, UnixStream)> {
    let made = UnixStream::pair().and_then(|(bell, ear)| {
        bell.set_nonblocking(true)?;
        ear.set_nonblocking(true)?;
        Ok((Bell(bell), ear))
    });
    made.map_err(|source| Error::internal("no descriptors to watch with").caused_by(source))
}

/// Begins to watch; ends once the relay stops and the bell rings.
///
/// # Errors
/// The system has no thread.
#[allow(clippy::disallowed_methods, reason = "it is no use to fail faster")]
pub(crate) fn start(shared: std::sync::Arc<Shared>, ear: UnixStream) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name("mc-watch".to_owned())
        .spawn(move || {
            while !shared.is_stopped() {
                if let Err(error) = look(&shared, &ear) {
                    tracing::warn!(%error, "the processes of guests cannot be watched");
                    std::thread::sleep(PAUSE);
                }
            }
        })
        .map_err(|source| Error::internal("no thread to watch with").caused_by(source))
}

/// Waits for a death or for the bell, and releases what the dead held.
fn look(shared: &Shared, mut ear: &UnixStream) -> io::Result<()> {
    let watched = shared.members.lock().processes();
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
    // Empties it; what it says is that it has been rung.
    while matches!(ear.read(&mut [0; 64]), Ok(count) if count > 0) {}
    for client in dead {
        let forgotten = shared.members.lock().forget(client);
        if let Some(granted) = forgotten {
            // Whoever is dead reads no more.
            shared.counters.count_death();
            shared.release(client, granted.into_returned(SystemClock.now()));
        }
    }
    Ok(())
}
