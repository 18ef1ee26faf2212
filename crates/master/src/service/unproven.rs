//! Connections of peers that have not shown yet that they may call: by the token of the master, or by
//! a greeting where it has none. They have a small pool of their own, in which a new one takes the
//! place of the oldest, so that strangers take no connections from clients.

use std::{collections::BTreeMap, sync::Arc};

use mooncake_base::{Error, ErrorCode, Result, sync::Mutex};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// The maximum number of such connections: a pool of clients that all connect again at once passes
/// through.
pub const UNPROVEN_MAX: usize = 4096;

/// The connections of a server by what their peers have shown.
#[derive(Debug, Clone)]
pub struct ConnectionPermits {
    /// One permit per connection of a client.
    proven: Arc<Semaphore>,
    unproven: Arc<UnprovenPool>,
}

#[derive(Debug)]
struct UnprovenPool {
    limit: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    last: u64,
    /// In the order of their arrival.
    by_number: BTreeMap<u64, CancellationToken>,
}

/// The place of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionPlace {
    permits: ConnectionPermits,
    number: u64,
    displaced: CancellationToken,
    permit: Mutex<Option<OwnedSemaphorePermit>>,
}

impl ConnectionPermits {
    /// Divides a number of connections: most are for clients.
    pub fn new(connections: usize) -> Self {
        let unproven = (connections / 8).clamp(1, UNPROVEN_MAX);
        Self::with(connections.saturating_sub(unproven).max(1), unproven)
    }

    pub(super) fn with(proven: usize, unproven: usize) -> Self {
        let waiting = Mutex::default();
        Self {
            proven: Arc::new(Semaphore::new(proven)),
            unproven: Arc::new(UnprovenPool { limit: unproven, waiting }),
        }
    }

    /// Takes a new connection in. The oldest unproven one ends if there are too many.
    pub(crate) fn take_in(&self) -> ConnectionPlace {
        let mut waiting = self.unproven.waiting.lock();
        waiting.last += 1;
        let (number, displaced) = (waiting.last, CancellationToken::new());
        waiting.by_number.insert(number, displaced.clone());
        let oldest = (waiting.by_number.len() > self.unproven.limit)
            .then(|| waiting.by_number.pop_first())
            .flatten();
        drop(waiting);
        if let Some((_, oldest)) = oldest {
            oldest.cancel();
        }
        ConnectionPlace { permits: self.clone(), number, displaced, permit: Mutex::default() }
    }

    /// Returns how many more connections of clients there may be.
    #[cfg(test)]
    pub(super) fn available(&self) -> usize {
        self.proven.available_permits()
    }
}

impl ConnectionPlace {
    /// Gives the connection a place among those of clients. Has no effect on one that has it.
    ///
    /// # Errors
    /// `RPC_FAIL`: there are too many clients, or the connection was displaced.
    pub(crate) fn prove(&self) -> Result<()> {
        let mut permit = self.permit.lock();
        if permit.is_some() {
            return Ok(());
        }
        let Ok(free) = self.permits.proven.clone().try_acquire_owned() else {
            return Err(refused("too many clients are connected to the master"));
        };
        // Removed first, so that nobody displaces a client.
        if self.permits.unproven.waiting.lock().by_number.remove(&self.number).is_none() {
            return Err(refused("too many peers connected to the master at the same time"));
        }
        *permit = Some(free);
        Ok(())
    }

    /// Returns whether the peer has shown that it may call.
    pub(super) fn is_proven(&self) -> bool {
        self.permit.lock().is_some()
    }

    /// Returns the token that is cancelled when the connection has to end for a newer one.
    pub(crate) fn displaced(&self) -> &CancellationToken {
        &self.displaced
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        if !self.is_proven() {
            self.permits.unproven.waiting.lock().by_number.remove(&self.number);
        }
    }
}

fn refused(why: &str) -> Error {
    Error::new(ErrorCode::RPC_FAIL, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_connection_displaces_oldest_unproven_one() {
        let permits = ConnectionPermits::with(2, 2);
        let [first, second] = [permits.take_in(), permits.take_in()];
        first.prove().unwrap();
        first.prove().unwrap();
        let third = permits.take_in();
        let is_over = |place: &ConnectionPlace| place.displaced().is_cancelled();
        assert!([&first, &second, &third].iter().all(|place| !is_over(place)));
        let fourth = permits.take_in();
        assert_eq!([&first, &second, &third, &fourth].map(is_over), [false, true, false, false]);
        assert_eq!(second.prove().unwrap_err().code(), ErrorCode::RPC_FAIL);
        third.prove().unwrap();
        assert_eq!(permits.available(), 0);
        fourth.prove().unwrap_err();
        drop(first);
        fourth.prove().unwrap();
        drop((second, third, fourth));
        assert_eq!(permits.available(), 2);
        assert!(permits.unproven.waiting.lock().by_number.is_empty());
    }

    #[test]
    fn most_connections_are_for_clients() {
        let shares = |connections| {
            let permits = ConnectionPermits::new(connections);
            (permits.available(), permits.unproven.limit)
        };
        assert_eq!(shares(65_536), (61_440, 4096));
        assert_eq!(shares(768), (672, 96));
        assert_eq!(shares(1), (1, 1));
    }
}
