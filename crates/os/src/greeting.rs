//! Accepts connections of a blocking listener, of which a bounded number may be in their greeting.
//!
//! Anybody who can reach the port can connect, and say nothing. A connection that has not said who it is when
//! too many others come is closed in favour of them, and each greeting has a deadline as a whole.

use std::{
    collections::VecDeque,
    io,
    net::{Shutdown, TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

use mooncake_base::{Clock, Moment, SystemClock, sync::Mutex};

/// How long the process accepts nothing after it could not: it has no descriptors left, for instance.
const PAUSE: Duration = Duration::from_millis(50);

/// Limits of the connections that have not proved yet who they are.
#[derive(Debug, Clone, Copy)]
pub struct GreetingLimits {
    /// Maximum number of them. The next one displaces the oldest.
    pub count: usize,
    /// Time that a greeting may take.
    pub time: Duration,
}

/// A listener, and the connections in their greeting.
#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    limits: GreetingLimits,
    open: Arc<Mutex<OpenGreetings>>,
}

#[derive(Debug, Default)]
struct OpenGreetings {
    next: u64,
    /// In the order in which they began.
    streams: VecDeque<(u64, TcpStream)>,
}

/// The place of a connection among those in their greeting, until it is dropped.
#[derive(Debug)]
pub struct Greeting {
    number: u64,
    deadline: Moment,
    open: Arc<Mutex<OpenGreetings>>,
}

impl Acceptor {
    /// Accepts the connections of a listener.
    pub fn new(listener: TcpListener, limits: GreetingLimits) -> Self {
        Self { listener, limits, open: Arc::default() }
    }

    /// Waits for the next connection; returns `None` once `is_over` holds. Connect to the listener to
    /// wake the waiting thread for that.
    pub fn next(&self, is_over: impl Fn() -> bool) -> Option<(TcpStream, Greeting)> {
        loop {
            let accepted = self.listener.accept();
            if is_over() {
                return None;
            }
            match accepted.and_then(|(stream, _)| Ok((self.begin(&stream)?, stream))) {
                Ok((greeting, stream)) => return Some((stream, greeting)),
                Err(error) => {
                    tracing::debug!(%error, "a connection cannot be accepted");
                    Self::pause();
                }
            }
        }
    }

    /// Keeps a process that cannot accept connections from trying it all the time.
    #[allow(clippy::disallowed_methods, reason = "nothing tells that descriptors are free again")]
    pub fn pause() {
        std::thread::sleep(PAUSE);
    }

    fn begin(&self, stream: &TcpStream) -> io::Result<Greeting> {
        let displaceable = stream.try_clone()?;
        let mut open = self.open.lock();
        let number = open.next;
        open.next += 1;
        open.streams.push_back((number, displaceable));
        if open.streams.len() > self.limits.count
            && let Some((_, oldest)) = open.streams.pop_front()
        {
            // The thread that reads it notices.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let deadline = SystemClock.now() + self.limits.time;
        Ok(Greeting { number, deadline, open: Arc::clone(&self.open) })
    }
}

impl Greeting {
    /// Returns when the greeting must be over; [`DeadlineStream`](crate::DeadlineStream) keeps to it.
    pub const fn deadline(&self) -> Moment {
        self.deadline
    }
}

impl Drop for Greeting {
    fn drop(&mut self) {
        self.open.lock().streams.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};

    use super::*;
    use crate::DeadlineStream;

    fn acceptor(count: usize, time: Duration) -> (Acceptor, impl Fn() -> TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connect = move || TcpStream::connect(address).unwrap();
        (Acceptor::new(listener, GreetingLimits { count, time }), connect)
    }

    #[test]
    fn silent_connections_are_displaced_by_new_ones() {
        let (acceptor, connect) = acceptor(2, Duration::from_secs(60));
        let mut callers: Vec<TcpStream> = Vec::new();
        let mut accepted = Vec::new();
        for _ in 0..3 {
            callers.push(connect());
            accepted.push(acceptor.next(|| false).unwrap());
        }
        assert_eq!(callers[0].read(&mut [0]).unwrap(), 0, "the oldest is closed");
        for caller in &mut callers[1..] {
            caller.set_nonblocking(true).unwrap();
            assert_eq!(caller.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        }
    }

    #[test]
    fn connection_that_has_greeted_is_not_displaced() {
        let (acceptor, connect) = acceptor(1, Duration::from_secs(60));
        let mut first = connect();
        let (_stream, greeting) = acceptor.next(|| false).unwrap();
        drop(greeting);
        let _others: Vec<_> = (0..3)
            .map(|_| {
                let caller = connect();
                (caller, acceptor.next(|| false).unwrap())
            })
            .collect();
        first.set_nonblocking(true).unwrap();
        assert_eq!(first.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }

    #[test]
    fn greeting_has_one_deadline_for_all_reads() {
        let (acceptor, connect) = acceptor(1, Duration::from_millis(50));
        let _caller = connect();
        let (stream, greeting) = acceptor.next(|| false).unwrap();
        let mut limited = DeadlineStream::new(&stream, greeting.deadline());
        for _ in 0..2 {
            assert_eq!(limited.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
        }
    }

    #[test]
    fn ends_when_it_is_over() {
        let (acceptor, connect) = acceptor(1, Duration::from_secs(60));
        let _caller = connect();
        assert!(acceptor.next(|| true).is_none());
    }
}
