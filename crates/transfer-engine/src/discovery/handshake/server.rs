//! The tokio server of the handshake socket.

use std::{
    collections::VecDeque,
    fmt, io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::Result;
use mooncake_base::sync::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    runtime::Handle,
    time::timeout,
};

use super::{
    codec::{self, MESSAGE_BYTES_MAX_DEFAULT, Message, MessageKind, Notification},
    proof,
};
use crate::{
    acceptor::{Accepted, Acceptor, OverflowPolicy},
    metrics::{QueueSnapshot, Refusals},
    token::{self, Nonce, Token},
};

/// Sent to a peer that has not proven the token.
const NO_TOKEN: &str = "this engine asks for a token";

/// Answer to a connection request of upstream's RDMA transport.
const NO_QUEUE_PAIRS: &str = r#"{"local_nic_path":"","peer_nic_path":"","qp_num":[],"reply_msg":"this engine offers no RDMA transport, use tcp"}"#;

/// Settings of a handshake server.
#[derive(Clone)]
pub struct HandshakeSettings {
    /// Timeout for receiving the request, and for sending the answer.
    pub receive_timeout: Duration,
    /// Maximum length of a request; at least upstream's 1 MiB.
    pub message_bytes_max: usize,
    /// Maximum number of concurrent connections. Above it the oldest silent one gives way.
    pub connections_max: usize,
    /// Maximum number of queued notifications; more are refused.
    pub notifications_max: usize,
    /// Answers requests to connect queue pairs; `None` refuses them.
    pub connect: Option<Connect>,
    /// The token that peers must prove to get the descriptor, to send notifications and to connect queue
    /// pairs, if any.
    pub token: Option<Token>,
    /// Counters of refused tokens.
    pub refusals: Arc<Refusals>,
}

impl fmt::Debug for HandshakeSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandshakeSettings")
            .field("receive_timeout", &self.receive_timeout)
            .field("message_bytes_max", &self.message_bytes_max)
            .field("connections_max", &self.connections_max)
            .field("notifications_max", &self.notifications_max)
            .finish_non_exhaustive()
    }
}

impl Default for HandshakeSettings {
    fn default() -> Self {
        Self {
            receive_timeout: Duration::from_secs(5),
            message_bytes_max: MESSAGE_BYTES_MAX_DEFAULT,
            connections_max: 256,
            notifications_max: 4096,
            connect: None,
            token: None,
            refusals: Arc::default(),
        }
    }
}

/// A running handshake server. Dropping it closes it.
#[derive(Debug)]
pub struct HandshakeServer {
    acceptor: Acceptor,
    shared: Arc<HandshakeShared>,
}

/// Returns this engine's descriptor as JSON.
pub type Describe = Arc<dyn Fn() -> Vec<u8> + Send + Sync>;

/// Answers a request to connect queue pairs. May block for a moment.
pub type Connect = Arc<dyn Fn(&[u8]) -> Vec<u8> + Send + Sync>;

struct HandshakeShared {
    settings: HandshakeSettings,
    describe: Describe,
    notifications: Mutex<VecDeque<Notification>>,
    /// Number of notifications refused by a full queue.
    notifications_refused: AtomicU64,
}

impl fmt::Debug for HandshakeShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandshakeShared").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl HandshakeServer {
    /// Starts the server on a listener; `describe` makes the answer to requests for the descriptor.
    ///
    /// # Errors
    /// The listener cannot be registered with the runtime.
    pub fn start(
        listener: std::net::TcpListener,
        describe: Describe,
        settings: HandshakeSettings,
        runtime: &Handle,
    ) -> Result<Self> {
        let limit = settings.connections_max;
        let shared = Arc::new(HandshakeShared {
            settings,
            describe,
            notifications: Mutex::default(),
            notifications_refused: AtomicU64::new(0),
        });
        let server = Arc::clone(&shared);
        let serve = move |accepted| serve(accepted, Arc::clone(&server));
        let acceptor = Acceptor::start(listener, limit, OverflowPolicy::Wait, runtime, serve)?;
        Ok(Self { acceptor, shared })
    }

    /// The listening address.
    pub fn address(&self) -> SocketAddr {
        self.acceptor.address()
    }

    /// Takes all queued notifications, oldest first. Each is returned once.
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.shared.notifications.lock().drain(..).collect()
    }

    /// Usage of the queue of notifications.
    pub fn notifications(&self) -> QueueSnapshot {
        QueueSnapshot {
            waiting: self.shared.notifications.lock().len(),
            limit: self.shared.settings.notifications_max,
            refused: self.shared.notifications_refused.load(Ordering::Relaxed),
        }
    }

    /// Stops listening and closes every connection, in at most 0.2 s. Idempotent.
    pub fn close(&self) {
        self.acceptor.close();
    }
}

async fn serve(mut accepted: Accepted, shared: Arc<HandshakeShared>) -> io::Result<()> {
    let Accepted { stream, guard, .. } = &mut accepted;
    let receive_timeout = shared.settings.receive_timeout;
    let request = timeout(receive_timeout, receive(stream, &shared.settings)).await??;
    guard.mark_known();
    // What remains is short, unless the peer does not read.
    guard.begin_wait();
    let answer = match shared.settings.token.as_ref() {
        Some(token) if proof::is_challenge_request(&request) => {
            let owner_nonce = token::nonce();
            let challenge = proof::challenge(&owner_nonce).encode();
            timeout(receive_timeout, stream.write_all(&challenge)).await??;
            let sealed = timeout(receive_timeout, receive(stream, &shared.settings)).await??;
            let (shared, token) = (Arc::clone(&shared), token.clone());
            blocking(sealed.kind(), move || shared.answer_sealed(&token, owner_nonce, &sealed))
                .await?
        }
        _ => {
            let shared = Arc::clone(&shared);
            blocking(request.kind(), move || shared.answer(request)).await?
        }
    };
    let answer = answer.encode();
    timeout(receive_timeout, async {
        stream.write_all(&answer).await?;
        stream.shutdown().await?;
        // The peer closes after it has read the answer. Closing first could discard bytes that are
        // still in flight.
        stream.read(&mut [0; 64]).await.map(drop)
    })
    .await?
}

/// Makes an answer, on a thread for blocking work where queue pairs are connected.
async fn blocking(
    kind: MessageKind,
    answer: impl FnOnce() -> Message + Send + 'static,
) -> io::Result<Message> {
    match kind {
        MessageKind::Connection => {
            tokio::task::spawn_blocking(answer).await.map_err(io::Error::other)
        }
        _ => Ok(answer()),
    }
}

async fn receive(stream: &mut TcpStream, settings: &HandshakeSettings) -> io::Result<Message> {
    let mut prefix = [0; codec::LENGTH_BYTES];
    stream.read_exact(&mut prefix).await?;
    let length =
        codec::content_length(prefix, settings.message_bytes_max).map_err(io::Error::other)?;
    // Grows with the bytes received, not with the length that the peer claims.
    let mut content = Vec::new();
    stream.take(length as u64).read_to_end(&mut content).await?;
    if content.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Message::decode(content).map_err(io::Error::other)
}

impl HandshakeShared {
    /// Answers a request without a proof.
    fn answer(&self, request: Message) -> Message {
        let is_guarded = match request.kind() {
            MessageKind::Metadata | MessageKind::Notify => true,
            MessageKind::Connection => self.settings.connect.is_some(),
            MessageKind::Probe => false,
        };
        if is_guarded && self.settings.token.is_some() {
            return self.refuse(&request);
        }
        self.answer_trusted(&request)
    }

    /// Answers a sealed request, if its seal proves the token.
    fn answer_sealed(&self, token: &Token, owner_nonce: Nonce, sealed: &Message) -> Message {
        match proof::unseal(token, owner_nonce, sealed) {
            Some((request, exchange)) => {
                proof::seal_answer(token, &exchange, &self.answer_trusted(&request))
            }
            None => self.refuse(sealed),
        }
    }

    fn refuse(&self, request: &Message) -> Message {
        self.settings.refusals.token_here.increment();
        Message { typed: request.typed, body: proof::refusal(NO_TOKEN) }
    }

    fn answer_trusted(&self, request: &Message) -> Message {
        let body = match request.kind() {
            MessageKind::Metadata => (self.describe)(),
            MessageKind::Probe => br#"{"status":"success"}"#.to_vec(),
            MessageKind::Notify => self.queue_notification(&request.body),
            MessageKind::Connection => match &self.settings.connect {
                Some(connect) => connect(&request.body),
                None => NO_QUEUE_PAIRS.as_bytes().to_vec(),
            },
        };
        Message { typed: request.typed, body }
    }

    fn queue_notification(&self, body: &[u8]) -> Vec<u8> {
        let verdict = match Notification::from_json(body) {
            Err(_) => "the notification cannot be read",
            Ok(notification) => {
                let mut queue = self.notifications.lock();
                if queue.len() < self.settings.notifications_max {
                    queue.push_back(notification);
                    "success"
                } else {
                    self.notifications_refused.fetch_add(1, Ordering::Relaxed);
                    "too many notifications wait to be taken"
                }
            }
        };
        Notification { name: String::new(), message: verdict.to_owned() }.to_json()
    }
}

#[cfg(test)]
mod tests;
