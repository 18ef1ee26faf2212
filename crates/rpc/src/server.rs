//! The receiving side: accepts connections and queues messages for the application.

use std::{
    collections::VecDeque,
    fmt,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Result, SystemClock};
use mooncake_os::{DeadlineStream, fork};
use socket2::SockRef;

use crate::{
    body_budget::{BodyBudget, BodyBytes},
    client::broken,
    rpc_message::{HEAD_BYTES, Head, Kind},
};

/// Memory for a body is allocated as its bytes arrive, in steps of at least this size.
const STEP_BYTES: u64 = 4 << 20;

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Maximum connections; further ones wait until one ends.
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
    generation: u64,
    acceptor: Mutex<Option<JoinHandle<()>>>,
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
    listener: TcpListener,
    bodies: Arc<BodyBudget>,
    state: Mutex<Deliveries>,
    /// Signalled when a message arrives or is taken, a connection ends, or the server stops.
    changed: Condvar,
}

#[derive(Default)]
struct Deliveries {
    is_stopped: bool,
    waiting: VecDeque<Delivery>,
    /// Messages taken and not answered yet.
    taken: Vec<Arc<AnswerSlot>>,
    connections: Vec<(TcpStream, JoinHandle<()>)>,
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
        let state = Mutex::new(Deliveries::default());
        let bodies = BodyBudget::new(config.bodies_bytes_max);
        let changed = Condvar::default();
        let shared = Arc::new(ServerShared { config, listener, bodies, state, changed });
        let accepting = Arc::clone(&shared);
        let acceptor = thread::Builder::new()
            .name("mooncake-rpc".into())
            .spawn(move || accept(&accepting))
            .map_err(refused)?;
        let generation = fork::generation();
        Ok(Self { shared, address, generation, acceptor: Mutex::new(Some(acceptor)) })
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
        if self.is_forked() {
            return;
        }
        let mut state = self.shared.state.lock();
        state.is_stopped = true;
        let refused: Vec<_> = state.waiting.drain(..).collect();
        let taken = std::mem::take(&mut state.taken);
        let connections = std::mem::take(&mut state.connections);
        drop(state);
        self.shared.changed.notify_all();
        drop(refused);
        for slot in taken {
            slot.set(Err("the server was stopped".to_owned()));
        }
        // Wakes the accepting thread; fails harmlessly if the listener is already shut down.
        let _ = SockRef::from(&self.shared.listener).shutdown(Shutdown::Both);
        for (stream, _) in &connections {
            // Answers in flight are still sent. Fails harmlessly on connections that the client has
            // closed.
            let _ = stream.shutdown(Shutdown::Read);
        }
        for (_, thread) in connections {
            join(thread);
        }
        if let Some(acceptor) = self.acceptor.lock().take() {
            join(acceptor);
        }
    }

    fn is_forked(&self) -> bool {
        fork::is_forked_since(self.generation)
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

fn join(thread: JoinHandle<()>) {
    // A thread that stops the server cannot join itself.
    if thread.thread().id() != thread::current().id() && thread.join().is_err() {
        tracing::error!("a thread of the server panicked");
    }
}

fn accept(shared: &Arc<ServerShared>) {
    loop {
        let accepted = shared.listener.accept();
        let mut state = shared.state.lock();
        loop {
            state.connections.retain(|(_, thread)| !thread.is_finished());
            if state.is_stopped {
                return;
            }
            if state.connections.len() < shared.config.connections_max {
                break;
            }
            shared.changed.wait_for(&mut state, Duration::from_millis(100));
        }
        let (stream, source) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                // Most likely out of file descriptors: retrying at once is useless until one is
                // closed.
                shared.changed.wait_for(&mut state, Duration::from_millis(100));
                continue;
            }
        };
        let Ok(clone) = stream.try_clone() else { continue };
        let serving = Arc::clone(shared);
        let thread = thread::Builder::new().name("mooncake-rpc".into()).spawn(move || {
            if let Err(error) = serve(&serving, &stream, source) {
                tracing::debug!(%error, peer = %source, "a connection ended");
            }
            // Explicit shutdown, since the clone for `stop` keeps the socket open.
            let _ = stream.shutdown(Shutdown::Both);
            serving.changed.notify_all();
        });
        match thread {
            Ok(thread) => state.connections.push((clone, thread)),
            Err(error) => tracing::warn!(%error, "cannot start a thread for a connection"),
        }
    }
}

/// Serves messages until the client closes the connection, is idle for too long or sends invalid
/// data.
fn serve(shared: &ServerShared, stream: &TcpStream, source: SocketAddr) -> Result<()> {
    // Without TCP_NODELAY an answer may wait for an acknowledgement; a failure costs only speed.
    let _ = stream.set_nodelay(true);
    let config = &shared.config;
    loop {
        stream.set_read_timeout(Some(config.idle_timeout)).map_err(broken)?;
        match stream.peek(&mut [0]) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(broken(error)),
        }
        let deadline = SystemClock.now() + config.timeout;
        let mut timed = DeadlineStream::new(stream, deadline);
        let mut held = shared.bodies.begin();
        let (head, meta, body) =
            receive(&mut timed, config.body_bytes_max, |bytes| held.grow(bytes, deadline))?;
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
    }
}

impl ServerShared {
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

/// Receives a message. `reserve` is asked for each step of the body before memory is allocated.
pub(crate) fn receive(
    stream: &mut impl Read,
    body_bytes_max: u64,
    mut reserve: impl FnMut(u64) -> Result<()>,
) -> Result<(Head, Vec<u8>, Vec<u8>)> {
    let mut bytes = [0; HEAD_BYTES];
    stream.read_exact(&mut bytes).map_err(broken)?;
    let head = Head::decode(&bytes, body_bytes_max)?;
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
    Ok((head, meta, body))
}
