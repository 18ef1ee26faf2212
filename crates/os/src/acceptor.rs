//! Accepts connections of blocking listeners, bounded in number.
//!
//! Anybody who can reach the port can connect, and say nothing. A connection that has not said who it is when
//! too many others come is closed in favour of them, and each greeting has a deadline as a whole.

use std::{
    collections::BTreeMap,
    io,
    net::{Shutdown, TcpListener},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::{
    Clock, Moment, SystemClock,
    sync::{Condvar, Mutex, MutexGuard},
};
use rustix::{io::retry_on_intr, net};

use crate::fork;

/// How long a process accepts nothing after it could not: it has no descriptors left, for instance.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The time that a connection has for its greeting even if others wait for its place.
const GREETING_TIME_MIN: Duration = Duration::from_millis(100);

/// The longest wait for the end of a connection that was closed in favour of another one.
const DISPLACE_TIMEOUT: Duration = Duration::from_secs(1);

/// The interval at which a listener that waits for a place asks whether it is to end.
const PLACE_INTERVAL: Duration = Duration::from_millis(100);

/// Limits of the connections of a server.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// Maximum number of connections. Above it, the oldest one that has not said who it is gives way.
    pub count: usize,
    /// Handling of a connection above the maximum if none gives way.
    pub overflow: Overflow,
    /// Maximum number of connections that have not said who they are. The next one displaces the oldest.
    pub greetings: usize,
    /// Time that a greeting may take.
    pub greeting_time: Duration,
}

/// Handling of connections above the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflow {
    /// They are closed.
    Close,
    /// They wait until another connection ends.
    Wait,
}

/// The open connections of one or several listeners.
#[derive(Debug)]
pub struct Connections {
    limits: ConnectionLimits,
    open: Mutex<OpenConnections>,
    /// Signalled when a connection ends.
    ended: Condvar,
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct OpenConnections {
    is_closed: bool,
    next: u64,
    sockets: BTreeMap<u64, OwnedFd>,
    /// Those that have not said who they are, and when they began, in this order.
    greetings: BTreeMap<u64, Moment>,
}

/// A listener and its connections. A forked child closes its copy of the listener.
#[derive(Debug)]
pub struct Acceptor<L: AsFd = TcpListener> {
    listener: L,
    connections: Arc<Connections>,
}

/// The place of a connection among the open ones, until it is dropped. The socket stays open until then.
#[derive(Debug)]
pub struct ConnectionPlace {
    number: u64,
    deadline: Moment,
    connections: Arc<Connections>,
}

impl ConnectionLimits {
    /// Limits only greetings: something else bounds the number of connections.
    pub const fn of_greetings(greetings: usize, greeting_time: Duration) -> Self {
        Self { count: usize::MAX, overflow: Overflow::Close, greetings, greeting_time }
    }
}

impl<L: AsFd> Acceptor<L> {
    /// Accepts the connections of a listener.
    pub fn new(listener: L, limits: ConnectionLimits) -> Self {
        Self::sharing(listener, Connections::new(limits))
    }

    /// Accepts the connections of a listener that shares its limits with others.
    pub fn sharing(listener: L, connections: Arc<Connections>) -> Self {
        fork::guard_descriptor(listener.as_fd().as_raw_fd());
        Self { listener, connections }
    }

    /// Returns the open connections.
    pub const fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    /// Waits for the next connection; returns `None` once `is_over` holds. [`close`](Self::close), or a
    /// connection, wakes the waiting thread for that.
    pub fn next<S: From<OwnedFd>>(
        &self,
        is_over: impl Fn() -> bool,
    ) -> Option<(S, ConnectionPlace)> {
        loop {
            let accepted =
                retry_on_intr(|| net::accept_with(&self.listener, net::SocketFlags::CLOEXEC));
            if is_over() {
                return None;
            }
            let admitted = accepted.map_err(io::Error::from).and_then(|socket| {
                let place = self.connections.admit(&socket, &is_over)?;
                Ok(place.map(|place| (S::from(socket), place)))
            });
            match admitted {
                Ok(Some(admitted)) => return Some(admitted),
                Ok(None) if is_over() => return None,
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    pause_accepting();
                }
            }
        }
    }

    /// Stops listening, which wakes the waiting thread.
    pub fn close(&self) {
        fork::unguard(self.listener.as_fd().as_raw_fd());
        // Fails if it was stopped before.
        let _ = net::shutdown(&self.listener, net::Shutdown::Both);
    }
}

impl<L: AsFd> Drop for Acceptor<L> {
    fn drop(&mut self) {
        fork::unguard(self.listener.as_fd().as_raw_fd());
    }
}

/// Keeps a process that cannot accept connections from trying it all the time.
#[allow(clippy::disallowed_methods, reason = "nothing tells that descriptors are free again")]
pub fn pause_accepting() {
    std::thread::sleep(ACCEPT_PAUSE);
}

impl Connections {
    /// No connections yet.
    pub fn new(limits: ConnectionLimits) -> Arc<Self> {
        let (open, ended, refused) = (Mutex::default(), Condvar::new(), AtomicU64::new(0));
        Arc::new(Self { limits, open, ended, refused })
    }

    /// Ends all connections, in one direction or both, and admits none any more.
    pub fn close(&self, how: Shutdown) {
        let how = match how {
            Shutdown::Read => net::Shutdown::Read,
            Shutdown::Write => net::Shutdown::Write,
            Shutdown::Both => net::Shutdown::Both,
        };
        let mut open = self.open.lock();
        open.is_closed = true;
        for socket in open.sockets.values() {
            // Fails if the peer has already closed the connection.
            let _ = net::shutdown(socket, how);
        }
        drop(open);
        self.ended.notify_all();
    }

    /// Waits until all connections have ended. Returns how many are left at the deadline.
    pub fn await_end(&self, deadline: Moment) -> usize {
        let mut open = self.open.lock();
        loop {
            let left = deadline.left(SystemClock.now());
            if open.sockets.is_empty() || left.is_zero() {
                return open.sockets.len();
            }
            self.ended.wait_for(&mut open, left);
        }
    }

    /// Number of open connections.
    pub fn count(&self) -> usize {
        self.open.lock().sockets.len()
    }

    /// Number of connections that were refused.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Counts a connection that is refused.
    pub fn record_refusal(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    fn admit(
        self: &Arc<Self>,
        socket: &OwnedFd,
        is_over: &impl Fn() -> bool,
    ) -> io::Result<Option<ConnectionPlace>> {
        let socket = socket.try_clone()?;
        let mut open = self.open.lock();
        let has_place = self.await_place(&mut open, is_over);
        let is_over = open.is_closed || is_over();
        if !has_place && !is_over {
            // Before the peer learns it.
            self.record_refusal();
        }
        if !has_place || is_over {
            return Ok(None);
        }
        if open.greetings.len() >= self.limits.greetings
            && let Some((oldest, _)) = open.oldest_greeting()
        {
            open.displace(oldest);
        }
        let number = open.next;
        open.next += 1;
        let now = SystemClock.now();
        open.sockets.insert(number, socket);
        open.greetings.insert(number, now);
        drop(open);
        let deadline = now + self.limits.greeting_time;
        Ok(Some(ConnectionPlace { number, deadline, connections: Arc::clone(self) }))
    }

    /// Waits for a place. Returns `false` if there is none.
    fn await_place(
        &self,
        open: &mut MutexGuard<'_, OpenConnections>,
        is_over: &impl Fn() -> bool,
    ) -> bool {
        // Until when the end of a connection is waited for that was told to end.
        let mut ending: Option<Moment> = None;
        while open.sockets.len() >= self.limits.count {
            if open.is_closed || is_over() {
                return false;
            }
            let now = SystemClock.now();
            let wait = match (ending, open.oldest_greeting()) {
                (Some(until), _) if !until.has_passed(now) => until.left(now),
                (None, Some((number, began))) => {
                    let wait = (began + GREETING_TIME_MIN).left(now);
                    if wait.is_zero() {
                        open.displace(number);
                        ending = Some(now + DISPLACE_TIMEOUT);
                        continue;
                    }
                    wait
                }
                _ if self.limits.overflow == Overflow::Close => return false,
                _ => {
                    ending = None;
                    PLACE_INTERVAL
                }
            };
            self.ended.wait_for(open, wait.min(PLACE_INTERVAL));
        }
        true
    }
}

impl OpenConnections {
    fn oldest_greeting(&self) -> Option<(u64, Moment)> {
        self.greetings.first_key_value().map(|(number, began)| (*number, *began))
    }

    /// Ends a connection that has not said who it is. The thread that reads it notices.
    fn displace(&mut self, number: u64) {
        self.greetings.remove(&number);
        if let Some(socket) = self.sockets.get(&number) {
            // Fails if the peer has already closed the connection.
            let _ = net::shutdown(socket, net::Shutdown::Both);
        }
    }
}

impl ConnectionPlace {
    /// Returns when the greeting must be over; [`DeadlineStream`](crate::DeadlineStream) keeps to it.
    pub const fn greeting_deadline(&self) -> Moment {
        self.deadline
    }

    /// Records that the peer has said who it is: from here on the connection gives way to no other.
    pub fn end_greeting(&self) {
        self.connections.open.lock().greetings.remove(&self.number);
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock();
        open.greetings.remove(&self.number);
        let socket = open.sockets.remove(&self.number);
        drop(open);
        drop(socket);
        self.connections.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{ErrorKind, Read},
        net::TcpStream,
        thread,
    };

    use super::*;
    use crate::DeadlineStream;

    const PATIENCE: Duration = Duration::from_secs(60);

    const LIMITS: ConnectionLimits = ConnectionLimits {
        count: 100,
        overflow: Overflow::Close,
        greetings: 100,
        greeting_time: PATIENCE,
    };

    fn acceptor(limits: ConnectionLimits) -> (Acceptor, impl Fn() -> TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connect = move || TcpStream::connect(address).unwrap();
        (Acceptor::new(listener, limits), connect)
    }

    fn accept(acceptor: &Acceptor) -> (TcpStream, ConnectionPlace) {
        acceptor.next(|| false).unwrap()
    }

    fn assert_open(caller: &mut TcpStream) {
        caller.set_nonblocking(true).unwrap();
        assert_eq!(caller.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }

    #[test]
    fn silent_connections_are_displaced_by_new_ones() {
        let (acceptor, connect) = acceptor(ConnectionLimits { greetings: 2, ..LIMITS });
        let mut callers: Vec<TcpStream> = Vec::new();
        let mut accepted = Vec::new();
        for _ in 0..3 {
            callers.push(connect());
            accepted.push(accept(&acceptor));
        }
        assert_eq!(callers[0].read(&mut [0]).unwrap(), 0, "the oldest is closed");
        callers[1..].iter_mut().for_each(assert_open);
    }

    #[test]
    fn connection_that_has_greeted_is_not_displaced() {
        let (acceptor, connect) = acceptor(ConnectionLimits { greetings: 1, ..LIMITS });
        let mut first = connect();
        let (_stream, place) = accept(&acceptor);
        place.end_greeting();
        let _others: Vec<_> = (0..3).map(|_| (connect(), accept(&acceptor))).collect();
        assert_open(&mut first);
    }

    #[test]
    fn greeting_has_one_deadline_for_all_reads() {
        let greeting_time = Duration::from_millis(50);
        let (acceptor, connect) = acceptor(ConnectionLimits { greeting_time, ..LIMITS });
        let _caller = connect();
        let (stream, place) = accept(&acceptor);
        let mut limited = DeadlineStream::new(&stream, place.greeting_deadline());
        for _ in 0..2 {
            assert_eq!(limited.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
        }
    }

    #[test]
    fn silent_connection_gives_its_place_to_one_above_the_limit() {
        let (acceptor, connect) = acceptor(ConnectionLimits { count: 2, ..LIMITS });
        let mut known = connect();
        let (_known, place) = accept(&acceptor);
        place.end_greeting();
        let mut silent = connect();
        let (stream, place) = accept(&acceptor);
        let serving = thread::spawn(move || {
            let read = (&stream).read(&mut [0]);
            drop(place);
            read
        });
        let _next = connect();
        let _accepted = accept(&acceptor);
        assert_eq!(serving.join().unwrap().unwrap(), 0);
        assert_eq!(silent.read(&mut [0]).unwrap(), 0);
        assert_open(&mut known);
        assert_eq!(acceptor.connections().count(), 2);
    }

    #[test]
    fn connection_above_the_limit_is_closed_if_all_have_greeted() {
        let (acceptor, connect) = acceptor(ConnectionLimits { count: 1, ..LIMITS });
        let _first = connect();
        let (stream, place) = accept(&acceptor);
        place.end_greeting();
        thread::scope(|scope| {
            let accepting = scope.spawn(|| accept(&acceptor));
            assert_eq!(connect().read(&mut [0]).unwrap(), 0);
            assert_eq!(acceptor.connections().refused(), 1);
            drop((stream, place));
            let _second = connect();
            let _accepted = accepting.join().unwrap();
        });
    }

    #[test]
    fn connection_above_the_limit_waits_for_the_end_of_another() {
        let limits = ConnectionLimits { count: 1, overflow: Overflow::Wait, ..LIMITS };
        let (acceptor, connect) = acceptor(limits);
        let _first = connect();
        let (_stream, place) = accept(&acceptor);
        place.end_greeting();
        let mut second = connect();
        thread::scope(|scope| {
            let accepting = scope.spawn(|| accept(&acceptor));
            second.set_read_timeout(Some(PLACE_INTERVAL)).unwrap();
            assert_eq!(second.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert!(!accepting.is_finished());
            drop(place);
            let _accepted = accepting.join().unwrap();
        });
        assert_eq!(acceptor.connections().refused(), 0);
    }

    #[test]
    fn end_of_all_connections_is_awaited() {
        let (acceptor, connect) = acceptor(LIMITS);
        let mut caller = connect();
        let (stream, place) = accept(&acceptor);
        let connections = acceptor.connections();
        assert_eq!(connections.await_end(SystemClock.now()), 1);
        thread::scope(|scope| {
            scope.spawn(move || {
                assert_eq!((&stream).read(&mut [0]).unwrap(), 0);
                drop(place);
            });
            connections.close(Shutdown::Both);
            assert_eq!(connections.await_end(SystemClock.now() + PATIENCE), 0);
        });
        assert_eq!(caller.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn close_wakes_the_waiting_thread() {
        let (acceptor, _connect) = acceptor(LIMITS);
        let is_over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            let waiting =
                scope.spawn(|| acceptor.next::<TcpStream>(|| is_over.load(Ordering::Acquire)));
            is_over.store(true, Ordering::Release);
            acceptor.close();
            assert!(waiting.join().unwrap().is_none());
        });
    }
}
