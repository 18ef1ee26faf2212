//! One connection on the server's side: bytes between its socket and pinned memory, at a pace.

use std::{io, os::fd::AsFd, time::Duration};

use tokio::{
    io::Interest,
    time::{Instant, timeout_at},
};

use crate::{
    handshake::acceptor::Accepted,
    piece::RemoteRange,
    region::{Pin, Regions},
    transport::tcp::vector::{self, Cursor, Span, Void},
};

/// The slowest that a request may be on the whole. Slower, it would keep memory pinned for ever.
const BYTES_PER_SECOND_MIN: u64 = 1 << 20;

/// How long a request may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// How long it may stand still.
    progress: Duration,
    /// When it must be through.
    end: Instant,
}

/// A connection and the memory that its present request is about.
#[derive(Debug)]
pub(super) struct Connection {
    accepted: Accepted,
    /// What is sent before the spans. Emptied by sending.
    pub(super) wire: Vec<u8>,
    spans: Vec<Span>,
    /// Keeps the memory of `spans` registered.
    pins: Vec<Pin>,
    void: Void,
}

impl Pace {
    pub(super) fn until(end: Instant) -> Self {
        Self { progress: Duration::from_secs(u64::MAX >> 32), end }
    }

    pub(super) fn of(progress: Duration, bytes: u64) -> Self {
        let whole = progress + Duration::from_secs(bytes / BYTES_PER_SECOND_MIN);
        Self { progress, end: Instant::now() + whole }
    }

    fn next(&self) -> Instant {
        self.end.min(Instant::now() + self.progress)
    }
}

impl Connection {
    pub(super) fn new(accepted: Accepted) -> Self {
        Self {
            accepted,
            wire: Vec::new(),
            spans: Vec::new(),
            pins: Vec::new(),
            void: Void::default(),
        }
    }

    /// Adds registered memory to what is moved next; false, and nothing is added, if the range is
    /// not registered.
    pub(super) fn add(&mut self, regions: &Regions, range: RemoteRange) -> bool {
        let Ok(pin) = regions.pin(range) else { return false };
        // SAFETY: the pin keeps the range registered, and with that its owner's promise that it may
        // be transferred from and to. `release` and dropping take spans and pins out together.
        self.spans.push(unsafe { Span::new(pin.address().expose_provenance(), pin.length()) });
        self.pins.push(pin);
        true
    }

    /// Adds bytes that are received and thrown away.
    pub(super) fn add_void(&mut self, length: usize) {
        self.spans.push(Span::void(length));
    }

    /// How many bytes are to be moved.
    pub(super) fn payload(&self) -> u64 {
        self.spans.iter().map(|span| span.length() as u64).sum()
    }

    /// Lets go of the memory.
    pub(super) fn release(&mut self) {
        self.spans.clear();
        self.pins.clear();
    }

    /// Waits for the first bytes of the next request, as long as it takes, and reads what is there.
    pub(super) async fn read_some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.accepted.stream.readable().await?;
            match self.accepted.stream.try_read(buffer) {
                Err(failure) if failure.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
        }
    }

    /// Fills the buffer.
    pub(super) async fn read(&mut self, buffer: &mut [u8], pace: Pace) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.accepted.stream.try_read(&mut buffer[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(failure) => self.wait_after(failure, Interest::READABLE, pace).await?,
            }
        }
        Ok(())
    }

    /// Receives into the spans. Those whose memory cannot be written are returned by their index;
    /// their bytes are thrown away.
    pub(super) async fn receive(&mut self, pace: Pace) -> io::Result<Vec<usize>> {
        let mut cursor = Cursor::default();
        let mut bad = Vec::new();
        while !cursor.is_done(&[], &self.spans) {
            let (stream, spans, void) = (&self.accepted.stream, &self.spans, &mut self.void);
            let received = stream.try_io(Interest::READABLE, || {
                vector::receive(stream.as_fd(), spans, &mut cursor, void)
            });
            match received {
                Ok(()) => tokio::task::consume_budget().await,
                Err(failure) if vector::is_fault(&failure) => {
                    if let Some(index) = cursor.fault() {
                        self.spans[index] = self.spans[index].into_void();
                        bad.push(index);
                    }
                }
                Err(failure) => self.wait_after(failure, Interest::READABLE, pace).await?,
            }
        }
        Ok(bad)
    }

    /// Sends `wire` and the spans.
    pub(super) async fn send(&mut self, pace: Pace) -> io::Result<()> {
        let mut cursor = Cursor::default();
        while !cursor.is_done(&self.wire, &self.spans) {
            let (stream, wire, spans) = (&self.accepted.stream, &self.wire, &self.spans);
            let sent = stream.try_io(Interest::WRITABLE, || {
                vector::send(stream.as_fd(), wire, spans, &mut cursor)
            });
            match sent {
                Ok(()) => tokio::task::consume_budget().await,
                // The peer has been told that bytes come which cannot be read: only the end of
                // the connection can tell it otherwise.
                Err(failure) => self.wait_after(failure, Interest::WRITABLE, pace).await?,
            }
        }
        self.wire.clear();
        Ok(())
    }

    /// Waits if the failure says that waiting helps.
    async fn wait_after(
        &self,
        failure: io::Error,
        interest: Interest,
        pace: Pace,
    ) -> io::Result<()> {
        match failure.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => {
                timeout_at(pace.next(), self.accepted.stream.ready(interest)).await??;
                Ok(())
            }
            _ => Err(failure),
        }
    }
}
