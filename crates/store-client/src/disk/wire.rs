//! A connection between a reader of records and their owner: frames and the greeting, for both sides.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

use bytes::BytesMut;
use mooncake_base::{Error, ErrorCode, Moment, Result, Token};
use mooncake_os::DeadlineStream;
use mooncake_proto::{
    native_frame::{self, Filled, GREETING_BYTES_MAX, ServerGreeting},
    native_token::{self, Challenge, ClientProof},
    records,
};
use prost::Message;

/// A connection, used by one thread at a time.
#[derive(Debug)]
pub(super) struct Wire {
    stream: TcpStream,
    incoming: native_frame::Reader,
    outgoing: BytesMut,
}

impl Wire {
    /// Wraps a connected socket.
    pub(super) fn new(stream: TcpStream) -> Self {
        // Without this, the end of a frame may wait for an acknowledgement; the calls work anyway.
        let _ = stream.set_nodelay(true);
        Self { stream, incoming: native_frame::Reader::default(), outgoing: BytesMut::new() }
    }

    /// Returns the socket.
    pub(super) const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Greets the owner of records, and proves the token.
    ///
    /// # Errors
    /// The peer does not answer in time, does not serve records, or has another token.
    pub(super) fn greet(&mut self, token: Option<&Token>, deadline: Moment) -> Result<()> {
        self.outgoing.extend_from_slice(&records::reader_greeting());
        self.flush(deadline)?;
        let greeting: ServerGreeting = self.receive(GREETING_BYTES_MAX, deadline)?;
        native_token::authenticate(token, greeting, |proof| {
            self.send(proof, deadline)?;
            self.receive(GREETING_BYTES_MAX, deadline)
        })?;
        Ok(())
    }

    /// Reads the greeting of a reader, has it prove the token, and proves it.
    ///
    /// # Errors
    /// The peer sends nothing in time, is no reader of records, or has another token.
    pub(super) fn welcome(&mut self, token: Option<&Token>, deadline: Moment) -> Result<()> {
        let mut greeting = [0; 12];
        DeadlineStream::new(&self.stream, deadline).read_exact(&mut greeting).map_err(broken)?;
        let own = ServerGreeting { version: native_frame::VERSION, ..ServerGreeting::default() };
        if let Err(error) = records::check_reader_greeting(&greeting) {
            if error.code() == ErrorCode::INVALID_VERSION {
                return self.refuse(own, error, deadline);
            }
            return Err(error);
        }
        let Some(token) = token else { return self.send(&own, deadline) };
        let challenge = Challenge::new();
        self.send(&challenge.greeting(), deadline)?;
        let proof: ClientProof = self.receive(GREETING_BYTES_MAX, deadline)?;
        match challenge.check(token, &proof) {
            Ok(exchange) => {
                let mut own = own;
                exchange.seal(token, &mut own);
                self.send(&own, deadline)
            }
            Err(error) => self.refuse(own, error, deadline),
        }
    }

    /// Tells the peer why it is refused, and returns the reason.
    fn refuse(&mut self, own: ServerGreeting, error: Error, deadline: Moment) -> Result<()> {
        self.send(&ServerGreeting { refusal: Some((&error).into()), ..own }, deadline)?;
        Err(error)
    }

    /// Sends one message.
    ///
    /// # Errors
    /// The message is too large, or the connection is broken or full until the deadline.
    pub(super) fn send(&mut self, message: &impl Message, deadline: Moment) -> Result<()> {
        native_frame::encode(message, &mut self.outgoing)?;
        self.flush(deadline)
    }

    /// Receives one message.
    ///
    /// # Errors
    /// As for [`Self::receive_next`], or the peer has closed the connection.
    pub(super) fn receive<M: Message + Default>(
        &mut self,
        limit: usize,
        deadline: Moment,
    ) -> Result<M> {
        let message = self.receive_next(limit, deadline)?;
        message.ok_or_else(|| broken(io::ErrorKind::UnexpectedEof.into()))
    }

    /// Receives one message; `None` if the peer has closed the connection instead.
    ///
    /// # Errors
    /// The connection is broken, the message malformed or above the limit, or none arrives until the
    /// deadline.
    pub(super) fn receive_next<M: Message + Default>(
        &mut self,
        limit: usize,
        deadline: Moment,
    ) -> Result<Option<M>> {
        loop {
            if let Some(message) = self.incoming.take_message(limit)? {
                return Ok(Some(message));
            }
            let mut stream = DeadlineStream::new(&self.stream, deadline);
            match self.incoming.fill(|into| stream.read(into)).map_err(broken)? {
                Filled::Open => {}
                Filled::Closed => return Ok(None),
            }
        }
    }

    fn flush(&mut self, deadline: Moment) -> Result<()> {
        let sent = DeadlineStream::new(&self.stream, deadline).write_all(&self.outgoing);
        self.outgoing.clear();
        sent.map_err(broken)
    }
}

fn broken(source: io::Error) -> Error {
    if source.kind() == io::ErrorKind::TimedOut {
        let text = "the other side of a read from disk did not answer in time";
        return Error::new(ErrorCode::RPC_TIMEOUT, text);
    }
    let text = "the connection of a read from disk broke";
    Error::new(ErrorCode::TRANSFER_FAIL, text).caused_by(source)
}
