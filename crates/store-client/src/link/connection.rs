//! One connection to the master, used by the calling thread itself: one frame out, one frame in.

use std::{
    io::{self, Read, Write},
    sync::Arc,
    time::Duration,
};

use bytes::BytesMut;
use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::{
    call_limit,
    spin_wait::{ANSWER_SPIN_TIME, ActiveThread, SpinWait, peek},
};
use mooncake_proto::{
    calls::{Method, Repetition},
    native_frame::{self, Filled},
    native_token::ClientProof,
    v1,
};
use prost::Message;
use socket2::Socket;

/// An open connection.
#[derive(Debug)]
pub(super) struct Connection {
    socket: Arc<Socket>,
    incoming: native_frame::Reader,
    outgoing: BytesMut,
    /// The receive and send time-outs that are set on the socket now.
    timeout: Duration,
    /// Time of the last use.
    last_used: Moment,
    /// For each call, since some are answered within microseconds, and others wait for disks or other
    /// masters.
    spin_waits: [SpinWait; Method::ALL.len()],
    /// The master is one of several, so that changes may wait for its standbys.
    has_view: bool,
}

/// Reason why an exchange failed. The connection cannot be used again.
#[derive(Debug)]
pub(super) enum ExchangeError {
    /// The master cannot have received the complete request.
    Unsent(io::Error),
    /// The master may have executed the request; no byte of a response arrived.
    Unanswered(io::Error),
    /// The response was cut off or malformed.
    Malformed(Error),
    /// The deadline passed.
    TimedOut,
}

impl Connection {
    /// Wraps a connected socket.
    pub(super) fn new(socket: Socket) -> Self {
        Self {
            socket: Arc::new(socket),
            incoming: native_frame::Reader::default(),
            outgoing: BytesMut::new(),
            timeout: Duration::ZERO,
            last_used: SystemClock.now(),
            spin_waits: [const { SpinWait::new(ANSWER_SPIN_TIME) }; Method::ALL.len()],
            has_view: false,
        }
    }

    /// Returns the socket, so that another thread can shut it down.
    pub(super) fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// Returns the address of this end; "unix" for a Unix socket.
    pub(super) fn own_address(&self) -> String {
        let own = self.socket.local_addr().ok();
        match own.and_then(|own| own.as_socket()) {
            Some(address) => address.to_string(),
            None => "unix".to_owned(),
        }
    }

    /// Sends the client greeting and reads the server greeting.
    pub(super) fn greet(
        &mut self,
        deadline: Moment,
    ) -> Result<native_frame::ServerGreeting, ExchangeError> {
        self.outgoing.extend_from_slice(&native_frame::client_greeting());
        self.send(deadline)?;
        self.receive(native_frame::GREETING_BYTES_MAX, deadline, None)
    }

    /// Answers the challenge of a master's first greeting and reads its second greeting.
    pub(super) fn prove(
        &mut self,
        proof: &ClientProof,
        deadline: Moment,
    ) -> Result<native_frame::ServerGreeting, ExchangeError> {
        native_frame::encode(proof, &mut self.outgoing).map_err(ExchangeError::Malformed)?;
        self.send(deadline)?;
        self.receive(native_frame::GREETING_BYTES_MAX, deadline, None)
    }

    /// Sends a request and reads the response.
    ///
    /// # Errors
    /// Outer error: the request is too large to send, and the connection stays usable.
    pub(super) fn exchange(
        &mut self,
        request: &v1::Request,
        deadline: Moment,
    ) -> Result<Result<v1::Response, ExchangeError>> {
        native_frame::encode(request, &mut self.outgoing)?;
        let method = request.call.as_ref().map(v1::request::Call::method);
        let _active = ActiveThread::new();
        let answer = self
            .send(deadline)
            .and_then(|()| self.receive(native_frame::FRAME_BYTES_MAX, deadline, method));
        if !self.has_view && answer.as_ref().is_ok_and(|answer: &v1::Response| answer.view > 0) {
            self.has_view = true;
            self.spin_waits = Method::ALL.map(spin_wait_of_several);
        }
        self.last_used = SystemClock.now();
        native_frame::release_large(&mut self.outgoing);
        self.incoming.release_large_buffer();
        Ok(answer)
    }

    /// Time since the last use.
    pub(super) fn idle(&self, now: Moment) -> Duration {
        now.since(self.last_used)
    }

    /// Returns whether the master has closed the connection, as far as can be seen without waiting.
    pub(super) fn is_closed_by_peer(&self) -> bool {
        // An unsolicited byte counts as closed.
        peek(&self.socket).map_or_else(|error| error.kind() != io::ErrorKind::WouldBlock, |_| true)
    }

    fn send(&mut self, deadline: Moment) -> Result<(), ExchangeError> {
        let mut sent = 0;
        let outcome = loop {
            if sent == self.outgoing.len() {
                break Ok(());
            }
            if let Err(late) = self.set_timeout(deadline) {
                break Err(late);
            }
            match (&*self.socket).write(&self.outgoing[sent..]) {
                Ok(0) => break Err(ExchangeError::Unsent(io::ErrorKind::WriteZero.into())),
                Ok(count) => sent += count,
                Err(error) if is_transient(&error) => {}
                Err(error) => break Err(ExchangeError::Unsent(error)),
            }
        };
        self.outgoing.clear();
        outcome
    }

    /// Reads a message. `method`: the call that it answers.
    fn receive<A: Message + Default>(
        &mut self,
        limit: usize,
        deadline: Moment,
        method: Option<Method>,
    ) -> Result<A, ExchangeError> {
        loop {
            match self.incoming.take_message(limit) {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => {}
                Err(error) => return Err(ExchangeError::Malformed(error)),
            }
            self.set_timeout(deadline)?;
            let is_first = self.incoming.is_empty();
            let filled = self.incoming.fill(|into| {
                if let (true, Some(method)) = (is_first, method) {
                    // The data is read below.
                    let _ = self.spin_waits[method as usize].poll(|| peek(&self.socket));
                }
                (&*self.socket).read(into)
            });
            let ended = match filled {
                Ok(Filled::Open) => continue,
                Ok(Filled::Closed) => io::ErrorKind::UnexpectedEof.into(),
                Err(error) if is_transient(&error) => continue,
                Err(error) => error,
            };
            return Err(if is_first {
                ExchangeError::Unanswered(ended)
            } else {
                let text = "the connection to the master broke in the middle of a response";
                ExchangeError::Malformed(Error::new(ErrorCode::RPC_FAIL, text).caused_by(ended))
            });
        }
    }

    /// Limits the next wait on the socket by the deadline.
    ///
    /// The time-out is rounded down to a power of two, so that consecutive calls seldom change it.
    /// A wait that ends early is repeated.
    fn set_timeout(&mut self, deadline: Moment) -> Result<(), ExchangeError> {
        let left = call_limit::next_wait(deadline);
        if left.is_zero() {
            return Err(ExchangeError::TimedOut);
        }
        let millis = u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1);
        let timeout = Duration::from_millis(1 << millis.ilog2().min(20));
        if timeout != self.timeout {
            let set = self
                .socket
                .set_read_timeout(Some(timeout))
                .and_then(|()| self.socket.set_write_timeout(Some(timeout)));
            set.map_err(ExchangeError::Unsent)?;
            self.timeout = timeout;
        }
        Ok(())
    }
}

/// Returns how to wait for the answer of one of several masters to a call.
fn spin_wait_of_several(method: Method) -> SpinWait {
    match method.repetition() {
        // The leader answers such a change once its standbys have it.
        Repetition::ClosesPut | Repetition::Numbered => SpinWait::giving_way(),
        // The start of a put does not wait for them where memory is prepared.
        Repetition::StartsPut | Repetition::Harmless | Repetition::Probe => {
            SpinWait::new(ANSWER_SPIN_TIME)
        }
    }
}

/// Returns whether a socket time-out or a signal ended the wait; the deadline then decides.
/// `TimedOut` does not belong to these: the peer's host has acknowledged nothing for so long that
/// the connection is broken.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
