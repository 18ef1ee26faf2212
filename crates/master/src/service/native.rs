//! the native protocol on the runtime: frames in, answers out, in order. The codec is `mooncake-proto`'s.

use std::{io, time::Duration};

use bytes::{Buf, BytesMut};
use mooncake_base::{Error, ErrorCode, Result};
use mooncake_proto::{
    native_frame::{self, FRAME_BYTES_MAX, ServerGreeting},
    v1::{self, response},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::UnixStream,
    sync::OwnedSemaphorePermit,
    time::timeout,
};

use super::{
    admission::SMALL_FRAME_BYTES,
    connection::{Connection, ServerContext},
    dedicated_thread::{self, LocalStream},
};

/// How long a peer may take for its greeting and for taking ours.
const GREETING_DEADLINE: Duration = Duration::from_secs(10);

/// How long a peer may take for each next part of a frame that it began.
const FRAME_DEADLINE: Duration = Duration::from_secs(30);

/// How long a peer may leave our answer untaken.
pub(super) const WRITE_DEADLINE: Duration = Duration::from_secs(30);

/// Answers are written out when so many bytes of them have gathered.
const FLUSH_BYTES: usize = 256 * 1024;

/// So many answers in a row are made before other connections have the thread.
const YIELD_AFTER: u32 = 64;

/// A buffer that grew beyond this is given back once it is empty.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// What a connection reads into at first.
const READ_BYTES: usize = 8 * 1024;

/// Serves one connection until it closes, errs, or the master stops.
pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    prefix: BytesMut,
    connection: Connection,
    context: ServerContext,
) {
    log_end(ConnectionDriver::new(stream, prefix, connection, context).run().await);
}

/// Serves one connection of this host, on a seat while its calls come thick and fast.
pub(super) async fn serve_local(
    stream: UnixStream,
    connection: Connection,
    context: ServerContext,
) {
    let driver =
        ConnectionDriver::new(LocalStream::Async(stream), BytesMut::new(), connection, context);
    log_end(dedicated_thread::run(driver).await);
}

/// How a connection ended is the peer's doing or the network's: of interest only to one who looks
/// for it.
fn log_end(ended: Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// What came of waiting for calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Some came, and those that came whole were answered.
    Answered,
    /// None came for a while; told on a seat only.
    Idle,
    /// The peer closed between frames, was idle too long, or the master stops.
    Closed,
}

/// A connection, what was read of it, and what is to be written.
#[derive(Debug)]
pub(super) struct ConnectionDriver<S> {
    pub(super) stream: S,
    input: BytesMut,
    output: BytesMut,
    /// Room for the large frame in hand.
    frame_permit: Option<OwnedSemaphorePermit>,
    /// Bytes of a refused frame that are still to come.
    discard_bytes: usize,
    connection: Connection,
    pub(super) context: ServerContext,
}

impl<S: AsyncRead + AsyncWrite + Unpin> ConnectionDriver<S> {
    fn new(stream: S, prefix: BytesMut, connection: Connection, context: ServerContext) -> Self {
        let (output, frame_permit, discard_bytes) = (BytesMut::new(), None, 0);
        Self { stream, input: prefix, output, frame_permit, discard_bytes, connection, context }
    }

    async fn run(&mut self) -> Result<()> {
        if self.begin().await? {
            while self.step().await? != Step::Closed {}
        }
        Ok(())
    }

    /// Exchanges greetings, and answers what came with the peer's. `false`: it closed instead.
    pub(super) async fn begin(&mut self) -> Result<bool> {
        match timeout(GREETING_DEADLINE, self.greet()).await {
            Ok(Ok(true)) => {}
            Ok(refused) => return refused,
            Err(_) => return Err(late("the peer did not finish its greeting")),
        }
        self.answer_buffered().await?;
        Ok(true)
    }

    /// Waits for calls and answers them. What arrived before a stop is still read and answered.
    pub(super) async fn step(&mut self) -> Result<Step> {
        let step = self.read().await?;
        if step == Step::Answered {
            self.answer_buffered().await?;
        }
        Ok(step)
    }

    /// Checks the peer's greeting and sends ours. `false`: it closed before it had said anything.
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
        // A client of another version learns ours before we close.
        let ours = ServerGreeting {
            version: native_frame::VERSION,
            master: self.context.service.identity().to_vec(),
            unix_socket: self.context.unix_name.to_string(),
            daemon: None,
        };
        native_frame::encode(&ours, &mut self.output)?;
        self.flush().await?;
        checked.map(|()| true)
    }

    /// Answers every whole frame in the buffer; the answers go out together.
    async fn answer_buffered(&mut self) -> Result<()> {
        let mut answered = 0;
        while self.admit_next_frame()? {
            let answer = match native_frame::decode::<v1::Request>(&mut self.input, FRAME_BYTES_MAX)
            {
                Ok(Some(request)) => self.answer(request).await,
                Ok(None) => break,
                // The frame was whole, and too much: the next one begins behind it.
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

    async fn answer(&self, request: v1::Request) -> v1::Response {
        self.context.service.wait_for_owners(request.call.as_ref()).await;
        match self.context.admission.admit(request.call.as_ref()).await {
            Ok(_permit) => self.context.service.answer(request, &self.connection.origin).await,
            Err(error) => refusal(&error),
        }
    }

    /// Makes sure that there is room for the frame that begins the buffer; a frame without is
    /// refused by its head, and what comes of it is thrown away. `false`: more must come first.
    fn admit_next_frame(&mut self) -> Result<bool> {
        loop {
            let thrown = self.discard_bytes.min(self.input.len());
            self.input.advance(thrown);
            self.discard_bytes -= thrown;
            let Some(head) = self.input.first_chunk::<4>() else { return Ok(false) };
            let length = u32::from_le_bytes(*head) as usize;
            // The codec refuses what is above the limit.
            let is_small = length <= SMALL_FRAME_BYTES || length > FRAME_BYTES_MAX;
            if is_small || self.frame_permit.is_some() {
                return Ok(true);
            }
            match self.context.admission.admit_frame(length) {
                Ok(permit) => self.frame_permit = Some(permit),
                Err(error) => {
                    self.discard_bytes = head.len() + length;
                    native_frame::encode(&refusal(&error), &mut self.output)?;
                }
            }
        }
    }

    /// Reads some bytes, which are then to be answered.
    async fn read(&mut self) -> Result<Step> {
        let is_between = self.input.is_empty() && self.discard_bytes == 0;
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
                    Err(_) if is_between => return Ok(Step::Closed),
                    Err(_) => return Err(late("the peer did not finish its frame")),
                },
                () = stop => return Ok(Step::Closed),
            },
        };
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
            Err(_) => return Err(late("the peer does not take its answers")),
        }
        if self.output.capacity() > KEPT_BYTES_MAX {
            self.output = BytesMut::new();
        }
        Ok(())
    }
}

fn refusal(error: &Error) -> v1::Response {
    v1::Response { call: Some(response::Call::Failure(error.into())) }
}

fn broken(source: io::Error) -> Error {
    Error::new(ErrorCode::RPC_FAIL, "the connection broke").caused_by(source)
}

fn late(what: &str) -> Error {
    Error::new(ErrorCode::RPC_TIMEOUT, what)
}
