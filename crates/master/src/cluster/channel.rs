//! A connection between two masters: messages in frames of the native protocol, over a blocking socket.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs as _},
    time::Duration,
};

use bytes::BytesMut;
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock, Token};
use mooncake_proto::{
    native_frame::{self, FRAME_BYTES_MAX, GREETING_BYTES_MAX, ServerGreeting},
    native_token,
    standby::standby_greeting,
};
use prost::Message;

/// Time after which a peer that sends nothing is given up. Each side sends something at least every
/// [`KEEPALIVE`].
const SILENCE_MAX: Duration = Duration::from_secs(3);

/// Time between messages of a leader that has nothing to say.
pub(super) const KEEPALIVE: Duration = Duration::from_millis(500);

/// Time in which a message must be written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

const READ_BYTES: usize = 64 * 1024;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Channel {
    stream: TcpStream,
    input: BytesMut,
    output: BytesMut,
}

impl Channel {
    /// Takes a connected socket and the bytes that were read from it already.
    ///
    /// # Errors
    /// The socket refuses an option.
    pub(super) fn over(stream: TcpStream, input: BytesMut) -> Result<Self> {
        let set = || {
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(SILENCE_MAX))?;
            stream.set_write_timeout(Some(WRITE_TIMEOUT))
        };
        set().map_err(broken)?;
        Ok(Self { stream, input, output: BytesMut::new() })
    }

    /// Connects to a leader as a standby, and proves the token.
    ///
    /// # Errors
    /// The leader cannot be reached, does not lead, or has another token.
    pub(super) fn connect(to: &Endpoint, token: Option<&Token>, deadline: Moment) -> Result<Self> {
        let host = (&to.host[..], to.port.unwrap_or(crate::config::RPC_PORT));
        let mut last = io::Error::other("the host name has no address");
        for address in host.to_socket_addrs().map_err(unreachable)? {
            match connect_to(address, deadline) {
                Ok(stream) => {
                    let mut channel = Self::over(stream, BytesMut::new())?;
                    channel.greet(token)?;
                    return Ok(channel);
                }
                Err(error) => last = error,
            }
        }
        Err(unreachable(last))
    }

    fn greet(&mut self, token: Option<&Token>) -> Result<()> {
        self.stream.write_all(&standby_greeting()).map_err(broken)?;
        let greeting: ServerGreeting = self.receive_up_to(GREETING_BYTES_MAX)?;
        native_token::authenticate(token, greeting, |proof| {
            self.send(proof)?;
            self.receive_up_to(GREETING_BYTES_MAX)
        })?;
        Ok(())
    }

    /// Returns a second handle, for another thread.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub(super) fn split(&mut self) -> Result<Self> {
        let stream = self.stream.try_clone().map_err(broken)?;
        Ok(Self { stream, input: std::mem::take(&mut self.input), output: BytesMut::new() })
    }

    /// Returns a handle that ends the connection.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub(super) fn closer(&self) -> Result<Closer> {
        self.stream.try_clone().map(Closer).map_err(broken)
    }

    /// Reads so many bytes.
    ///
    /// # Errors
    /// The connection broke, or the peer is silent.
    pub(super) fn receive_exact<const N: usize>(&mut self) -> Result<[u8; N]> {
        loop {
            if let Some(bytes) = self.input.first_chunk::<N>().copied() {
                let _ = self.input.split_to(N);
                return Ok(bytes);
            }
            self.fill()?;
        }
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// The connection broke, the peer is silent, or the message is malformed.
    pub(super) fn receive<M: Message + Default>(&mut self) -> Result<M> {
        self.receive_up_to(FRAME_BYTES_MAX)
    }

    /// Waits for a message of limited size.
    ///
    /// # Errors
    /// Those of [`receive`](Self::receive).
    pub(super) fn receive_up_to<M: Message + Default>(&mut self, limit: usize) -> Result<M> {
        loop {
            if let Some(message) = native_frame::decode(&mut self.input, limit)? {
                return Ok(message);
            }
            self.fill()?;
        }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection broke, or the peer does not read.
    pub(super) fn send(&mut self, message: &impl Message) -> Result<()> {
        self.output.clear();
        native_frame::encode(message, &mut self.output)?;
        self.stream.write_all(&self.output).map_err(broken)?;
        if self.output.capacity() > (1 << 20) {
            self.output = BytesMut::new();
        }
        Ok(())
    }

    fn fill(&mut self) -> Result<()> {
        let start = self.input.len();
        let room = (self.input.capacity() - start).max(READ_BYTES);
        self.input.resize(start + room, 0);
        let read = self.stream.read(&mut self.input[start..]);
        self.input.truncate(start + read.as_ref().copied().unwrap_or(0));
        match read {
            Ok(0) => Err(broken(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(broken(error)),
        }
    }
}

/// Ends a connection from another thread.
#[derive(Debug)]
pub(super) struct Closer(TcpStream);

impl Closer {
    /// Ends the connection. Reads and writes under way fail.
    pub(super) fn close(&self) {
        // Fails if the peer has already closed it.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

fn connect_to(address: SocketAddr, deadline: Moment) -> io::Result<TcpStream> {
    let left = deadline.left(SystemClock.now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    TcpStream::connect_timeout(&address, left)
}

fn unreachable(source: io::Error) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the other master cannot be reached").caused_by(source)
}

fn broken(source: io::Error) -> Error {
    let text = match source.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "the other master is silent",
        _ => "the connection between two masters broke",
    };
    Error::new(ErrorCode::RPC_FAIL, text).caused_by(source)
}
