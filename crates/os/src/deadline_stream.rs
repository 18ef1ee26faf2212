//! A blocking socket with a deadline.

use std::{
    borrow::Borrow,
    io::{self, Read, Write},
    net::TcpStream,
    time::Duration,
};

use mooncake_base::{Clock, Moment, SystemClock};

/// A socket whose reads and writes end at the deadline, with [`io::ErrorKind::TimedOut`] or
/// [`io::ErrorKind::WouldBlock`]. It owns or borrows the socket.
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

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.left(SystemClock.now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl<S: Borrow<TcpStream>> Read for DeadlineStream<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut stream = self.stream.borrow();
        stream.set_read_timeout(self.left()?)?;
        stream.read(buffer)
    }
}

impl<S: Borrow<TcpStream>> Write for DeadlineStream<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stream = self.stream.borrow();
        stream.set_write_timeout(self.left()?)?;
        stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

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
