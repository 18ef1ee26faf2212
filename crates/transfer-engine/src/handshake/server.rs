//! Answers the handshake socket, on tokio.

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
    acceptor::{Accepted, Acceptor, OverflowPolicy},
    codec::{self, MESSAGE_BYTES_MAX_DEFAULT, Message, MessageKind, Notification},
    proof,
};
use crate::{
    metrics::{QueueSnapshot, Refusals},
    token::{self, Nonce, Token},
};

/// What is said to who has not shown the token.
const NO_TOKEN: &str = "this engine asks for a token";

/// What the answer to a connection request of the established engine's RDMA transport says.
const NO_QUEUE_PAIRS: &str = r#"{"local_nic_path":"","peer_nic_path":"","qp_num":[],"reply_msg":"this engine offers no RDMA transport, use tcp"}"#;

/// How a handshake server behaves.
#[derive(Debug, Clone)]
pub struct HandshakeSettings {
    /// How long a connection may take to bring its request, and to take the answer.
    pub receive_timeout: Duration,
    /// The longest request; at least the established 1 MiB.
    pub message_bytes_max: usize,
    /// How many connections are served at once; more wait.
    pub connections_max: usize,
    /// How many notifications are kept until somebody takes them; more are refused.
    pub notifications_max: usize,
    /// What must be proven before a descriptor is told or a notification taken; if there is one.
    pub token: Option<Token>,
    /// Where refused tokens are counted.
    pub refusals: Arc<Refusals>,
}

impl Default for HandshakeSettings {
    fn default() -> Self {
        Self {
            receive_timeout: Duration::from_secs(5),
            message_bytes_max: MESSAGE_BYTES_MAX_DEFAULT,
            connections_max: 64,
            notifications_max: 4096,
            token: None,
            refusals: Arc::default(),
        }
    }
}

/// A running handshake socket. Dropping it closes it.
#[derive(Debug)]
pub struct HandshakeServer {
    acceptor: Acceptor,
    shared: Arc<Shared>,
}

/// Gives our descriptor, as JSON, whenever a peer asks.
pub type Describe = Arc<dyn Fn() -> Vec<u8> + Send + Sync>;

struct Shared {
    settings: HandshakeSettings,
    describe: Describe,
    notifications: Mutex<VecDeque<Notification>>,
    /// Those that found no place.
    notifications_refused: AtomicU64,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl HandshakeServer {
    /// Serves the listener; `describe` makes the answer to whoever asks for our descriptor.
    ///
    /// # Errors
    /// The listener cannot be handed to the runtime.
    pub fn start(
        listener: std::net::TcpListener,
        describe: Describe,
        settings: HandshakeSettings,
        runtime: &Handle,
    ) -> Result<Self> {
        let limit = (settings.connections_max, OverflowPolicy::Wait);
        let shared = Arc::new(Shared {
            settings,
            describe,
            notifications: Mutex::default(),
            notifications_refused: AtomicU64::new(0),
        });
        let server = Arc::clone(&shared);
        let serve = move |accepted| serve(accepted, Arc::clone(&server));
        Ok(Self { acceptor: Acceptor::start(listener, limit, runtime, serve)?, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.acceptor.address()
    }

    /// Takes all notifications that have come, oldest first; each is given out once.
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.shared.notifications.lock().drain(..).collect()
    }

    /// How full the queue of notifications is.
    pub fn notifications(&self) -> QueueSnapshot {
        QueueSnapshot {
            waiting: self.shared.notifications.lock().len(),
            limit: self.shared.settings.notifications_max,
            refused: self.shared.notifications_refused.load(Ordering::Relaxed),
        }
    }

    /// Stops listening and ends every connection. Idempotent, at most 0.2 s.
    pub fn close(&self) {
        self.acceptor.close();
    }
}

async fn serve(mut accepted: Accepted, shared: Arc<Shared>) -> io::Result<()> {
    let stream = &mut accepted.stream;
    let patience = shared.settings.receive_timeout;
    let request = timeout(patience, receive(stream, &shared.settings)).await??;
    let answer =
        match shared.settings.token.as_ref().filter(|_| proof::is_challenge_request(&request)) {
            Some(token) => {
                let owner_nonce = token::nonce();
                let challenge = proof::challenge(&owner_nonce).encode();
                timeout(patience, stream.write_all(&challenge)).await??;
                let sealed = timeout(patience, receive(stream, &shared.settings)).await??;
                shared.answer_sealed(token, owner_nonce, &sealed)
            }
            None => shared.answer(request),
        };
    let answer = answer.encode();
    timeout(patience, async {
        stream.write_all(&answer).await?;
        stream.shutdown().await?;
        // The peer closes when it has read the answer. Closing before it does could destroy bytes
        // that are still on their way.
        stream.read(&mut [0; 64]).await.map(drop)
    })
    .await?
}

async fn receive(stream: &mut TcpStream, settings: &HandshakeSettings) -> io::Result<Message> {
    let mut prefix = [0; codec::LENGTH_BYTES];
    stream.read_exact(&mut prefix).await?;
    let length =
        codec::content_length(prefix, settings.message_bytes_max).map_err(io::Error::other)?;
    // Grown as bytes come, not by what the peer claims.
    let mut content = Vec::new();
    stream.take(length as u64).read_to_end(&mut content).await?;
    if content.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Message::decode(content).map_err(io::Error::other)
}

impl Shared {
    /// Answers who has shown nothing.
    fn answer(&self, request: Message) -> Message {
        let is_guarded = matches!(request.kind(), MessageKind::Metadata | MessageKind::Notify);
        if is_guarded && self.settings.token.is_some() {
            return self.refuse(&request);
        }
        self.answer_trusted(&request)
    }

    /// Answers who was challenged, if it knows the token.
    fn answer_sealed(&self, token: &Token, owner_nonce: Nonce, sealed: &Message) -> Message {
        match proof::unseal(token, owner_nonce, sealed) {
            Some((request, exchange)) => {
                proof::seal_answer(token, &exchange, &self.answer_trusted(&request))
            }
            None => self.refuse(sealed),
        }
    }

    fn refuse(&self, request: &Message) -> Message {
        self.settings.refusals.count_token_here();
        Message { typed: request.typed, body: proof::refusal(NO_TOKEN) }
    }

    fn answer_trusted(&self, request: &Message) -> Message {
        let body = match request.kind() {
            MessageKind::Metadata => (self.describe)(),
            MessageKind::Probe => br#"{"status":"success"}"#.to_vec(),
            MessageKind::Notify => self.queue_notification(&request.body),
            MessageKind::Connection => NO_QUEUE_PAIRS.as_bytes().to_vec(),
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
