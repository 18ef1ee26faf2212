//! The native protocol: request frames in, response frames out, in order. The codec is in
//! `mooncake-proto`.

use std::{io, time::Duration};

use bytes::{Buf, BytesMut};
use mooncake_base::{Error, ErrorCode, Result, Token};
use mooncake_proto::{
    native_frame::{self, FRAME_BYTES_MAX, GREETING_BYTES_MAX, ServerGreeting},
    native_token::{Challenge, ClientProof},
    v1::{self, response},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::UnixStream,
    sync::OwnedSemaphorePermit,
    time::timeout,
};

use super::{
    admission::{SMALL_FRAME_BYTES, begins_put_end},
    connection::{Connection, ServerContext},
    dedicated_thread::{self, LocalStream},
    durability::AnsweringThread,
};

/// The deadline for exchanging greetings.
const GREETING_DEADLINE: Duration = Duration::from_secs(10);

/// The deadline for each next part of a frame that the peer has begun.
const FRAME_DEADLINE: Duration = Duration::from_secs(30);

/// The deadline for writing responses to the peer.
pub(super) const WRITE_DEADLINE: Duration = Duration::from_secs(30);

/// Responses are flushed when this many bytes are buffered.
const FLUSH_BYTES: usize = 256 * 1024;

/// The number of consecutive responses after which the task yields to other connections.
const YIELD_AFTER: u32 = 64;

/// A buffer that grew beyond this size is freed once it is empty.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// The bytes of later calls that are read while a call waits.
const READ_AHEAD_MAX: usize = 64 * 1024;

/// The initial size of the read buffer.
const READ_BYTES: usize = 8 * 1024;

/// Serves one connection until it closes, fails, or the master stops.
pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    prefix: BytesMut,
    connection: Connection,
    context: ServerContext,
) {
    log_end(ConnectionDriver::new(stream, prefix, connection, context).run().await);
}

/// Serves one connection of a client on this host, on a dedicated thread during bursts of calls.
pub(super) async fn serve_local(
    stream: UnixStream,
    connection: Connection,
    context: ServerContext,
) {
    let driver =
        ConnectionDriver::new(LocalStream::Async(stream), BytesMut::new(), connection, context);
    log_end(dedicated_thread::run(driver).await);
}

/// Logs why a connection failed, at debug level: the peer or the network caused the failure.
fn log_end(ended: Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// The outcome of one wait for calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Bytes arrived, and every complete call was answered.
    Answered,
    /// No bytes arrived for a while. Only on a dedicated thread.
    Idle,
    /// The peer closed the connection between frames or was idle too long, or the master stops.
    Closed,
}

/// A connection with its input and output buffers.
#[derive(Debug)]
pub(super) struct ConnectionDriver<S> {
    pub(super) stream: S,
    input: BytesMut,
    output: BytesMut,
    /// The admission permit of the large frame in progress.
    frame_permit: Option<OwnedSemaphorePermit>,
    /// Bytes of a refused frame that are still to be received and discarded.
    discard_bytes: usize,
    /// Whether the master has stopped before it could begin a call, which is not answered.
    is_abandoned: bool,
    connection: Connection,
    pub(super) context: ServerContext,
    pub(super) thread: AnsweringThread,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ConnectionDriver<S> {
    fn new(stream: S, prefix: BytesMut, connection: Connection, context: ServerContext) -> Self {
        Self {
            stream,
            input: prefix,
            output: BytesMut::new(),
            frame_permit: None,
            discard_bytes: 0,
            is_abandoned: false,
            connection,
            context,
            thread: AnsweringThread::Runtime,
        }
    }

    async fn run(&mut self) -> Result<()> {
        if self.begin().await? {
            while self.step().await? != Step::Closed {}
        }
        Ok(())
    }

    /// Exchanges greetings, and answers the calls received with the peer's greeting. Returns `false`
    /// if the peer closed the connection instead.
    pub(super) async fn begin(&mut self) -> Result<bool> {
        match timeout(GREETING_DEADLINE, self.greet()).await {
            Ok(Ok(true)) => {}
            Ok(refused) => return refused,
            Err(_) => return Err(late("the peer did not finish its greeting")),
        }
        self.answer_buffered().await?;
        Ok(!self.is_abandoned)
    }

    /// Waits for calls and answers them. Calls that were read before a stop are still answered; a peer
    /// that always has another call does not keep the master from its end.
    pub(super) async fn step(&mut self) -> Result<Step> {
        let step = self.read().await?;
        if step == Step::Answered {
            self.answer_buffered().await?;
            if self.is_abandoned || self.context.stop.is_cancelled() && self.is_between_frames() {
                return Ok(Step::Closed);
            }
        }
        Ok(step)
    }

    fn is_between_frames(&self) -> bool {
        self.input.is_empty() && self.discard_bytes == 0
    }

    /// Checks the peer's greeting and sends the master's. Returns `false` if the peer closed the
    /// connection before its greeting.
    async fn greet(&mut self) -> Result<bool> {
        let greeting = loop {
            if let Some(greeting) = self.input.first_chunk::<12>() {
                break *greeting;
            }
            if self.read().await? != Step::Answered {
                return Ok(false);
            }
        };
        let checked = native_frame::check_client_greeting(&greeting);
        self.input.advance(greeting.len());
        if greeting[..8] != native_frame::MAGIC {
            return checked.map(|()| false);
        }
        // A client of another version receives the greeting, and with it the version of the master,
        // before the connection is closed.
        let challenge = self.context.token.clone().map(|token| (token, Challenge::new()));
        let ours = match &challenge {
            Some((_, challenge)) => challenge.greeting(),
            None => self.full_greeting(),
        };
        self.send(&ours).await?;
        checked.inspect_err(|error| self.connection.record_other_version(error))?;
        match challenge {
            Some((token, challenge)) => self.prove(&token, challenge).await,
            None => self.take_place().map(|()| true),
        }
    }

    /// Takes a place among the connections of clients.
    fn take_place(&self) -> Result<()> {
        let taken = self.connection.place.prove();
        taken.inspect_err(|_| self.context.service.record_excess())
    }

    /// Returns the greeting that names the master.
    fn full_greeting(&self) -> ServerGreeting {
        ServerGreeting {
            version: native_frame::VERSION,
            master: self.context.service.identity().to_vec(),
            unix_socket: self.context.unix_name.to_string(),
            ..ServerGreeting::default()
        }
    }

    /// Receives the client's proof of the token and answers it with the second greeting. Returns
    /// `false` if the peer closed the connection instead, as a client without the token does.
    async fn prove(&mut self, token: &Token, challenge: Challenge) -> Result<bool> {
        let proof = loop {
            match native_frame::decode::<ClientProof>(&mut self.input, GREETING_BYTES_MAX) {
                Ok(Some(proof)) => break proof,
                Ok(None) => {}
                Err(_) => break ClientProof::default(),
            }
            if self.read().await? != Step::Answered {
                return Ok(false);
            }
        };
        let knows_tokens = proof != ClientProof::default();
        match challenge.check(token, &proof) {
            Ok(exchange) => {
                self.take_place()?;
                let mut ours = self.full_greeting();
                exchange.seal(token, &mut ours);
                self.send(&ours).await?;
                Ok(true)
            }
            Err(error) if knows_tokens => {
                self.context.service.record_refusal(&error);
                let refusal = Some((&error).into());
                self.send(&ServerGreeting { refusal, ..ServerGreeting::default() }).await?;
                Err(error)
            }
            // A client that knows no tokens has sent its first call, and reads a response.
            Err(error) => {
                self.context.service.record_refusal(&error);
                self.send(&refusal(&error)).await?;
                Err(error)
            }
        }
    }

    async fn send(&mut self, message: &impl prost::Message) -> Result<()> {
        native_frame::encode(message, &mut self.output)?;
        self.flush().await
    }

    /// Answers every complete frame in the buffer. The responses are flushed together.
    async fn answer_buffered(&mut self) -> Result<()> {
        let mut answered = 0;
        while self.admit_next_frame().await? {
            let answer = match native_frame::decode::<v1::Request>(&mut self.input, FRAME_BYTES_MAX)
            {
                Ok(Some(request)) => match self.answer(request).await? {
                    Some(answer) => answer,
                    None => {
                        self.is_abandoned = true;
                        break;
                    }
                },
                Ok(None) => break,
                // The frame was complete but exceeds a limit. The next frame begins behind it.
                Err(error) if error.code() == ErrorCode::INVALID_PARAMS => refusal(&error),
                Err(error) => return Err(error),
            };
            if let Err(error) = native_frame::encode(&answer, &mut self.output) {
                native_frame::encode(&refusal(&error), &mut self.output)?;
            }
            if self.output.len() > FLUSH_BYTES || self.frame_permit.is_some() {
                self.flush().await?;
                self.frame_permit = None;
            }
            answered += 1;
            if answered % YIELD_AFTER == 0 {
                tokio::task::yield_now().await;
            }
        }
        self.flush().await
    }

    /// Answers a call. Returns `None` if the master stops while the call waits to begin: its client
    /// makes it again, at the next master.
    ///
    /// # Errors
    /// The peer hung up while the call waited, to begin or for the log. The connection gives back what
    /// it holds at once: a disk that hangs must not keep it for clients that are gone.
    async fn answer(&mut self, request: v1::Request) -> Result<Option<v1::Response>> {
        self.connection.record_caller_address(&request.caller_address);
        let Self { stream, input, connection, context, thread, .. } = self;
        let (service, origin) = (&context.service, &connection.origin);
        let begin = async {
            service.wait_before(&request, origin).await?;
            context.admission.admit(request.call.as_ref()).await
        };
        let begun = tokio::select! {
            biased;
            begun = begin => begun,
            () = context.stop.cancelled() => return Ok(None),
            read = hang_up(stream, input, *thread) => {
                connection.record_read(&read);
                return Err(hung_up());
            }
        };
        let permit = match begun {
            Ok(permit) => permit,
            Err(error) => return Ok(Some(refusal(&error))),
        };
        // A call that has begun is not given up: it may run on a thread of its own.
        let executed = service.execute_for(request, origin, permit).await;
        tokio::select! {
            biased;
            answer = service.answer_from_log(executed, *thread) => Ok(Some(answer)),
            read = hang_up(stream, input, *thread) => {
                connection.record_read(&read);
                Err(hung_up())
            }
        }
    }

    /// Acquires an admission permit for the frame at the start of the buffer. A frame without a
    /// permit is refused as soon as its length is known, and its bytes are discarded. Returns
    /// `false` if more bytes are needed.
    async fn admit_next_frame(&mut self) -> Result<bool> {
        loop {
            let thrown = self.discard_bytes.min(self.input.len());
            self.input.advance(thrown);
            self.discard_bytes -= thrown;
            let Some(head) = self.input.first_chunk::<4>().copied() else { return Ok(false) };
            let length = u32::from_le_bytes(head) as usize;
            // The codec refuses frames above the limit.
            let is_small = length <= SMALL_FRAME_BYTES || length > FRAME_BYTES_MAX;
            if is_small || self.frame_permit.is_some() {
                return Ok(true);
            }
            let Some(&first) = self.input.get(head.len()) else { return Ok(false) };
            let admission = &self.context.admission;
            let admitted = if begins_put_end(first) {
                admission.admit_put_end_frame(length).await
            } else {
                admission.admit_frame(length)
            };
            match admitted {
                Ok(permit) => self.frame_permit = Some(permit),
                Err(error) => {
                    self.discard_bytes = head.len() + length;
                    native_frame::encode(&refusal(&error), &mut self.output)?;
                }
            }
        }
    }

    /// Reads some bytes into the input buffer.
    async fn read(&mut self) -> Result<Step> {
        let is_between = self.is_between_frames();
        if is_between && self.input.capacity() > KEPT_BYTES_MAX {
            self.input = BytesMut::new();
        }
        if self.input.capacity() == self.input.len() {
            self.input.reserve(READ_BYTES);
        }
        let limit = if is_between { self.context.idle } else { Some(FRAME_DEADLINE) };
        let read = self.stream.read_buf(&mut self.input);
        let stop = self.context.stop.cancelled();
        let read = match limit {
            None => {
                tokio::select! { biased; read = read => read, () = stop => return Ok(Step::Closed) }
            }
            Some(limit) => tokio::select! {
                biased;
                read = timeout(limit, read) => match read {
                    Ok(read) => read,
                    Err(_) if is_between => {
                        self.connection.end_idle();
                        return Ok(Step::Closed);
                    }
                    Err(_) => return Err(late("the peer did not finish its frame")),
                },
                () = stop => return Ok(Step::Closed),
            },
        };
        self.connection.record_read(&read);
        match read {
            Ok(0) if is_between => Ok(Step::Closed),
            Ok(0) => Err(broken(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Ok(Step::Answered),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Step::Idle),
            Err(error) => Err(broken(error)),
        }
    }

    async fn flush(&mut self) -> Result<()> {
        if self.output.is_empty() {
            return Ok(());
        }
        match timeout(WRITE_DEADLINE, self.stream.write_all_buf(&mut self.output)).await {
            Ok(written) => written.map_err(broken)?,
            Err(_) => return Err(late("the peer does not read its responses")),
        }
        if self.output.capacity() > KEPT_BYTES_MAX {
            self.output = BytesMut::new();
        }
        Ok(())
    }
}

/// Waits until the peer closes its end of the connection. What it sends meanwhile is kept for later,
/// up to a limit beyond which the end is not seen. A dedicated thread does not see it either: its reads
/// block.
async fn hang_up<S: AsyncRead + Unpin>(
    stream: &mut S,
    input: &mut BytesMut,
    thread: AnsweringThread,
) -> io::Result<usize> {
    while thread == AnsweringThread::Runtime && input.len() < READ_AHEAD_MAX {
        input.reserve(READ_BYTES);
        match stream.read_buf(input).await {
            Ok(0) => return Ok(0),
            Ok(_) => {}
            Err(error) => return Err(error),
        }
    }
    std::future::pending().await
}

fn hung_up() -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the peer hung up before its call was answered")
}

fn refusal(error: &Error) -> v1::Response {
    v1::Response { call: Some(response::Call::Failure(error.into())), ..v1::Response::default() }
}

fn broken(source: io::Error) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the connection broke").caused_by(source)
}

fn late(what: &str) -> Error {
    Error::new(ErrorCode::RPC_TIMEOUT, what)
}
