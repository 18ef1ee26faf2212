//! One connection of a dummy client, served by its own thread: requests in, responses out, in
//! order. The input is untrusted; each frame is checked before it is forwarded.

use std::io::{self, Read as _, Write as _};

use bytes::BytesMut;
use mooncake_base::{ClientId, Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::acceptor::ConnectionPlace;
use mooncake_proto::{
    convert::Caller,
    native_frame::{self, FRAME_BYTES_MAX, Filled, ServerGreeting},
    v1::{self, response},
};
use socket2::Socket;

use crate::{dummy_clients::DummyClients, limits::RelayLimits, process::Process};

/// Serves until the peer closes the connection, sends an invalid frame, or the socket is shut down.
pub(crate) fn serve(
    dummy_clients: &DummyClients,
    greeting: &ServerGreeting,
    peer: Peer<'_>,
    limits: RelayLimits,
    place: ConnectionPlace,
) {
    let mut connection = Connection {
        dummy_clients,
        greeting,
        peer,
        limits,
        frame_end: Some(place.greeting_deadline()),
        place,
        client: None,
        incoming: native_frame::Reader::default(),
        outgoing: BytesMut::new(),
    };
    // Caused by the peer, so only logged at debug level.
    if let Err(error) = connection.run() {
        tracing::debug!(%error, "a connection of a dummy client ended with an error");
    }
}

/// The other end of a connection.
pub(crate) struct Peer<'a> {
    pub(crate) socket: &'a Socket,
    /// Unknown over TCP.
    pub(crate) process: Option<Process>,
    /// Whether it is known to run as this user or as root.
    pub(crate) is_of_this_user: bool,
}

struct Connection<'a> {
    dummy_clients: &'a DummyClients,
    greeting: &'a ServerGreeting,
    peer: Peer<'a>,
    limits: RelayLimits,
    place: ConnectionPlace,
    /// The time at which the frame that has begun must be complete. The time-out of the socket
    /// limits only each read, and a byte in time would extend it for ever.
    frame_end: Option<Moment>,
    /// The client of this connection, known from its first call.
    client: Option<ClientId>,
    incoming: native_frame::Reader,
    outgoing: BytesMut,
}

impl Connection<'_> {
    fn run(&mut self) -> Result<()> {
        let RelayLimits { greeting_timeout, frame_timeout, .. } = self.limits;
        let socket = self.peer.socket;
        socket.set_read_timeout(Some(greeting_timeout)).map_err(broken)?;
        socket.set_write_timeout(Some(frame_timeout)).map_err(broken)?;
        if !self.greet()? {
            return Ok(());
        }
        socket.set_read_timeout(Some(frame_timeout)).map_err(broken)?;
        self.frame_end = None;
        while !self.dummy_clients.is_closed() {
            match self.incoming.take_message::<v1::Request>(FRAME_BYTES_MAX) {
                Ok(Some(request)) => {
                    self.frame_end = None;
                    let answer = self.answer(request);
                    self.send(&answer)?;
                }
                Ok(None) => {
                    if !self.read()? {
                        return Ok(());
                    }
                }
                Err(error) => {
                    // The next frame boundary is unknown now, so this is the last response.
                    self.send(&refusal(&error))?;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Checks the client greeting and sends the server greeting. `false`: the peer closed the
    /// connection without sending anything.
    fn greet(&mut self) -> Result<bool> {
        let greeting = loop {
            if let Some(greeting) = self.incoming.take_bytes::<12>() {
                break greeting;
            }
            if !self.read()? {
                return Ok(false);
            }
        };
        let checked = native_frame::check_client_greeting(&greeting);
        if greeting[..8] == native_frame::MAGIC {
            // A client of another version learns this version before the connection closes.
            self.write(self.greeting)?;
        }
        checked.map(|()| true)
    }

    fn answer(&mut self, mut request: v1::Request) -> v1::Response {
        self.check_caller(&mut request)
            .and_then(|client| self.dummy_clients.forward(client, request))
            .unwrap_or_else(|error| refusal(&error))
    }

    /// Returns the caller, which must be the same for all calls of a connection.
    fn check_caller(&mut self, request: &mut v1::Request) -> Result<ClientId> {
        if self.limits.own_user_only && !self.peer.is_of_this_user {
            let text = "the daemon serves only processes of its own user, over its Unix socket";
            return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, text).with("option", "--unix_only"));
        }
        let call = request.call.as_mut().ok_or_else(|| Error::invalid("the call is empty"))?;
        let client = Caller::try_from(call.caller_mut().as_ref())?.client;
        match self.client {
            Some(known) if known == client => {}
            Some(known) => {
                let text = "the connection belongs to another client";
                return Err(Error::new(ErrorCode::ILLEGAL_CLIENT, text)
                    .with("client", client)
                    .with("speaks_for", known));
            }
            None => {
                self.dummy_clients.add_connection(client, self.peer.process.as_ref())?;
                self.client = Some(client);
                self.place.end_greeting();
            }
        }
        Ok(client)
    }

    /// Reads some bytes. `false`: the peer closed the connection between frames.
    fn read(&mut self) -> Result<bool> {
        self.incoming.release_large_buffer();
        let is_idle = self.incoming.is_empty() && self.client.is_some();
        let mut socket = self.peer.socket;
        match self.incoming.fill(|into| socket.read(into)) {
            Ok(Filled::Closed) => return Ok(false),
            Ok(Filled::Open) => {}
            // Between frames, a client may be idle without limit.
            Err(error) if is_late(&error) && is_idle => {}
            Err(error) => return Err(broken(error)),
        }
        if self.incoming.is_empty() {
            return Ok(true);
        }
        let limit = self.limits.frame_timeout;
        let now = SystemClock.now();
        if self.frame_end.get_or_insert_with(|| now + limit).has_passed(now) {
            Err(broken(io::ErrorKind::TimedOut.into()))
        } else {
            Ok(true)
        }
    }

    fn send(&mut self, answer: &v1::Response) -> Result<()> {
        match native_frame::encode(answer, &mut self.outgoing) {
            Ok(()) => self.flush(),
            Err(error) => self.write(&refusal(&error)),
        }
    }

    fn write(&mut self, message: &impl prost::Message) -> Result<()> {
        native_frame::encode(message, &mut self.outgoing)?;
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        let written = self.write_all();
        self.outgoing.clear();
        native_frame::release_large(&mut self.outgoing);
        written.map_err(broken)
    }
}

impl Connection<'_> {
    /// Writes the outgoing bytes within the time limit of a frame, also to a peer that reads slowly.
    fn write_all(&self) -> io::Result<()> {
        let mut socket = self.peer.socket;
        let end = SystemClock.now() + self.limits.frame_timeout;
        let mut rest = &self.outgoing[..];
        while !rest.is_empty() {
            match socket.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if !rest.is_empty() && end.has_passed(SystemClock.now()) {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        if let Some(client) = self.client {
            self.dummy_clients.remove_connection(client);
        }
    }
}

fn refusal(error: &Error) -> v1::Response {
    v1::Response { call: Some(response::Call::Failure(error.into())), ..v1::Response::default() }
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn broken(source: io::Error) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the connection broke").caused_by(source)
}
