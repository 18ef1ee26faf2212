//! The receiving side: accepts connections and queues messages for the application.

use std::{
    collections::VecDeque,
    fmt,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::Arc,
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::{
    DeadlineStream,
    acceptor::{Acceptor, ConnectionLimits, ConnectionPlace, Overflow, pause_accepting},
    threads::Threads,
};

use crate::{
    body_budget::{BodyBudget, BodyBytes},
    client::broken,
    rpc_message::{HEAD_BYTES, Head, Kind},
};

/// Memory for a body is allocated as its bytes arrive, in steps of at least this size.
const STEP_BYTES: u64 = 4 << 20;

/// Time in which a client must begin its first message.
const GREETING_TIME: Duration = Duration::from_secs(10);

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Maximum connections. Above it, the oldest one that has not begun a message gives way; without
    /// one, the next connection waits until another one ends.
    pub connections_max: usize,
    /// Idle time between messages after which a connection is closed.
    pub idle_timeout: Duration,
    /// Time limit for each stage of a message: arrival, acceptance and answer.
    pub timeout: Duration,
    /// Maximum body length.
    pub body_bytes_max: u64,
    /// Maximum length of all bodies that no application has taken; the next bytes wait on their
    /// connections.
    pub bodies_bytes_max: u64,
    /// Maximum queued messages; further messages wait on their connections.
    pub waiting_max: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            connections_max: 256,
            idle_timeout: Duration::from_secs(60),
            timeout: Duration::from_secs(30),
            body_bytes_max: 4 << 30,
            bodies_bytes_max: 8 << 30,
            waiting_max: 64,
        }
    }
}

/// A running server. Stops when dropped.
pub struct Server {
    shared: Arc<ServerShared>,
    address: SocketAddr,
}

/// A received message to be answered. Dropped without an answer, it is refused.
#[derive(Debug)]
pub struct Delivery {
    /// Data or tensor.
    pub kind: Kind,
    /// Address of the sender.
    pub source: SocketAddr,
    /// The sender's description.
    pub meta: Vec<u8>,
    /// The body.
    pub body: Vec<u8>,
    /// Counts the body, until it is taken.
    held: Option<BodyBytes>,
    slot: Arc<AnswerSlot>,
}

/// The answer to a message, awaited by the connection's thread.
#[derive(Debug, Default)]
struct AnswerSlot {
    answer: Mutex<Option<Result<(), String>>>,
    is_answered: Condvar,
}

struct ServerShared {
    config: ServerConfig,
    acceptor: Acceptor,
    /// One for each connection, and the one that accepts them.
    threads: Threads,
    bodies: Arc<BodyBudget>,
    state: Mutex<Deliveries>,
    /// Signalled when a message arrives or is taken, or the server stops.
    changed: Condvar,
}

#[derive(Default)]
struct Deliveries {
    is_stopped: bool,
    waiting: VecDeque<Delivery>,
    /// Messages taken and not answered yet.
    taken: Vec<Arc<AnswerSlot>>,
}

impl Server {
    /// Listens on an address; port 0 takes a free port.
    ///
    /// # Errors
    /// The address cannot be bound, or a limit is 0, or one body may be longer than all together.
    pub fn start(listen: &Endpoint, config: ServerConfig) -> Result<Self> {
        if config.connections_max == 0 || config.waiting_max == 0 || config.timeout.is_zero() {
            return Err(Error::invalid(
                "a server needs at least one connection, one queued message and a time-out",
            ));
        }
        if config.bodies_bytes_max < config.body_bytes_max {
            return Err(Error::invalid("a server needs memory for the largest body")
                .with("body_bytes_max", config.body_bytes_max)
                .with("bodies_bytes_max", config.bodies_bytes_max));
        }
        let refused = |source: io::Error| {
            let text = "the server cannot listen on the address";
            Error::new(ErrorCode::INVALID_PARAMS, text).with("address", listen).caused_by(source)
        };
        let addresses: Vec<_> = listen.to_pair().to_socket_addrs().map_err(refused)?.collect();
        let listener = TcpListener::bind(&addresses[..]).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let limits = ConnectionLimits {
            count: config.connections_max,
            overflow: Overflow::Wait,
            greetings: config.connections_max,
            greeting_time: GREETING_TIME,
        };
        let shared = Arc::new(ServerShared {
            bodies: BodyBudget::new(config.bodies_bytes_max),
            config,
            acceptor: Acceptor::new(listener, limits),
            threads: Threads::unbounded(),
            state: Mutex::default(),
            changed: Condvar::default(),
        });
        let accepting = Arc::clone(&shared);
        shared.threads.spawn("mooncake-rpc", move || accept(&accepting)).map_err(refused)?;
        Ok(Self { shared, address })
    }

    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next message; `None` if none arrives within `timeout`.
    ///
    /// # Errors
    /// A closed error when the server is stopped.
    pub fn take(&self, timeout: Duration) -> Result<Option<Delivery>> {
        let closed = || Error::closed("the server is stopped");
        if self.is_forked() {
            return Err(closed());
        }
        let deadline = SystemClock.now() + timeout;
        let mut state = self.shared.state.lock();
        loop {
            if state.is_stopped {
                return Err(closed());
            }
            if let Some(delivery) = state.waiting.pop_front() {
                state.taken.retain(|slot| slot.answer.lock().is_none());
                state.taken.push(Arc::clone(&delivery.slot));
                drop(state);
                self.shared.changed.notify_all();
                return Ok(Some(delivery));
            }
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                return Ok(None);
            }
            self.shared.changed.wait_for(&mut state, left);
        }
    }

    /// Stops listening, refuses all queued messages, closes every connection and joins the threads.
    /// Idempotent; may be called while answering a message.
    pub fn stop(&self) {
        self.shared.threads.stop(|| self.shared.end());
    }

    fn is_forked(&self) -> bool {
        self.shared.threads.is_forked()
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.is_forked() {
            // The threads and the sockets belong to the parent.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        self.stop();
    }
}

impl Delivery {
    /// Accepts the message, or refuses it with a reason.
    pub fn answer(self, answer: Result<(), String>) {
        self.slot.set(answer);
    }

    /// Moves the body out; the answer is still due.
    pub fn take_body(&mut self) -> Vec<u8> {
        self.held = None;
        std::mem::take(&mut self.body)
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.slot.set(Err("it was dropped without an answer".to_owned()));
    }
}

impl AnswerSlot {
    /// Sets the answer; only the first one counts.
    fn set(&self, answer: Result<(), String>) {
        self.answer.lock().get_or_insert(answer);
        self.is_answered.notify_all();
    }

    fn wait(&self, timeout: Duration) -> Result<(), String> {
        let deadline = SystemClock.now() + timeout;
        let mut answer = self.answer.lock();
        loop {
            if let Some(answer) = answer.clone() {
                return answer;
            }
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                return Err("it was not accepted in time".to_owned());
            }
            self.is_answered.wait_for(&mut answer, left);
        }
    }
}

fn accept(shared: &Arc<ServerShared>) {
    while let Some((stream, place)) = shared.acceptor.next(|| shared.state.lock().is_stopped) {
        let serving = Arc::clone(shared);
        let thread = shared.threads.spawn("mooncake-rpc", move || {
            if let Err(error) = serve(&serving, &stream, &place) {
                tracing::debug!(%error, "a connection ended");
            }
        });
        if let Err(error) = thread {
            tracing::warn!(%error, "cannot start a thread for a connection");
            pause_accepting();
        }
    }
}

/// Serves messages until the client closes the connection, is idle for too long or sends invalid
/// data.
fn serve(shared: &ServerShared, stream: &TcpStream, place: &ConnectionPlace) -> Result<()> {
    let source = stream.peer_addr().map_err(broken)?;
    // Without TCP_NODELAY an answer may wait for an acknowledgement; a failure costs only speed.
    let _ = stream.set_nodelay(true);
    let config = &shared.config;
    let mut begun_by = place.greeting_deadline();
    while await_message(stream, begun_by)? {
        let mut timed = DeadlineStream::new(stream, begun_by);
        let head = receive_head(&mut timed, config.body_bytes_max)?;
        place.end_greeting();
        let deadline = SystemClock.now() + config.timeout;
        timed.set_deadline(deadline);
        let mut held = shared.bodies.begin();
        let (meta, body) = receive_rest(&mut timed, &head, |bytes| held.grow(bytes, deadline))?;
        let slot = Arc::new(AnswerSlot::default());
        let answer = match head.kind {
            Kind::Data | Kind::Tensor => {
                let slot = Arc::clone(&slot);
                let (kind, held) = (head.kind, Some(held));
                shared.offer(Delivery { kind, source, meta, body, held, slot })
            }
            Kind::Taken | Kind::Refused => {
                return Err(Error::new(ErrorCode::RPC_FAIL, "the client sent an answer"));
            }
        };
        let answer = answer.and_then(|()| slot.wait(config.timeout));
        let (kind, reason) = match answer {
            Ok(()) => (Kind::Taken, String::new()),
            Err(reason) => (Kind::Refused, reason),
        };
        let reason = &reason.as_bytes()[..reason.len().min(1024)];
        let head = Head { kind, id: head.id, meta_bytes: reason.len() as u32, body_bytes: 0 };
        let mut timed = DeadlineStream::new(stream, SystemClock.now() + config.timeout);
        timed.write_all(&[&head.encode(), reason].concat()).map_err(broken)?;
        begun_by = SystemClock.now() + config.idle_timeout;
    }
    Ok(())
}

/// Waits for the next message; `false`: the client closed the connection instead.
fn await_message(stream: &TcpStream, begun_by: Moment) -> Result<bool> {
    loop {
        let left = begun_by.left(SystemClock.now());
        if left.is_zero() {
            return Err(broken(io::ErrorKind::TimedOut.into()));
        }
        stream.set_read_timeout(Some(left)).map_err(broken)?;
        match stream.peek(&mut [0]) {
            Ok(count) => return Ok(count > 0),
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(broken(error)),
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl ServerShared {
    /// Refuses all messages, and ends the connections.
    fn end(&self) {
        let mut state = self.state.lock();
        state.is_stopped = true;
        let refused: Vec<_> = state.waiting.drain(..).collect();
        let taken = std::mem::take(&mut state.taken);
        drop(state);
        self.changed.notify_all();
        drop(refused);
        for slot in taken {
            slot.set(Err("the server was stopped".to_owned()));
        }
        self.acceptor.close();
        // Answers in flight are still sent.
        self.acceptor.connections().close(Shutdown::Read);
    }

    /// Queues a message; waits while the queue is full.
    fn offer(&self, delivery: Delivery) -> Result<(), String> {
        let deadline = SystemClock.now() + self.config.timeout;
        let mut state = self.state.lock();
        while state.waiting.len() >= self.config.waiting_max && !state.is_stopped {
            let left = deadline.left(SystemClock.now());
            if left.is_zero() {
                return Err("too many messages are queued".to_owned());
            }
            self.changed.wait_for(&mut state, left);
        }
        if state.is_stopped {
            return Err("the server was stopped".to_owned());
        }
        state.waiting.push_back(delivery);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }
}

/// Receives the head of a message.
pub(crate) fn receive_head(stream: &mut impl Read, body_bytes_max: u64) -> Result<Head> {
    let mut bytes = [0; HEAD_BYTES];
    stream.read_exact(&mut bytes).map_err(broken)?;
    Head::decode(&bytes, body_bytes_max)
}

/// Receives the description and the body of a message. `reserve` is asked for each step of the body
/// before memory is allocated.
pub(crate) fn receive_rest(
    stream: &mut impl Read,
    head: &Head,
    mut reserve: impl FnMut(u64) -> Result<()>,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let mut meta = vec![0; head.meta_bytes as usize];
    stream.read_exact(&mut meta).map_err(broken)?;
    let mut body = Vec::new();
    while (body.len() as u64) < head.body_bytes {
        let step = (head.body_bytes - body.len() as u64).min(STEP_BYTES.max(body.len() as u64));
        reserve(step)?;
        body.try_reserve_exact(step as usize).map_err(|source| {
            Error::internal("cannot allocate memory for a message").caused_by(source)
        })?;
        let begin = body.len();
        body.resize(begin + step as usize, 0);
        stream.read_exact(&mut body[begin..]).map_err(broken)?;
    }
    Ok((meta, body))
}
