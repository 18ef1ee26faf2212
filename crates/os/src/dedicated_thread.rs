//! What servers share that give a connection a thread of its own while calls arrive in bursts.
//!
//! A task of a runtime learns of a call through an event queue. A thread that blocks in a read of
//! its only socket starts sooner and needs fewer system calls. Which connection gets such a thread
//! is decided by [`BurstDetector`]; a thread that blocks is ended by [`ShutdownOnDrop`].

use std::{
    os::fd::AsFd,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use rustix::net::{Shutdown, shutdown};

/// The maximum gap between two calls of one burst.
const BURST_GAP: Duration = Duration::from_millis(5);

/// The number of calls in a row, each at most a few milliseconds after the previous one, that make a
/// burst.
pub const BURST_CALLS: u32 = 16;

/// Finds bursts of calls on a connection.
#[derive(Debug)]
pub struct BurstDetector {
    last: Instant,
    calls: u32,
}

impl BurstDetector {
    /// Begins before the first call.
    pub const fn new(now: Instant) -> Self {
        Self { last: now, calls: 0 }
    }

    /// Records a call that has just ended. Returns `true` once for each burst that it finds.
    pub fn record(&mut self, now: Instant) -> bool {
        let is_close = now.saturating_duration_since(self.last) < BURST_GAP;
        self.calls = if is_close { self.calls + 1 } else { 0 };
        self.last = now;
        let is_burst = self.calls >= BURST_CALLS;
        if is_burst {
            self.calls = 0;
        }
        is_burst
    }
}

/// Shuts a socket down when dropped, unless [disarmed](Self::disarm). A thread may be blocked in a
/// read of the socket, and only a shutdown wakes it.
#[derive(Debug)]
pub struct ShutdownOnDrop<S: AsFd>(Weak<S>);

impl<S: AsFd> ShutdownOnDrop<S> {
    /// Guards a socket without keeping it open.
    pub fn new(socket: &Arc<S>) -> Self {
        Self(Arc::downgrade(socket))
    }

    /// Leaves the socket as it is.
    pub fn disarm(mut self) {
        self.0 = Weak::new();
    }
}

impl<S: AsFd> Drop for ShutdownOnDrop<S> {
    fn drop(&mut self) {
        if let Some(socket) = self.0.upgrade() {
            // An error means that the peer has just closed the connection, with the same effect.
            let _ = shutdown(&*socket, Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn burst_is_found_once_and_ended_by_a_gap() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut detector = BurstDetector::new(start);
        let found: Vec<_> = (1..=32).filter(|&millis| detector.record(at(millis))).collect();
        assert_eq!(found, [16, 32]);
        assert!((33..=47).all(|millis| !detector.record(at(millis))));
        assert!(!detector.record(at(60)), "the sixteenth call came too late");
        assert!((61..=75).all(|millis| !detector.record(at(millis))));
        assert!(detector.record(at(76)));
    }

    #[test]
    fn drop_wakes_a_blocked_reader() {
        let (reader, _writer) = UnixStream::pair().unwrap();
        let reader = Arc::new(reader);
        let guard = ShutdownOnDrop::new(&reader);
        let blocked = std::thread::spawn(move || (&*reader).read(&mut [0; 1]));
        drop(guard);
        assert_eq!(blocked.join().unwrap().unwrap(), 0);
    }

    #[test]
    fn disarmed_guard_leaves_the_socket_open() {
        let (reader, writer) = UnixStream::pair().unwrap();
        let reader = Arc::new(reader);
        ShutdownOnDrop::new(&reader).disarm();
        std::io::Write::write_all(&mut &writer, b"x").unwrap();
        assert_eq!((&*reader).read(&mut [0; 1]).unwrap(), 1);
    }
}
