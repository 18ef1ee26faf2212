//! The sending side: blocking calls over a connection pool per server.

use std::{
    collections::HashMap,
    fmt,
    io::{self, Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use mooncake_base::sync::{Condvar, Mutex};
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use mooncake_os::{DeadlineStream, dial, fork};

use crate::rpc_message::{HEAD_BYTES, Head, Kind, META_BYTES_MAX};

/// Maximum number of servers with a connection pool.
const TARGETS_MAX: usize = 1024;

/// Size of the buffer through which a body is sent.
const PART_BYTES: usize = 256 << 10;

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// Maximum connections per server; further calls wait for a free one.
    pub connections_max: usize,
    /// Time limit of a call, including waiting and connecting.
    pub timeout: Duration,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self { connections_max: 100, timeout: Duration::from_secs(30) }
    }
}

/// A thread-safe client for any number of servers.
pub struct Client {
    config: ClientConfig,
    generation: u64,
    pools: Mutex<HashMap<String, Arc<Pool>>>,
    next_id: AtomicU64,
}

/// The connection pool of one server.
#[derive(Debug, Default)]
struct Pool {
    state: Mutex<PoolState>,
    is_freed: Condvar,
}

#[derive(Debug, Default)]
struct PoolState {
    idle: Vec<TcpStream>,
    /// Number of connections, idle and in use.
    open: usize,
}

/// A pooled connection, owned for one call. It returns to the pool only after a successful
/// exchange.
struct PooledConnection<'a> {
    pool: &'a Pool,
    stream: Option<TcpStream>,
    is_reusable: bool,
}

impl Client {
    /// Creates a client without connections.
    ///
    /// # Errors
    /// The settings allow no connection, or the time-out is 0.
    pub fn new(config: ClientConfig) -> Result<Self> {
        if config.connections_max == 0 || config.timeout.is_zero() {
            return Err(Error::invalid("a client needs at least one connection and some time")
                .with("connections_max", config.connections_max)
                .with("timeout_s", config.timeout.as_secs_f64()));
        }
        let generation = fork::generation();
        Ok(Self { config, generation, pools: Mutex::default(), next_id: AtomicU64::new(1) })
    }

    /// Sends a message and waits until the server's application has accepted it.
    ///
    /// The body is read once, in parts, while it is sent.
    ///
    /// # Errors
    /// The address is invalid, the server cannot be reached or does not answer in time, the message
    /// is refused, or the body ends before its length.
    pub fn send(
        &self,
        target: &str,
        kind: Kind,
        meta: &[u8],
        body: &mut dyn Read,
        body_bytes: u64,
    ) -> Result<()> {
        if fork::is_forked_since(self.generation) {
            return Err(Error::closed(
                "the client was made before a fork; make another one in this process",
            ));
        }
        if meta.len() > META_BYTES_MAX {
            return Err(Error::invalid("the description of the message is too long")
                .with("bytes", meta.len()));
        }
        let endpoint: Endpoint = target.parse()?;
        let deadline = SystemClock.now() + self.config.timeout;
        let pool = self.pool(target);
        let mut connection = self.acquire(&pool, &endpoint, deadline)?;
        let stream = connection
            .stream
            .as_ref()
            .expect("a pooled connection has a stream until it is dropped");
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let head = Head { kind, id, meta_bytes: meta.len() as u32, body_bytes };
        let mut timed = DeadlineStream::new(stream, deadline);
        let answer =
            exchange(&mut timed, head, meta, body).map_err(|error| error.with("target", target))?;
        connection.is_reusable = true;
        match answer {
            None => Ok(()),
            Some(reason) => Err(Error::new(ErrorCode::RPC_FAIL, "the server refused the message")
                .with("target", target)
                .with("reason", reason)),
        }
    }

    fn pool(&self, target: &str) -> Arc<Pool> {
        let mut pools = self.pools.lock();
        if let Some(pool) = pools.get(target) {
            return Arc::clone(pool);
        }
        if pools.len() >= TARGETS_MAX {
            // Pools in use now are kept alive by their callers.
            pools.retain(|_, pool| Arc::strong_count(pool) > 1);
        }
        Arc::clone(pools.entry(target.to_owned()).or_default())
    }

    fn acquire<'a>(
        &self,
        pool: &'a Pool,
        endpoint: &Endpoint,
        deadline: Moment,
    ) -> Result<PooledConnection<'a>> {
        let mut state = pool.state.lock();
        loop {
            while let Some(stream) = state.idle.pop() {
                if is_open_and_silent(&stream) {
                    return Ok(PooledConnection { pool, stream: Some(stream), is_reusable: false });
                }
                // The server has closed the connection.
                state.open -= 1;
            }
            if state.open < self.config.connections_max {
                state.open += 1;
                break;
            }
            let left = deadline.left(SystemClock.now());
            if left.is_zero() || pool.is_freed.wait_for(&mut state, left).timed_out() {
                let text = "all connections to the server are in use";
                return Err(Error::new(ErrorCode::RPC_TIMEOUT, text).with("target", endpoint));
            }
        }
        drop(state);
        let mut connection = PooledConnection { pool, stream: None, is_reusable: false };
        let stream = dial(endpoint, deadline)?;
        // Without TCP_NODELAY an answer may wait for an acknowledgement; a failure costs only
        // speed.
        let _ = stream.set_nodelay(true);
        connection.stream = Some(stream);
        Ok(connection)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if fork::is_forked_since(self.generation) {
            // The sockets belong to the parent, and its locks may be held forever in this process.
            std::mem::forget(std::mem::take(&mut self.pools));
        }
    }
}

impl Drop for PooledConnection<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        match self.stream.take() {
            Some(stream) if self.is_reusable => state.idle.push(stream),
            _ => state.open -= 1,
        }
        drop(state);
        self.pool.is_freed.notify_one();
    }
}

/// Returns whether an idle connection is open and has no unexpected data.
fn is_open_and_silent(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return false;
    }
    let peeked = stream.peek(&mut [0]);
    let is_open_and_silent = peeked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
    is_open_and_silent && stream.set_nonblocking(false).is_ok()
}

/// Sends a message and reads its answer: `None` if it was accepted, otherwise the reason.
fn exchange(
    stream: &mut (impl Read + Write),
    head: Head,
    meta: &[u8],
    body: &mut dyn Read,
) -> Result<Option<String>> {
    let mut part = Vec::with_capacity(HEAD_BYTES + meta.len());
    part.extend_from_slice(&head.encode());
    part.extend_from_slice(meta);
    let mut left = head.body_bytes;
    loop {
        let room = (PART_BYTES.saturating_sub(part.len()) as u64).min(left);
        let filled = part.len();
        part.resize(filled + room as usize, 0);
        body.read_exact(&mut part[filled..]).map_err(|source| {
            Error::invalid("the body ends before its length").caused_by(source)
        })?;
        stream.write_all(&part).map_err(broken)?;
        left -= room;
        part.clear();
        if left == 0 {
            break;
        }
    }
    read_answer(stream, head.id)
}

/// Reads the answer to a message: `None` if it was accepted, otherwise the reason.
pub(crate) fn read_answer(stream: &mut impl Read, id: u64) -> Result<Option<String>> {
    let mut bytes = [0; HEAD_BYTES];
    stream.read_exact(&mut bytes).map_err(broken)?;
    let answer = Head::decode(&bytes, 0)?;
    let mut reason = vec![0; answer.meta_bytes as usize];
    stream.read_exact(&mut reason).map_err(broken)?;
    match answer.kind {
        _ if answer.id != id => {
            Err(Error::new(ErrorCode::RPC_FAIL, "the answer is to another message"))
        }
        Kind::Taken => Ok(None),
        Kind::Refused => Ok(Some(String::from_utf8_lossy(&reason).into_owned())),
        Kind::Data | Kind::Tensor => {
            Err(Error::new(ErrorCode::RPC_FAIL, "the server answered with a request"))
        }
    }
}

/// Converts an I/O error; a passed deadline has its own error code.
pub(crate) fn broken(source: io::Error) -> Error {
    let (code, text) = match source.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            (ErrorCode::RPC_TIMEOUT, "the other side did not answer in time")
        }
        _ => (ErrorCode::RPC_FAIL, "the connection broke"),
    };
    Error::new(code, text).caused_by(source)
}
