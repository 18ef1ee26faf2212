//! A blocking socket with a deadline.

use std::{
    borrow::Borrow,
    io::{self, Read, Write},
    net::TcpStream,
    time::Duration,
};

use mooncake_base::Moment;

use crate::call_limit;

/// A socket whose reads and writes end at the deadline, with [`io::ErrorKind::TimedOut`],
/// or with the [`call_limit`]. It owns or borrows the socket.
#[derive(Debug)]
pub struct DeadlineStream<S> {
    stream: S,
    deadline: Moment,
}

impl<S: Borrow<TcpStream>> DeadlineStream<S> {
    /// Wraps a socket.
    pub const fn new(stream: S, deadline: Moment) -> Self {
        Self { stream, deadline }
    }

    /// Sets the deadline of later reads and writes.
    pub const fn set_deadline(&mut self, deadline: Moment) {
        self.deadline = deadline;
    }

    /// Makes attempts, each for as long as a wait may last, until one is done or the time is over.
    fn attempt(
        &self,
        mut attempt: impl FnMut(&TcpStream, Duration) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            let wait = call_limit::next_wait(self.deadline);
            if wait.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match attempt(self.stream.borrow(), wait) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
        }
    }
}

impl<S: Borrow<TcpStream>> Read for DeadlineStream<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.attempt(|mut stream, wait| {
            stream.set_read_timeout(Some(wait))?;
            stream.read(buffer)
        })
    }
}

impl<S: Borrow<TcpStream>> Write for DeadlineStream<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.attempt(|mut stream, wait| {
            stream.set_write_timeout(Some(wait))?;
            stream.write(bytes)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use mooncake_base::{Clock, SystemClock};

    use super::*;

    #[test]
    fn reads_and_writes_end_at_the_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ends_with = |deadline| {
            let mut timed = DeadlineStream::new(&stream, deadline);
            timed.read(&mut [0]).unwrap_err().kind()
        };
        let soon = SystemClock.now() + Duration::from_millis(20);
        assert!(matches!(ends_with(soon), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock));
        assert!(soon.has_passed(SystemClock.now()));
        assert_eq!(ends_with(soon), io::ErrorKind::TimedOut);
        let error = DeadlineStream::new(&stream, soon).write(b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
